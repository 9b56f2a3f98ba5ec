"""`ARRAYS`: what is needed of CuPy. Memory comes from CuPy's pool."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np

from syncbn_core.arrays import LEGACY_STREAMS, DeviceArrays
from syncbn_core.layout import Layout, layout_of

Array = Any  # cupy.ndarray


class CupyArrays(DeviceArrays):
    """`DeviceArrays` of CuPy, on the current stream."""

    def device_of(self, array: Array) -> int:
        return int(array.device.id)

    def copy(self, values: Array) -> Array:
        with values.device:
            return values.copy()

    def to_host(self, values: Array) -> np.ndarray[Any, Any]:
        with values.device:
            return np.asarray(values.get())

    def from_host(self, values: np.ndarray[Any, Any], like: Array) -> Array:
        with like.device:
            return cupy.asarray(values.astype(like.dtype, copy=False))

    def working(self, values: Array) -> Any:
        return cupy.float64 if values.dtype == cupy.float64 else cupy.float32

    def cast(self, values: Array, dtype: Any) -> Array:
        return values.astype(dtype, copy=False)

    def difference(self, x: Array, values: Array) -> Array:
        return _native(x) - values  # converts 16 bits within CuPy's kernel

    def multiple(self, x: Array, values: Array) -> Array:
        return _native(x) * values

    def product(self, values: Array, other: Array) -> Array:
        values *= _native(other)
        return values

    def scaled(self, values: Array, scale: Array, shift: Array, dtype: Any) -> Array:
        values *= scale
        values += shift
        return self.cast(values, dtype)

    def plus_scaled(self, values: Array, other: Array, scale: Array, dtype: Any) -> Array:
        values += _native(other) * scale
        return self.cast(values, dtype)

    def sum(self, values: Array, axes: tuple[int, ...]) -> Array:
        return _native(values).sum(axes, dtype=cupy.float64)

    def count_of(self, mask: Array) -> Any:
        return mask.sum()

    def is_current(self, index: int) -> bool:
        return bool(cupy.cuda.runtime.getDevice() == index)

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        return cupy.cuda.Device(index)  # type: ignore[no-any-return]

    def stream(self, index: int) -> int:
        return int(cupy.cuda.get_current_stream().ptr)

    def is_captured(self, index: int) -> bool:
        with self.on_device(index):
            stream = self.stream(index)
            return stream not in LEGACY_STREAMS and bool(
                cupy.cuda.runtime.streamIsCapturing(stream)
            )

    def pointer(self, array: Array) -> Any:
        return array.data.ptr

    def dtype_name(self, dtype: Any) -> str:
        return str(dtype.name)

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        with self.on_device(index):
            return cupy.empty(shape, _dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        with self.on_device(index):
            return cupy.zeros(shape, _dtype(dtype))

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous)

    def layout(self, array: Array) -> Layout | None:
        return layout_of(array)

    def form(self, array: Array) -> tuple[Any, ...]:
        return array.shape, array.strides, array.dtype

    def empty_like(self, dense: Array, layout: Layout) -> Array:
        ordered = cupy.empty([dense.shape[axis] for axis in layout.axes], dense.dtype)
        return ordered.transpose([layout.axes.index(axis) for axis in range(dense.ndim)])

    def page_locked(self, like: Array) -> Array:
        word = np.frombuffer(cupy.cuda.alloc_pinned_memory(8), np.float64, 1)
        word[:] = 0
        return word

    def write_where(self, wrong: Array, number: float, word: Array) -> None:
        with wrong.device:
            now = cupy.empty(1)
            now.data.copy_from_host_async(word.ctypes.data, 8)
            cupy.where(wrong & (now == 0), number, now).get(out=word, blocking=False)


def _native(values: Array) -> Array:
    """`values`, in float32 if CuPy's own operations do not know their dtype (bfloat16)."""
    return values if values.dtype.kind == "f" else values.astype(cupy.float32)


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return getattr(cupy, name)


ARRAYS = CupyArrays(cupy)
