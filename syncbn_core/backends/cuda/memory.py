"""What the CUDA steps ask of an array library, and launches on its current stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.driver import kernel_for
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.kernels.cuda.constants import THREADS, VECTOR
from syncbn_core.layout import Layout

__all__ = ["DeviceMemory", "DeviceView", "Launcher"]

Array = Any  # of the library
Pointer = Any  # an int on a device

BLOCK_COUNTERS = 4096  # at first; as many as a reduction has channels or tiles
LEGACY_STREAMS = (0, 1)  # never captured
PER_THREAD_STREAM = 2  # one handle, another stream in every thread


class DeviceMemory(Protocol):
    """An array library whose arrays are on CUDA devices. dtypes are NumPy's names."""

    @property
    def plain(self) -> PlainOperations:
        """The steps in the library's own operations."""

    def device_of(self, array: Array) -> int:
        """The number of the array's device."""

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        """Makes a device the current one, as launches and allocations want it."""

    def stream(self, index: int) -> int:
        """The handle of the stream that is current on a device."""

    def is_captured(self, stream: int) -> bool:
        """Whether a graph is made of what a stream of the current device does."""

    def pointer(self, array: Array) -> Pointer:
        """The address of the first element."""

    def dtype_name(self, array: Array) -> str:
        """`float32` and the like."""

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new array on the device that is current."""

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new array of zeros on the device that is current."""

    def join(self, arrays: list[Array]) -> Array:
        """The arrays one after the other along their first axis, where the first one is."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the array lies in row-major order without gaps."""

    def contiguous(self, array: Array) -> Array:
        """The array, or a copy of it in row-major order."""

    def dense(self, x: Array) -> tuple[Array, Layout]:
        """x, or a dense copy of it, and its layout."""

    def like(self, other: Array, dense: Array, layout: Layout) -> Array:
        """`other` in the dtype and layout of `dense`."""

    def target(self, dense: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
        """Where to write: `out` if it lies like `dense` and across no operand, else a new array."""

    def cast_to_output(self, result: Array, out: Array | None) -> Array:
        """The result, in `out` if that is given."""

    def assign(self, targets: Sequence[Array], values: Sequence[Array]) -> None:
        """Write values into arrays, on the current stream."""


class DeviceView:
    """A dense activation as the kernels see it: `[outer, channels, inner]` at a pointer."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, memory: DeviceMemory, array: Array, layout: Layout) -> None:
        self.pointer = memory.pointer(array)
        self.offset = int(self.pointer) % VECTOR
        self.dtype = memory.dtype_name(array)
        self.outer, self.channels, self.inner = layout.outer, layout.channels, layout.inner


class Launcher:
    """Launches on the current stream of a device, which has to be the current one."""

    __slots__ = ("counters", "index", "memory", "stream")

    threads = THREADS

    def __init__(
        self, memory: DeviceMemory, index: int, counters: dict[tuple[int, int, int], Array]
    ) -> None:
        self.memory = memory
        self.index = index
        self.stream = memory.stream(index)
        self.counters = counters

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel; does not wait for it."""
        kernel_for(source, self.index).launch(grid, self.stream, *arguments)

    def scratch(self, size: int) -> tuple[Pointer, Array]:
        """`size` float64 until the launch that follows, and what keeps them."""
        array = self.memory.empty((size,), "float64", self.index)
        return self.memory.pointer(array), array

    def block_counters(self, size: int) -> tuple[Pointer, Array]:
        """`size` int32 zeros, which kernels leave as zeros, and what keeps them.

        Each stream has its own. So has a captured graph: it may run beside its stream.
        """
        memory, stream = self.memory, self.stream
        if stream not in LEGACY_STREAMS and memory.is_captured(stream):
            array = memory.zeros((size,), "int32", self.index)
        else:
            thread = threading.get_ident() if stream == PER_THREAD_STREAM else 0
            key = (self.index, stream, thread)
            known = self.counters.get(key)
            if known is None or known.shape[0] < size:
                known = memory.zeros((max(size, BLOCK_COUNTERS),), "int32", self.index)
                self.counters[key] = known
            array = known
        return memory.pointer(array), array
