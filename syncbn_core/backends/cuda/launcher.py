"""`Launcher`: starts kernels on a stream of a device."""

from __future__ import annotations

from typing import Any, NamedTuple

from syncbn_core._kernels.cuda.constants import THREADS
from syncbn_core.arrays import LEGACY_STREAMS, DeviceArrays
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.kernels import launch_of, multiprocessor_count

__all__ = ["Launcher"]

Array = Any  # of the library
Pointer = Any  # an int on a device

BLOCK_COUNTERS = 4096  # the first allocation; a reduction needs one per channel or tile
PARTIALS = 1 << 15  # the first allocation; a reduction needs two per block
PER_THREAD_STREAM = 2  # the same handle in all threads, but a different stream in each


class Scratch(NamedTuple):
    """Addresses of partial sums and of block counters; how many of each; what owns both."""

    partials: Pointer
    counters: Pointer
    sizes: tuple[int, int]
    owner: Any


Held = dict[tuple[int, int], Scratch]  # by device and stream


class Launcher:
    """Launches kernels on a stream of device `index`, which must be current then."""

    __slots__ = ("arrays", "held", "index", "multiprocessors", "stream")

    threads = THREADS

    def __init__(self, arrays: DeviceArrays, index: int, stream: int, held: Held) -> None:
        self.arrays: DeviceArrays = arrays
        self.index: int = index
        self.stream: int = stream
        self.held: Held = held
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

    def shared_sums(self, partials: int, counters: int) -> Scratch:
        """`partials` float64 and `counters` int32 zeros for the next launch alone.

        Kernels reset the counters to zero. Each stream that lives as long as the process has its
        own. Not so a captured graph, which may run at the same time as the stream on which it was
        captured, and another stream, whose handle may come to mean a stream that runs at the same
        time: for them they are new.
        """
        arrays, stream, index = self.arrays, self.stream, self.index
        lasts = stream in LEGACY_STREAMS or (
            stream != PER_THREAD_STREAM
            and arrays.keeps_stream(stream)
            and not arrays.is_captured(index)
        )
        known = self.held.get((index, stream)) if lasts else None
        has = (0, 0) if known is None else known.sizes
        if known is not None and has[0] >= partials and has[1] >= counters:
            return known
        if lasts:
            sizes = max(PARTIALS, has[0], partials), max(BLOCK_COUNTERS, has[1], counters)
            made = arrays.lasting_zeros(2 * sizes[0] + sizes[1], index, stream)
            if made is not None:
                found = Scratch(made[0], made[0] + 8 * sizes[0], sizes, made[1])
                self.held[index, stream] = found
                return found
        first, owner = self.scratch(partials)
        zeros = arrays.zeros((counters,), "int32", index)
        return Scratch(first, arrays.pointer(zeros), (partials, counters), (owner, zeros))
