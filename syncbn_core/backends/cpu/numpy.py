"""The CPU steps for NumPy arrays.

Dtypes: float64, float32, float16 and bfloat16 (of the package `ml_dtypes`, or its bits as uint16).
Dense arrays of any layout are used in place; arrays with gaps, negative strides or non-native byte
order are copied first. 16-bit numbers are computed in float32 and rounded once. Results have the
dtype of x and, if x is dense, its layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from syncbn_core.backends.base import RunningStatistics
from syncbn_core.backends.cpu.operations import NO_VALUES, CpuOperations
from syncbn_core.backends.cpu.plan import Plan, kernel_dtype, plan_of
from syncbn_core.layout import writable_view
from syncbn_core.moments import Moments

__all__ = ["OPERATIONS", "NumpyMemory"]

Array = np.ndarray[Any, Any]

_BLENDED = (np.float32, np.float64)
_set_item: Any = setitem


class NumpyMemory:
    """`HostMemory` of NumPy arrays."""

    def may_use_threads(self) -> bool:
        return True

    def dense(self, x: Array) -> tuple[Array, Array, Plan]:
        array, plan = _dense(x)
        return array, plan.view(array), plan

    def dense_pair(
        self, x: Array, dy: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array], Plan]:
        # Convert both to float32: a wider dy must not lose digits or overflow in the 16 bits of x.
        if x.dtype.itemsize == 2 and dy.dtype != x.dtype:
            x = np.array(x, np.float32, order="K")
        dense, plan = _dense(x)
        grad = _like(dy, x, dense, plan)
        return (dense, plan.view(dense)), (grad, plan.view(grad)), plan

    def target(
        self, dense: Array, plan: Plan, out: Array | None, *operands: Array
    ) -> tuple[Array, Array]:
        result = _target(dense, plan, out, *operands)
        return result, plan.view(result)

    def cast_to_output(self, result: Array, x: Array, out: Array | None) -> Array:
        if result is out or (out is not None and result.ctypes.data == out.ctypes.data):
            return result if out is None else out
        if result.dtype.itemsize == x.dtype.itemsize:
            result = _bits(result, x.dtype.newbyteorder("="))
        with np.errstate(over="ignore"):  # too large for float16: infinite, without a warning
            if out is None:
                return result.astype(x.dtype, copy=False)
            np.copyto(out, result, casting="same_kind")
        return out

    def empty_like(self, x: Array, out: Array | None) -> Array:
        return np.empty_like(x) if out is None else out

    def as_float64(self, values: Array | None) -> Array:
        if values is None:
            return NO_VALUES
        return writable_view(np.ascontiguousarray(values, np.float64))

    def parameter_gradients(
        self, sums: Array, x: Array, weight: Array | None
    ) -> tuple[Array, Array]:
        dtype = (x if weight is None else weight).dtype
        with np.errstate(invalid="ignore", over="ignore"):
            return sums[1].astype(dtype), sums[0].astype(dtype)

    def shared_buffers(
        self, running: RunningStatistics, total: Moments
    ) -> tuple[Array, Array, Array | None] | None:
        mean, var, counter, _ = running
        assert mean is not None
        assert var is not None
        for own in (mean, var):
            if own.dtype not in _BLENDED or not _is_plain(own) or own.shape != total.mean.shape:
                return None
        if counter is not None and (counter.dtype != np.int64 or not _is_plain(counter)):
            return None
        return mean, var, counter

    def assign(self, targets: Sequence[Array], values: Sequence[Any]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            deque(map(_set_item, targets, repeat(...), values), maxlen=0)


OPERATIONS = CpuOperations(NumpyMemory())


def _plan_of(x: Array) -> Plan | None:
    """The plan for x in place; None if the kernels need a copy."""
    return plan_of(x.shape, x.strides, x.dtype, x.itemsize) if x.flags.aligned else None


def _dense(x: Array) -> tuple[Array, Plan]:
    """x, or a dense copy of it, in the dtype of the kernels; and its plan."""
    plan = _plan_of(x)
    if plan is not None:
        return _bits(writable_view(x), plan.dtype), plan
    copy = _copied(x, kernel_dtype(x.dtype))
    plan = plan_of(copy.shape, copy.strides, copy.dtype, copy.itemsize)
    assert plan is not None
    return copy, plan


def _bits(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)


def _copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """A dense copy of x in `dtype`, the dtype of the kernels, with the axis order of x."""
    if dtype.itemsize == x.dtype.itemsize:
        return _bits(np.array(x, x.dtype.newbyteorder("="), order="K"), dtype)
    return np.array(x, dtype, order="K")


def _like(other: Array, x: Array, dense: Array, plan: Plan) -> Array:
    """`other` in the dtype and layout of `dense`, the array that the kernels use for x."""
    own = _plan_of(other) if other.dtype == x.dtype else None
    if own is not None and own.layout == plan.layout:
        return _bits(writable_view(other), dense.dtype)
    copy = np.empty_like(dense)
    same = dense.dtype.itemsize == x.dtype.itemsize
    into = copy.view(x.dtype.newbyteorder("=")) if same else copy
    np.copyto(into, other, casting="same_kind")
    return copy


def _target(x: Array, plan: Plan, out: Array | None, *operands: Array) -> Array:
    """The array to write to: `out` if possible, else a new array like x.

    `out` must have the dtype and layout of x, and overlap no operand unless it is the same memory.
    """
    own = None if out is None else _plan_of(out)
    if out is None or own is None or own.dtype != plan.dtype or own.layout != plan.layout:
        return np.empty_like(x)
    for operand in (x, *operands):
        if np.may_share_memory(out, operand) and out.ctypes.data != operand.ctypes.data:
            return np.empty_like(x)
    return _bits(out, x.dtype)


def _is_plain(array: Array) -> bool:
    return array.dtype.isnative and bool(array.flags.carray)
