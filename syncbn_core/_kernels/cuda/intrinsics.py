"""How CUDA kernels access memory: by raw pointers, 128 bits at a time where addresses allow.

A pointer is a 64-bit integer. Loads and stores are written in LLVM's terms, because only a load
of a whole vector becomes one access of 128 bits (`LDG.E.128`).
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic
from numba.cuda.extending import register_jitable as device

from syncbn_core._kernels.cuda.constants import VECTOR
from syncbn_core._kernels.cuda.kinds import KINDS

__all__ = [
    "barrier",
    "count_up",
    "device",
    "fence",
    "given",
    "number_access",
    "product",
    "quotient",
    "read_count",
    "reset",
    "small_quotient",
    "vector_access",
    "write_count",
]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_FLOATS = {"float16": _F16, "float32": _F32, "float64": _F64}


def _address(builder, pointer, index, size, kind):
    at = builder.add(pointer, builder.mul(index, _I64(size)))
    return builder.inttoptr(at, ir.PointerType(kind, 1))


def _unpack(builder, dtype, word):
    """The two numbers in 32 bits, as float32."""
    if dtype == "bfloat16":  # the upper half of a float32
        low = builder.shl(word, _I32(16))
        high = builder.and_(word, _I32(0xFFFF0000))
        return [builder.bitcast(half, _F32) for half in (low, high)]
    pair = builder.bitcast(word, ir.VectorType(_F16, 2))
    halves = (builder.extract_element(pair, _I32(k)) for k in range(2))
    return [builder.fpext(half, _F32) for half in halves]


def _pack(builder, dtype, low, high):
    """Two float32 rounded to nearest even into 32 bits; NaN stays NaN."""
    if dtype == "bfloat16":  # one instruction from compute capability 8.0 on
        kind = ir.FunctionType(_I32, [_F32, _F32])
        convert = ir.InlineAsm(kind, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", side_effect=False)
        return builder.call(convert, [high, low])
    pair = ir.Constant(ir.VectorType(_F16, 2), ir.Undefined)
    for k, value in enumerate((low, high)):
        pair = builder.insert_element(pair, builder.fptrunc(value, _F16), _I32(k))
    return builder.bitcast(pair, _I32)


def _load_vector(dtype, lanes):
    work = KINDS[dtype].work

    @intrinsic
    def load(typing_context, pointer, index):
        """`lanes` numbers from element `index` on, where the address is a multiple of 16."""

        def generate(context, builder, signature, arguments):
            if KINDS[dtype].size == 2:
                kind = ir.VectorType(_I32, lanes // 2)
                words = builder.load(_address(builder, *arguments, 2, kind), align=VECTOR)
                numbers = []
                for k in range(lanes // 2):
                    numbers += _unpack(builder, dtype, builder.extract_element(words, _I32(k)))
            else:
                kind = ir.VectorType(_FLOATS[dtype], lanes)
                source = _address(builder, *arguments, KINDS[dtype].size, kind)
                vector = builder.load(source, align=VECTOR)
                numbers = [builder.extract_element(vector, _I32(k)) for k in range(lanes)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return types.UniTuple(work, lanes)(types.int64, types.int64), generate

    return load


def _store_vector(dtype, lanes):
    work = KINDS[dtype].work

    @intrinsic
    def store(typing_context, pointer, index, values):
        """Store the tuple `values` where `load` reads."""

        def generate(context, builder, signature, arguments):
            pointer, index, values = arguments
            numbers = [builder.extract_value(values, k) for k in range(lanes)]
            if KINDS[dtype].size == 2:
                kind, size = ir.VectorType(_I32, lanes // 2), 2
                pairs = zip(numbers[::2], numbers[1::2], strict=True)
                numbers = [_pack(builder, dtype, low, high) for low, high in pairs]
            else:
                kind, size = ir.VectorType(_FLOATS[dtype], lanes), KINDS[dtype].size
            vector = ir.Constant(kind, ir.Undefined)
            for k, number in enumerate(numbers):
                vector = builder.insert_element(vector, number, _I32(k))
            builder.store(vector, _address(builder, pointer, index, size, kind), align=VECTOR)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.UniTuple(work, lanes)), generate

    return store


def _load_number(dtype):
    size, work = KINDS[dtype]

    @intrinsic
    def load_one(typing_context, pointer, index):
        """The number at element `index`."""

        def generate(context, builder, signature, arguments):
            kind = ir.IntType(16) if dtype == "bfloat16" else _FLOATS[dtype]
            number = builder.load(_address(builder, *arguments, size, kind), align=size)
            if dtype == "bfloat16":
                return _unpack(builder, dtype, builder.zext(number, _I32))[0]
            return builder.fpext(number, _F32) if dtype == "float16" else number

        return work(types.int64, types.int64), generate

    return load_one


def _store_number(dtype):
    size, work = KINDS[dtype]

    @intrinsic
    def store_one(typing_context, pointer, index, value):
        """Store `value` where `load_one` reads."""

        def generate(context, builder, signature, arguments):
            pointer, index, value = arguments
            kind = _FLOATS.get(dtype, ir.IntType(16))
            if dtype == "float16":
                value = builder.fptrunc(value, _F16)
            elif dtype == "bfloat16":
                value = _round_to_bfloat16(builder, value)
            builder.store(value, _address(builder, pointer, index, size, kind), align=size)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, work), generate

    return store_one


def _round_to_bfloat16(builder, value):
    """To nearest even by integer operations, on any compute capability; NaN stays NaN."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
    quiet = builder.or_(bits, _I32(0x00400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, _I32(16)), ir.IntType(16))


def vector_access(dtype, lanes):
    """`load(pointer, index)` and `store(pointer, index, values)` of `lanes` numbers."""
    if lanes == 1:
        return _one_lane(dtype)
    return _load_vector(dtype, lanes), _store_vector(dtype, lanes)


def _one_lane(dtype):
    load_one, store_one = number_access(dtype)

    @device
    def load(pointer, index):
        return (load_one(pointer, index),)

    @device
    def store(pointer, index, values):
        store_one(pointer, index, values[0])

    return load, store


def number_access(dtype):
    """`load_one(pointer, index)` and `store_one(pointer, index, value)`."""
    return _load_number(dtype), _store_number(dtype)


@intrinsic
def count_up(typing_context, pointer, index):
    """Add 1 to a block counter (int32), atomically; returns its value before."""

    def generate(context, builder, signature, arguments):
        place = _address(builder, *arguments, 4, _I32)
        return builder.atomic_rmw("add", place, _I32(1), "monotonic")

    return types.int32(types.int64, types.int64), generate


@intrinsic
def reset(typing_context, pointer, index):
    """Set a block counter to 0."""

    def generate(context, builder, signature, arguments):
        builder.store(_I32(0), _address(builder, *arguments, 4, _I32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def read_count(typing_context, pointer):
    """The int64 at `pointer`."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.PointerType(_I64, 1))
        return builder.load(place, align=8)

    return types.int64(types.int64), generate


@intrinsic
def write_count(typing_context, pointer, value):
    """Store an int64 at `pointer`."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.PointerType(_I64, 1))
        builder.store(arguments[1], place, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def quotient(typing_context, a, b):
    """`a // b` for numbers that are not negative."""

    def generate(context, builder, signature, arguments):
        return builder.udiv(*arguments)  # no checks; the compiler divides 32 bits where it can

    return types.int64(types.int64, types.int64), generate


@intrinsic
def small_quotient(typing_context, a, b):
    """`a // b` for numbers from 0 to 2**31 - 1: one division of 32 bits."""

    def generate(context, builder, signature, arguments):
        narrow = [builder.trunc(argument, _I32) for argument in arguments]
        return builder.zext(builder.udiv(*narrow), _I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def product(typing_context, a, b):
    """`a * b` in float64, rounded: the compiler does not join it with a sum that follows."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_F64, [_F64, _F64])
        multiply = ir.InlineAsm(kind, "mul.rn.f64 $0, $1, $2;", "=d,d,d", side_effect=False)
        return builder.call(multiply, arguments)

    return types.float64(types.float64, types.float64), generate


@device
def given(pointer):
    """Whether an optional array is there: its pointer is not 0."""
    return pointer != 0


@device
def barrier():
    """Wait for all threads of the block."""
    cuda.syncthreads()


@device
def fence():
    """Make what this thread has written visible to all blocks before what it writes from now on."""
    cuda.threadfence()
