"""The emulator itself, by small kernels written by hand.

Instructions are compared with exact arithmetic on Python's integers and fractions. Each fault has
a kernel that has it and a sound twin that lacks no more than that: the twin runs.
"""

from __future__ import annotations

import math
import operator
import struct
import threading
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
from emulator import device as emulated_device
from emulator.device import emulated
from emulator.machine import Schedule, run
from emulator.memory import Fault, GlobalMemory, Range
from emulator.parse import Unsupported, parse
from emulator.translate import Program, translate
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core.backends.cuda import driver
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.errors import BackendError

THREADS = 64
IN_ORDER = Schedule()
FIRST = 1 << 32  # the address of the first array, others follow at the same distance

# ---------------------------------------------------------------------- kernels as text


def module(body, parameters="", shared=None):
    """A kernel: in %t, %b, %n and %i are thread, block, number of blocks, thread of the grid; in
    %a0, %a1, ... the parameters, a letter each: "q" for an integer or pointer, "d" for a float64.
    """
    kinds = {"q": "u64", "d": "f64"}
    given = [f".param .{kinds[letter]} k_param_{n}" for n, letter in enumerate(parameters)]
    arrays = [
        f".visible .shared .align 8 .b8 {name}[{size}];" for name, size in (shared or {}).items()
    ]
    lines = [
        "// by hand",
        ".version 8.0",
        ".target sm_90",
        ".address_size 64",
        *arrays,
        f".visible .entry k({', '.join(given)})",
        f".maxntid {THREADS}, 1, 1",
        "{",
        ".reg .pred %p<10>;",
        ".reg .b16 %rs<10>;",
        ".reg .b32 %r<20>;",
        ".reg .b32 %t, %b, %n, %i;",
        ".reg .f32 %f<10>;",
        ".reg .b64 %rd<20>;",
        ".reg .b64 %a<10>;",
        ".reg .f64 %fd<10>;",
        *(f"ld.param.u64 %a{n}, [k_param_{n}];" for n in range(len(parameters))),
        "mov.u32 %t, %tid.x;",
        "mov.u32 %b, %ctaid.x;",
        "mov.u32 %n, %nctaid.x;",
        "mov.u32 %i, %ntid.x;",
        "mad.lo.s32 %i, %b, %i, %t;",
        *body.splitlines(),
        "ret;",
        "}",
    ]
    return "\n".join(lines)


def element(to, base, index, size=4):
    """The address of a number in an array, into `to`."""
    return f"mul.wide.s32 {to}, {index}, {size};\nadd.s64 {to}, {base}, {to};"


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


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products_keep_all_bits(kind):
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    a, b = pairs(DTYPES[kind])
    text = f"mul.wide.{kind} {registers(wide, 0)}, {registers(kind, 1, 2)};"
    found = compute(text, DTYPES[wide], a, b)
    expected = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(found, np.array(expected, DTYPES[wide]))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_a_product_and_a_sum_in_one(kind):
    a, b = pairs(DTYPES[kind])
    c = np.roll(a, 3)
    found = compute(f"mad.lo.{kind} {registers(kind, 0, 1, 2, 3)};", DTYPES[kind], a, b, c)
    expected = (x * y + z for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    np.testing.assert_array_equal(found, wrapped(expected, DTYPES[kind]))


@pytest.mark.parametrize("kind", ["u32", "u64"])
@pytest.mark.parametrize(("name", "expected"), [("div", operator.floordiv), ("rem", operator.mod)])
def test_division_of_integers(name, expected, kind):
    a, b = pairs(DTYPES[kind])
    a, b = a[b != 0], b[b != 0]
    text = f"{name}.{kind} {registers(kind, 0, 1, 2)};"
    found = compute(text, DTYPES[kind], a, b)
    np.testing.assert_array_equal(found, list(map(expected, a.tolist(), b.tolist())))
    b[3] = 0
    with pytest.raises(Fault, match="divided by zero"):
        compute(text, DTYPES[kind], a, b)


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_signs_of_integers(kind):
    a = examples(DTYPES[kind])
    for name, function in (("neg", operator.neg), ("abs", abs)):
        found = compute(f"{name}.{kind} {registers(kind, 0, 1)};", DTYPES[kind], a)
        np.testing.assert_array_equal(found, wrapped(map(function, a.tolist()), DTYPES[kind]))


@pytest.mark.parametrize("kind", BITS)
def test_not_turns_all_bits(kind):
    a = examples(DTYPES[kind])
    found = compute(f"not.{kind} {registers(kind, 0, 1)};", DTYPES[kind], a)
    np.testing.assert_array_equal(found, wrapped((-1 - x for x in a.tolist()), DTYPES[kind]))


AMOUNTS = [0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 65, 1 << 16, 1 << 31, (1 << 32) - 1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("shl", kind) for kind in BITS), *(("shr", kind) for kind in [*INTEGERS, "b32"])],
)
def test_shifts_by_more_than_all_bits(name, kind):
    bits = int(kind[1:])
    values, amounts = map(np.ravel, np.meshgrid(examples(DTYPES[kind]), np.array(AMOUNTS, "u4")))
    text = f"{name}.{kind} {registers(kind, 0, 1)}, %r2;"
    found = compute(text, DTYPES[kind], values, amounts)
    move = operator.lshift if name == "shl" else operator.rshift
    both = zip(values.tolist(), np.minimum(amounts, bits).tolist(), strict=True)
    np.testing.assert_array_equal(found, wrapped((move(v, n) for v, n in both), DTYPES[kind]))


@pytest.mark.parametrize(("text", "expected"), [("shl.b32", 0x2468ACF0), ("shr.u32", 0x091A2B3C)])
def test_shifts_by_a_literal(text, expected):
    assert compute(f"{text} %r0, %r1, 1;", "u4", np.array([0x12345678], "u4"))[0] == expected


# ------------------------------------------------------------------------ comparisons

ORDER = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt}
ORDER |= {"le": operator.le, "gt": operator.gt, "ge": operator.ge}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def compared(comparison, kind):
    a, b = pairs(DTYPES[kind])
    text = f"setp.{comparison}.{kind} %p1, {registers(kind, 1, 2)};\nselp.u32 %r0, 1, 0, %p1;"
    return compute(text, "u4", a, b).astype(bool), a.tolist(), b.tolist()


@pytest.mark.parametrize(
    ("comparison", "kind"),
    [
        *product(ORDER, INTEGERS),
        *product(UNSIGNED, ["u32", "u64"]),
        *product(["eq", "ne"], BITS),
    ],
)
def test_comparisons_of_integers(comparison, kind):
    found, a, b = compared(comparison, kind)
    np.testing.assert_array_equal(found, list(map((ORDER | UNSIGNED)[comparison], a, b)))


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


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_whether_one_is_nan(kind):
    for comparison, wanted in (("nan", True), ("num", False)):
        found, a, b = compared(comparison, kind)
        either = [math.isnan(x) or math.isnan(y) for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(found, np.array(either) == wanted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("and.pred %p3, %p1, %p2;", operator.and_),
        ("or.pred %p3, %p1, %p2;", operator.or_),
        ("xor.pred %p3, %p1, %p2;", operator.xor),
        ("not.pred %p3, %p1;", lambda a, b: not a),
        ("mov.pred %p3, %p2;", lambda a, b: b),
        ("mov.pred %p3, -1;", lambda a, b: True),
        ("mov.pred %p3, 0;", lambda a, b: False),
    ],
)
def test_predicates(text, expected):
    a, b = np.array([0, 0, 1, 1], "i4"), np.array([0, 1, 0, 1], "i4")
    text = f"""
        setp.ne.s32 %p1, %r1, 0;
        setp.ne.s32 %p2, %r2, 0;
        {text}
        selp.u32 %r0, 1, 0, %p3;
    """
    assert compute(text, "u4", a, b).tolist() == list(map(expected, a == 1, b == 1))


@pytest.mark.parametrize("kind", ["b32", "u32", "s32", "f32", "b64", "u64", "f64"])
def test_selp_takes_the_first_where_the_predicate_holds(kind):
    a, b = pairs(DTYPES[kind])
    chosen = np.arange(a.size, dtype="i4") % 3
    text = f"""
        setp.eq.s32 %p1, %r3, 0;
        selp.{kind} {registers(kind, 0, 1, 2)}, %p1;
    """
    found = compute(text, DTYPES[kind], a, b, chosen)
    assert found.tobytes() == np.where(chosen == 0, a, b).tobytes()


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


@pytest.mark.parametrize("kind", ["f32", "f64"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_square_root_is_the_nearest(kind, data):
    number = st.floats(0, allow_infinity=False, exclude_min=True, width=int(kind[1:]))
    values = np.array(data.draw(st.lists(number, min_size=1, max_size=40)), DTYPES[kind])
    found = compute(f"sqrt.rn.{kind} {registers(kind, 0, 1)};", DTYPES[kind], values)
    near = [np.nextafter(found, values.dtype.type(to)) for to in (0, math.inf)]
    for numbers in zip(*(part.tolist() for part in (values, found, *near)), strict=True):
        value, root, less, more = map(Fraction, numbers)
        assert ((root + less) / 2) ** 2 <= value <= ((root + more) / 2) ** 2


def test_fma_is_no_product_and_sum_in_float64():
    a, b, c = (np.array([number], "f4") for number in (97, 172961, 2.0**-40))
    found = compute("fma.rn.f32 %f0, %f1, %f2, %f3;", "f4", a, b, c)
    assert found[0] == 2**24 + 2  # 2**24 + 1 is a tie, and the rest lies beyond float64
    a, b, c = (np.array([number], "f8") for number in (1 + 2.0**-30, 1 - 2.0**-30, -1))
    assert compute("fma.rn.f64 %fd0, %fd1, %fd2, %fd3;", "f8", a, b, c)[0] == -(2.0**-60)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("add.{}", (INF, -INF), NAN),
        ("add.{}", (-0.0, -0.0), -0.0),
        ("add.{}", (NAN, 1), NAN),
        ("sub.{}", (1, 1), 0.0),
        ("sub.{}", (INF, INF), NAN),
        ("mul.{}", (0, INF), NAN),
        ("mul.{}", (-0.0, 3), -0.0),
        ("div.rn.{}", (0, 0), NAN),
        ("div.rn.{}", (-1, 0), -INF),
        ("div.rn.{}", (1, -INF), -0.0),
        ("rcp.rn.{}", (-0.0,), -INF),
        ("rcp.rn.{}", (-INF,), -0.0),
        ("sqrt.rn.{}", (-1,), NAN),
        ("sqrt.rn.{}", (-0.0,), -0.0),
        ("sqrt.rn.{}", (INF,), INF),
        ("fma.rn.{}", (INF, 0, 1), NAN),
        ("fma.rn.{}", (-1, 0, -0.0), -0.0),
        ("neg.{}", (0,), -0.0),
        ("neg.{}", (-INF,), INF),
        ("abs.{}", (-0.0,), 0.0),
        ("abs.{}", (-INF,), INF),
    ],
)
def test_infinity_nan_and_signed_zeros(name, given, expected, kind):
    operands = (np.array([number], DTYPES[kind]) for number in given)
    text = f"{name.format(kind)} {registers(kind, *range(len(given) + 1))};"
    same(compute(text, DTYPES[kind], *operands), [expected])


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


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_float64_to_float32_and_back(values):
    wide = np.array(values)
    found = compute("cvt.rn.f32.f64 %f0, %fd1;", "f4", wide)
    assert found.tolist() == [rounded(value, "f32") for value in values]
    assert compute("cvt.f64.f32 %fd0, %f1;", "f8", found).tolist() == found.tolist()


@pytest.mark.parametrize("to", ["f32", "f64"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integers_to_floats_are_rounded_to_even(kind, to):
    values = examples(DTYPES[kind])
    near = [(1 << e) + n for e in (24, 25, 30, 53, 54, 62) for n in range(-3, 4)]
    near = [n for n in near if n <= np.iinfo(values.dtype).max]
    values = np.append(values, np.array(near, values.dtype))
    text = f"cvt.rn.{to}.{kind} {registers(to, 0)}, {registers(kind, 1)};"
    found = compute(text, DTYPES[to], values)
    assert found.tolist() == [rounded(value, to) for value in values.tolist()]


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("add", lambda a, b, c: a + c),
        ("sub", lambda a, b, c: a - c),
        ("fma", lambda a, b, c: a * b + c),
    ],
)
def test_float16_beside_float32(name, exact):
    """What is widened is the first operand of a sum, the two of a product; one rounding."""
    halves, singles = examples("f2"), examples("f4")
    a = halves[np.isfinite(halves)]
    b, c = np.roll(a, 5), np.resize(singles[np.abs(singles) < 1e9], a.size)
    if name == "fma":
        found = compute("fma.rn.f32.f16 %f0, %rs1, %rs2, %f3;", "f4", a, b, c)
    else:
        found = compute(f"{name}.rn.f32.f16 %f0, %rs1, %f2;", "f4", a, c)
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    expected = [rounded(exact(*map(Fraction, triple)), "f32") for triple in triples]
    assert found.tolist() == expected


# --------------------------------------------------------------------- bits and memory


@pytest.mark.parametrize(
    ("text", "result", "given", "expected"),
    [
        ("cvt.s64.s32 %rd0, %r1;", "i8", ("i4", -5), -5),
        ("cvt.u64.u32 %rd0, %r1;", "u8", ("i4", -5), (1 << 32) - 5),
        ("cvt.u32.u64 %r0, %rd1;", "u4", ("u8", (7 << 32) + 9), 9),
        ("cvt.u32.u16 %r0, %rs1;", "u4", ("u2", 0xFFFE), 0xFFFE),
        ("cvt.s32.s16 %r0, %rs1;", "i4", ("u2", 0xFFFE), -2),
        ("cvt.u16.u32 %rs0, %r1;", "u2", ("u4", 0x12345678), 0x5678),
        # registers wider than the type: the lower part counts
        ("cvt.s64.s32 %rd0, %rd1;", "i8", ("u8", (7 << 32) + 0xFFFFFFFF), -1),
        ("cvt.u32.u16 %r0, %r1;", "u4", ("u4", 0x1234FFFE), 0xFFFE),
        ("cvt.u16.u32 %r0, %r1;", "u4", ("u4", 0x1234FFFE), 0xFFFE),
        ("cvt.s16.s32 %r0, %r1;", "i4", ("u4", 0x1234FFFE), -2),
        ("cvt.f32.f16 %f0, %r1;", "f4", ("u4", 0xFFFF3C00), 1.0),
        # bits from one kind of register into another
        ("mov.b32 %r0, %f1;", "u4", ("f4", 1.0), 0x3F800000),
        ("mov.b32 %f0, %r1;", "f4", ("u4", 0xC0000000), -2.0),
        ("mov.b64 %rd0, %fd1;", "u8", ("f8", 1.0), 0x3FF << 52),
        ("mov.f64 %fd0, %rd1;", "f8", ("u8", 0x3FF << 52), 1.0),
        ("mov.b32 {%rs2, %rs0}, %r1;", "u2", ("u4", 0x12345678), 0x1234),
        ("mov.b32 {%rs0, %rs2}, %r1;", "u2", ("u4", 0x12345678), 0x5678),
        ("mov.b64 {%f2, %f0}, %rd1;", "f4", ("u8", 0x3F800000_40000000), 1.0),
        ("mov.b64 {%r0, %f2}, %rd1;", "u4", ("u8", 0x3F800000_40000000), 0x40000000),
        (
            "mov.b32 {%rs2, %rs3}, %r1;\nmov.b32 %r0, {%rs3, %rs2};",
            "u4",
            ("u4", 0x12345678),
            0x56781234,
        ),
        (
            "mov.f32 %f2, 0f3F800000;\nmov.b64 %rd0, {%r1, %f2};",
            "u8",
            ("u4", 9),
            (0x3F800000 << 32) + 9,
        ),
        # literals
        ("mov.u32 %r0, -2;", "u4", ("u4", 0), 0xFFFFFFFE),
        ("mov.u32 %r0, 0xFFFFFFFF;", "i4", ("u4", 0), -1),
        ("mov.u32 %r0, 17U;", "u4", ("u4", 0), 17),
        ("mov.b32 %r0, 0f3F800000;", "u4", ("u4", 0), 0x3F800000),
        ("mov.b64 %rd0, 0d3FF8000000000000;", "u8", ("u4", 0), 0x3FF8 << 48),
        ("mov.f32 %f0, 0fFF800000;", "f4", ("u4", 0), -INF),
        ("add.f32 %f0, %f1, 0f3F800000;", "f4", ("f4", 2.0), 3.0),
        ("sub.s32 %r0, 5, %r1;", "i4", ("i4", 7), -2),
        (
            "setp.eq.s32 %p1, %r1, 0;\nselp.b32 %r0, 0f3F800000, %r1, %p1;",
            "u4",
            ("u4", 0),
            0x3F800000,
        ),
    ],
)
def test_bits_and_literals(text, result, given, expected):
    dtype, value = given
    assert compute(text, result, np.array([value], dtype))[0] == expected


def test_two_kernels_differ_in_the_sign_of_a_zero():
    zero = np.array([1], "u4")
    for bits, expected in (("00000000", 0.0), ("80000000", -0.0)):
        same(compute(f"mov.f32 %f0, 0f{bits};", "f4", zero), [expected])


@pytest.mark.parametrize(
    ("kind", "count", "dtype"),
    [
        ("f32", 4, "f4"),
        ("u32", 2, "u4"),
        ("b32", 4, "u4"),
        ("f64", 2, "f8"),
        ("b64", 2, "u8"),
        ("u64", 1, "u8"),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors(kind, count, dtype, space):
    x = (np.arange(THREADS * count) + 3).astype(dtype)
    y = np.zeros_like(x)
    size, name = x.itemsize * count, REGISTERS[dtype]
    numbers = [f"{name}{k}" for k in range(count)]
    vector = f".v{count}.{kind}" if count > 1 else f".{kind}"
    forward, back = (
        "{" + ", ".join(order) + "}" if count > 1 else order[0]
        for order in (numbers, numbers[::-1])
    )
    through = f"""
        mul.lo.s32 %r10, %t, {size};
        mov.u32 %r11, table;
        add.s32 %r10, %r10, %r11;
        st.shared{vector} [%r10], {forward};
        ld.shared{vector} {forward}, [%r10];
    """
    body = f"""
        {element("%rd10", "%a0", "%t", size)}
        {element("%rd11", "%a1", "%t", size)}
        ld.global{vector} {forward}, [%rd10];
        {through if space == "shared" else ""}
        st.global{vector} [%rd11], {back};
    """
    Memory(x, y).run(body, shared={"table": size * THREADS})
    np.testing.assert_array_equal(y.reshape(-1, count), x.reshape(-1, count)[:, ::-1])


def test_two_bytes_from_and_into_wider_registers():
    x = np.arange(THREADS, dtype="u2") + 0xFFE0
    unsigned, signed = np.zeros(THREADS, "u4"), np.zeros(THREADS, "i4")
    stored = np.full(2 * THREADS, 7, "u2")
    body = f"""
        {element("%rd1", "%a0", "%t", 2)}
        ld.global.u16 %r1, [%rd1];
        ld.global.s16 %r2, [%rd1];
        {element("%rd1", "%a1", "%t", 4)}
        st.global.u32 [%rd1], %r1;
        {element("%rd1", "%a2", "%t", 4)}
        st.global.u32 [%rd1], %r2;
        {element("%rd1", "%a3", "%t", 4)}
        or.b32 %r1, %r1, 0x50000;
        st.global.b16 [%rd1+2], %r1;
    """
    Memory(x, unsigned, signed, stored).run(body)
    np.testing.assert_array_equal(unsigned, x)
    np.testing.assert_array_equal(signed, x.view("i2"))
    np.testing.assert_array_equal(stored.reshape(-1, 2), np.stack([np.full(THREADS, 7), x], 1))


@pytest.mark.parametrize("order", ["first", "last", "random"])
def test_where_a_thread_is(order):
    grid, threads = (3, 4, 2), 48
    names = ["tid.x", "tid.y", "ntid.x", "ntid.y"]
    names += [f"{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"]
    blocks = grid[0] * grid[1] * grid[2]
    out = np.zeros((blocks, threads, len(names)), "i4")
    body = f"""
        mov.u32 %r1, %ctaid.z;
        mov.u32 %r2, %nctaid.y;
        mov.u32 %r3, %ctaid.y;
        mad.lo.s32 %r1, %r1, %r2, %r3;
        mad.lo.s32 %r1, %r1, %n, %b;
        mov.u32 %r2, %ntid.x;
        mad.lo.s32 %r1, %r1, %r2, %t;
        {element("%rd1", "%a0", "%r1", 4 * len(names))}
    """
    for number, name in enumerate(names):
        body += f"\nmov.u32 %r4, %{name};\nst.global.u32 [%rd1+{4 * number}], %r4;"
    Memory(out.reshape(-1)).run(body, grid, Schedule(order, 5), threads=threads)
    for block, (z, y, x) in enumerate(np.ndindex(grid[::-1])):
        for thread in range(threads):
            assert out[block, thread].tolist() == [thread, 0, threads, 1, x, y, z, *grid]


def test_counters_count_one_thread_after_another():
    counter, before = np.array([10], "u4"), np.zeros(3 * THREADS, "u4")
    body = f"""
        atom.global.add.u32 %r1, [%a0], 2;
        {element("%rd1", "%a1", "%i")}
        st.global.u32 [%rd1], %r1;
    """
    Memory(counter, before).run(body, (3, 1, 1))
    assert counter[0] == 10 + 2 * 3 * THREADS
    assert sorted(before) == list(range(10, 10 + 2 * 3 * THREADS, 2))


# ------------------------------------------------------------------------ control flow

SCHEDULES = [
    *(Schedule(order, width) for order in ("first", "last") for width in (1, 2, 32)),
    *(Schedule("random", width, seed=seed) for width in (1, 2, 32) for seed in range(3)),
]
in_all_orders = pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: f"{s.order}-{s.width}-{s.seed}"
)

COLLATZ = f"""
    {element("%rd1", "%a0", "%i")}
    ld.global.u32 %r1, [%rd1];
    mov.u32 %r2, 0;
    mov.u32 %r4, 7;
LOOP:
    setp.le.s32 %p1, %r1, 1;
    @%p1 bra DONE;
    and.b32 %r3, %r1, 1;
    setp.eq.s32 %p2, %r3, 0;
    @%p2 bra EVEN;
    mad.lo.s32 %r1, %r1, 3, 1;
    mov.u32 %r4, %r1;
    bra.uni NEXT;
EVEN:
    shr.s32 %r1, %r1, 1;
NEXT:
    add.s32 %r2, %r2, 1;
    bra LOOP;
DONE:
    mad.lo.s32 %r2, %r2, 1000, %r4;
    {element("%rd1", "%a1", "%i")}
    st.global.u32 [%rd1], %r2;
"""


def collatz(n):
    """Steps, the last number behind an odd one, and how many were odd and even."""
    steps, last, odd = 0, 7, 0
    while n > 1:
        if n % 2:
            n = last = 3 * n + 1
            odd += 1
        else:
            n //= 2
        steps += 1
    return 1000 * steps + last, odd, steps - odd


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=3 * THREADS, max_size=3 * THREADS), st.integers(1, 4))
def test_threads_go_round_loops_and_branches_as_each_must(values, width):
    x, y = np.array(values, "i4"), np.zeros(len(values), "i4")
    counts = Memory(x, y).run(COLLATZ, (3, 1, 1), Schedule(width=width))
    expected, odd, even = zip(*map(collatz, values), strict=True)
    assert y.tolist() == list(expected)
    begins = {
        step.lines[0]: threads
        for step, threads in zip(program(module(COLLATZ, "qq")).steps, counts.threads, strict=True)
    }
    lines = module(COLLATZ, "qq").splitlines()
    for text, total in (("mad.lo.s32 %r1", sum(odd)), ("shr.s32", sum(even))):
        (line,) = (number for number, words in enumerate(lines, 1) if text in words)
        assert begins[line] == total


def test_nested_loops_and_both_polarities_of_a_guard():
    out = np.zeros(2 * THREADS, "i4")
    body = f"""
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
    OUTER:
        setp.lt.s32 %p1, %r2, %i;
        @!%p1 bra END;
        and.b32 %r3, %r2, 3;
    INNER:
        setp.gt.s32 %p2, %r3, 0;
        @!%p2 bra NEXT;
        mad.lo.s32 %r1, %r1, 3, %r3;
        sub.s32 %r3, %r3, 1;
        bra.uni INNER;
    NEXT:
        add.s32 %r2, %r2, 1;
        bra.uni OUTER;
    END:
        {element("%rd1", "%a0", "%i")}
        st.global.u32 [%rd1], %r1;
    """
    Memory(out).run(body, (2, 1, 1))
    expected = []
    for thread in range(out.size):
        total = 0
        for outer in range(thread):
            for inner in range(outer % 4, 0, -1):
                total = total * 3 + inner
        expected.append(total)
    np.testing.assert_array_equal(out, wrapped(expected, "i4"))


ROUNDS = f"""
    {element("%rd1", "%a0", "%b")}
    ld.global.u32 %r1, [%rd1];      // how many rounds this block goes
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra GONE;
    mov.u32 %r2, %i;
    mov.u32 %r3, table;
    shl.b32 %r4, %t, 2;
    add.s32 %r4, %r3, %r4;
    add.s32 %r5, %t, 1;
    and.b32 %r5, %r5, 63;
    shl.b32 %r5, %r5, 2;
    add.s32 %r5, %r3, %r5;
ROUND:
    st.shared.u32 [%r4], %r2;
    bar.sync 0;                     // behind the write
    ld.shared.u32 %r6, [%r5];
    bar.sync 0;                     // behind the read
    mad.lo.s32 %r2, %r2, 5, %r6;
    sub.s32 %r1, %r1, 1;
    setp.gt.s32 %p2, %r1, 0;
    @%p2 bra ROUND;
    setp.gt.s32 %p3, %t, %b;
    @%p3 bra GONE;
    {element("%rd2", "%a1", "%i")}
    st.global.u32 [%rd2], %r2;
GONE:
"""


@in_all_orders
def test_blocks_go_their_own_ways(schedule):
    """Rounds with barriers, as many as a block wants; some exit at once, threads before the end."""
    rounds, out = np.array([3, 0, 1, 6, 2, 0, 4], "i4"), np.full(7 * THREADS, -1, "i4")
    Memory(rounds, out).run(ROUNDS, (7, 1, 1), schedule, {"table": 4 * THREADS})
    for block, count in enumerate(rounds):
        values = np.arange(block * THREADS, (block + 1) * THREADS)
        for _ in range(count):
            values = values * 5 + np.roll(values, -1)
        expected = np.where((np.arange(THREADS) <= block) & (count > 0), values, -1)
        np.testing.assert_array_equal(out[block * THREADS : (block + 1) * THREADS], expected)


def test_in_random_order_blocks_leave_barriers_at_their_own_pace():
    body = f"""
        mov.u32 %r1, 0;
        setp.ne.s32 %p1, %t, 0;
    ROUND:
        @%p1 bra MEET;
        atom.global.add.u32 %r2, [%a0], 1;
        mad.lo.s32 %r3, %b, 3, %r1;
        {element("%rd1", "%a1", "%r3")}
        st.global.u32 [%rd1], %r2;
    MEET:
        bar.sync 0;
        add.s32 %r1, %r1, 1;
        setp.lt.s32 %p2, %r1, 3;
        @%p2 bra ROUND;
    """

    def one_is_ahead(schedule):
        turns = words(6 * 3)
        Memory(words(1), turns).run(body, (6, 1, 1), schedule)
        return turns.reshape(6, 3)[:, 2].min() < turns.reshape(6, 3)[:, 1].max()

    assert not one_is_ahead(Schedule("first"))
    assert any(one_is_ahead(Schedule("random", seed=seed)) for seed in range(4))
    assert one_is_ahead(Schedule("first", 1))


def test_only_some_blocks_run():
    out = np.zeros(5 * THREADS, "i4")
    body = f"{element('%rd1', '%a0', '%i')}\nst.global.u32 [%rd1], %n;"
    Memory(out).run(body, (5, 1, 1), Schedule(only=[1, 3]))
    np.testing.assert_array_equal(out.reshape(5, -1).max(1), [0, 5, 0, 5, 0])


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


def test_a_vector_does_not_reach_into_a_neighbour():
    memory = GlobalMemory()
    memory.add(Range(FIRST, words(18).view("u1"), name="first"))
    second = memory.add(Range(FIRST + 72, words(18).view("u1"), name="second"))
    for size, sound in (("", True), (".v2", True), (".v4", False)):
        group = {"": "%r1", ".v2": "{%r1, %r2}", ".v4": "{%r1, %r2, %r3, %r4}"}[size]
        text = module(f"ld.global{size}.u32 {group}, [%a0+64];", "q")
        if sound:
            run(program(text), memory, [np.uint64(FIRST)], (1, 1, 1), THREADS)
        else:
            with pytest.raises(Fault, match="16 bytes out of bounds"):
                run(program(text), memory, [np.uint64(FIRST)], (1, 1, 1), THREADS)
    assert second.read_bytes == 0


@pytest.mark.parametrize("name", ["low", "high"])
def test_shared_arrays_do_not_reach_into_each_other(name):
    body = """
        mov.u32 %r1, {0};
        st.shared.u32 [%r1+{1}], 1;
        ld.shared.u32 %r2, [%r1+{1}];
        st.shared.u32 [{0}+{1}], 1;
    """
    shared = {"low": 4, "high": 4}
    Memory().run(body.format(name, 0), shared=shared, threads=1)
    for offset in (-4, 4, 8, 64, 4096):
        with pytest.raises(Fault, match="is out of bounds"):
            Memory().run(body.format(name, offset), shared=shared, threads=1)


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


def test_misaligned_in_shared_memory():
    body = "st.shared.v2.u32 [table+{}], {{%t, %t}};"
    Memory().run(body.format(8), shared={"table": 64}, threads=1)
    with pytest.raises(Fault, match="misaligned"):
        Memory().run(body.format(4), shared={"table": 64}, threads=1)


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


# -------------------------------------------------------- order of threads of one block

# %1 and %2: the place of a thread and of its neighbour
HAND_OVERS = {
    "write, read": """
        st [%1], %t;
        bar.sync 0;                 // between
        ld %r3, [%2];
    """,
    "read, write": """
        st [%1], %t;
        bar.sync 0;
        ld %r3, [%2];
        bar.sync 0;                 // between
        st [%1], %r3;
    """,
    "write, write": """
        st [%1], %t;
        bar.sync 0;                 // between
        st [%2], %t;
    """,
    "reads of many, write": """
        st [%1], %t;
        bar.sync 0;
        ld %r3, [%2];
        ld %r3, [%1];
        bar.sync 0;                 // between
        st [%1], %r3;
    """,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", HAND_OVERS)
def test_a_barrier_orders_the_threads_of_a_block(name, space):
    body = HAND_OVERS[name].replace("st ", f"st.{space}.u32 ").replace("ld ", f"ld.{space}.u32 ")
    if space == "shared":
        own, other = "%r1", "%r2"
        places = """
            mov.u32 %r2, table;
            shl.b32 %r1, %t, 2;
            add.s32 %r1, %r1, %r2;
            add.s32 %r4, %t, 1;
            and.b32 %r4, %r4, 63;
            shl.b32 %r4, %r4, 2;
            add.s32 %r2, %r4, %r2;
        """
        shared = {"table": 4 * THREADS}
    else:
        own, other, shared = "%rd1", "%rd2", None
        places = f"""
            {element("%rd1", "%a0", "%i")}
            xor.b32 %r4, %i, 1;
            {element("%rd2", "%a0", "%r4")}
        """
    body = places + body.replace("%1", own).replace("%2", other)
    memory = Memory(words(3 * THREADS))
    memory.run(body, (3, 1, 1), Schedule("random", 2), shared)
    with pytest.raises(Fault, match="no order" if space == "global" else "no barrier"):
        memory.run(without(body, "between"), (3, 1, 1), shared=shared)


@pytest.mark.parametrize("place", ["[%a0]", "[flag]"])
def test_two_threads_write_one_number_at_once(place):
    space = "shared" if "flag" in place else "global"
    body = f"""
        setp.ne.s32 %p1, %t, 3;
        @%p1 bra END;               // alone
        st.{space}.u32 {place}, %t;
    END:
    """
    memory = Memory(words(1))
    memory.run(body, shared={"flag": 4})
    with pytest.raises(Fault, match="at once" if space == "global" else "no barrier between"):
        memory.run(without(body, "alone"), shared={"flag": 4})


def test_a_reader_is_remembered_behind_what_it_writes_itself():
    """0 reads, 1 writes with no barrier between, and behind one 0 writes: the first two race."""
    body = """
        setp.ne.s32 %p1, %t, 0;
        setp.ne.s32 %p2, %t, 1;
        @%p1 bra WRITE;
        ld.global.u32 %r1, [%a0];
    WRITE:
        bar.sync 0;                 // between
        @%p2 bra MEET;
        st.global.u32 [%a0], 3;
    MEET:
        bar.sync 0;
        @%p1 bra END;
        st.global.u32 [%a0], 4;
    END:
    """
    Memory(words(1)).run(body)
    with pytest.raises(
        Fault, match=r"thread 1 of block 0 overwrites what thread 0 of block 0 read"
    ):
        Memory(words(1)).run(without(body, "between"))


def test_one_of_many_readers_has_met_nobody():
    """All read a number; behind a barrier all but one read again, and that one writes."""
    body = """
        ld.global.u32 %r1, [%a0];
        bar.sync 0;                 // first
        setp.eq.s32 %p1, %t, 63;
        @%p1 bra WRITE;             // again
        ld.global.u32 %r1, [%a0];   // again
    WRITE:
        setp.ne.s32 %p1, %t, 63;
        @%p1 bra END;
        st.global.u32 [%a0], 3;
    END:
    """
    with pytest.raises(
        Fault, match=r"thread 63 of block 0 overwrites what thread [0-9]+ of block 0 read"
    ):
        Memory(words(1)).run(body)
    Memory(words(1)).run(without(body, "again"))
    with pytest.raises(Fault, match="thread 63 of block 0 overwrites what"):
        Memory(words(1)).run(without(without(body, "again"), "first"))


# with the line they diverge, without it they don't
DIVERGENCES = {
    "half of the threads": """
        setp.lt.s32 %p1, %t, 32;
        @%p1 bra END;           // diverge
        bar.sync 0;
    END:
    """,
    "another barrier": """
        setp.lt.s32 %p1, %t, 32;
        @%p1 bra OTHER;         // diverge
        bar.sync 0;
        bra.uni END;
    OTHER:
        bar.sync 0;
    END:
    """,
    "exit of one": """
        setp.ne.s32 %p1, %t, 9;
        @%p1 bra STAY;
        ret;                    // diverge
    STAY:
        bar.sync 0;
    """,
    "more rounds for some": """
        mov.u32 %r1, 3;
        and.b32 %r1, %t, 3;     // diverge
    ROUND:
        bar.sync 0;
        sub.s32 %r1, %r1, 1;
        setp.gt.s32 %p1, %r1, 0;
        @%p1 bra ROUND;
    """,
    "in one block": """
        setp.eq.s32 %p1, %i, 70;
        @%p1 bra END;           // diverge
        bar.sync 0;
    END:
    """,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_barrier_is_for_all_threads(name):
    broken = DIVERGENCES[name]
    Memory().run(without(broken, "diverge"), (3, 1, 1))
    with pytest.raises(Fault, match=r"block [0-2] diverges at a barrier: threads are at \['"):
        Memory().run(broken, (3, 1, 1))


# ------------------------------------------------------------------- order between blocks

BLOCKS = 6

# Each block writes, the last to count adds up. In FENCED each thread has its own fences, in LED
# the fences of the first thread are handed on by barriers.
_COUNT = """
    setp.ne.s32 %p1, %t, 0;
    @%p1 bra COUNTED;
    {}
    atom.global.add.u32 %r2, [%a1], 1;      // count
    add.s32 %r3, %n, -1;
    setp.eq.s32 %p2, %r2, %r3;
    selp.u32 %r3, 1, 0, %p2;
    st.shared.u32 [flag], %r3;
    {}
COUNTED:
    bar.sync 0;                             // barrier behind
    ld.shared.u32 %r4, [flag];
    setp.eq.s32 %p3, %r4, 0;
    @%p3 bra END;                           // look at the count
"""
_WRITE = f"""
    {element("%rd1", "%a0", "%i")}
    add.s32 %r1, %i, 5;
    st.global.u32 [%rd1], %r1;              // write
"""
_ADD_UP = f"""
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
SUM:
    mad.lo.s32 %r7, %r5, {THREADS}, %t;
    {element("%rd2", "%a0", "%r7")}
    ld.global.u32 %r8, [%rd2];
    add.s32 %r6, %r6, %r8;
    add.s32 %r5, %r5, 1;
    setp.lt.s32 %p4, %r5, %n;
    @%p4 bra SUM;
    {element("%rd2", "%a2", "%t")}
    st.global.u32 [%rd2], %r6;
    setp.ne.s32 %p1, %t, 0;
    @%p1 bra END;
    st.global.u32 [%a1], 0;                 // reset
END:
"""
FENCED = f"""
    {_WRITE}
    membar.gl;                              // writer's fence
    bar.sync 0;                             // barrier before
    {_COUNT.format("", "")}
    membar.gl;                              // reader's fence
    {_ADD_UP}
"""
LED = f"""
    {_WRITE}
    bar.sync 0;                             // barrier before
    {_COUNT.format("membar.gl; // writer's fence", "membar.gl; // reader's fence")}
    {_ADD_UP}
"""


class Reduction:
    """Memory for the kernels above."""

    def __init__(self, **how):
        self.counter, self.sums = words(2, 0), words(THREADS, 0)
        self.memory = Memory(words(BLOCKS * THREADS), self.counter, self.sums, **how)

    def run(self, body, schedule=IN_ORDER, threads=THREADS):
        self.memory.run(body, (BLOCKS, 1, 1), schedule, {"flag": 4}, threads)

    @property
    def is_right(self):
        expected = 5 * BLOCKS + np.arange(BLOCKS * THREADS).reshape(BLOCKS, -1).sum(0)
        return (self.sums == expected).all() and not self.counter.any()


@in_all_orders
@pytest.mark.parametrize("body", [FENCED, LED], ids=["fenced", "led"])
def test_the_last_block_sees_what_all_have_written(body, schedule):
    reduction = Reduction(unwritten=[0])
    for _ in range(2):
        reduction.run(body, schedule)
        assert reduction.is_right


def moved(text, tag, behind):
    """The text with a line in another place."""
    lines = text.splitlines()
    (line,) = (line for line in lines if line.endswith("// " + tag))
    lines.remove(line)
    (place,) = (number for number, words in enumerate(lines) if words.endswith("// " + behind))
    return "\n".join([*lines[: place + 1], line, *lines[place + 1 :]])


def counting_at_two_places(text):
    """Blocks of even and odd numbers count apart, half as many each."""
    chosen = f"and.b32 %r9, %b, 1;\n{element('%rd3', '%a1', '%r9')}\n"
    half = f"mov.u32 %r3, {BLOCKS // 2 - 1};"
    return chosen + text.replace("[%a1], 1;", "[%rd3], 1;").replace("add.s32 %r3, %n, -1;", half)


UNORDERED = (
    "(reads|overwrites) what (thread [0-9]+ of block [0-9] (wrote|read), in no order|nobody)"
)
BROKEN = {
    "no fence of the writer": (lambda text: without(text, "writer's fence"), UNORDERED),
    "no fence of the reader": (lambda text: without(text, "reader's fence"), UNORDERED),
    "no barrier before": (lambda text: without(text, "barrier before"), UNORDERED),
    "no barrier behind": (lambda text: without(text, "barrier behind"), "no barrier between"),
    "write behind the count": (lambda text: moved(text, "write", "barrier behind"), UNORDERED),
    "nobody looks at the count": (lambda text: without(text, "look at the count"), UNORDERED),
    "two counters": (counting_at_two_places, UNORDERED),
}


@in_all_orders
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("body", [FENCED, LED], ids=["fenced", "led"])
def test_a_last_block_that_lacks_something(body, name, schedule):
    change, message = BROKEN[name]
    with pytest.raises(Fault, match=message):
        Reduction().run(change(body), schedule)


@in_all_orders
@pytest.mark.parametrize("body", [FENCED, LED], ids=["fenced", "led"])
def test_a_block_of_one_thread_needs_the_fences_alone(body, schedule):
    body = body.replace(f"%r5, {THREADS}, %t", "%r5, 1, %t")
    for tag in ("barrier before", "barrier behind"):
        body = without(body, tag)
    Reduction().run(body, schedule, threads=1)
    for tag in ("writer's fence", "reader's fence"):
        with pytest.raises(Fault, match=UNORDERED):
            Reduction().run(without(body, tag), schedule, threads=1)


def test_a_block_that_takes_itself_for_the_last_is_found_in_some_order():
    broken = FENCED.replace("setp.eq.s32 %p2, %r2, %r3;", "setp.eq.s32 %p2, %b, %r3;")
    assert broken != FENCED
    found = []
    for schedule in SCHEDULES:
        try:
            Reduction().run(broken, schedule)
        except Fault:
            found.append(schedule.order)
    assert {"last", "random"} <= set(found)


# what one thread of block {} does, or of all blocks
ALONE = """
    setp.ne.s32 %p8, %t, 0;
    setp.ne.s32 %p9, %b, {};                // of one block
    or.pred %p8, %p8, %p9;                  // of one block
    @%p8 bra NOT_ALONE;
    st.global.u32 [%a1], 0;
NOT_ALONE:
"""
RESETS = {
    "by all before": lambda text: without(ALONE, "of one block") + without(text, "reset"),
    "by the first before": lambda text: ALONE.format(0) + without(text, "reset"),
    "by some block behind": lambda text: without(text, "reset") + ALONE.format(2),
    "by the first to count": lambda text: text.replace(
        "// count\n",
        "\nsetp.ne.s32 %p8, %r2, 0;\n@%p8 bra KEEP;\nst.global.u32 [%a1], 0;\nKEEP:\n",
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES[:6], ids=lambda s: f"{s.order}-{s.width}")
@pytest.mark.parametrize("name", RESETS)
def test_a_counter_that_is_reset_before_all_have_counted(name, schedule):
    what = "(counts up|overwrites) what thread 0 of block [0-9] wrote|writes what another writes"
    with pytest.raises(Fault, match=what):
        Reduction().run(RESETS[name](FENCED), schedule)


def test_a_counter_is_reset_by_another_thread():
    body = """
        setp.ne.s32 %p1, %t, 0;
        setp.ne.s32 %p2, %t, 1;
        @%p1 bra COUNTED;
        atom.global.add.u32 %r2, [%a0], 1;
    COUNTED:
        bar.sync 0;             // between
        @%p2 bra END;
        st.global.u32 [%a0], 0;
    END:
    """
    Memory(words(1)).run(body)
    with pytest.raises(
        Fault, match="thread 1 of block 0 overwrites what thread 0 of block 0 wrote"
    ):
        Memory(words(1)).run(without(body, "between"))


@in_all_orders
def test_a_counter_is_read_plainly_by_the_last_alone(schedule):
    read = "    ld.global.u32 %r10, [%a1];\n"
    by_the_last = FENCED.replace(
        "    st.global.u32 [%a1], 0;", read + "    st.global.u32 [%a1], 0;"
    )
    by_all = FENCED.replace("// count\n", "\n" + read)
    Reduction().run(by_the_last, schedule)
    with pytest.raises(Fault, match=r"(counts up|reads) what thread 0 of block [0-9] (read|wrote)"):
        Reduction().run(by_all, schedule)


@in_all_orders
def test_one_counter_serves_twice(schedule):
    """Blocks write, count, write elsewhere, count again: the last has both."""
    body = f"""
        {element("%rd1", "%a0", "%i")}
        st.global.u32 [%rd1], %i;
        membar.gl;                              // first fence
        bar.sync 0;
        setp.ne.s32 %p1, %t, 0;
        @%p1 bra FIRST;
        atom.global.add.u32 %r2, [%a1], 1;
    FIRST:
        {element("%rd2", "%a2", "%i")}
        st.global.u32 [%rd2], %i;
        membar.gl;                              // second fence
        bar.sync 0;
        @%p1 bra SECOND;
        atom.global.add.u32 %r2, [%a1], 1;
        st.shared.u32 [flag], %r2;
    SECOND:
        bar.sync 0;
        ld.shared.u32 %r2, [flag];
        mad.lo.s32 %r3, %n, 2, -1;
        setp.ne.s32 %p2, %r2, %r3;
        @%p2 bra END;
        membar.gl;                              // reader's fence
        mov.u32 %r5, 0;
    SUM:
        mad.lo.s32 %r7, %r5, {THREADS}, %t;
        {element("%rd1", "%a0", "%r7")}
        ld.global.u32 %r8, [%rd1];
        {element("%rd1", "%a2", "%r7")}
        ld.global.u32 %r8, [%rd1];
        add.s32 %r5, %r5, 1;
        setp.lt.s32 %p4, %r5, %n;
        @%p4 bra SUM;
    END:
    """

    def run(text):
        memory = Memory(words(BLOCKS * THREADS), words(1, 0), words(BLOCKS * THREADS))
        memory.run(text, (BLOCKS, 1, 1), schedule, {"flag": 4})

    run(body)
    run(without(body, "first fence"))  # the second fence is one for both
    with pytest.raises(Fault, match=UNORDERED):
        run(without(body, "second fence"))


@in_all_orders
def test_one_thread_fences_for_all_between_two_barriers(schedule):
    fence = """
        bar.sync 0;                             // first
        setp.ne.s32 %p5, %t, 9;
        @%p5 bra {0};
        membar.gl;                              // fence
    {0}:
        bar.sync 0;                             // second
    """
    sound = f"{_WRITE}{fence.format('OUT')}{_COUNT.format('', '')}{fence.format('IN')}{_ADD_UP}"
    Reduction().run(sound, schedule)
    for name in ("OUT", "IN"):
        for tag in ("first", "fence", "second"):
            if (name, tag) == ("IN", "first"):
                continue  # the barrier behind the count is there too
            broken = sound.replace(fence.format(name), without(fence.format(name), tag))
            with pytest.raises(Fault, match=UNORDERED):
                Reduction().run(broken, schedule)


@in_all_orders
def test_what_others_read_is_overwritten_by_the_last(schedule):
    total = BLOCKS * THREADS
    body = f"""
        add.s32 %r1, %i, {THREADS};
        rem.u32 %r1, %r1, {total};
        {element("%rd1", "%a0", "%r1")}
        ld.global.u32 %r1, [%rd1];              // what another block may overwrite
        membar.gl;                              // reader's fence
        bar.sync 0;                             // barrier before
        {_COUNT.format("", "")}
        membar.gl;                              // writer's fence
        mov.u32 %r5, 0;
    CLEAR:
        mad.lo.s32 %r7, %r5, {THREADS}, %t;
        {element("%rd2", "%a0", "%r7")}
        st.global.u32 [%rd2], 0;
        add.s32 %r5, %r5, 1;
        setp.lt.s32 %p4, %r5, %n;
        @%p4 bra CLEAR;
        setp.ne.s32 %p1, %t, 0;
        @%p1 bra END;
        st.global.u32 [%a1], 0;
    END:
    """
    Reduction().run(body, schedule)
    for tag in ("reader's fence", "barrier before", "writer's fence"):
        with pytest.raises(Fault, match=r"overwrites what thread [0-9]+ of block [0-9] read"):
            Reduction().run(without(body, tag), schedule)


@in_all_orders
def test_blocks_that_do_not_count_share_nothing(schedule):
    total = BLOCKS * THREADS
    apart = f"""
        {element("%rd1", "%a0", "%i")}
        {element("%rd2", "%a1", "%i")}
        add.s32 %r1, %i, 1;
        rem.u32 %r1, %r1, {total};
        {element("%rd3", "%a0", "%r1")}
        ld.global.u32 %r2, [%rd3];
        st.global.u32 [%rd2], %r2;
    """

    def run(text):
        Memory(words(total), words(total)).run(text, (BLOCKS, 1, 1), schedule)

    run(apart)
    with pytest.raises(Fault, match=r"(reads|overwrites) what thread [0-9]+ of block [0-9]"):
        run(apart.replace("[%rd2]", "[%rd1]"))
    with pytest.raises(Fault, match=r"writes what another writes|overwrites what"):
        run(apart.replace("%rd2, %i", "%rd2, %t"))


# --------------------------------------------------------------------------------- parser

UNKNOWN = [
    "popc.b32 %r1, %t;",
    "trap;",
    "exit;",
    "ret.uni;",
    "@%p1 st.global.u32 [%a0], %t;",
    "@!%p1 ret;",
    "call.uni (%r1), helper, (%t);",
    "call helper;",
    "bar.sync 1;",
    "bar.sync 0, 64;",
    "bar.red.popc.u32 %r1, 0, %p1;",
    "bar.warp.sync -1;",
    "barrier.sync 0;",
    "shfl.sync.idx.b32 %r1, %t, 0, 31, -1;",
    "vote.sync.any.pred %p2, %p1, -1;",
    "membar.cta;",
    "membar.sys;",
    "fence.acq_rel.gpu;",
    "atom.global.max.u32 %r1, [%a0], 1;",
    "atom.global.add.f32 %f1, [%a0], %f2;",
    "atom.shared.add.u32 %r1, [table], 1;",
    "atom.relaxed.cta.global.add.u32 %r1, [%a0], 1;",
    "red.global.add.u32 [%a0], 1;",
    "ld.global.nc.f32 %f1, [%a0];",
    "ld.volatile.global.u32 %r1, [%a0];",
    "ld.acquire.gpu.global.u32 %r1, [%a0];",
    "ld.u32 %r1, [%a0];",
    "ld.local.u32 %r1, [%a0];",
    "ld.global.u8 %r1, [%a0];",
    "ld.shared.u16 %r1, [table];",
    "st.shared.b16 [table], %t;",
    "ld.global.v4.u32 {%r1, %r2}, [%a0];",
    "ld.global.v2.u32 %r1, [%a0];",
    "ld.global.u32 {%r1, %r2}, [%a0];",
    "ld.global.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%a0];",
    "ld.global.u32 %r1, [%t];",
    "ld.global.u32 %r1, [unknown];",
    "ld.global.u32 %r1, [64];",
    "st.global.u32 [%a0], unknown;",
    "st.global.v2.u32 [%a0], {%t, 0};",
    "st.global.b16 [%a0], %f2;",
    "ld.param.u32 %r1, [k_param_0];",
    "ld.param.u64 %rd1, [k_param_0+8];",
    "ld.param.u64 %rd1, [k_param_7];",
    "mov.u32 %r1, %laneid;",
    "mov.b64 %rd1, {%t, 0};",
    "mov.u32 %r1, k_param_0;",
    "mov.f32 %f1, 0d3FF0000000000000;",
    "mov.f32 %f1, 1;",
    "cvta.to.global.u64 %rd1, %a0;",
    "add.s32 %r1, 1, 2;",
    "add.s32 %r1, %t, %a0;",
    "add.ftz.f32 %f1, %f2, %f2;",
    "add.rz.f32 %f1, %f2, %f2;",
    "add.sat.s32 %r1, %t, %t;",
    "add.cc.u32 %r1, %t, %t;",
    "mul.hi.u32 %r1, %t, %t;",
    "mad.hi.s32 %r1, %t, %t, %t;",
    "mad.lo.cc.u32 %r1, %t, %t, %t;",
    "mad.lo.sat.s32 %r1, %t, %t, %t;",
    "min.f32 %f1, %f2, %f2;",
    "max.f64 %fd1, %fd2, %fd2;",
    "div.s32 %r1, %t, %t;",
    "rem.s64 %rd1, %a0, %a0;",
    "div.full.f32 %f1, %f2, %f2;",
    "div.approx.f32 %f1, %f2, %f2;",
    "fma.rn.ftz.f32 %f1, %f2, %f2, %f2;",
    "fma.rz.f32 %f1, %f2, %f2, %f2;",
    "fma.rn.f16 %rs1, %rs2, %rs2, %rs2;",
    "fma.rn.f32.bf16 %f1, %rs2, %rs2, %f2;",
    "neg.ftz.f32 %f1, %f2;",
    "abs.ftz.f32 %f1, %f2;",
    "sqrt.approx.f32 %f1, %f2;",
    "sqrt.rn.ftz.f32 %f1, %f2;",
    "rcp.approx.f32 %f1, %f2;",
    "rcp.rn.ftz.f32 %f1, %f2;",
    "ex2.approx.f32 %f1, %f2;",
    "shl.b32 %r1, %t, 32;",
    "setp.lt.ftz.f32 %p2, %f2, %f2;",
    "setp.lt.and.s32 %p2, %t, %t, %p1;",
    "setp.lt.s32 %p2|%p3, %t, %t;",
    "cvt.rzi.s32.f32 %r1, %f2;",
    "cvt.rn.s32.f32 %r1, %f2;",
    "cvt.rni.f32.f32 %f1, %f2;",
    "cvt.rz.f32.f64 %f1, %fd2;",
    "cvt.rn.ftz.f32.f64 %f1, %fd2;",
    "cvt.sat.u16.u32 %rs1, %t;",
    "cvt.rn.bf16.f32 %rs1, %f2;",
    "cvt.rn.relu.bf16x2.f32 %r1, %f2, %f2;",
    ".local .align 8 .b8 depot[16];",
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("st.global.u32 [%a0], %r1;", "%r1"),
        (
            "setp.eq.s32 %p1, %t, 0;\n@%p1 bra A;\nmov.u32 %r1, 1;\nA: st.global.u32 [%a0], %r1;",
            "%r1",
        ),
    ],
)
def test_a_register_that_may_have_no_value_is_refused(text, message):
    with pytest.raises(Unsupported, match=message):
        translate(parse(module(text, "q")))


def test_a_text_ends_with_an_exit():
    text = module("bar.sync 0;")
    translate(parse(text))
    with pytest.raises(Unsupported, match=r"the text ends behind bar\.sync 0"):
        translate(parse(text.replace("ret;", "")))


@pytest.mark.parametrize("text", ["", ".target sm_90", module("ret;").replace(".target", "// ")])
def test_a_module_has_a_kernel(text):
    with pytest.raises(Unsupported, match=r"expected one \.entry"):
        parse(text)


def test_a_second_kernel_is_not_overlooked():
    with pytest.raises(Unsupported, match=r"line [0-9]+: .*entry"):
        parse(module("") + "\n" + module("").partition("k(")[0] + "other() { ret; }")


def test_every_statement_is_an_instruction_on_its_line():
    body = """
        /* a comment; with
           mov.u32 %r1, 1; */ .pragma "nounroll";
        { // a scope
            mov.u32 %r1, 1; mov.u32 %r2,
                2;
        }
    $L__BB0_1: again: add.s32 %r3, %r1, -0x10;
        @!%p1 bra $L__BB0_1;
        st.global.v2.u32 [ %a0 + -8 ], {%r1, %r2}; // behind
        st.global.u32 [%a0-4], %r3;
    """
    text = module(f"setp.eq.s32 %p1, %t, 0;{body}", "q")
    kernel = parse(text)
    lines = text.splitlines()
    assert kernel.arch == "sm_90"
    assert kernel.threads == THREADS
    last = ["setp.eq.s32", "mov.u32", "mov.u32", "add.s32", "bra"]
    last += ["st.global.v2.u32", "st.global.u32", "ret"]
    assert [item.opcode for item in kernel.instructions][-len(last) :] == last
    for item in kernel.instructions:
        assert item.text.split()[-1] in lines[item.line - 1], item
    assert [item.operands[0].offset for item in kernel.instructions[-3:-1]] == [-8, -4]
    assert [item for item in kernel.body if isinstance(item, str)] == ["$L__BB0_1", "again"]


def test_one_instruction_less():
    kernel = parse(module(FENCED, "qqq", {"flag": 4}))
    every = kernel.instructions
    for number, item in enumerate(every):
        less = kernel.without(item).instructions
        assert all(a is b for a, b in zip(less, every[:number] + every[number + 1 :], strict=True))
    assert kernel.instructions == every
    twin = parse(module(FENCED, "qqq", {"flag": 4})).instructions[0]
    assert twin == every[0]
    with pytest.raises(ValueError, match="expected an instruction of k"):
        kernel.without(twin)


# --------------------------------------------------------------------------------- driver


class Machine:
    """A device with a kernel that is loaded by the library's driver module."""

    def __init__(self, device, patch):
        self.device, self.patch, self.loaded = device, patch, 0

    def load(self, body, parameters, threads=THREADS, device=0):
        self.patch.setattr(emulated_device, "ptx_of", lambda *given: module(body, parameters))
        self.loaded += 1
        source = Source(f"by-hand-{self.loaded}", lambda: None, parameters, threads)
        return driver.kernel_for(source, device)

    def array(self, array, name="array"):
        """Its address, where it really is."""
        data = array.view(np.uint8)
        start = data.__array_interface__["data"][0]
        self.device.memory.add(Range(start, data, name=name))
        return start


@pytest.fixture
def machine(monkeypatch):
    with emulated((9, 0), devices=2) as device:
        device.make_current(0)
        yield Machine(device, monkeypatch)


STORE_ALL = f"""
    mov.u32 %r1, %ctaid.y;
    mad.lo.s32 %r1, %r1, %n, %b;
    mov.u32 %r2, %ntid.x;
    mad.lo.s32 %r1, %r1, %r2, %t;
    {element("%rd1", "%a0", "%r1", 32)}
    st.global.u64 [%rd1], %a1;
    st.global.u64 [%rd1+8], %a2;
    st.global.u64 [%rd1+16], %a3;
    mov.b64 %fd1, %a4;
    add.f64 %fd1, %fd1, %fd1;
    st.global.f64 [%rd1+24], %fd1;
"""


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.floats(allow_nan=False),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, THREADS),
)
def test_arguments_and_shapes_arrive_as_given(numbers, real, grid, threads):
    with emulated((9, 0)) as device, pytest.MonkeyPatch.context() as patch:
        device.make_current(1)
        machine = Machine(device, patch)
        out = np.zeros((grid[0] * grid[1] * threads, 4), "i8")
        kernel = machine.load(STORE_ALL, "qqqqd", threads, device=1)
        start = machine.array(out)
        kernel.launch(grid, 1234 << 32, start, *numbers, real)
        assert (out[:, :3] == numbers).all()
        assert (out[:, 3].view("f8") == real + real).all()
        (launch,) = device.launches
        assert launch.arguments == (start, *numbers, real)
        assert launch.grid == (*grid, 1)
        assert (launch.threads, launch.device, launch.stream) == (threads, 1, 1234 << 32)
        assert launch.stored_bytes == {start: out.nbytes}
        assert launch.read_bytes == {}


@pytest.mark.parametrize(
    ("grid", "threads", "sound"),
    [
        ((1, 1), THREADS, True),
        ((0, 1), THREADS, False),
        ((1, 0), THREADS, False),
        ((1, 65536), THREADS, False),
        ((2**31, 1), THREADS, False),
        ((-1, 1), THREADS, False),
        ((1, 1), 0, False),
        ((1, 1), THREADS + 1, False),
    ],
)
def test_a_bad_geometry_is_refused(machine, grid, threads, sound):
    kernel = machine.load("mov.u32 %r1, 1;", "", threads)
    if sound:
        kernel.launch(grid, 0)
        assert machine.device.launches[-1].grid == (*grid, 1)
    else:
        with pytest.raises(BackendError, match=r"CUDA_ERROR_INVALID_VALUE \(1\): .*grid \("):
            kernel.launch(grid, 0)
        assert not machine.device.launches


READ_ONE = f"""
    add.s32 %r1, %i, 3;
    {element("%rd1", "%a0", "%r1")}
    ld.global.u32 %r2, [%rd1];
    {element("%rd1", "%a1", "%i")}
    st.global.u32 [%rd1], %r2;
"""


def test_a_fault_says_what_and_where(machine):
    kernel = machine.load(READ_ONE, "qq")
    line = module(READ_ONE, "qq").splitlines().index("    ld.global.u32 %r2, [%rd1];") + 1
    x, y = machine.array(words(THREADS), "x of 64"), machine.array(words(THREADS))
    said = rf"kernel by-hand-1 .*ILLEGAL_ADDRESS \(700\): Fault: .*of x of 64 .*line {line} of .*k"
    with pytest.raises(BackendError, match=said):
        kernel.launch((1, 1), 0, x, y)
    assert isinstance(machine.device.fault, Fault)
    assert not machine.device.launches
    with pytest.raises(BackendError, match=r"\(101\): no fault"):  # not that of the launch
        driver.compute_capability(7)
    x = machine.array(words(THREADS + 3))
    kernel.launch((1, 1), 0, x, y)
    assert machine.device.launches[-1].read_bytes == {x: 4 * THREADS}


def test_memory_is_unknown_once_it_is_removed(machine):
    kernel = machine.load("st.global.u32 [%a0], %a1;".replace("%a1", "3"), "q", threads=1)
    array = words(4)
    area = machine.device.memory.add(Range(array.ctypes.data, array.view("u1")))
    kernel.launch((1, 1), 0, area.start)
    machine.device.memory.remove(area)
    with pytest.raises(BackendError, match="out of bounds"):
        kernel.launch((1, 1), 0, area.start)


def test_a_kernel_that_is_changed_before_it_is_loaded(machine):
    machine.device.before = lambda kernel: kernel.without(kernel.instructions[-2])
    out = words(1, 7)
    machine.load("st.global.u32 [%a0], 3;", "q", threads=1).launch((1, 1), 0, machine.array(out))
    assert out[0] == 7


def test_threads_launch_side_by_side_each_with_its_own_fault(machine):
    kernel = machine.load(READ_ONE, "qq")
    wrong = []

    def launch(number):
        for turn in range(6):
            broken = (number + turn) % 2
            x, y = words(2 * THREADS + 3 - broken, 10 * number + turn), words(2 * THREADS, 0)
            source, name = x.ctypes.data, f"x of {number} in {turn}"
            areas = [
                machine.device.memory.add(Range(start.ctypes.data, start.view("u1"), name=name))
                for start in (x, y)
            ]
            said = ""
            try:
                kernel.launch((2, 1), number, source, y.ctypes.data)
            except BackendError as error:
                said = str(error)
            if broken != (f"of {name} of " in said) or (y != (not broken) * x[0]).all():
                wrong.append((name, said, y))
            for area in areas:
                machine.device.memory.remove(area)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    streams = [launch.stream for launch in machine.device.launches]
    assert sorted(streams) == sorted(list(range(6)) * 3)
