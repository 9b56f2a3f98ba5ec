"""Basic blocks of PTX as Python functions over NumPy arrays, a number per thread.

A block is written as the source of a function, once for all threads and once for some of them:

    def block(R, I, n, s):        # registers, threads (None: all), their number, the machine
        rd1 = R[3]                # or R[3][I]
        ...
        R[5] = rd7                # or R[5][I] = rd7: what later blocks read
        return p4                 # of a conditional branch: who takes it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types, vectorize
from numba.extending import intrinsic

from .parse import (
    Address,
    Group,
    Instruction,
    Kernel,
    Number,
    Register,
    Special,
    Symbol,
    Unsupported,
)

__all__ = ["Program", "translate"]

Array = np.ndarray[Any, Any]

# In registers; an instruction that takes the bits for something else looks at them so.
HELD = {"pred": np.dtype(bool), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
HELD |= {f"{kind}16": np.dtype(np.uint16) for kind in "bsuf"}
HELD |= {f"{kind}32": np.dtype(np.int32) for kind in "bsu"}
HELD |= {f"{kind}64": np.dtype(np.int64) for kind in "bsu"}

TYPES = {"pred": np.dtype(bool), "f16": np.dtype(np.float16)}
TYPES |= {f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (32, 64)}
TYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (16, 32, 64)}
TYPES |= {f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)}


@intrinsic
def _fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        return builder.fma(*arguments)

    return a(a, a, a), generate


@cache
def _fma() -> Callable[..., Array]:
    """`a * b + c`, rounded once."""
    signatures = [types.float32(*[types.float32] * 3), types.float64(*[types.float64] * 3)]
    fused: Callable[..., Array] = vectorize(signatures)(lambda a, b, c: _fused(a, b, c))
    return fused


def _divide(a: Array, b: Array, remainder: bool) -> Array:
    if not np.all(b):
        raise ZeroDivisionError("an integer divided by zero")
    return a % b if remainder else a // b


def _to_bfloat16(value: Array) -> Array:
    """The bits, rounded to nearest even; NaN is that of the device."""
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(value), np.uint64(0x7FFF), rounded).astype(np.uint32)


def _to_float16(value: Array) -> Array:
    """The bits, rounded to nearest even; NaN is that of the device."""
    bits = value.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), bits).astype(np.uint32)


def _to_int64(value: Array) -> Array:
    """Without what follows the point; the device has some number where none is near."""
    inside = np.abs(value) < 2.0**63
    return np.where(inside, value, 0).astype(np.int64)


HELPERS = {"np": np, "divide": _divide}
HELPERS |= {"to_bf16": _to_bfloat16, "to_f16": _to_float16, "to_s64": _to_int64}

_COMPARE = {"eq": "{} == {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
_UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # the negation of
_PLAIN = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "mul.lo": "{} * {}"}
_PLAIN |= {f"{name}.rn": _PLAIN[name] for name in ("add", "sub", "mul")}
_PLAIN |= {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}"}
_PLAIN |= {"min": "np.minimum({}, {})", "max": "np.maximum({}, {})", "div.rn": "{} / {}"}


@dataclass(frozen=True)
class Step:
    """A translated basic block, and where it goes."""

    sources: tuple[str, str]  # for all threads, for some
    ends: str  # "branch", "jump", "barrier", "exit" or "" (the next block)
    target: int
    lines: tuple[int, int]
    kinds: dict[str, int]  # how many instructions of a kind


class Program:
    """A kernel that can be executed."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constants: dict[str, Any] = dict(HELPERS)
        self.numbers: dict[str, int] = {}  # of registers that outlive a basic block
        blocks, labels = kernel.blocks()
        last = blocks[-1][-1]
        if last.opcode != "ret" and (not last.opcode.startswith("bra") or last.guard):
            raise Unsupported(f"line {last.line}: the text ends behind {last.text}")
        unwritten, live = _live(blocks, labels)
        self.steps = [
            _Writer(self, block, live[number], labels).step(number)
            for number, block in enumerate(blocks)
        ]
        if unwritten:
            raise Unsupported(f"{sorted(unwritten)} of {kernel.name} are read before a write")
        self._compiled: dict[tuple[int, bool], Callable[..., Any]] = {}

    @cached_property
    def held(self) -> list[np.dtype[Any]]:
        """The dtypes of the numbered registers."""
        return [HELD[self.kernel.type_of(name)] for name in self.numbers]

    def function(self, number: int, some: bool) -> Callable[..., Any]:
        """What executes a block, for all threads or for some."""
        key = number, some
        known = self._compiled.get(key)
        if known is None:
            if "fma" not in self.constants:
                self.constants["fma"] = _fma()
            name = f"<{self.kernel.name[-20:]} block {number}>"
            code: CodeType = compile(self.steps[number].sources[some], name, "exec")
            scope: dict[str, Any] = {}
            exec(code, self.constants, scope)
            known = self._compiled[key] = scope["block"]
        return known

    def number(self, register: str) -> int:
        return self.numbers.setdefault(register, len(self.numbers))

    def constant(self, literal: Number, dtype: np.dtype[Any]) -> str:
        """The name of a number; a float literal is its bits where integers are asked for."""
        value = literal.value
        if isinstance(value, float):
            if literal.size != dtype.itemsize or dtype.kind == "b":
                raise ValueError(f"a literal of {literal.size} bytes as {dtype}")
            number = np.array(value, f"f{literal.size}").view(dtype)[()]
        elif dtype.kind == "f":
            raise ValueError(f"an integer literal as {dtype}")
        elif dtype.kind == "b":
            number = dtype.type(value)
        else:
            bits = 8 * dtype.itemsize
            value &= (1 << bits) - 1
            if dtype.kind == "i" and value >> (bits - 1):
                value -= 1 << bits
            number = dtype.type(value)
        name = f"k_{dtype.name}_{number.tobytes().hex()}"
        self.constants[name] = number
        return name


def translate(kernel: Kernel) -> Program:
    return Program(kernel)


# ------------------------------------------------------------------------------- liveness


def _registers(operand: Any) -> list[str]:
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Address):
        return _registers(operand.base)
    if isinstance(operand, Group):
        return [part.name for part in operand.parts]
    return []


def _writes(item: Instruction) -> list[str]:
    stores = item.opcode.startswith(("st.", "bra", "ret", "bar", "membar"))
    return [] if stores or not item.operands else _registers(item.operands[0])


def _reads(item: Instruction) -> list[str]:
    operands = item.operands if item.opcode.startswith("st.") else item.operands[1:]
    names = [name for operand in operands for name in _registers(operand)]
    return [*names, item.guard.lstrip("!")] if item.guard else names


def _live(
    blocks: list[list[Instruction]], labels: dict[str, int]
) -> tuple[set[str], list[set[str]]]:
    """The registers that are read before anything is written, and those read behind each block."""
    used: list[set[str]] = []
    made: list[set[str]] = []
    for block in blocks:
        reads: set[str] = set()
        writes: set[str] = set()
        for item in block:
            reads |= set(_reads(item)) - writes
            writes |= set(_writes(item))
        used.append(reads)
        made.append(writes)
    follows = [_successors(blocks, labels, number) for number in range(len(blocks))]
    begin = [set(reads) for reads in used]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            after = set().union(*(begin[k] for k in follows[number]))
            before = used[number] | (after - made[number])
            if before != begin[number]:
                begin[number], changed = before, True
    return begin[0], [set().union(*(begin[k] for k in after)) for after in follows]


def _successors(blocks: list[list[Instruction]], labels: dict[str, int], number: int) -> list[int]:
    last = blocks[number][-1] if blocks[number] else None
    following = [number + 1] if number + 1 < len(blocks) else []
    if last is None or not last.opcode.startswith(("bra", "ret")):
        return following
    if last.opcode == "ret":
        return []
    return [labels[last.target], *(following if last.guard else [])]


# --------------------------------------------------------------------------------- writing


class _Writer:
    """Writes the function of one basic block."""

    def __init__(
        self, program: Program, block: list[Instruction], live: set[str], labels: dict[str, int]
    ) -> None:
        self.program, self.block, self.live, self.labels = program, block, live, labels
        self.lines: list[str] = []
        self.known: set[str] = set()  # registers that are local variables by now
        self.read: list[str] = []  # those that come from blocks before
        self.line = 0

    def step(self, number: int) -> Step:
        ends, target, result = "", number + 1, None
        kinds: dict[str, int] = {}
        for item in self.block:
            self.line = item.line
            kind = _kind(item.opcode)
            kinds[kind] = kinds.get(kind, 0) + 1
            if item.opcode in ("bra", "bra.uni"):
                ends, target = ("branch" if item.guard else "jump"), self.labels[item.target]
                if item.guard:
                    taken = self.register(Register(item.guard.lstrip("!")), HELD["pred"])
                    result = f"~{taken}" if item.guard.startswith("!") else taken
            elif item.opcode in ("ret", "bar.sync"):
                ends = "exit" if item.opcode == "ret" else "barrier"
                if ends == "barrier" and item.operands != (Number(0),):
                    raise Unsupported(f"line {item.line}: a barrier other than 0")
            else:
                self.write(item)
        sources = tuple(self.source(some, result) for some in (False, True))
        lines = (self.block[0].line, self.block[-1].line) if self.block else (0, 0)
        return Step(sources, ends, target, lines, kinds)

    def source(self, some: bool, result: str | None) -> str:
        out = ["def block(R, I, n, s):"]
        for name in self.read:
            pick = f"R[{self.program.number(name)}]{'[I]' if some else ''}"
            out.append(f"    {_local(name)} = {pick}")
        out += [f"    {line}" for line in self.lines]
        for name in sorted(self.live & {name for item in self.block for name in _writes(item)}):
            if some:
                out.append(f"    s.put({self.program.number(name)}, {_local(name)}, I)")
            else:
                out.append(f"    R[{self.program.number(name)}] = {_local(name)}")
        out.append(f"    return {result}")
        return "\n".join(out)

    # operands

    def register(self, operand: Register, dtype: np.dtype[Any]) -> str:
        """A variable, or a view of it, with numbers of `dtype`."""
        name = operand.name
        if name not in self.known:
            self.known.add(name)
            self.read.append(name)
        held = self.held(operand)
        if held == dtype:
            return _local(name)
        if held.itemsize != dtype.itemsize or held.kind == "b":
            raise Unsupported(f"line {self.line}: {name} taken as {dtype}")
        return f"{_local(name)}.view(np.{dtype.name})"

    def held(self, operand: Register) -> np.dtype[Any]:
        return HELD[self.program.kernel.type_of(operand.name)]

    def value(self, operand: Any, dtype: np.dtype[Any]) -> str:
        if isinstance(operand, Register):
            return self.register(operand, dtype)
        if isinstance(operand, Number):
            return self.program.constant(operand, dtype)
        if isinstance(operand, Special):
            return f"s.{operand.name}(I, {'xyz'.index(operand.axis)}).astype(np.{dtype.name})"
        if isinstance(operand, Symbol) and operand.name in self.program.kernel.shared:
            return self.program.constant(
                Number(self.program.kernel.shared[operand.name].start), dtype
            )
        raise Unsupported(f"line {self.line}: operand {operand}")

    def address(self, operand: Address, shared: bool) -> str:
        if isinstance(operand.base, Symbol):
            if not shared:
                raise Unsupported(f"line {self.line}: {operand}")
            start = self.program.kernel.shared[operand.base.name].start
            return f"np.full(n, {start + operand.offset}, np.int64)"
        kind = np.dtype(np.int64)
        if shared and self.held(operand.base).itemsize == 4:
            return f"({self.register(operand.base, TYPES['u32'])}.astype(np.int64) + " + (
                f"{operand.offset})"
            )
        base = self.register(operand.base, kind)
        return f"{base} + {operand.offset}" if operand.offset else base

    def assign(self, operand: Any, dtype: np.dtype[Any], expression: str) -> None:
        """`expression` gives an array of `dtype` that nobody else holds."""
        if not isinstance(operand, Register):
            raise Unsupported(f"line {self.line}: result {operand}")
        held = self.held(operand)
        if held.itemsize > dtype.itemsize and held.kind in "iu" and dtype.kind in "iu":
            expression = f"({expression}).astype(np.{held.name})"
        elif held.itemsize != dtype.itemsize:
            raise Unsupported(f"line {self.line}: {dtype} into {operand.name}")
        elif held != dtype:
            expression = f"({expression}).view(np.{held.name})"
        self.known.add(operand.name)
        self.lines.append(f"{_local(operand.name)} = {expression}")

    # instructions

    def write(self, item: Instruction) -> None:
        parts = item.opcode.split(".")
        handler = getattr(self, "write_" + parts[0], self.write_plain)
        try:
            handler(item, parts)
        except (KeyError, ValueError, IndexError) as error:
            raise Unsupported(f"line {item.line}: {item.text} ({error!r})") from error

    def write_plain(self, item: Instruction, parts: list[str]) -> None:
        to, a, b = item.operands
        if parts[-2:] == ["f32", "f16"]:  # the first operand is widened
            dtype, first = TYPES["f32"], self.widened(a)
            pattern = _PLAIN[".".join(parts[:-2])]
        else:
            dtype = TYPES[parts[-1]]
            pattern, first = _PLAIN[".".join(parts[:-1])], self.value(a, dtype)
        if dtype.kind == "f" and parts[0] in ("min", "max"):
            raise ValueError("of NaN and a number the number is wanted")
        _needs_a_register(item)
        self.assign(to, dtype, pattern.format(first, self.value(b, dtype)))

    def widened(self, operand: Any) -> str:
        return f"{self.value(operand, TYPES['f16'])}.astype(np.float32)"

    def write_mul(self, item: Instruction, parts: list[str]) -> None:
        if parts[1] == "wide":
            _, _, kind = parts
            dtype = TYPES[kind]
            wide = TYPES[f"{kind[0]}{16 * dtype.itemsize}"]
            to, *both = item.operands
            a, b = (f"{self.value(v, dtype)}.astype(np.{wide.name})" for v in both)
            _needs_a_register(item)
            self.assign(to, wide, f"{a} * {b}")
        else:
            self.write_plain(item, parts)

    def write_mad(self, item: Instruction, parts: list[str]) -> None:
        _, half, kind = parts
        dtype = TYPES[kind]
        if half != "lo" or dtype.kind == "f":
            raise ValueError("only the lower half of integers")
        to, *operands = item.operands
        a, b, c = (self.value(operand, dtype) for operand in operands)
        _needs_a_register(item)
        self.assign(to, dtype, f"{a} * {b} + {c}")

    def write_bfi(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        dtype = TYPES[kind]
        to, a, b, start, length = item.operands
        if not isinstance(start, Number) or not isinstance(length, Number):
            raise ValueError("only a field that is known")
        field, bits = int(start.value), 8 * dtype.itemsize
        if not 0 <= field < bits or not 0 < int(length.value) <= bits - field:
            raise ValueError(f"a field within {bits} bits")
        mask = ((1 << int(length.value)) - 1) << field
        word = f"np.{dtype.name}"
        inserted = f"({self.value(a, dtype)} << {word}({field})) & {word}({mask})"
        others = f"{self.value(b, dtype)} & {word}({mask ^ ((1 << bits) - 1)})"
        _needs_a_register(item)
        self.assign(to, dtype, f"({inserted}) | ({others})")

    def write_div(self, item: Instruction, parts: list[str]) -> None:
        if parts[1] == "rn":
            self.write_plain(item, parts)
        else:
            _, kind = parts
            dtype = TYPES[kind]
            if dtype.kind != "u":
                raise ValueError("signed division rounds to zero, NumPy's does not")
            to, a, b = item.operands
            values = f"{self.value(a, dtype)}, {self.value(b, dtype)}"
            _needs_a_register(item)
            self.assign(to, dtype, f"divide({values}, {parts[0] == 'rem'})")

    write_rem = write_div

    def write_fma(self, item: Instruction, parts: list[str]) -> None:
        _, rounding, *kinds = parts
        if rounding != "rn" or kinds not in (["f32"], ["f64"], ["f32", "f16"]):
            raise ValueError("only rn of f32, f64, and f32 from f16")
        dtype = TYPES[kinds[0]]
        to, a, b, c = item.operands
        both = [self.widened(v) if len(kinds) > 1 else self.value(v, dtype) for v in (a, b)]
        _needs_a_register(item)
        self.assign(to, dtype, f"fma({both[0]}, {both[1]}, {self.value(c, dtype)})")

    def unary(self, pattern: str, item: Instruction, kind: str) -> None:
        to, value = item.operands
        _needs_a_register(item)
        self.assign(to, TYPES[kind], pattern.format(self.value(value, TYPES[kind])))

    def write_neg(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        self.unary("-{}", item, kind)

    def write_not(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        self.unary("~{}", item, kind)

    def write_abs(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        self.unary("np.abs({})", item, kind)

    def write_sqrt(self, item: Instruction, parts: list[str]) -> None:
        _, rounding, kind = parts
        self.unary({"rn": "np.sqrt({})"}[rounding], item, kind)

    def write_rcp(self, item: Instruction, parts: list[str]) -> None:
        _, rounding, kind = parts
        self.unary({"rn": "1 / {}"}[rounding], item, kind)

    def write_shl(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        dtype = TYPES[kind]
        to, value, by = item.operands
        _needs_a_register(item)
        operator = "<<" if parts[0] == "shl" else ">>"
        most = 8 * dtype.itemsize - 1
        if isinstance(by, Number):
            if not 0 <= by.value <= most:
                raise ValueError("a shift by all bits")
            amount = self.program.constant(by, dtype)
            shifted = f"{self.value(value, dtype)} {operator} {amount}"
        else:
            wide = self.value(by, TYPES["u32"])
            amount = f"np.minimum({wide}, {most}).astype(np.{dtype.name})"
            shifted = f"{self.value(value, dtype)} {operator} {amount}"
            if dtype.kind == "u":  # else what is beyond repeats the sign
                zero = self.program.constant(Number(0), dtype)
                shifted = f"np.where({wide} <= {most}, {shifted}, {zero})"
        self.assign(to, dtype, shifted)

    write_shr = write_shl

    def write_selp(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        dtype = TYPES[kind]
        to, a, b, condition = item.operands
        chosen = f"{self.value(condition, HELD['pred'])}, {self.value(a, dtype)}"
        self.assign(to, dtype, f"np.where({chosen}, {self.value(b, dtype)})")

    def write_setp(self, item: Instruction, parts: list[str]) -> None:
        _, comparison, kind = parts
        dtype = TYPES[kind]
        to, *both = item.operands
        a, b = (self.value(operand, dtype) for operand in both)
        _needs_a_register(item)
        if comparison in _COMPARE:
            result = _COMPARE[comparison].format(a, b)
        elif comparison == "ne" and dtype.kind != "f":
            result = f"{a} != {b}"
        elif comparison == "ne":
            result = f"({a} < {b}) | ({a} > {b})"
        elif comparison == "neu":
            result = f"{a} != {b}"
        elif comparison == "equ":
            result = f"~(({a} < {b}) | ({a} > {b}))"
        elif comparison in ("nan", "num"):
            result = f"np.isnan({a}) | np.isnan({b})"
            result = result if comparison == "nan" else f"~({result})"
        elif comparison in ("lo", "ls", "hi", "hs"):
            operator = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}[comparison]
            result = f"{a} {operator} {b}"
        else:
            result = f"~({a} {_UNORDERED[comparison]} {b})"
        self.assign(to, HELD["pred"], result)

    def write_mov(self, item: Instruction, parts: list[str]) -> None:
        _, kind = parts
        dtype = TYPES[kind]
        to, value = item.operands
        if isinstance(to, Group):
            low, high = to.parts
            whole = self.value(value, TYPES[f"u{8 * dtype.itemsize}"])
            half = TYPES[f"u{4 * dtype.itemsize}"]
            self.assign(low, half, f"({whole}).astype(np.{half.name})")
            upper = f"({whole} >> {4 * dtype.itemsize}).astype(np.{half.name})"
            self.assign(high, half, upper)
        elif isinstance(value, Group):
            half = TYPES[f"u{4 * dtype.itemsize}"]
            low, high = (f"{self.value(p, half)}.astype(np.{dtype.name})" for p in value.parts)
            whole = TYPES[f"u{8 * dtype.itemsize}"]
            self.assign(to, whole, f"{low} | ({high} << {4 * dtype.itemsize})")
        elif isinstance(value, (Number, Symbol)):
            constant = self.value(value, dtype)
            self.assign(to, dtype, f"np.full(n, {constant})")
        elif isinstance(value, Special):
            self.assign(to, dtype, self.value(value, dtype))
        else:
            held = self.held(value)  # the bits, whatever they stand for
            self.assign(to, held, f"{self.register(value, held)}.copy()")

    def write_cvt(self, item: Instruction, parts: list[str]) -> None:
        *rounding, to_type, from_type = parts[1:]
        to, *values = item.operands
        _needs_a_register(item)
        if item.opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            convert = "to_" + to_type.removesuffix("x2")
            high, low = (f"{convert}({self.array(v, TYPES['f32'])})" for v in values)
            self.assign(to, TYPES["u32"], f"({high} << 16) | {low}")
        else:
            (value,) = values
            wanted, given = TYPES[to_type], TYPES[from_type]
            exact = wanted.kind in "iu" and given.kind in "iu"
            exact |= wanted.kind == given.kind == "f" and wanted.itemsize > given.itemsize
            to_whole = wanted.kind in "iu" and given.kind == "f"
            if rounding == ["rzi"] and (to_type, from_type) == ("s64", "f64"):
                self.assign(to, wanted, f"to_s64({self.array(value, given)})")
                return
            if rounding != ([] if exact else ["rn"]) or to_whole:
                raise ValueError("rounding")
            self.assign(to, wanted, f"{self.narrow(value, given)}.astype(np.{wanted.name})")

    def array(self, operand: Any, dtype: np.dtype[Any]) -> str:
        """A value for each thread, also of a literal."""
        value = self.value(operand, dtype)
        return f"np.full(n, {value})" if isinstance(operand, Number) else value

    def narrow(self, operand: Any, dtype: np.dtype[Any]) -> str:
        """The lower bytes of a register that may be wider."""
        if not isinstance(operand, Register) or self.held(operand).itemsize <= dtype.itemsize:
            return self.value(operand, dtype)
        held = self.held(operand)
        if held.kind == "f":
            raise ValueError(f"a part of {operand.name}")
        part = f"{self.register(operand, held)}.astype(np.uint{8 * dtype.itemsize})"
        return f"{part}.view(np.{dtype.name})"

    def write_ld(self, item: Instruction, parts: list[str]) -> None:
        to, place = item.operands
        if parts[1] == "param":
            self.write_parameter(to, place, parts)
            return
        space, dtype, targets = self.memory(parts, place, to)
        at = self.address(place, space == "shared")
        self.lines.append(f"s.line = {item.line}")
        self.lines.append(f"loaded = s.load_{space}({at}, I, np.dtype('{dtype}'), {len(targets)})")
        for number, target in enumerate(targets):
            self.assign(target, dtype, f"loaded[:, {number}].copy()")

    def write_parameter(self, to: Any, place: Any, parts: list[str]) -> None:
        _, _, kind = parts
        names = [name for name, _ in self.program.kernel.parameters]
        number = names.index(place.base.name)
        types_ = TYPES[kind], TYPES[self.program.kernel.parameters[number][1]]
        if place.offset or {dtype.itemsize for dtype in types_} != {8}:
            raise ValueError("a parameter is 8 bytes, taken as a whole")
        value = f"s.parameters[{number}].view(np.{types_[0]})"
        self.assign(to, types_[0], f"np.full(n, {value})")

    def memory(
        self, parts: list[str], place: Any, value: Any
    ) -> tuple[str, np.dtype[Any], list[Any]]:
        """Space and type of an access, and the registers of its vector."""
        _, space, *vector, kind = parts
        dtype, given = TYPES[kind], list(value.parts) if isinstance(value, Group) else [value]
        size = dtype.itemsize * len(given)
        if vector != ([f"v{len(given)}"] if isinstance(value, Group) else []):
            raise ValueError(f"{len(given)} registers")
        if not isinstance(place, Address) or dtype.itemsize < {"global": 2, "shared": 4}[space]:
            raise ValueError("smaller than what is tracked")
        if size > 16:
            raise ValueError(f"an access of {size} bytes")
        return space, dtype, given

    def write_st(self, item: Instruction, parts: list[str]) -> None:
        place, value = item.operands
        space, dtype, given = self.memory(parts, place, value)
        at = self.address(place, space == "shared")
        self.lines.append(f"s.line = {item.line}")
        self.lines.append(f"stored = np.empty((n, {len(given)}), '{dtype}')")
        for number, operand in enumerate(given):
            self.lines.append(f"stored[:, {number}] = {self.narrow(operand, dtype)}")
        self.lines.append(f"s.store_{space}({at}, I, stored)")

    def write_atom(self, item: Instruction, parts: list[str]) -> None:
        scopes = ("atom", "atom.relaxed.gpu", "atom.relaxed.sys")
        if item.opcode not in [f"{scope}.global.add.u32" for scope in scopes]:
            raise ValueError("only global.add.u32")
        to, place, value = item.operands
        if not isinstance(place, Address):
            raise ValueError("no address")
        dtype = TYPES["u32"]
        at, given = self.address(place, False), self.value(value, dtype)
        self.lines.append(f"s.line = {item.line}")
        self.assign(to, dtype, f"s.count({at}, I, np.broadcast_to({given}, (n,)))")

    def write_membar(self, item: Instruction, parts: list[str]) -> None:
        if item.opcode != "membar.gl":
            raise ValueError("only membar.gl")
        self.lines.append("s.fence(I)")


def _needs_a_register(item: Instruction) -> None:
    """A result of literals alone would be one number and none per thread."""
    if all(isinstance(operand, Number) for operand in item.operands[1:]):
        raise ValueError("literals alone")


def _local(register: str) -> str:
    return "r_" + re.sub(r"\W", "", register)


def _kind(opcode: str) -> str:
    """What part of a device an instruction keeps busy."""
    name, *types_ = opcode.split(".")
    if name in ("ld", "st", "atom"):
        return "param" if "param" in types_ else "memory"
    if name == "cvt" and "f64" in types_:
        return "convert64"
    if name == "cvt" and ("f16" in types_ or "bf16x2" in types_):
        return "convert16"
    if "f64" in types_ and name not in ("mov", "selp"):
        return "f64"
    return "f32" if "f32" in types_ and name not in ("mov", "selp", "cvt") else "other"
