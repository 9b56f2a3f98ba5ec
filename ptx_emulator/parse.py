"""PTX text into kernels of basic blocks."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace

__all__ = ["Instruction", "Kernel", "Unsupported", "parse"]


GAP = 512  # bytes between shared arrays, so that what goes beyond one doesn't reach the next


class Unsupported(NotImplementedError):
    """PTX that the emulator does not know; add it rather than guess."""


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """`tid`, `ntid`, `ctaid` or `nctaid`, in direction `x`, `y` or `z`."""

    name: str
    axis: str


@dataclass(frozen=True, slots=True)
class Number:
    """A literal: `int`, or `float` of an exact bit pattern of `size` bytes."""

    value: int | float
    size: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name: of a parameter, of shared memory, or of a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: Register | Symbol
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """`{a, b, ...}`: the parts of a vector."""

    parts: tuple[Register, ...]


Operand = Register | Special | Number | Symbol | Address | Group


@dataclass(frozen=True, slots=True)
class Instruction:
    """`guard`: the predicate that decides about a branch, with "!" before it if negated."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    text: str
    guard: str = ""

    @property
    def target(self) -> str:
        (label,) = self.operands
        assert isinstance(label, Symbol)
        return label.name


@dataclass(frozen=True)
class Kernel:
    """An entry. `body`: instructions and labels (`str`) as they stand in the text."""

    name: str
    arch: str
    parameters: tuple[tuple[str, str], ...]  # name, type
    registers: dict[str, str]  # name without number -> type
    shared: dict[str, range]  # name -> bytes in shared memory
    threads: int  # at most, per block
    body: tuple[Instruction | str, ...]

    @property
    def instructions(self) -> list[Instruction]:
        return [item for item in self.body if isinstance(item, Instruction)]

    def without(self, instruction: Instruction) -> Kernel:
        """The same kernel with one instruction less."""
        body = tuple(item for item in self.body if item is not instruction)
        if len(body) != len(self.body) - 1:
            raise ValueError(f"expected an instruction of {self.name}, got {instruction}")
        return replace(self, body=body)

    def blocks(self) -> tuple[list[list[Instruction]], dict[str, int]]:
        """Basic blocks in the order of the text, and the block that each label names.

        Blocks also end at a barrier, where threads wait for each other.
        """
        blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for item in self.body:
            if isinstance(item, str):
                if blocks[-1]:
                    blocks.append([])
                labels[item] = len(blocks) - 1
            else:
                blocks[-1].append(item)
                if item.opcode in ("bra", "bra.uni", "ret", "bar.sync"):
                    blocks.append([])
        if not blocks[-1]:
            blocks.pop()
        return blocks, labels

    def type_of(self, register: str) -> str:
        return self.registers[re.sub(r"\d+$", "", register)]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{(.*)\}\s*$", re.DOTALL)
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.]*)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:([+-])\s*(-?\d+))?\s*\]")
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)")


def parse(text: str) -> Kernel:
    """The only kernel of a module."""
    clean = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found = _ENTRY.search(clean)
    arch = re.search(r"\.target (\w+)", clean)
    if found is None or arch is None:
        raise Unsupported("expected one .entry behind .target")
    name, parameters, bounds, body = found.groups()
    shared, end = {}, 0
    for align, symbol, size in _SHARED.findall(clean):
        start = -(-end // int(align)) * int(align)
        shared[symbol] = range(start, start + int(size))
        end = start + int(size) + GAP
    limit = re.search(r"\.maxntid (\d+)", bounds)
    registers: dict[str, str] = {}
    items: list[Instruction | str] = []
    line = clean[: found.start(4)].count("\n") + 1
    for statement in re.split(r"([;{}])", _join_vectors(body)):
        line += statement.count("\n")
        words = statement.strip()
        while label := re.match(r"(\$?\w+):\s*", words):
            items.append(label[1])
            words = words[label.end() :]
        if not words or words in ";{}" or words.startswith(".pragma"):
            continue
        declared = _REGISTERS.match(words)
        if declared:
            for register in declared[2].split(","):
                registers[re.sub(r"<\d+>", "", register.strip())] = declared[1]
        else:
            items.append(_instruction(words, line))
    return Kernel(
        name,
        arch[1],
        tuple((n, t) for t, n in re.findall(r"\.param \.(\w+) (\w+)", parameters)),
        registers,
        shared,
        int(limit[1]) if limit else 1024,
        tuple(items),
    )


def _join_vectors(body: str) -> str:
    """`{a, b}` as `<a, b>`: other braces are scopes."""
    return re.sub(r"\{(\s*%\w+(?:\s*,\s*%\w+)*\s*)\}", r"<\1>", body)


def _instruction(words: str, line: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(words.replace("<", "{").replace(">", "}"))
    if found is None:
        raise Unsupported(f"line {line}: {words!r}")
    guard, opcode, rest = found.groups()
    if guard and opcode not in ("bra", "bra.uni"):
        raise Unsupported(f"line {line}: a guard before {opcode}")
    try:
        operands = tuple(_operand(word.strip()) for word in _OPERAND.findall(rest))
    except Unsupported as error:
        raise Unsupported(f"line {line}: {found[0]} ({error})") from error
    return Instruction(opcode, operands, line, " ".join(found[0].split()), guard or "")


def _operand(word: str) -> Operand:
    if word.startswith("{"):
        return Group(tuple(Register(part.strip()) for part in word[1:-1].split(",")))
    if word.startswith("["):
        found = _ADDRESS.fullmatch(word)
        place = _operand(found[1]) if found else None
        if found is None or not isinstance(place, (Register, Symbol)):
            raise Unsupported(f"operand {word!r}")
        return Address(place, int(found[3] or 0) * (-1 if found[2] == "-" else 1))
    special = re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", word)
    if special:
        return Special(*special.groups())
    if word.startswith("%"):
        return Register(word)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word):
        return Number(struct.unpack(">f", bytes.fromhex(word[2:]))[0], 4)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", word):
        return Number(struct.unpack(">d", bytes.fromhex(word[2:]))[0], 8)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", word):
        return Number(int(word.rstrip("U"), 0))
    if re.fullmatch(r"[$\w]+", word):
        return Symbol(word)
    raise Unsupported(f"operand {word!r}")
