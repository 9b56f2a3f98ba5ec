"""`DeviceMemory`: what the CUDA steps need from an array library; `Launcher`: kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.driver import LEGACY_STREAMS, multiprocessor_count
from syncbn_core.backends.cuda.usable import usable_kernel
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.kernels.cuda.constants import THREADS, VECTOR
from syncbn_core.layout import Layout

__all__ = ["DeviceMemory", "DeviceView", "Launcher"]

Array = Any  # of the library
Pointer = Any  # an int on a device

BLOCK_COUNTERS = 4096  # the first allocation; a reduction needs one per channel or tile
PER_THREAD_STREAM = 2  # the same handle in all threads, but a different stream in each


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
        """Context manager: the library neither reports nor refuses that the host waits."""

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

    def assign(self, targets: Sequence[Array], values: Sequence[Array]) -> None:
        """Write `values` into `targets`, on the current stream."""


class DeviceView:
    """The address, dtype and sizes `[outer, channels, inner]` of a dense activation."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, memory: DeviceMemory, array: Array, layout: Layout) -> None:
        self.pointer = memory.pointer(array)
        self.offset = int(self.pointer) % VECTOR
        self.dtype = memory.dtype_name(array)
        self.outer, self.channels, self.inner = layout.outer, layout.channels, layout.inner

    def beside(self, memory: DeviceMemory, array: Array) -> DeviceView:
        """The view of another array of this dtype and layout."""
        other = DeviceView.__new__(DeviceView)
        other.pointer = memory.pointer(array)
        other.offset = int(other.pointer) % VECTOR
        other.dtype = self.dtype
        other.outer, other.channels, other.inner = self.outer, self.channels, self.inner
        return other


class Launcher:
    """Launches kernels on the current stream of device `index`, which must be current."""

    __slots__ = ("counters", "index", "memory", "multiprocessors", "stream")

    threads = THREADS

    def __init__(
        self, memory: DeviceMemory, index: int, counters: dict[tuple[int, int], Array]
    ) -> None:
        self.memory = memory
        self.index = index
        self.stream = memory.stream(index)
        self.counters = counters
        self.multiprocessors = multiprocessor_count(index)

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel without waiting for it, except for its check before the first use.

        Raises `KernelFailure` if the kernel can't be used; then nothing was started.
        """
        kernel = usable_kernel(self.memory, source, self.index, self.stream)
        kernel.launch(grid, self.stream, *arguments)

    def scratch(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` float64 for the next launch, and the array that owns them."""
        array = self.memory.empty((size,), "float64", self.index)
        return self.memory.pointer(array), array

    def block_counters(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` int32 zeros, which kernels reset to zero, and the array that owns them.

        Each stream that lives as long as the process has its own. So has each launch in a captured
        graph, which may run at the same time as the stream on which it was captured, and each
        launch on another stream, whose handle may come to mean a stream that runs at the same time.
        """
        memory, stream = self.memory, self.stream
        lasts = stream in LEGACY_STREAMS or (
            stream != PER_THREAD_STREAM
            and memory.keeps_stream(stream)
            and not memory.is_captured(stream)
        )
        known = self.counters.get((self.index, stream)) if lasts else None
        if lasts and (known is None or known.shape[0] < size):
            known = memory.lasting_zeros(max(size, BLOCK_COUNTERS), self.index, stream)
            if known is not None:
                self.counters[self.index, stream] = known
        if known is None:
            known = memory.zeros((size,), "int32", self.index)
        return memory.pointer(known), known
