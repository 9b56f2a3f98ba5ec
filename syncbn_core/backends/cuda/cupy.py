"""The CUDA steps for CuPy arrays.

Dtypes: float16, bfloat16, float32 and float64. Dense arrays of any layout are used in place; other
arrays are copied first. Memory comes from CuPy's pool. With SYNCBN_KERNELS=off the steps are CuPy's
operations. Else importing this module raises `BackendError` if the machine is not ready to compile
and launch kernels; the text says what is missing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cupy
import numpy as np

from syncbn_core.backends.cuda.kernels import require
from syncbn_core.backends.cuda.operations import CudaOperations
from syncbn_core.backends.cuda.plain import PlainDeviceOperations
from syncbn_core.backends.cuda.usable import setting
from syncbn_core.backends.plain import Namespace, PlainOperations
from syncbn_core.layout import Layout, layout_of

__all__ = ["OPERATIONS", "CupyMemory"]

Array = Any  # cupy.ndarray

KERNELS = setting() != "off"
if KERNELS:
    require()


class _CupyNamespace(Namespace):
    """`Namespace` of CuPy."""

    def working(self, values: Array) -> Any:
        return cupy.float64 if values.dtype == cupy.float64 else cupy.float32

    def cast(self, values: Array, dtype: Any) -> Array:
        return values.astype(dtype, copy=False)

    def difference(self, x: Array, values: Array) -> Array:
        return self._native(x) - values  # converts 16 bits within CuPy's kernel

    def multiple(self, x: Array, values: Array) -> Array:
        return self._native(x) * values

    def product(self, values: Array, other: Array) -> Array:
        values *= self._native(other)
        return values

    def scaled(self, values: Array, scale: Array, shift: Array, dtype: Any) -> Array:
        values *= scale
        values += shift
        return self.cast(values, dtype)

    def plus_scaled(self, values: Array, other: Array, scale: Array, dtype: Any) -> Array:
        values += self._native(other) * scale
        return self.cast(values, dtype)

    def sum(self, values: Array, axes: tuple[int, ...]) -> Array:
        return self._native(values).sum(axes, dtype=cupy.float64)

    def _native(self, values: Array) -> Array:
        """`values`, in float32 if CuPy's own operations do not know their dtype (bfloat16)."""
        return values if values.dtype.kind == "f" else values.astype(cupy.float32)


class CupyMemory:
    """`DeviceMemory` of CuPy arrays."""

    plain: PlainOperations = PlainOperations(_CupyNamespace(cupy))

    def device_of(self, array: Array) -> int:
        return int(array.device.id)

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = cupy.cuda.Device(index)
        return device

    def stream(self, index: int) -> int:
        return int(cupy.cuda.get_current_stream().ptr)

    def is_captured(self, stream: int) -> bool:
        return bool(cupy.cuda.runtime.streamIsCapturing(stream))

    def keeps_stream(self, stream: int) -> bool:
        return False  # it may be destroyed, and its handle used again, while its work runs

    def pointer(self, array: Array) -> Any:
        return array.data.ptr

    def dtype_name(self, array: Array) -> str:
        return str(array.dtype.name)

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        return cupy.empty(shape, _dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        return cupy.zeros(shape, _dtype(dtype))

    def lasting_zeros(self, size: int, index: int, stream: int) -> Array:
        return self.zeros((size,), "int32", index)  # CuPy frees nothing that an array holds

    def upload(self, values: np.ndarray[Any, Any], dtype: str, index: int) -> Array:
        return cupy.asarray(values).astype(_dtype(dtype))

    def download(self, array: Array) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = cupy.asnumpy(array).astype(np.float64)
        return values

    def waiting_allowed(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, arrays: list[Array]) -> Array:
        with arrays[0].device:
            return cupy.concatenate(arrays)

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous)

    def contiguous(self, array: Array) -> Array:
        return cupy.ascontiguousarray(array)

    def dense(self, x: Array) -> tuple[Array, Layout]:
        layout = layout_of(x)
        if layout is None:
            x = cupy.ascontiguousarray(x)
            layout = layout_of(x)
            assert layout is not None
        return x, layout

    def like(self, other: Array, dense: Array, layout: Layout) -> Array:
        if other.dtype == dense.dtype and layout_of(other) == layout:
            return other
        copy = _empty_like(dense, layout)
        copy[...] = other
        return copy

    def target(self, dense: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
        if out is None or out.dtype != dense.dtype or layout_of(out) != layout:
            return _empty_like(dense, layout)
        for operand in (dense, *operands):
            if out.data.ptr != operand.data.ptr and cupy.may_share_memory(out, operand):
                return _empty_like(dense, layout)
        return out

    def cast_to_output(self, result: Array, out: Array | None) -> Array:
        if out is None or out is result:
            return result
        out[...] = result
        return out

    def mark_written(self, *arrays: Array) -> None:
        """CuPy keeps no count of writes."""


OPERATIONS = (CudaOperations if KERNELS else PlainDeviceOperations)(CupyMemory())


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return getattr(cupy, name)


def _empty_like(x: Array, layout: Layout) -> Array:
    """A new array with the shape and dtype of x, and with `layout`, the layout of x."""
    ordered = cupy.empty([x.shape[axis] for axis in layout.axes], x.dtype)
    return ordered.transpose([layout.axes.index(axis) for axis in range(x.ndim)])
