"""The CPU steps for NumPy arrays.

Dtypes: float64, float32, float16 and bfloat16 (of the package `ml_dtypes`, or its bits as uint16).
Dense arrays of any layout are used in place; arrays with gaps, negative strides or non-native byte
order are copied first. 16-bit numbers are computed in float32 and rounded once. Results have the
dtype of x and, if x is dense, its layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from syncbn_core.backends.cpu.operations import CpuOperations
from syncbn_core.kernels.cpu.numerics import has_half
from syncbn_core.kernels.cpu.operands import ANYWHERE, ARRAY_STRUCTS, look
from syncbn_core.layout import layout_of

__all__ = ["OPERATIONS", "NumpyMemory"]

Array = np.ndarray[Any, Any]

_set_item: Any = setitem


class NumpyMemory:
    """`HostMemory` of NumPy arrays."""

    def may_use_threads(self) -> bool:
        return True

    def look(self, calls: Array, threads: int, arrays: Sequence[Array | None]) -> int:
        structs = [None if array is None else array.__array_struct__ for array in arrays]
        objects = np.array([*map(id, structs)])
        half = has_half()
        return int(look(ARRAY_STRUCTS, id(None), objects, threads, half, calls, ANYWHERE))

    def dense(self, x: Array) -> Array:
        return x if _is_usable(x) else _copied(x, kernel_dtype(x.dtype))

    def dense_pair(self, x: Array, dy: Array) -> tuple[Array, Array]:
        # Convert both to float32: a wider dy must not lose digits or overflow in the 16 bits of x.
        if x.dtype.itemsize == 2 and dy.dtype != x.dtype:
            x = np.array(x, np.float32, order="K")
        dense = self.dense(x)
        return dense, _like(dy, x, dense)

    def target(self, dense: Array, out: Array | None, *operands: Array) -> Array:
        if out is None or out.dtype != dense.dtype or not _is_usable(out):
            return np.empty_like(dense)
        if layout_of(out) != layout_of(dense):
            return np.empty_like(dense)
        for operand in (dense, *operands):
            if np.may_share_memory(out, operand) and out.ctypes.data != operand.ctypes.data:
                return np.empty_like(dense)
        return out

    def cast_to_output(self, result: Array, x: Array, out: Array | None) -> Array:
        if result is out or (out is None and result.dtype == x.dtype):
            return result
        if result.dtype.itemsize == x.dtype.itemsize:
            result = _bits(result, x.dtype.newbyteorder("="))
        with np.errstate(over="ignore"):  # too large for float16: infinite, without a warning
            if out is None:
                return result.astype(x.dtype, copy=False)
            np.copyto(out, result, casting="same_kind")
        return out

    def empty_like(self, x: Array, out: Array | None) -> Array:
        return np.empty_like(x) if out is None else out

    def wide(self, values: Array | None) -> Array | None:
        return None if values is None else np.require(values, np.float64, ("C", "A"))

    def gradients(self, like: Array | None, channels: int) -> tuple[Array, Array]:
        dtype = np.float64 if like is None else like.dtype
        return np.empty(channels, dtype), np.empty(channels, dtype)

    def rounded(self, wide: Array, like: Array) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return wide.astype(like.dtype)

    def mark_written(self, *arrays: Array | None) -> None:
        """Nothing: NumPy keeps no record."""

    def assign(self, targets: Sequence[Array], values: Sequence[Any]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            deque(map(_set_item, targets, repeat(...), values), maxlen=0)


OPERATIONS = CpuOperations(NumpyMemory())


@lru_cache(maxsize=64)
def kernel_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that the kernels use for arrays of `dtype`: one of the same size, or float32.

    16-bit floats are passed as integers with the same bits (see `kernels.cpu.numerics`).
    """
    if dtype.itemsize > 2:
        return dtype.newbyteorder("=")
    if dtype.name in ("bfloat16", "uint16"):
        return np.dtype(np.uint16)
    return np.dtype(np.int16 if dtype.name in ("float16", "int16") and has_half() else np.float32)


def _is_usable(x: Array) -> bool:
    """Whether the kernels can use x in place."""
    return (
        kernel_dtype(x.dtype).itemsize == x.dtype.itemsize
        and x.dtype.isnative
        and x.flags.aligned
        and layout_of(x) is not None
    )


def _bits(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)


def _copied(x: Array, dtype: np.dtype[Any]) -> Array:
    """A dense copy of x in `dtype`, the dtype of the kernels, with the axis order of x."""
    if dtype.itemsize == x.dtype.itemsize:
        return _bits(np.array(x, x.dtype.newbyteorder("="), order="K"), dtype)
    return np.array(x, dtype, order="K")


def _like(other: Array, x: Array, dense: Array) -> Array:
    """`other` in the dtype and layout of `dense`, the array that the kernels use for x."""
    if other.dtype == x.dtype and _is_usable(other) and layout_of(other) == layout_of(dense):
        return _bits(other, dense.dtype)
    copy = np.empty_like(dense)
    same = dense.dtype.itemsize == x.dtype.itemsize
    into = copy.view(x.dtype.newbyteorder("=")) if same else copy
    np.copyto(into, other, casting="same_kind")
    return copy
