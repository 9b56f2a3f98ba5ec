"""The dtypes that the CPU kernels compute with, and what the compiler has to be told of them.

Activations are float64, float32, or 16 bits that Numba has no type for on a CPU: int16 stands for
the bits of a float16, uint16 for those of a bfloat16. 16-bit numbers are computed in float32 and
rounded once, to nearest even, when they are stored; NaN stays NaN. The *computing dtype* of an
array is therefore float64 for float64 and float32 for all others.

Arguments that may be missing are None. The compiler makes a kernel for each such case.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import _empty_nd_impl, make_array

from syncbn_core._kernels.cpu.builds import strict

# ----------------------------------------------------------------------- dtypes


@cache
def has_half() -> bool:
    """Whether this processor converts float16, as every x86 since 2013 and 64-bit ARM does.

    On others LLVM would call functions that Numba does not load.
    """
    settings: Any = numba.config
    name, features = settings.CPU_NAME, settings.CPU_FEATURES
    if features is not None:
        return "+f16c" in features
    if name is not None:
        return False
    architecture = llvmlite.binding.get_process_triple().partition("-")[0]
    if architecture in ("aarch64", "arm64"):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))


def _computed_in(dtype: Any) -> Any:
    """The computing dtype, for Numba's type of an element."""
    return dtype if isinstance(dtype, types.Float) else types.float32


def _widen(typing_context, value):
    """An element of an activation in its computing dtype."""

    def generate(context, builder, signature, arguments):
        (bits,) = arguments
        if value == types.int16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        if value == types.uint16:  # a bfloat16 is the upper half of a float32
            word = ir.IntType(32)
            shifted = builder.shl(builder.zext(bits, word), ir.Constant(word, 16))
            return builder.bitcast(shifted, ir.FloatType())
        return bits

    return _computed_in(value)(value), generate


widen: Any = intrinsic(_widen)


def _narrow(typing_context, value, like):
    """`value`, in the computing dtype of `like`, an array or a number, rounded to its dtype."""
    dtype = getattr(like, "dtype", like)

    def generate(context, builder, signature, arguments):
        number = arguments[0]
        if dtype == types.int16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        if dtype == types.uint16:
            return _nearest_bfloat16(builder, number)
        return number

    return dtype(value, like), generate


narrow: Any = intrinsic(_narrow)


def _nearest_bfloat16(builder, number):
    """The upper half of a float32, rounded to nearest even.

    Adding 0x7FFF, and 1 more if the upper half is odd, carries into it exactly when it must be
    rounded up. A NaN keeps its upper half with one bit set, so that it does not become infinity.
    """
    word = ir.IntType(32)
    sixteen = ir.Constant(word, 16)
    bits = builder.bitcast(number, word)
    upper = builder.lshr(bits, sixteen)
    odd = builder.and_(upper, ir.Constant(word, 1))
    raised = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
    quiet = builder.or_(upper, ir.Constant(word, 0x40))
    is_nan = builder.fcmp_unordered("uno", number, number)
    chosen = builder.select(is_nan, quiet, builder.lshr(raised, sixteen))
    return builder.trunc(chosen, ir.IntType(16))


def _rounded(typing_context, value, like):
    """`value` in the computing dtype of `like`, an array or a number."""
    dtype = _computed_in(getattr(like, "dtype", like))

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], value, dtype)

    return dtype(value, like), generate


rounded: Any = intrinsic(_rounded)


def _extreme(comparison):
    def choose(typing_context, one, other):
        kind = typing_context.unify_types(types.unliteral(one), types.unliteral(other))

        def generate(context, builder, signature, arguments):
            first, second = [
                context.cast(builder, value, own, kind)
                for value, own in zip(arguments, (one, other), strict=True)
            ]
            compare = builder.fcmp_ordered if isinstance(kind, types.Float) else builder.icmp_signed
            return builder.select(compare(comparison, second, first), second, first)

        return kind(one, other), generate

    return choose


# Python's `max` and `min` of two numbers, which Numba would compile for each pair of types
larger: Any = intrinsic(_extreme(">"))
smaller: Any = intrinsic(_extreme("<"))


def _scratch(typing_context, shape, like):
    """A new array of the computing dtype of `like`, an array or a number; not initialized."""
    array = types.Array(_computed_in(getattr(like, "dtype", like)), len(shape), "C")

    def generate(context, builder, signature, arguments):
        sizes = [
            context.cast(builder, size, own, types.intp)
            for size, own in zip(cgutils.unpack_tuple(builder, arguments[0]), shape, strict=True)
        ]
        return _empty_nd_impl(context, builder, array, sizes)._getvalue()

    return array(shape, like), generate


scratch: Any = intrinsic(_scratch)


def _unowned(typing_context, array):
    """The same array without its owner, so that Numba counts no references to parts of it.

    For arguments of kernels, which the caller keeps alive. Short runs take half the time. None for
    None.
    """
    if array == types.none:
        return array(array), lambda context, *_: context.get_dummy_value()

    def generate(context, builder, signature, arguments):
        bare = make_array(array)(context, builder, arguments[0])
        bare.meminfo = cgutils.get_null_value(bare.meminfo.type)
        bare.parent = cgutils.get_null_value(bare.parent.type)
        return bare._getvalue()

    return array(array), generate


unowned: Any = intrinsic(_unowned)


def _item(typing_context, values, place):
    """The type of `values[place]`, or of `values` itself if it is no array; how to generate it."""
    if not isinstance(values, types.Array):
        return values, lambda context, builder, signature, arguments: arguments[0]
    found = typing_context.resolve_function_type(operator.getitem, (values, place), {})

    def generate(context, builder, signature, arguments):
        return context.get_function(operator.getitem, found)(builder, arguments[:2])

    return found.return_type, generate


def _at(typing_context, values, place):
    """`values[place]` of an array; `values` itself if that is None, or one number for all."""
    kind, generate = _item(typing_context, values, place)
    return kind(values, place), generate


at: Any = intrinsic(_at)


def _select(typing_context, condition, one, other):
    """`one if condition else other`, without the branch that keeps a loop from being vectorized."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return one(types.boolean, one, one), generate


where: Any = intrinsic(_select)


def _kept(typing_context, valid, i):
    """Whether element (or row) `i` counts; `valid`: uint8, or None where all do."""
    _, item = _item(typing_context, valid, i)

    def generate(context, builder, signature, arguments):
        if valid == types.none:
            return context.get_constant(types.boolean, True)
        byte = item(context, builder, signature, arguments)
        return builder.icmp_unsigned("!=", byte, ir.Constant(byte.type, 0))

    return types.boolean(valid, i), generate


kept: Any = intrinsic(_kept)


def _is_wide(typing_context, like):
    """Whether the array `like` is computed in float64."""
    wide = _computed_in(like.dtype) == types.float64
    return types.boolean(like), lambda context, *_: context.get_constant(types.boolean, wide)


is_wide: Any = intrinsic(_is_wide)


@strict
def kept_of(valid, tile):
    """How many of the elements `[top:bottom, left:right]` of a channel count; of rows, if 1-D."""
    top, bottom, left, right = tile
    if valid is None:
        return (bottom - top) * (right - left)
    count = 0
    for a in range(top, bottom):
        row = at(valid, (a, slice(left, right)))
        for i in range(row.shape[0]):
            count += row[i]
    return count


@strict
def float32_fails(first, second, count, like):
    """Whether sums of `count` deviations (`first`) and of their squares (`second`) are unusable.

    Always false if the array `like` is computed in float64. In float32, squares overflow or, below
    1e-37, lose digits. Two sums of exactly 0 count as a constant channel, which is fine.
    """
    fails = not (1e-37 * count <= second < np.inf) and not (second == 0 and first == 0)
    return not is_wide(like) and fails


def _power_up_to(typing_context, value):
    """The largest power of two up to a positive float64; 0 for a subnormal one."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(64)
        bits = builder.bitcast(arguments[0], word)
        return builder.bitcast(builder.and_(bits, ir.Constant(word, 0x7FF << 52)), ir.DoubleType())

    return types.float64(types.float64), generate


power_up_to: Any = intrinsic(_power_up_to)


# -------------------------------------------------------- numbers of one channel


@strict
def share(total, k, parts):
    """`(begin, end)` of part `k` when `total` things are cut into `parts` almost equal parts."""
    return total * k // parts, total * (k + 1) // parts


@strict
def value_or(values, c, default):
    """`values[c]`, or `default` if `values` is empty, as for an absent weight or bias."""
    # Numba counts references to `values` at run time if this is written in several statements.
    return values[c] if values.shape[0] else default


@strict
def merge(count, mean, m2, other_count, other_mean, other_m2):
    """`(mean, m2)` of two parts of one channel together, by Chan's formula."""
    total = count + other_count
    delta = other_mean - mean
    fraction = other_count / total
    return mean + delta * fraction, m2 + other_m2 + delta * delta * (count * fraction)
