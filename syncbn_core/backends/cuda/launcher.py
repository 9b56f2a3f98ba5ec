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
PER_THREAD_STREAM = 2  # the same handle in all threads, but a different stream in each


class Launcher:
    """Launches kernels on the current stream of device `index`, which must be current."""

    __slots__ = ("arrays", "counters", "index", "multiprocessors", "stream")

    threads = THREADS

    def __init__(
        self, arrays: DeviceArrays, index: int, counters: dict[tuple[int, int], Array]
    ) -> None:
        self.arrays: DeviceArrays = arrays
        self.index: int = index
        self.stream: Any = arrays.stream(index)
        self.counters: dict[tuple[int, int], Array] = counters
        self.multiprocessors: int = multiprocessor_count(index)

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel without waiting for it.

        Raises `KernelFailure` if the kernel can't be compiled or loaded; nothing was started then.
        """
        launch_of(source, self.index)(grid, self.stream, *arguments)

    def scratch(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` float64 for the next launch, and the array that owns them."""
        array = self.arrays.empty((size,), "float64", self.index)
        return self.arrays.pointer(array), array

    def block_counters(self, size: int) -> tuple[Pointer, Array]:
        """Address of `size` int32 zeros, which kernels reset to zero, and the array that owns them.

        Each stream that lives as long as the process has its own. So has each launch in a captured
        graph, which may run at the same time as the stream on which it was captured, and each
        launch on another stream, whose handle may come to mean a stream that runs at the same time.
        """
        arrays, stream = self.arrays, self.stream
        lasts = stream in LEGACY_STREAMS or (
            stream != PER_THREAD_STREAM
            and arrays.keeps_stream(stream)
            and not arrays.is_captured(self.index)
        )
        known = self.counters.get((self.index, stream)) if lasts else None
        if lasts and (known is None or known.shape[0] < size):
            known = arrays.lasting_zeros(max(size, BLOCK_COUNTERS), self.index, stream)
            if known is not None:
                self.counters[self.index, stream] = known
        if known is None:
            known = arrays.zeros((size,), "int32", self.index)
        return arrays.pointer(known), known
