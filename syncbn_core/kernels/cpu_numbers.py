"""What the Numba CPU kernels share: how they are built, and the numbers they compute with.

Activations are float64, float32, or 16 bits that Numba has no type for on a CPU: int16 stands for
the bits of a float16, uint16 for those of a bfloat16. 16-bit numbers are computed in float32 and
rounded once, to nearest even, when they are stored; NaN stays NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

__all__ = [
    "MAP_FLAGS",
    "SUM_FLAGS",
    "Twins",
    "blend",
    "exact",
    "has_half",
    "invstd_of",
    "maps",
    "merge",
    "narrow",
    "rounded",
    "scratch",
    "sums",
    "widen",
]

# Sums vectorise only when they may be reordered. Never plain `fastmath=True`: it assumes
# that NaN and infinity do not occur and drops them.
SUM_FLAGS = {"reassoc", "contract", "nsz", "arcp"}
MAP_FLAGS = {"contract"}


def _stamp() -> int:
    """Changes with this file, at which Numba's cache does not look when its users are the same."""
    try:
        return zlib.crc32(Path(__file__).read_bytes())
    except OSError:  # imported from an archive
        return 0


_STAMP = _stamp()


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with an on-disk cache where there is a place to write it."""

    def decorate(function: Callable[..., Any]) -> Any:
        function = _renamed(function, f"_{_STAMP:08x}")
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable cache directory, for example a read-only container
            return numba.njit(**options)(function)

    return decorate


class Twins:
    """The serial and the parallel build of one kernel; each compiles when first called."""

    def __init__(self, function: Callable[..., None]) -> None:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        self.serial = _jit(**options)(function)
        self.parallel = _jit(parallel=True, **options)(_renamed(function, "_parallel"))


def _renamed(function: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """A copy under another name, by which alone Numba's disk cache tells builds apart."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = function.__qualname__ + suffix
    copy.__module__ = function.__module__
    return copy


sums = _jit(nogil=True, error_model="numpy", fastmath=SUM_FLAGS)
maps = _jit(nogil=True, error_model="numpy", fastmath=MAP_FLAGS)
exact = _jit(nogil=True, error_model="numpy")


def has_half() -> bool:
    """Whether this processor converts float16, as every x86 since 2013 and 64-bit ARM does.

    LLVM would call functions that Numba does not load where it does not.
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
    return dtype if isinstance(dtype, types.Float) else types.float32


def _widen(typing_context, value):
    """An element of an activation as the number that is computed with."""

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


def _narrow(typing_context, value, array):
    """`value` rounded to what `array` holds."""

    def generate(context, builder, signature, arguments):
        number = arguments[0]
        if array.dtype == types.int16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        if array.dtype == types.uint16:
            return _nearest_bfloat16(builder, number)
        return number

    return array.dtype(value, array), generate


narrow: Any = intrinsic(_narrow)


def _nearest_bfloat16(builder, number):
    """The upper half, after half a unit of it less one, and one for an odd one, were added."""
    word = ir.IntType(32)
    sixteen = ir.Constant(word, 16)
    bits = builder.bitcast(number, word)
    upper = builder.lshr(bits, sixteen)
    odd = builder.and_(upper, ir.Constant(word, 1))
    raised = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
    quiet = builder.or_(upper, ir.Constant(word, 0x40))  # NaN, were its set bits all cut off
    is_nan = builder.fcmp_unordered("uno", number, number)
    chosen = builder.select(is_nan, quiet, builder.lshr(raised, sixteen))
    return builder.trunc(chosen, ir.IntType(16))


def rounded(value: float, array: Any) -> Any:
    """`value` in the dtype that elements of `array` are computed in."""
    raise NotImplementedError


@overload(rounded)
def _rounded(value, array):
    if _computed_in(array.dtype) == types.float64:
        return lambda value, array: np.float64(value)
    return lambda value, array: np.float32(value)


def scratch(size: int, array: Any) -> Any:
    """Zeros of the dtype that elements of `array` are computed in."""
    raise NotImplementedError


@overload(scratch)
def _scratch(size, array):
    if _computed_in(array.dtype) == types.float64:
        return lambda size, array: np.zeros(size, np.float64)
    return lambda size, array: np.zeros(size, np.float32)


@exact
def merge(count, mean, m2, tile_count, tile_mean, tile_m2):
    """Chan's merge of one channel: the formula of `syncbn_core.moments`, for scalars."""
    total = count + tile_count
    delta = tile_mean - mean
    share = tile_count / total
    return mean + delta * share, m2 + tile_m2 + delta * delta * (count * share)


@exact
def invstd_of(var, eps, clamp):
    """`1 / sqrt(var + eps)`, with `clamp` `1 / sqrt(max(var, eps))`; NaN stays NaN."""
    wide = (eps if var < eps else var) if clamp else var + eps
    return 1.0 / np.sqrt(wide)


@exact
def blend(running_mean, running_var, tracked, mean, m2, count, factor):
    """The update of running statistics, of `syncbn_core.moments`, in place, and of their counter.

    `tracked` (1,), or (0,) for none. All in one call, which no interrupt can cut in two.
    """
    for i in range(tracked.shape[0]):
        tracked[i] += 1
    for c in range(mean.shape[0]):
        running_mean[c] = (1.0 - factor) * running_mean[c] + factor * mean[c]
        running_var[c] = (1.0 - factor) * running_var[c] + factor * (m2[c] / (count - 1))
