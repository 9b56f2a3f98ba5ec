"""`Launcher`: starts kernels on a stream of a device."""

from __future__ import annotations

from typing import Any

from syncbn_core._kernels.cuda.constants import THREADS
from syncbn_core.arrays import LEGACY_STREAMS, DeviceArrays
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.kernels import launch_of, multiprocessor_count

__all__ = ["Launcher"]

Array = Any  # of the library
Pointer = Any  # an int on a device

BLOCK_COUNTERS = 4096  # the first allocation; a reduction needs one per channel or tile
PARTIALS = 1 << 16  # the first allocation; a reduction needs four per block
PER_THREAD_STREAM = 2  # the same handle in all threads, but a different stream in each


class Launcher:
    """Launches kernels on the current stream of device `index`, which must be current."""

    __slots__ = ("arrays", "held", "index", "multiprocessors", "stream")

    threads = THREADS

    def __init__(self, arrays: DeviceArrays, index: int, held: Any) -> None:
        self.arrays: DeviceArrays = arrays
        self.index: int = index
        self.stream: Any = arrays.stream(index)
        self.held: Any = held  # `counters` and `partials`, by device and stream
        self.multiprocessors: int = multiprocessor_count(index)

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel without waiting for it.

        Raises `KernelFailure` if the kernel can't be compiled or loaded; nothing was started then.
        """
        launch_of(source, self.index)(grid, self.stream, *arguments)

    def scratch(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` float64 for the next launches, and the array that owns them."""
        array = self.arrays.empty((size,), "float64", self.index)
        return self.arrays.pointer(array), array

    def partial_sums(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` float64 for the next launch alone, and the array that owns them."""
        known = self._of_stream(self.held.partials, 2 * size, PARTIALS)
        return self.scratch(size) if known is None else (self.arrays.pointer(known), known)

    def block_counters(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` int32 zeros, which kernels reset to zero, and what owns them."""
        known = self._of_stream(self.held.counters, size, BLOCK_COUNTERS)
        if known is None:
            known = self.arrays.zeros((size,), "int32", self.index)
        return self.arrays.pointer(known), known

    def _of_stream(self, held: dict[tuple[int, int], Array], size: int, least: int) -> Array | None:
        """`size` int32 for the next launch, of those that each stream holds; they begin as zeros.

        Each stream that lives as long as the process has its own. Not so a captured graph, which
        may run at the same time as the stream on which it was captured, and another stream, whose
        handle may come to mean a stream that runs at the same time: for them None.
        """
        arrays, stream, index = self.arrays, self.stream, self.index
        if stream not in LEGACY_STREAMS and (
            stream == PER_THREAD_STREAM
            or not arrays.keeps_stream(stream)
            or arrays.is_captured(index)
        ):
            return None
        known = held.get((index, stream))
        if known is None or known.shape[0] < size:
            known = arrays.lasting_zeros(max(size, least), index, stream)
            if known is not None:
                held[index, stream] = known
        return known
