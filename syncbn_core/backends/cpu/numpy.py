"""NumPy arrays on the Numba CPU kernels.

Takes float64, float32, float16 and bfloat16 (of the package `ml_dtypes`, or its bits as uint16) in
any dense layout as it lies in memory; anything else (gaps, negative strides, foreign byte order) is
copied to a dense array first. 16-bit numbers are computed in float32 and rounded once. Results have
the dtype and layout of `x`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncbn_core.backends.cpu import launch as cpu
from syncbn_core.backends.cpu.launch import Plan, carrier, plan_of
from syncbn_core.layout import writable_view
from syncbn_core.moments import EpsMode, Moments

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

_BLENDED = (np.float32, np.float64)


def _plan_of(x: Array) -> Plan | None:
    """How the kernels take `x` as it lies in memory, if they can."""
    return plan_of(x.shape, x.strides, x.dtype, x.itemsize) if x.flags.aligned else None


def _dense(x: Array) -> tuple[Array, Plan]:
    """`x`, or a dense copy of it, in a dtype that the kernels take, and how they do."""
    plan = _plan_of(x)
    if plan is not None:
        return _bits(writable_view(x), plan.dtype), plan
    copy = _copied(x, carrier(x.dtype))
    plan = plan_of(copy.shape, copy.strides, copy.dtype, copy.itemsize)
    assert plan is not None
    return copy, plan


def _bits(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)


def _copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """A dense copy in the order of `x`, as the kernels take it."""
    if dtype.itemsize == x.dtype.itemsize:
        return _bits(np.array(x, x.dtype.newbyteorder("="), order="K"), dtype)
    return np.array(x, dtype, order="K")


def _like(other: Array, x: Array, dense: Array, plan: Plan) -> Array:
    """`other` in the dtype and layout of `dense`, which is what the kernels see of `x`."""
    own = _plan_of(other) if other.dtype == x.dtype else None
    if own is not None and own.layout == plan.layout:
        return _bits(writable_view(other), dense.dtype)
    copy = np.empty_like(dense)
    same = dense.dtype.itemsize == x.dtype.itemsize
    into = copy.view(x.dtype.newbyteorder("=")) if same else copy
    np.copyto(into, other, casting="same_kind")
    return copy


def _pair(x: Array, dy: Array) -> tuple[Array, Array, Plan]:
    """`x` and `dy` as the kernels take them, of one dtype and layout.

    A `dy` that is wider than a 16-bit `x` must not lose digits, or overflow: both in float32 then.
    """
    if x.dtype.itemsize == 2 and dy.dtype != x.dtype:
        x = np.array(x, np.float32, order="K")
    dense, plan = _dense(x)
    return dense, _like(dy, x, dense, plan), plan


def _wide(values: Array | None) -> Array:
    if values is None:
        return cpu.NOTHING
    return writable_view(np.ascontiguousarray(values, np.float64))


def _target(x: Array, plan: Plan, out: Array | None, *operands: Array) -> Array:
    """Where to write: `out` itself if it lies like `x` and across no operand, else a new array."""
    own = None if out is None else _plan_of(out)
    if out is None or own is None or own.dtype != plan.dtype or own.layout != plan.layout:
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
    if x.size == 0:
        return Moments.empty(x.shape[1])
    dense, plan = _dense(x)
    return cpu.moments(plan, plan.view(dense), parallel=parallel)


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
    dense, plan = _dense(x)
    y = _target(dense, plan, out)
    per_channel = (_wide(mean), _wide(invstd), _wide(weight), _wide(bias))
    cpu.normalize(plan, plan.view(dense), *per_channel, plan.view(y), parallel=parallel)
    return _give(y, x, out)


def forward_alone(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    eps_mode: EpsMode,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Moments, Array] | None:
    """`(y, moments, invstd)` of `x` alone; None for nothing."""
    if x.size == 0:
        return None
    dense, plan = _dense(x)
    y = _target(dense, plan, out)
    settings = (_wide(weight), _wide(bias), eps, eps_mode)
    views = (plan.view(dense), *settings, plan.view(y))
    total, invstd = cpu.forward_alone(plan, *views, parallel=parallel)
    return _give(y, x, out), total, invstd


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
    """`(sum_dy, sum_dy_xhat, dx)` of `x` alone; None for nothing.

    `frozen` (C,) bool: where `invstd` is a constant.
    """
    if x.size == 0:
        return None
    dense, grad, plan = _pair(x, dy)
    dx = _target(dense, plan, out, grad)
    constant = None if frozen is None else np.ascontiguousarray(frozen)
    per_channel = (_wide(mean), _wide(invstd), _wide(weight), constant)
    views = (plan.view(dense), plan.view(grad), *per_channel, plan.view(dx))
    sum_dy, sum_dy_xhat = cpu.backward_alone(plan, *views, parallel=parallel)
    return sum_dy, sum_dy_xhat, _give(dx, x, out)


def backward_reduce(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * xhat)`."""
    if x.size == 0:
        channels = x.shape[1]
        return np.zeros(channels), np.zeros(channels)
    dense, grad, plan = _pair(x, dy)
    views = (plan.view(dense), plan.view(grad), _wide(mean), _wide(invstd))
    sum_dy, sum_dy_xhat = cpu.backward_reduce(plan, *views, parallel=parallel)
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
    dense, grad, plan = _pair(x, dy)
    dx = _target(dense, plan, out, grad)
    per_channel = tuple(_wide(v) for v in (mean, invstd, weight, mean_dy, mean_dy_xhat))
    views = (plan.view(dense), plan.view(grad), *per_channel, plan.view(dx))
    cpu.backward_input(plan, *views, parallel=parallel)
    return _give(dx, x, out)


def update_running(
    running_mean: Array, running_var: Array, tracked: Array | None, total: Moments, factor: float
) -> bool:
    """Blend `total` in and count it, in place; False, and nothing done, where the kernel can't.

    As `syncbn_core.moments.blend`, in float64 throughout and in a tenth of the time.
    """
    for running in (running_mean, running_var):
        if running.dtype not in _BLENDED or not _is_plain(running):
            return False
        if running.shape != total.mean.shape:
            return False
    if tracked is not None and (tracked.dtype != np.int64 or not _is_plain(tracked)):
        return False
    cpu.update_running(running_mean, running_var, tracked, total, factor)
    return True


def _is_plain(array: Array) -> bool:
    return array.dtype.isnative and bool(array.flags.carray)
