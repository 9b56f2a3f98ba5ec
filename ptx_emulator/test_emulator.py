"""The emulator itself, by small kernels written by hand: rounding, faults, refusals.

That it finds missing barriers, fences and resets is shown by `tools/gpu_emulator/test_mutants.py`.
"""

from __future__ import annotations

import math
import operator
import struct
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_emulator.by_hand import THREADS, element, module
from ptx_emulator.machine import Schedule, run
from ptx_emulator.memory import Fault, GlobalMemory, Range
from ptx_emulator.parse import Unsupported, parse
from ptx_emulator.translate import Program, translate

IN_ORDER = Schedule()
FIRST = 1 << 32  # the address of the first array, others follow at the same distance


@cache
def program(text) -> Program:
    return translate(parse(text))


class Memory:
    """Arrays far from each other, in the order of a kernel's parameters."""

    def __init__(self, *arrays, unwritten=()):
        self.memory, self.arrays = GlobalMemory(), list(arrays)
        self.starts = [FIRST * (number + 1) for number in range(len(arrays))]
        for number, array in enumerate(arrays):
            how = {"written": number not in unwritten, "name": f"array {number}"}
            self.memory.add(Range(self.starts[number], array.view(np.uint8), **how))

    def run(self, body, grid=(1, 1, 1), schedule=IN_ORDER, shared=None, threads=THREADS):
        text = module(body, "q" * len(self.arrays), shared)
        given = [np.uint64(start) for start in self.starts]
        return run(program(text), self.memory, given, grid, threads, schedule)


def without(text, tag):
    """The text less the lines with that comment."""
    kept = [line for line in text.splitlines() if not line.endswith("// " + tag)]
    assert len(kept) < len(text.splitlines()), tag
    return "\n".join(kept)


# ------------------------------------------------------------------ one number per thread

REGISTERS = {"f4": "%f", "f8": "%fd", "f2": "%rs", "u2": "%rs", "i2": "%rs"}
REGISTERS |= {f"{kind}{size}": name for kind in "iu" for size, name in ((4, "%r"), (8, "%rd"))}
DTYPES = {
    f"{kind}{bits}": f"{dtype}{bits // 8}"
    for kind, dtype in zip("subf", "iuuf", strict=True)
    for bits in (16, 32, 64)
}


def compute(text, result, *operands):
    """What `text` makes of arrays, from %r1, %f2, ... (number and type as given) into %r0, ..."""
    operands = np.broadcast_arrays(*operands)
    shape, size = operands[0].shape, operands[0].size
    total = -(-size // THREADS) * THREADS
    arrays = [np.resize(operand, total) for operand in operands]
    out = np.zeros(total, result)
    body = []
    for number, array in enumerate(arrays):
        kind, bits = array.dtype.str[1:], 8 * array.itemsize
        body.append(element("%rd19", f"%a{number}", "%i", array.itemsize))
        body.append(f"ld.global.b{bits} {REGISTERS[kind]}{number + 1}, [%rd19];")
    body += [text, element("%rd19", f"%a{len(arrays)}", "%i", out.itemsize)]
    body.append(f"st.global.b{8 * out.itemsize} [%rd19], {REGISTERS[out.dtype.str[1:]]}0;")
    Memory(*arrays, out).run("\n".join(body), grid=(total // THREADS, 1, 1))
    return out[:size].reshape(shape)


def examples(dtype):
    """Numbers at the edges of what there is, and some between."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(1)
    if dtype.kind == "f":
        info = np.finfo(dtype)
        edges = [info.max, info.tiny, info.smallest_subnormal, 1 + info.eps, np.inf, 1 / 3, 1.5, 0]
        edges += list(rng.normal(size=4) * 10.0 ** rng.integers(-3, 3, 4))
        return np.array([*edges, *(-np.array(edges, dtype)), np.nan], dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    edges = [0, 1, 2, 7, high, high - 1, high // 2, high // 2 + 1, low, low + 1, high // 3]
    return np.array([*edges, *rng.integers(low, high, 6, dtype)], dtype)


def pairs(dtype):
    """All pairs of examples, as two arrays."""
    return (np.ravel(part) for part in np.meshgrid(examples(dtype), examples(dtype)))


def wrapped(values, dtype):
    """Python's integers modulo the size of `dtype`."""
    dtype = np.dtype(dtype)
    unsigned = [int(value) & ((1 << 8 * dtype.itemsize) - 1) for value in values]
    return np.array(unsigned, f"u{dtype.itemsize}").view(dtype)


def registers(kind, *numbers):
    return ", ".join(f"{REGISTERS[DTYPES[kind]]}{number}" for number in numbers)


def same(found, expected):
    """The same numbers with the same signs; one NaN is as good as another."""
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        found, expected = np.asarray(found, "f8"), np.asarray(expected, "f8")
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(expected)[number])


INTEGERS = ["s16", "u16", "s32", "u32", "s64", "u64"]
BITS = ["b16", "b32", "b64"]
ON_INTEGERS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(list(ON_INTEGERS)[:5], INTEGERS), *product(list(ON_INTEGERS)[5:], BITS)],
)
def test_integers_wrap_around(name, kind):
    a, b = pairs(DTYPES[kind])
    found = compute(f"{name}.{kind} {registers(kind, 0, 1, 2)};", DTYPES[kind], a, b)
    expected = map(ON_INTEGERS[name], a.tolist(), b.tolist())
    np.testing.assert_array_equal(found, wrapped(expected, DTYPES[kind]))


# ------------------------------------------------------------------------ comparisons

ORDER = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt}
ORDER |= {"le": operator.le, "gt": operator.gt, "ge": operator.ge}


def compared(comparison, kind):
    a, b = pairs(DTYPES[kind])
    text = f"setp.{comparison}.{kind} %p1, {registers(kind, 1, 2)};\nselp.u32 %r0, 1, 0, %p1;"
    return compute(text, "u4", a, b).astype(bool), a.tolist(), b.tolist()


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("comparison", ORDER)
def test_comparisons_with_nan(comparison, unordered, kind):
    found, a, b = compared(comparison + "u" * unordered, kind)
    expected = [
        unordered if math.isnan(x) or math.isnan(y) else ORDER[comparison](x, y)
        for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------------------ floats

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127)}  # digits, least and largest exponent
FORMATS |= {"f32": (24, -126, 127), "f64": (53, -1022, 1023)}


def rounded(exact, kind):
    """The nearest number of a format, the even one of two; as a Python float."""
    digits, least, most = FORMATS[kind]
    exact = Fraction(exact)
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - digits + 1)
    nearest = round(exact / unit) * unit  # of a tie Python takes the even one
    if abs(nearest) < Fraction(2) ** (most + 1):
        return float(nearest)
    return math.inf if exact > 0 else -math.inf


def numbers(kind):
    """Lists of triples of finite numbers, some near enough to meet in their last digits."""
    width = int(kind[1:])
    every = st.floats(allow_nan=False, allow_infinity=False, width=width)
    near = st.integers(-(2**24) + 1, 2**24 - 1).map(lambda n: n / 2**20)
    number = st.one_of(every, near)
    return st.lists(st.tuples(number, number, number), min_size=1, max_size=40)


ON_FLOATS = {
    "add.{}": lambda a, b, c: a + b,
    "add.rn.{}": lambda a, b, c: a + b,
    "sub.{}": lambda a, b, c: a - b,
    "mul.{}": lambda a, b, c: a * b,
    "div.rn.{}": lambda a, b, c: a / b,
    "rcp.rn.{}": lambda a, b, c: 1 / a,
    "fma.rn.{}": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ON_FLOATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_floats_are_rounded_once(name, kind, data):
    triples = np.array(data.draw(numbers(kind)), DTYPES[kind])
    divisor = {"div.rn.{}": 1, "rcp.rn.{}": 0}.get(name)
    if divisor is not None:
        triples[triples[:, divisor] == 0, divisor] = 3
    count = {"rcp.rn.{}": 1, "fma.rn.{}": 3}.get(name, 2)
    operands = registers(kind, *range(count + 1))
    found = compute(f"{name.format(kind)} {operands};", DTYPES[kind], *triples.T[:count])
    exact = [ON_FLOATS[name](*map(Fraction, triple)) for triple in triples.tolist()]
    assert found.tolist() == [rounded(value, kind) for value in exact]


def test_fma_is_no_product_and_sum_in_float64():
    a, b, c = (np.array([number], "f4") for number in (97, 172961, 2.0**-40))
    found = compute("fma.rn.f32 %f0, %f1, %f2, %f3;", "f4", a, b, c)
    assert found[0] == 2**24 + 2  # 2**24 + 1 is a tie, and the rest lies beyond float64
    a, b, c = (np.array([number], "f8") for number in (1 + 2.0**-30, 1 - 2.0**-30, -1))
    assert compute("fma.rn.f64 %fd0, %fd1, %fd2, %fd3;", "f8", a, b, c)[0] == -(2.0**-60)


INF, NAN = math.inf, math.nan


HALVES = np.arange(1 << 16, dtype="u2")
OF_HALVES = [struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(1 << 16)]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_every_float16_is_widened_exactly(kind):
    same(compute(f"cvt.{kind}.f16 {registers(kind, 0)}, %rs1;", DTYPES[kind], HALVES), OF_HALVES)


def ties(kind):
    """float32 that lie between two neighbours of a format, and what is just off them."""
    digits, least, most = FORMATS[kind]
    fractions = [1 + n / 2**digits for n in (0, 1, 2, 5, 2 ** (digits - 1), 2**digits - 1)]
    exponents = [*range(max(least - 12, -149), least + 2), *range(-3, 3), most - 1, most]
    middle = [0.0, math.inf, *(math.ldexp(f, e) for f in fractions for e in exponents)]
    middle = np.array(middle, "f4")
    every = [middle, *(np.nextafter(middle, np.float32(to)) for to in (0, math.inf))]
    every = np.concatenate([*every, *(-part for part in every)])
    return every[np.isfinite(every) | np.isin(every, middle)]


def narrowed(values, kind):
    return [math.copysign(rounded(v, kind), v) if math.isfinite(v) else v for v in values.tolist()]


def test_float32_to_float16_is_rounded_to_even():
    values = np.append(ties("f16"), np.array([65519.996, 65520, -65520, 1e30, NAN], "f4"))
    found = compute("cvt.rn.f16.f32 %rs0, %f1;", "f2", values)
    np.testing.assert_array_equal(found.astype("f8"), narrowed(values, "f16"))


def of_bits(bits, kind):
    """The number that 16 bits stand for."""
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return OF_HALVES[bits]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_two_float32_into_one_register(kind):
    """The first operand into the upper half; NaN as the device makes it."""
    high = np.append(ties(kind), np.array([NAN, 1, -NAN], "f4"))
    low = np.roll(high, 1)
    found = compute(f"cvt.rn.{kind}x2.f32 %r0, %f1, %f2;", "u4", high, low)
    for values, halves in ((high, found >> 16), (low, found & 0xFFFF)):
        same([of_bits(bits, kind) for bits in halves.tolist()], narrowed(values, kind))
        assert (halves[np.isnan(values)] == 0x7FFF).all()


# ---------------------------------------------------------------- faults of one access


def words(count, fill=1):
    return np.full(count, fill, "u4")


@pytest.mark.parametrize("offset", [-4, 72, 1 << 20])
@pytest.mark.parametrize(
    "access",
    [
        "ld.global.u32 %r1, [%a0+{}];",
        "st.global.u32 [%a0+{}], %t;",
        "atom.global.add.u32 %r1, [%a0+{}], 1;",
    ],
)
def test_out_of_bounds(access, offset):
    alone = f"setp.ne.s32 %p1, %t, 5;\n@%p1 bra END;\n{access}\nEND:"
    Memory(words(18)).run(alone.format(68))
    where = rf"4 bytes out of bounds.* {offset} bytes from .*array 0 of 72 "
    with pytest.raises(Fault, match=where):
        Memory(words(18)).run(alone.format(offset))


@pytest.mark.parametrize(
    ("access", "size"),
    [
        ("ld.global.u32 %r1, [%a0+{}];", 4),
        ("ld.global.b16 %rs1, [%a0+{}];", 2),
        ("st.global.u64 [%a0+{}], %a0;", 8),
        ("ld.global.v2.f32 {{%f1, %f2}}, [%a0+{}];", 8),
        ("ld.global.v4.f32 {{%f1, %f2, %f3, %f4}}, [%a0+{}];", 16),
        ("st.global.v2.b64 [%a0+{}], {{%a0, %a0}};", 16),
        ("atom.global.add.u32 %r1, [%a0+{}], 1;", 4),
    ],
)
def test_misaligned(access, size):
    Memory(words(20)).run(access.format(size), threads=1)
    for offset in {1, size // 2, size - 2} - {0}:
        with pytest.raises(Fault, match=f"misaligned access of {size} bytes.*array 0"):
            Memory(words(20)).run(access.format(size + offset), threads=1)


def test_what_nobody_has_written():
    write, read = (
        f"{element('%rd1', '%a0', '%t')}\n{text}"
        for text in ("st.global.u32 [%rd1], %t;", "ld.global.u32 %r1, [%rd1];")
    )
    memory = Memory(words(THREADS), unwritten=[0])
    memory.run(write)
    memory.run(read)  # by an earlier launch
    Memory(words(THREADS), unwritten=[0]).run(write + "\n" + read)
    with pytest.raises(Fault, match=r"thread 0 of block 0 reads what nobody .*byte 0 of array 0"):
        Memory(words(THREADS), unwritten=[0]).run(read)
    pair = f"{element('%rd2', '%a0', '%t', 8)}\nld.global.v2.u32 {{%r1, %r2}}, [%rd2];"
    with pytest.raises(Fault, match=r"thread 32 of block 0 reads what nobody has written"):
        Memory(words(2 * THREADS), unwritten=[0]).run(f"{write}\nbar.sync 0;\n{pair}")
    with pytest.raises(Fault, match="counts up what nobody has written"):
        Memory(words(1), unwritten=[0]).run("atom.global.add.u32 %r1, [%a0], 1;")


def test_shared_memory_begins_with_nothing():
    body = """
        shl.b32 %r1, %t, 2;
        mov.u32 %r2, table;
        add.s32 %r1, %r1, %r2;
        st.shared.u32 [%r1], %t;    // write
        ld.shared.u32 %r3, [%r1];
    """
    Memory().run(body, (3, 1, 1), shared={"table": 4 * THREADS})
    with pytest.raises(Fault, match=r"thread 0 of block 0 reads what nobody has written"):
        Memory().run(without(body, "write"), (3, 1, 1), shared={"table": 4 * THREADS})


# --------------------------------------------------------------------------------- parser

UNKNOWN = [
    "popc.b32 %r1, %t;",
    "trap;",
    "exit;",
    "@%p1 st.global.u32 [%a0], %t;",
    "call.uni (%r1), helper, (%t);",
    "bar.sync 1;",
    "bar.warp.sync -1;",
    "shfl.sync.idx.b32 %r1, %t, 0, 31, -1;",
    "membar.cta;",
    "fence.acq_rel.gpu;",
    "atom.global.add.f32 %f1, [%a0], %f2;",
    "ld.global.nc.f32 %f1, [%a0];",
    "ld.local.u32 %r1, [%a0];",
    "ld.global.v4.u32 {%r1, %r2}, [%a0];",
    "ld.global.u32 %r1, [unknown];",
    "mov.u32 %r1, %laneid;",
    "add.ftz.f32 %f1, %f2, %f2;",
    "div.approx.f32 %f1, %f2, %f2;",
    "cvt.rzi.s32.f32 %r1, %f2;",
    "cvt.sat.u16.u32 %rs1, %t;",
    "?;",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_unknown_is_refused_with_its_line(text):
    body = f"setp.eq.s32 %p1, %t, 0;\nmov.f32 %f2, 0f00000000;\nmov.f64 %fd2, 0d{'0' * 16};"
    body += "\nmov.b32 {%rs2, %rs3}, %t;"
    shared = {"table": 64}
    program(module(body, "q", shared))
    whole = module(f"{body}\n{text}\nadd.s32 %r9, %t, 1;", "q", shared)
    line = whole.splitlines().index(text) + 1
    with pytest.raises(Unsupported, match=rf"^line {line}: "):
        translate(parse(whole))
