"""The numbers that the CPU kernels compute with: their dtypes, and the formulas per channel.

**Dtypes.** Activations are float64, float32, or 16 bits that Numba has no type for on a CPU: int16
stands for the bits of a float16, uint16 for those of a bfloat16. 16-bit numbers are computed in
float32 and rounded once, to nearest even, when they are stored; NaN stays NaN. The *computing
dtype* of an array is therefore float64 for float64 and float32 for all others.

**The mean.** Per-channel numbers are float64. A mean of 1e6 is off by 0.03 when it is rounded to
float32. Kernels therefore subtract `rounded_mean`, the mean in the computing dtype, which is exact
for elements near it. The remainder `rounded_mean - mean` is known in float64 and goes into the
constants that kernels add per channel.

**The power.** `x - rounded_mean` can be too small or too large for products in float32. Kernels
compute

    x * power - centre,    centre = rounded_mean * power

instead, where `power` is a power of two of the size of `invstd` (`power_of`). This is as exact as
`x - rounded_mean`, gives numbers around 1, and costs no more, because it is one instruction. Each
pass over an activation is then linear, with coefficients that this module computes in float64:

    y  = (x * power - centre) * scale + shift                 affine, affine_coefficients
    dx = dy * of_dy + (x * power - centre) * of_x + shift     gradient, gradient_coefficients
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from syncbn_core._kernels.cpu.builds import from_python, may_contract, strict

__all__ = [
    "affine",
    "affine_coefficients",
    "at",
    "float32_fails",
    "gradient",
    "gradient_coefficients",
    "has_half",
    "kept",
    "kept_of",
    "merge",
    "narrow",
    "power_of",
    "rounded",
    "scratch",
    "share",
    "unowned",
    "valid_part",
    "value_or",
    "where",
    "widen",
    "xhat_sum",
]


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


def rounded(value: float, like: Any) -> Any:
    """`value` in the computing dtype of `like`, an array or a number."""
    raise NotImplementedError


@overload(rounded)
def _rounded(value, like):
    if _computed_in(getattr(like, "dtype", like)) == types.float64:
        return lambda value, like: np.float64(value)
    return lambda value, like: np.float32(value)


def scratch(shape: tuple[int, ...], like: Any) -> Any:
    """A new array of the computing dtype of the array `like`; not initialized."""
    raise NotImplementedError


@overload(scratch)
def _scratch(shape, like):
    if _computed_in(like.dtype) == types.float64:
        return lambda shape, like: np.empty(shape, np.float64)
    return lambda shape, like: np.empty(shape, np.float32)


def _unowned(typing_context, array):
    """The same array without its owner, so that Numba counts no references to parts of it.

    For arguments of kernels, which the caller keeps alive. Short runs take half the time.
    """

    def generate(context, builder, signature, arguments):
        bare = make_array(array)(context, builder, arguments[0])
        bare.meminfo = cgutils.get_null_value(bare.meminfo.type)
        bare.parent = cgutils.get_null_value(bare.parent.type)
        return bare._getvalue()

    return array(array), generate


unowned: Any = intrinsic(_unowned)


def at(values: Any, i: int) -> Any:
    """`values[i]` of an array; `values` itself if it is one number for all `i`."""
    raise NotImplementedError


@overload(at)
def _at(values, i):
    if isinstance(values, types.Array):
        return lambda values, i: values[i]
    return lambda values, i: values


def _select(typing_context, condition, one, other):
    """`one if condition else other`, without the branch that keeps a loop from being vectorized."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return one(types.boolean, one, one), generate


where: Any = intrinsic(_select)


def kept(valid: Any, i: int) -> bool:
    """Whether element (or row) `i` counts; `valid`: uint8, or None where all do."""
    raise NotImplementedError


@overload(kept)
def _kept(valid, i):
    if isinstance(valid, types.Array):
        return lambda valid, i: valid[i] != 0
    return lambda valid, i: True


def valid_part(valid: Any, at: Any) -> Any:
    """`valid[at]`; None for None."""
    raise NotImplementedError


@overload(valid_part)
def _valid_part(valid, at):
    if isinstance(valid, types.Array):
        return lambda valid, at: valid[at]
    return lambda valid, at: None


def kept_of(valid: Any, begin: int, end: int) -> int:
    """How many of the elements (or rows) from `begin` to `end` count."""
    raise NotImplementedError


@overload(kept_of)
def _kept_of(valid, begin, end):
    if isinstance(valid, types.Array):
        return lambda valid, begin, end: valid[begin:end].sum()
    return lambda valid, begin, end: end - begin


def float32_fails(first: float, second: float, count: float, like: Any) -> bool:
    """Whether sums of `count` deviations (`first`) and of their squares (`second`) are unusable.

    Always false if the array `like` is computed in float64. In float32, squares overflow or, below
    1e-37, lose digits. Two sums of exactly 0 count as a constant channel, which is fine.
    """
    raise NotImplementedError


@overload(float32_fails)
def _float32_fails(first, second, count, like):
    if _computed_in(like.dtype) == types.float64:
        return lambda first, second, count, like: False
    return lambda first, second, count, like: (
        not (1e-37 * count <= second < np.inf) and not (second == 0 and first == 0)
    )


def _power_up_to(typing_context, value):
    """The largest power of two up to a positive float64; 0 for a subnormal one."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(64)
        bits = builder.bitcast(arguments[0], word)
        return builder.bitcast(builder.and_(bits, ir.Constant(word, 0x7FF << 52)), ir.DoubleType())

    return types.float64(types.float64), generate


power_up_to: Any = intrinsic(_power_up_to)


# --------------------------------------------------------- one element of a pass


@may_contract
def affine(x, power, centre, scale, shift):
    """`y` of one element of an activation, before it is narrowed; see the top of this file."""
    return (widen(x) * power - centre) * scale + shift


@may_contract
def gradient(x, dz, power, centre, of_dy, of_x, shift):
    """`dx` of one element, before it is narrowed; `dz` is in the computing dtype."""
    d = widen(x) * power - centre
    return dz * of_dy + (d * of_x + shift)


# -------------------------------------------------------- numbers of one channel


@from_python
def share(total, k, parts):
    """`(begin, end)` of part `k` when `total` things are cut into `parts` almost equal parts."""
    return total * k // parts, total * (k + 1) // parts


@strict
def value_or(values, c, default):
    """`values[c]`, or `default` if `values` is empty, as for an absent weight or bias."""
    # Numba counts references to `values` at run time if this is written in several statements.
    return values[c] if values.shape[0] else default


@strict
def power_of(invstd, rounded_mean):
    """The power of two by which x is multiplied: the largest one up to `invstd`.

    It is limited so that it fits into float32 and `rounded_mean * power` does not overflow there.
    """
    room = 2.0**120 / power_up_to(abs(np.float64(rounded_mean)))
    return max(min(power_up_to(invstd), room, 2.0**120), 2.0**-126)


@strict
def affine_coefficients(mean, rounded_mean, invstd, weight, power):
    """`(scale, shift)`, float64, of `y = (x - mean) * invstd * weight`; a bias adds to `shift`."""
    slope = invstd * weight
    return slope / power, (np.float64(rounded_mean) - mean) * slope


@strict
def gradient_coefficients(mean, rounded_mean, invstd, weight, mean_dy, mean_dy_xhat, power):
    """`(of_dy, of_x, shift)`, float64, of the gradient by x, which is

    `dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`.
    """
    of_x = -invstd * (invstd / power) * mean_dy_xhat
    shift = (np.float64(rounded_mean) - mean) * power * of_x - invstd * mean_dy
    return invstd * weight, of_x, shift


@strict
def xhat_sum(sum_dy, sum_dy_x, mean, rounded_mean, invstd):
    """`sum(dy * xhat)`, where `sum_dy_x` is `sum(dy * (x - rounded_mean))`."""
    return (sum_dy_x + (np.float64(rounded_mean) - mean) * sum_dy) * invstd


@strict
def merge(count, mean, m2, other_count, other_mean, other_m2):
    """`(mean, m2)` of two parts of one channel together, by Chan's formula."""
    total = count + other_count
    delta = other_mean - mean
    fraction = other_count / total
    return mean + delta * fraction, m2 + other_m2 + delta * delta * (count * fraction)
