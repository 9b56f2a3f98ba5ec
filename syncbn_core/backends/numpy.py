"""NumPy arrays on the Numba CPU kernels.

Takes float32 and float64 in any dense layout as it lies in memory; anything else (gaps,
negative strides, foreign byte order) is copied to a dense array first, and float16 is computed
in float32. Results have the layout of `x`.

Which build of a kernel runs: the parallel one for a single caller with enough work, the serial
one for threads that fill the cores by themselves (`parallel=False`), for small arrays, while
another thread is in a parallel kernel, and after a fork. Numba's `workqueue` layer aborts the
process when two threads enter it, and its OpenMP layer when a forked child does.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numba
import numpy as np

from syncbn_core.kernels import cpu
from syncbn_core.layout import Layout, layout_of, writable_view
from syncbn_core.moments import Moments

__all__ = [
    "backward_alone",
    "backward_input",
    "backward_reduce",
    "forward_alone",
    "moments",
    "normalize",
]

Array = np.ndarray[Any, Any]

PARALLEL_SIZE = 32768  # elements; below, starting the threads costs more than they save
NEAR = 1 << 20  # bytes of a channel that a core's own cache still has when it is read again
_NOTHING = np.empty(0)

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


def _run(kernel: cpu.Twins, parallel: bool, x: Array, *arguments: Any) -> None:
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


def _dense(x: Array) -> tuple[Array, Layout]:
    """`x`, or a dense copy of it, in a dtype and layout that the kernels take."""
    dtype = np.float32 if x.dtype.itemsize < 4 else x.dtype.newbyteorder("=")
    if x.dtype == dtype and x.dtype.isnative and x.flags.aligned:
        layout = layout_of(x)
        if layout is not None:
            return writable_view(x), layout
    copy = np.array(x, dtype, order="K")
    layout = layout_of(copy)
    assert layout is not None
    return copy, layout


def _like(other: Array, x: Array, layout: Layout) -> Array:
    """`other` as an array with the dtype and memory layout of `x`."""
    if other.dtype == x.dtype and layout_of(other) == layout and other.flags.aligned:
        return writable_view(other)
    copy = np.empty_like(x)
    np.copyto(copy, other, casting="same_kind")
    return copy


def _flat(x: Array, layout: Layout) -> Array:
    view: Array = layout.view(x)
    return view[:, :, 0] if layout.inner == 1 else view


def _wide(values: Array | None) -> Array:
    if values is None:
        return _NOTHING
    return writable_view(np.ascontiguousarray(values, np.float64))


def _target(x: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
    """Where to write: `out` itself if it lies like `x` and across no operand, else a new array."""
    if out is None or out.dtype != x.dtype or not out.flags.aligned or layout_of(out) != layout:
        return np.empty_like(x)
    for operand in (x, *operands):
        if out.ctypes.data != operand.ctypes.data and np.may_share_memory(out, operand):
            return np.empty_like(x)
    return out


def _give(result: Array, dtype: np.dtype[Any], out: Array | None) -> Array:
    with np.errstate(over="ignore"):  # what float16 can't hold is infinite, not a warning
        if out is None:
            return result.astype(dtype, copy=False)
        if out is not result:
            np.copyto(out, result, casting="same_kind")
    return out


def moments(x: Array, *, parallel: bool = True) -> Moments:
    """Moments of `x` (N, C, *spatial)."""
    channels = x.shape[1]
    if x.size == 0:
        return Moments.empty(channels)
    dense, layout = _dense(x)
    mean, m2 = np.empty(channels), np.empty(channels)
    kernel = cpu.rows_moments if layout.inner == 1 else cpu.planes_moments
    _run(kernel, parallel, _flat(dense, layout), mean, m2)
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
    kernel = cpu.rows_normalize if layout.inner == 1 else cpu.planes_normalize
    per_channel = (_wide(mean), _wide(invstd), _wide(weight), _wide(bias))
    _run(kernel, parallel, _flat(dense, layout), *per_channel, _flat(y, layout))
    return _give(y, x.dtype, out)


def forward_alone(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    eps_mode: str,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Moments] | None:
    """`moments` and `normalize` by those, channel by channel; None where that is no gain."""
    if not _stays_near(x, 1, parallel):
        return None
    dense, layout = _dense(x)
    if layout.inner == 1:
        return None
    y = _target(dense, layout, out)
    mean, m2 = np.empty(x.shape[1]), np.empty(x.shape[1])
    settings = (_wide(weight), _wide(bias), float(eps), eps_mode == "clamp")
    arrays = (mean, m2, _flat(y, layout))
    _run(cpu.planes_forward, parallel, _flat(dense, layout), *settings, *arrays)
    return _give(y, x.dtype, out), Moments(x.size // x.shape[1], mean, m2)


def _stays_near(x: Array, arrays: int, parallel: bool) -> bool:
    """Whether a channel of so many arrays stays in cache, and there are channels for all cores.

    Asked before `_dense`: where the answer is no, nothing must have been copied.
    """
    if x.size == 0:
        return False
    channels = x.shape[1]
    near = x.size // channels * max(x.itemsize, 4) * arrays <= NEAR
    return near and not (parallel and channels < 4 * numba.get_num_threads())


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
    dense, layout = _dense(x)
    if layout.inner == 1:
        return None
    grad = _like(dy, dense, layout)
    dx = _target(dense, layout, out, grad)
    sum_dy, sum_dy_xhat = np.empty(x.shape[1]), np.empty(x.shape[1])
    constant = np.empty(0, np.bool_) if frozen is None else np.ascontiguousarray(frozen)
    _run(
        cpu.planes_backward,
        parallel,
        _flat(dense, layout),
        _flat(grad, layout),
        *(_wide(values) for values in (mean, invstd, weight)),
        constant,
        sum_dy,
        sum_dy_xhat,
        _flat(dx, layout),
    )
    return sum_dy, sum_dy_xhat, _give(dx, x.dtype, out)


def backward_reduce(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * xhat)`."""
    channels = x.shape[1]
    if x.size == 0:
        return np.zeros(channels), np.zeros(channels)
    dense, layout = _dense(x)
    grad = _flat(_like(dy, dense, layout), layout)
    sum_dy, sum_dy_xhat = np.empty(channels), np.empty(channels)
    kernel = cpu.rows_backward_reduce if layout.inner == 1 else cpu.planes_backward_reduce
    per_channel = (_wide(mean), _wide(invstd), sum_dy, sum_dy_xhat)
    _run(kernel, parallel, _flat(dense, layout), grad, *per_channel)
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
    dense, layout = _dense(x)
    grad = _like(dy, dense, layout)
    dx = _target(dense, layout, out, grad)
    kernel = cpu.rows_backward_input if layout.inner == 1 else cpu.planes_backward_input
    per_channel = tuple(_wide(v) for v in (mean, invstd, weight, mean_dy, mean_dy_xhat))
    arrays = (_flat(dense, layout), _flat(grad, layout))
    _run(kernel, parallel, *arrays, *per_channel, _flat(dx, layout))
    return _give(dx, x.dtype, out)
