"""`DeviceMemory`: what the CUDA steps need from an array library."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from syncbn_core._kernels.cuda.constants import VECTOR
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.layout import Layout

__all__ = ["DeviceMemory", "DeviceView"]

Array = Any  # of the library
Pointer = Any  # an int on a device


class DeviceMemory(Protocol):
    """An array library whose arrays are on CUDA devices. Dtypes are given by NumPy's names."""

    @property
    def plain(self) -> PlainOperations:
        """The same steps in the library's own array operations."""

    def device_of(self, array: Array) -> int:
        """The number of the device that holds the array."""

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        """Context manager: device `index` is current, as launches and allocations need it."""

    def stream(self, index: int) -> int:
        """The handle of the current stream of device `index`."""

    def is_captured(self, stream: int) -> bool:
        """Whether a stream of the current device is being captured into a CUDA graph."""

    def keeps_stream(self, stream: int) -> bool:
        """Whether a stream is never destroyed: the handle of a destroyed one may be used again."""

    def pointer(self, array: Array) -> Pointer:
        """The address of the first element of the array."""

    def dtype_name(self, array: Array) -> str:
        """The name of the dtype, such as "float32"."""

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new uninitialized array on device `index`, which is the current one."""

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new array of zeros on device `index`, which is the current one."""

    def lasting_zeros(self, size: int, index: int, stream: int) -> Array | None:
        """`size` int32 zeros that stay as long as the result does, for `stream` of device `index`.

        Not from a memory pool that the user has chosen: that may end before. None if there are
        none.
        """

    def upload(self, values: np.ndarray[Any, Any], dtype: str, index: int) -> Array:
        """A new array `(n,)` on device `index`, which is the current one, from float64 `(n,)`."""

    def download(self, array: Array) -> np.ndarray[Any, Any]:
        """A copy of the array in NumPy, as float64. Waits for the current stream of its device."""

    def waiting_allowed(self) -> AbstractContextManager[Any]:
        """Context manager: the library lets the host wait, even if it was told to report that."""

    def join(self, arrays: list[Array]) -> Array:
        """The arrays concatenated along axis 0, on the device of the first."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the array is row-major without gaps."""

    def contiguous(self, array: Array) -> Array:
        """The array, or a row-major copy of it."""

    def dense(self, x: Array) -> tuple[Array, Layout]:
        """x, or a dense copy of it, and its layout."""

    def like(self, other: Array, dense: Array, layout: Layout) -> Array:
        """`other`, or a copy of it in the dtype and layout of `dense`."""

    def target(self, dense: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
        """The array to write to: `out` if possible, else a new array like `dense`.

        `out` must have the dtype and layout of `dense`, and overlap no operand unless it is the
        same memory.
        """

    def cast_to_output(self, result: Array, out: Array | None) -> Array:
        """`result`, or `out` after writing the result into it."""

    def mark_written(self, *arrays: Array) -> None:
        """Tell the library that a kernel has written these arrays."""


class DeviceView:
    """The address, dtype and sizes `[outer, channels, inner]` of a dense activation."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, memory: DeviceMemory, array: Array, layout: Layout) -> None:
        self.pointer: Pointer = memory.pointer(array)
        self.offset: int = int(self.pointer) % VECTOR
        self.dtype: str = memory.dtype_name(array)
        self.outer: int = layout.outer
        self.channels: int = layout.channels
        self.inner: int = layout.inner

    def beside(self, memory: DeviceMemory, array: Array) -> DeviceView:
        """The view of another array of this dtype and layout."""
        other = DeviceView.__new__(DeviceView)
        other.pointer = memory.pointer(array)
        other.offset = int(other.pointer) % VECTOR
        other.dtype = self.dtype
        other.outer, other.channels, other.inner = self.outer, self.channels, self.inner
        return other
