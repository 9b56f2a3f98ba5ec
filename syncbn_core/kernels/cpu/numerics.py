"""What the Numba CPU kernels share: how they are built, and the numbers they compute with.

Activations are float64, float32, or 16 bits that Numba has no type for on a CPU: int16 stands for
the bits of a float16, uint16 for those of a bfloat16. 16-bit numbers are computed in float32 and
rounded once, to nearest even, when they are stored; NaN stays NaN.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    ZipCacheLocator,
)
from numba.extending import intrinsic, overload

__all__ = [
    "MAP_FLAGS",
    "SUM_FLAGS",
    "SerialParallelKernel",
    "at",
    "blend",
    "doubtful",
    "exact",
    "has_half",
    "invstd_of",
    "maps",
    "merge",
    "narrow",
    "power_of",
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


_LOCATORS: list[type[object]] = [UserProvidedCacheLocator, UserWideCacheLocator, ZipCacheLocator]


class _CacheFiles(CompileResultCacheImpl):
    """In `NUMBA_CACHE_DIR`, else the user's cache folder: an uninstaller leaves none behind.

    Numba's own choice is the folder of the source, which then stays and can be imported.
    """

    _locator_classes = _LOCATORS


class _Cache(FunctionCache):
    _impl_class = _CacheFiles


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with an on-disk cache where there is a place to write it."""

    def decorate(function: Callable[..., Any]) -> Any:
        function = _renamed(function, f"_{_STAMP:08x}")
        dispatcher = numba.njit(**options)(function)
        with suppress(RuntimeError):  # no folder can be written, as in a read-only container
            dispatcher._cache = _Cache(function)  # what `cache=True` does
        dispatcher._compile_for_args = partial(_apart, dispatcher._compile_for_args)
        return dispatcher

    return decorate


def _apart(compile_for: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`compile_for(...)`, in a thread of its own where this is the one that Ctrl-C interrupts.

    A compilation that was cut off leaves Numba's tables half filled, and then fails for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        return compile_for(*arguments, **named)
    outcome: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            outcome.append(compile_for(*arguments, **named))
        except BaseException as error:
            outcome.append(_Failed(error))
        finally:
            done.release()

    threading.Thread(target=run, name="compile", daemon=True).start()
    with done:
        (result,) = outcome
    if isinstance(result, _Failed):
        raise result.error
    return result


class _Failed:
    """What a compilation has raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class SerialParallelKernel:
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


def rounded(value: float, like: Any) -> Any:
    """`value` in the dtype that elements of the array `like`, or the number, are computed in."""
    raise NotImplementedError


@overload(rounded)
def _rounded(value, like):
    if _computed_in(getattr(like, "dtype", like)) == types.float64:
        return lambda value, like: np.float64(value)
    return lambda value, like: np.float32(value)


def scratch(shape: tuple[int, ...], like: Any) -> Any:
    """Memory for numbers in the dtype that elements of the array `like` are computed in."""
    raise NotImplementedError


@overload(scratch)
def _scratch(shape, like):
    if _computed_in(like.dtype) == types.float64:
        return lambda shape, like: np.empty(shape, np.float64)
    return lambda shape, like: np.empty(shape, np.float32)


def at(values: Any, i: int) -> Any:
    """`values[i]`, or the one number that `values` is for all."""
    raise NotImplementedError


@overload(at)
def _at(values, i):
    if isinstance(values, types.Array):
        return lambda values, i: values[i]
    return lambda values, i: values


def doubtful(first: float, second: float, count: float, like: Any) -> bool:
    """Whether squares were too large or too small for float32, if `like` is computed in that.

    `first`, `second`: sums of `count` deviations and of their squares. Squares below 1e-37 lose
    digits; where all of them are 0, and the first sum is, it is taken for a constant.
    """
    raise NotImplementedError


@overload(doubtful)
def _doubtful(first, second, count, like):
    if _computed_in(like.dtype) == types.float64:
        return lambda first, second, count, like: False
    return lambda first, second, count, like: (
        not (1e-37 * count <= second < np.inf) and not (second == 0 and first == 0)
    )


def _exponent(typing_context, value):
    """The largest power of two that is not above a positive float64; 0 for a subnormal one."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(64)
        bits = builder.bitcast(arguments[0], word)
        return builder.bitcast(builder.and_(bits, ir.Constant(word, 0x7FF << 52)), ir.DoubleType())

    return types.float64(types.float64), generate


exponent: Any = intrinsic(_exponent)


@exact
def power_of(invstd, near):
    """A power of two `p` of the size of `invstd`, for `x * p - near * p` instead of `x - near`.

    That is exact, too, and gives numbers around 1 to multiply with: the product of `x - near` and
    a factor of the size of `invstd**2` would leave the range of float32, one way or the other.
    """
    room = 2.0**120 / exponent(abs(np.float64(near)))  # near * p must not overflow
    return max(min(exponent(invstd), room, 2.0**120), 2.0**-126)


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
