"""NumPy arrays on the Numba CPU kernels.

Takes float64, float32, float16 and bfloat16 (of the package `ml_dtypes`, or its bits as uint16) in
any dense layout as it lies in memory; anything else (gaps, negative strides, foreign byte order) is
copied to a dense array first. 16-bit numbers are computed in float32 and rounded once. Results have
the dtype and layout of `x`.

Which build of a kernel runs: the parallel one for a single caller with enough work, the serial
one for threads that fill the cores by themselves (`parallel=False`), for small arrays, while
another thread is in a parallel kernel, and after a fork. Numba's `workqueue` layer aborts the
process when two threads enter it, and its OpenMP layer when a forked child does.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any

import numba
import numpy as np

from syncbn_core.kernels import cpu_planes, cpu_rows
from syncbn_core.kernels.cpu_numbers import Twins, blend, has_half
from syncbn_core.layout import Layout, layout_of, writable_view
from syncbn_core.moments import Moments

__all__ = [
    "backward_alone",
    "backward_input",
    "backward_reduce",
    "forward_alone",
    "moments",
    "normalize",
    "update_running",
]

Array = np.ndarray[Any, Any]

PARALLEL_SIZE = 32768  # elements; below, starting the threads costs more than they save
NEAR = 1 << 20  # bytes of a channel that a core's own cache still has when it is read again
SHORT = 64  # elements; shorter planes are computed side by side, as rows
_BLENDED = (np.float32, np.float64)
_NOTHING = np.empty(0)
_NOWHERE = np.empty(0, np.bool_)

_one_caller = threading.Lock()
_forked = False


def _layer() -> str | None:
    """Numba's threading layer, or None while it has not been started."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _after_fork() -> None:
    global _one_caller, _forked
    _one_caller = threading.Lock()  # its holder is not in this process
    _forked = _forked or _layer() is not None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _run(kernel: Twins, parallel: bool, x: Array, *arguments: Any) -> None:
    if (
        parallel
        and x.size >= PARALLEL_SIZE
        and not _forked
        and numba.get_num_threads() > 1
        and not (_layer() == "workqueue" and threading.active_count() > 1)
        and _one_caller.acquire(blocking=False)
    ):
        try:
            kernel.parallel(x, *arguments)
        finally:
            _one_caller.release()
    else:
        kernel.serial(x, *arguments)


@lru_cache(maxsize=64)
def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which the kernels take an array of `dtype`: of the same size, or float32."""
    if dtype.itemsize > 2:
        return dtype.newbyteorder("=")
    if dtype.name in ("bfloat16", "uint16"):
        return np.dtype(np.uint16)
    return np.dtype(np.int16 if dtype.name == "float16" and has_half() else np.float32)


def _dense(x: Array) -> tuple[Array, Layout]:
    """`x`, or a dense copy of it, in a dtype and layout that the kernels take."""
    dtype = _carrier(x.dtype)
    if x.dtype.isnative and x.flags.aligned and dtype.itemsize == x.dtype.itemsize:
        layout = layout_of(x)
        if layout is not None:
            return _bits(writable_view(x), dtype), layout
    copy = _copied(x, dtype)
    layout = layout_of(copy)
    assert layout is not None
    return copy, layout


def _bits(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)


def _copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """A dense copy in the order of `x`, as the kernels take it."""
    if dtype.itemsize == x.dtype.itemsize:
        return _bits(np.array(x, x.dtype.newbyteorder("="), order="K"), dtype)
    return np.array(x, dtype, order="K")


def _like(other: Array, x: Array, dense: Array, layout: Layout) -> Array:
    """`other` in the dtype and layout of `dense`, which is what the kernels see of `x`."""
    native = other.dtype == x.dtype and other.dtype.isnative and other.flags.aligned
    if native and dense.dtype.itemsize == x.dtype.itemsize and layout_of(other) == layout:
        return _bits(writable_view(other), dense.dtype)
    copy = np.empty_like(dense)
    same = dense.dtype.itemsize == x.dtype.itemsize
    into = copy.view(x.dtype.newbyteorder("=")) if same else copy
    np.copyto(into, other, casting="same_kind")
    return copy


def _pair(x: Array, dy: Array) -> tuple[Array, Array, Layout]:
    """`x` and `dy` as the kernels take them, of one dtype and layout.

    A `dy` that is wider than a 16-bit `x` must not lose digits, or overflow: both in float32 then.
    """
    if x.dtype.itemsize == 2 and dy.dtype != x.dtype:
        x = np.array(x, np.float32, order="K")
    dense, layout = _dense(x)
    return dense, _like(dy, x, dense, layout), layout


def _as_rows(layout: Layout) -> bool:
    return layout.inner == 1 or (layout.inner <= SHORT and layout.outer >= 8)


@lru_cache(maxsize=1024)
def _rows(layout: Layout) -> tuple[int, int]:
    """The shape of the rows that the kernels take: narrow ones are joined."""
    columns = layout.channels * layout.inner
    repeats = cpu_rows.joined(layout.outer, columns)
    return layout.outer // repeats, columns * repeats


def _call(
    step: str,
    parallel: bool,
    layout: Layout,
    read: tuple[Array, ...],
    channelwise: tuple[Any, ...],
    *written: Array,
) -> None:
    """Run the kernel for a layout; `read` and `written` are arrays of that layout."""
    if _as_rows(layout):
        shape = _rows(layout)
        kernel = getattr(cpu_rows, f"rows_{step}")
        views = [layout.view(x).reshape(shape) for x in (*read, *written)]
        channelwise = (layout.inner, *channelwise)
    else:
        kernel = getattr(cpu_planes, f"planes_{step}")
        views = [layout.view(x) for x in (*read, *written)]
    count = len(read)
    _run(kernel, parallel, *views[:count], *channelwise, *views[count:])


def _wide(values: Array | None) -> Array:
    if values is None:
        return _NOTHING
    return writable_view(np.ascontiguousarray(values, np.float64))


def _target(x: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
    """Where to write: `out` itself if it lies like `x` and across no operand, else a new array."""
    if (
        out is None
        or _carrier(out.dtype) != x.dtype
        or out.dtype.itemsize != x.dtype.itemsize
        or not (out.dtype.isnative and out.flags.aligned)
        or layout_of(out) != layout
    ):
        return np.empty_like(x)
    for operand in (x, *operands):
        if np.may_share_memory(out, operand) and out.ctypes.data != operand.ctypes.data:
            return np.empty_like(x)
    return _bits(out, x.dtype)


def _give(result: Array, x: Array, out: Array | None) -> Array:
    """`result` of a kernel as an array of the dtype of `x`: in `out`, where there is one."""
    if result is out or (out is not None and result.ctypes.data == out.ctypes.data):
        return result if out is None else out
    if result.dtype.itemsize == x.dtype.itemsize:
        result = _bits(result, x.dtype.newbyteorder("="))
    with np.errstate(over="ignore"):  # what float16 can't hold is infinite, not a warning
        if out is None:
            return result.astype(x.dtype, copy=False)
        np.copyto(out, result, casting="same_kind")
    return out


def moments(x: Array, *, parallel: bool = True) -> Moments:
    """Moments of `x` (N, C, *spatial)."""
    channels = x.shape[1]
    if x.size == 0:
        return Moments.empty(channels)
    dense, layout = _dense(x)
    mean, m2 = np.empty(channels), np.empty(channels)
    _call("moments", parallel, layout, (dense,), (mean, m2))
    return Moments(x.size // channels, mean, m2)


def normalize(
    x: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`y = (x - mean) * invstd * weight + bias`; `out` may be `x` itself."""
    if x.size == 0:
        return np.empty_like(x) if out is None else out
    dense, layout = _dense(x)
    y = _target(dense, layout, out)
    per_channel = (_wide(mean), _wide(invstd), _wide(weight), _wide(bias))
    _call("normalize", parallel, layout, (dense,), per_channel, y)
    return _give(y, x, out)


def forward_alone(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    eps_mode: str,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Moments, Array] | None:
    """`(y, moments, invstd)` of `x` alone, channel by channel; None where that is no gain."""
    if not _stays_near(x, 1, parallel):
        return None
    dense, layout = _dense(x)
    y = _target(dense, layout, out)
    mean, m2, invstd = np.empty((3, x.shape[1]))
    settings = (_wide(weight), _wide(bias), float(eps), eps_mode == "clamp")
    _call("forward", parallel, layout, (dense,), (*settings, mean, m2, invstd), y)
    return _give(y, x, out), Moments(x.size // x.shape[1], mean, m2), invstd


def _stays_near(x: Array, arrays: int, parallel: bool) -> bool:
    """Whether a channel of so many arrays stays in cache, and there are channels for all cores.

    Of rows, a block of channels. Asked before `_dense`: where the answer is no, nothing must have
    been copied.
    """
    if x.size == 0:
        return False
    layout = layout_of(x)
    if layout is None:  # a dense copy may lie in any order
        return False
    together = 1
    if _as_rows(layout):
        width = cpu_rows.WIDE if layout.inner == 1 else cpu_rows.WIDTH
        together = max(1, min(layout.channels, width // layout.inner))
    near = layout.outer * layout.inner * together * x.itemsize * arrays <= NEAR
    parts = layout.channels // together
    many = parallel and x.size >= PARALLEL_SIZE
    return near and not (many and parts < 4 * numba.get_num_threads())


def backward_alone(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    frozen: Array | None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Array, Array] | None:
    """`(sum_dy, sum_dy_xhat, dx)` channel by channel; None where that is no gain.

    `frozen` (C,) bool: where `invstd` is a constant.
    """
    if not _stays_near(x, 2, parallel):
        return None
    dense, grad, layout = _pair(x, dy)
    dx = _target(dense, layout, out, grad)
    sum_dy, sum_dy_xhat = np.empty(x.shape[1]), np.empty(x.shape[1])
    constant = _NOWHERE if frozen is None else np.ascontiguousarray(frozen)
    per_channel = (*(_wide(values) for values in (mean, invstd, weight)), constant)
    sums = (sum_dy, sum_dy_xhat)
    _call("backward", parallel, layout, (dense, grad), (*per_channel, *sums), dx)
    return sum_dy, sum_dy_xhat, _give(dx, x, out)


def backward_reduce(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * xhat)`."""
    channels = x.shape[1]
    if x.size == 0:
        return np.zeros(channels), np.zeros(channels)
    dense, grad, layout = _pair(x, dy)
    sum_dy, sum_dy_xhat = np.empty(channels), np.empty(channels)
    per_channel = (_wide(mean), _wide(invstd), sum_dy, sum_dy_xhat)
    _call("backward_reduce", parallel, layout, (dense, grad), per_channel)
    return sum_dy, sum_dy_xhat


def backward_input(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    mean_dy: Array,
    mean_dy_xhat: Array,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; `out` may be `dy` itself."""
    if x.size == 0:
        return np.empty_like(x) if out is None else out
    dense, grad, layout = _pair(x, dy)
    dx = _target(dense, layout, out, grad)
    per_channel = tuple(_wide(v) for v in (mean, invstd, weight, mean_dy, mean_dy_xhat))
    _call("backward_input", parallel, layout, (dense, grad), per_channel, dx)
    return _give(dx, x, out)


def update_running(running_mean: Array, running_var: Array, total: Moments, factor: float) -> bool:
    """Blend `total` in, in place; False, and nothing done, where the kernel can't write them.

    As `syncbn_core.moments.blend`, in float64 throughout and in a tenth of the time.
    """
    for running in (running_mean, running_var):
        native = running.dtype in _BLENDED and running.dtype.isnative and running.flags.carray
        if not native or running.shape != total.mean.shape:
            return False
    blend(running_mean, running_var, total.mean, total.m2, total.count, float(factor))
    return True
