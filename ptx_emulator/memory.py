"""Global and shared memory that checks every access.

Global memory is a set of ranges of addresses, each over a NumPy array. Checked are bounds,
alignment, reads of what nobody wrote, and order: a thread may read what another thread of its
block has written if a barrier lies between, and what another block has written if that block
issued a fence after writing, then counted up an atomic counter, and the reader saw the count and
issued a fence of its own. Fences of one thread and barriers hand on to the others of a block, as
in the PTX memory model: a write is released by its own thread's fence before a barrier, or by the
counting thread's fence behind one. Writing what another thread has read or written takes the same
order. An order that goes through a third block isn't known: such an access is refused.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

__all__ = ["Fault", "GlobalMemory", "Range", "SharedMemory"]

Array = np.ndarray[Any, Any]
GRAIN = 2  # bytes that are tracked together: the smallest number
NOBODY, SEVERAL = -1, -2  # in a table of threads


class Fault(Exception):
    """What a kernel must not do."""


class Range:
    """`size` bytes from `start` on, behind `data` (uint8), which may begin earlier.

    `ordered`: False where threads may write at once, because all write the same.
    """

    ordered = True

    def __init__(self, start: int, data: Array, *, written: bool = True, name: str = "") -> None:
        self.start, self.end, self.name = start, start + data.size, name
        self.base = start & ~15
        lead = start - self.base
        if lead:  # views by every type begin on 16 bytes
            self.bytes = _memory_before(data, lead)
        else:
            self.bytes = data
        self.written: Array | None = None if written else self._grains(bool)
        self.reset()

    def _grains(self, dtype: Any) -> Array:
        return np.zeros((self.end - self.base + 15) // 16 * 16 // GRAIN, dtype)

    def reset(self) -> None:
        """A launch begins."""
        self.read_bytes = self.stored_bytes = 0
        self.writer: Array | None = None
        self.when: Array | None = None
        self.reads: list[tuple[Array, int, Array, int]] = []
        self.noted = 0  # how many of `reads` these tables know
        self.reader: Array | None = None
        self.read_when: Array | None = None

    def view(self, dtype: Any, count: int) -> Array:
        """All of it as vectors of `count` numbers."""
        size = dtype.itemsize * count
        whole = self.bytes[: self.bytes.size // size * size]
        return whole.view(dtype).reshape(-1, count)

    def note(self, grains: Array, per: int, thread: Array, now: int) -> None:
        """These threads have written `per` grains each."""
        if self.writer is None:
            self.writer, self.when = self._grains(np.int64), self._grains(np.int64)
        assert self.when is not None
        self.writer.reshape(-1, per)[grains] = thread[:, None]
        self.when.reshape(-1, per)[grains] = now
        if self.written is not None:
            self.written.reshape(-1, per)[grains] = True

    def note_reads(self) -> None:
        """Reads matter once somebody writes: tables of who read last."""
        if self.reader is None:
            self.reader, self.read_when = self._grains(np.int64), self._grains(np.int64)
            self.reader[:] = NOBODY
        assert self.read_when is not None
        for index, per, thread, now in self.reads[self.noted :]:
            reader = self.reader.reshape(-1, per)
            before = reader[index]
            reader[index] = thread[:, None]
            others = (before != NOBODY) & (before != thread[:, None])
            others |= reader[index] != thread[:, None]
            lane, grain = np.nonzero(others)
            reader[index[lane], grain] = SEVERAL
            self.read_when.reshape(-1, per)[index] = now
        self.noted = len(self.reads)


def _memory_before(data: Array, lead: int) -> Array:
    """The same memory with the `lead` bytes that lie before it; they are never touched."""
    address = data.__array_interface__["data"][0]
    whole = (ctypes.c_uint8 * (data.size + lead)).from_address(address - lead)
    whole._keep = data
    return np.frombuffer(whole, np.uint8)


@dataclass
class Counter:
    """An atomic counter during a launch, and what the blocks that counted had released by then."""

    places: dict[int, list[int]] = field(default_factory=dict)  # of a block in `released`
    released: list[Array] = field(default_factory=list)  # per thread: the latest time
    last: int = 0  # when somebody counted
    reset: tuple[Array, Array] | None = None  # by whom and when, by a plain write


@dataclass
class Progress:
    """The clocks of a thread block: when each thread fenced, and when all met."""

    threads: int
    met: int = 0
    fenced: Array = field(init=False)
    fenced_before_meeting: Array = field(init=False)
    met_before_fence: Array = field(init=False)
    seen: list[tuple[int, int, Counter, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.threads
        self.fenced, self.fenced_before_meeting, self.met_before_fence = (
            np.zeros(shape, np.int64) for _ in range(3)
        )

    def fence(self, threads: Array, now: int) -> None:
        self.fenced[threads] = now
        self.met_before_fence[threads] = self.met

    def meet(self, now: int) -> None:
        # a fence hands on what the thread had been handed by an earlier barrier
        np.maximum(self.fenced, self.met_before_fence.max(), out=self.fenced_before_meeting)
        self.met = now

    def released_by(self, thread: int) -> Array:
        """Per thread: what it wrote before that time is released when `thread` counts."""
        released = np.maximum(self.fenced_before_meeting, self.met_before_fence[thread])
        released[thread] = max(released[thread], self.fenced[thread])
        return released

    def acquired(self, since: int, counted: int, threads: Array) -> Array:
        """Whether `threads` are behind a fence since the thread `counted` did so."""
        behind = (self.met > since) & (self.met_before_fence[threads] > since)
        behind |= (threads == counted) & (self.fenced[threads] > since)
        # that thread's fence, handed on by a barrier
        return behind | (self.fenced_before_meeting[counted] > since)


class GlobalMemory:
    """Ranges that kernels may touch, and the blocks of the launch that runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._starts: list[int] = []
        self._ranges: list[Range] = []
        self._removed: deque[Range] = deque()
        self.tracked = True  # False: only bounds and alignment, for memory too large to track
        self.begin(1)

    def add(self, area: Range) -> Range:
        with self.lock:
            self._forget_removed()
            at = bisect.bisect_left(self._starts, area.start)
            self._starts.insert(at, area.start)
            self._ranges.insert(at, area)
        return area

    def remove(self, area: Range) -> None:
        """From the next launch on; waits for no lock, as a finalizer may call it at any time."""
        self._removed.append(area)

    def _forget_removed(self) -> None:
        while self._removed:
            at = self._ranges.index(self._removed.popleft())
            del self._starts[at], self._ranges[at]

    def ranges(self) -> list[Range]:
        with self.lock:
            self._forget_removed()
            return list(self._ranges)

    def begin(self, threads: int) -> None:
        self.now = 1
        self.threads = threads
        self.progress: dict[int, Progress] = {}
        self.counters: dict[int, Counter] = {}
        self._forget_removed()
        for area in self._ranges:
            area.reset()

    def of_block(self, block: int) -> Progress:
        known = self.progress.get(block)
        if known is None:
            known = self.progress[block] = Progress(self.threads)
        return known

    # -------------------------------------------------------------------------- accesses

    def load(self, at: Array, dtype: Any, count: int, thread: Array) -> Array:
        """`[lanes, count]` numbers; `thread` counts all threads of the grid."""
        size = dtype.itemsize * count
        self.now += 1
        area = self._single(at, size)
        if area is None:
            values = np.empty((at.size, count), dtype)
            for area, own in self._split(at, size):
                values[own] = self._load(area, at[own], dtype, count, thread[own])
            return values
        return self._load(area, at, dtype, count, thread)

    def _load(self, area: Range, at: Array, dtype: Any, count: int, thread: Array) -> Array:
        size = dtype.itemsize * count
        index = self._index(area, at, size)
        area.read_bytes += index.size * size
        if self.tracked and area.ordered:
            self._check_read(area, index, size // GRAIN, thread)
            area.reads.append((index, size // GRAIN, thread, self.now))
        return area.view(dtype, count)[index]

    def store(self, at: Array, values: Array, thread: Array) -> None:
        """`values[lanes, count]`."""
        size = values.itemsize * values.shape[1]
        self.now += 1
        area = self._single(at, size)
        pieces = self._split(at, size) if area is None else [(area, slice(None))]
        for area, own in pieces:
            index = self._index(area, at[own], size)
            area.stored_bytes += index.size * size
            if self.tracked and area.ordered:
                self._check_write(area, index, size // GRAIN, thread[own])
            area.view(values.dtype, values.shape[1])[index] = values[own]

    def add_atomically(self, at: Array, dtype: Any, values: Array, thread: Array) -> Array:
        """The numbers before; one thread after another."""
        before = np.empty(at.size, dtype)
        for lane, (address, owner) in enumerate(zip(at.tolist(), thread.tolist(), strict=True)):
            self.now += 1
            one = at[lane : lane + 1]
            area = self._single(one, dtype.itemsize) or self._split(one, dtype.itemsize)[0][0]
            index = self._index(area, at[lane : lane + 1], dtype.itemsize)
            grains = dtype.itemsize // GRAIN
            if area.written is not None and not area.written.reshape(-1, grains)[index].all():
                what = "counts up what nobody has written"
                raise self._fault(what, area, index[0] * grains, owner)
            area.read_bytes += dtype.itemsize
            area.stored_bytes += dtype.itemsize
            cell = area.view(dtype, 1)
            before[lane] = cell[index[0], 0]
            cell[index[0], 0] += values[lane]
            if self.tracked:
                self._count(area, index, grains, address, owner)
        return before

    def _count(self, area: Range, index: Array, per: int, address: int, owner: int) -> None:
        counter, thread = self.counters.get(address), np.array([owner])
        self._check_readers(area, index, per, thread, "counts up")
        if area.writer is None or area.when is None:
            written = None
        else:
            written = area.writer.reshape(-1, per)[index], area.when.reshape(-1, per)[index]
        if counter is None or written is None or (written[1] != counter.last).any():
            # it begins anew: a plain write hands on nothing, and all who count come behind it
            counter = self.counters[address] = Counter(reset=written)
        self._check_others(area, index, per, counter.reset, thread, ("counts up", "wrote"))
        area.note(index, per, thread, self.now)
        counter.last = self.now
        block, number = divmod(owner, self.threads)
        progress, length = self.of_block(block), len(counter.released)
        progress.seen.append((self.now, number, counter, length))
        counter.places.setdefault(block, []).append(length)
        counter.released.append(progress.released_by(number))

    def fence(self, thread: Array) -> None:
        self.now += 1
        for block, own in _by_block(thread, self.threads):
            self.of_block(block).fence(own, self.now)

    def meet(self, blocks: list[int]) -> None:
        """All threads of each of these blocks have come to a barrier."""
        self.now += 1
        for block in blocks:
            self.of_block(block).meet(self.now)

    # ---------------------------------------------------------------------------- checks

    def _single(self, at: Array, size: int) -> Range | None:
        """The range that has all of the accesses, if one has."""
        lowest, highest = int(at.min()), int(at.max()) + size
        place = bisect.bisect_right(self._starts, lowest) - 1
        if place >= 0 and highest <= self._ranges[place].end:
            return self._ranges[place]
        return None

    def _split(self, at: Array, size: int) -> list[tuple[Range, Array]]:
        starts = np.array(self._starts, np.int64)
        ends = np.array([area.end for area in self._ranges], np.int64)
        places = np.searchsorted(starts, at, "right") - 1
        outside = (places < 0) | (at + size > (ends[places] if ends.size else 0))
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            near = self._ranges[max(places[lane], 0)] if self._ranges else None
            far = (
                ""
                if near is None
                else f", {at[lane] - near.start} bytes from the start of "
                + (f"{near.name or 'a range'} of {near.end - near.start} bytes")
            )
            raise Fault(f"access of {size} bytes out of bounds: at {at[lane]:#x}{far}")
        return [(self._ranges[p], np.flatnonzero(places == p)) for p in np.unique(places)]

    def _index(self, area: Range, at: Array, size: int) -> Array:
        if (at & (size - 1)).any():
            lane = int(np.flatnonzero(at & (size - 1))[0])
            raise Fault(f"misaligned access of {size} bytes at {at[lane]:#x} in {area.name}")
        return (at - area.base) // size

    def _fault(self, what: str, area: Range, grain: int, owner: int) -> Fault:
        block, thread = divmod(int(owner), self.threads)
        place = f"byte {int(grain) * GRAIN + area.base - area.start} of {area.name or 'a range'}"
        return Fault(f"thread {thread} of block {block} {what} ({place})")

    def _check_read(self, area: Range, index: Array, per: int, thread: Array) -> None:
        if area.written is not None and not area.written.reshape(-1, per)[index].all():
            lane = np.flatnonzero(~area.written.reshape(-1, per)[index].all(1))[0]
            what = "reads what nobody has written"
            raise self._fault(what, area, index[lane] * per, thread[lane])
        self._check_writers(area, index, per, thread, "reads")

    def _check_write(self, area: Range, index: Array, per: int, thread: Array) -> None:
        self._check_writers(area, index, per, thread, "overwrites")
        self._check_readers(area, index, per, thread, "overwrites")
        area.note(index, per, thread, self.now)
        assert area.writer is not None
        others = area.writer.reshape(-1, per)[index] != thread[:, None]
        if others.any():
            lane = np.flatnonzero(others.any(1))[0]
            what = "writes what another writes at once"
            raise self._fault(what, area, index[lane] * per, thread[lane])

    def _check_writers(self, area: Range, index: Array, per: int, thread: Array, does: str) -> None:
        """Whether what was written there in this launch was so before, for `thread`."""
        if area.writer is not None and area.when is not None:
            others = area.writer.reshape(-1, per)[index], area.when.reshape(-1, per)[index]
            self._check_others(area, index, per, others, thread, (does, "wrote"))

    def _check_readers(self, area: Range, index: Array, per: int, thread: Array, does: str) -> None:
        """Whether what others have read there in this launch was read before `thread` writes."""
        if not area.reads:
            return
        area.note_reads()
        assert area.reader is not None
        assert area.read_when is not None
        readers = area.reader.reshape(-1, per)[index]
        times = area.read_when.reshape(-1, per)[index] * (readers >= 0)
        self._check_others(area, index, per, (readers, times), thread, (does, "read"))
        lane, grain = np.nonzero(readers == SEVERAL)
        if lane.size:
            self._check_each_reader(area, index[lane] * per + grain, thread[lane], does)

    def _check_others(
        self,
        area: Range,
        index: Array,
        per: int,
        others: tuple[Array, Array] | None,
        thread: Array,
        words: tuple[str, str],
    ) -> None:
        """`_check_order` for each grain of an access."""
        if others is not None:
            for grain in range(per):
                who, when = others[0][:, grain], others[1][:, grain]
                self._check_order(area, index * per + grain, who, when, thread, words)

    def _check_each_reader(self, area: Range, grains: Array, thread: Array, does: str) -> None:
        writer = np.full(area._grains(bool).size, NOBODY)
        writer[grains] = thread
        for index, per, readers, now in area.reads:
            new = writer.reshape(-1, per)[index]
            lane, grain = np.nonzero(new != NOBODY)
            others = readers[lane], np.full(lane.size, now)
            place = index[lane] * per + grain
            self._check_order(area, place, *others, new[lane, grain], (does, "read"))

    def _check_order(
        self,
        area: Range,
        grains: Array,
        others: Array,
        times: Array,
        thread: Array,
        words: tuple[str, str],
    ) -> None:
        """Whether what `others` did at `times` (0: nothing) comes before what `thread` does."""
        foreign = np.flatnonzero((times > 0) & (others != thread))
        if not foreign.size:
            return
        blocks, own = others[foreign] // self.threads, thread[foreign] // self.threads
        for block, mine in set(zip(blocks.tolist(), own.tolist(), strict=True)):
            some = foreign[(blocks == block) & (own == mine)]
            if block == mine:
                good = times[some] < self.of_block(mine).met
            else:
                good = self._handed_over(block, others[some], times[some], mine, thread[some])
            if not good.all():
                lane = some[np.flatnonzero(~good)[0]]
                number = int(others[lane]) % self.threads
                what = f"{words[0]} what thread {number} of block {block} {words[1]}, in no order"
                raise self._fault(what, area, grains[lane], thread[lane])

    def _handed_over(
        self, block: int, others: Array, times: Array, mine: int, thread: Array
    ) -> Array:
        """Whether threads of `block` released what they did, and `thread` have acquired that."""
        progress, good = self.of_block(mine), np.zeros(times.size, bool)
        for since, counted, counter, length in progress.seen:
            acquired = progress.acquired(since, counted, thread % self.threads)
            for place in counter.places.get(block, ()):
                if place < length:
                    released = counter.released[place][others % self.threads] > times
                    good |= released & acquired
        return good


def _by_block(thread: Array, threads: int) -> list[tuple[int, Array]]:
    blocks = thread // threads
    return [(int(b), thread[blocks == b] % threads) for b in np.unique(blocks)]


class SharedMemory:
    """Shared arrays, the bytes `arrays`, of thread blocks that run side by side."""

    def __init__(self, blocks: Array, threads: int, arrays: Collection[range]) -> None:
        self.blocks, self.threads = blocks, threads
        self.size = max((array.stop for array in arrays), default=0) // 4 * 4
        self.inside = np.zeros(self.size // 4, bool)
        for array in arrays:
            self.inside[array.start // 4 : array.stop // 4] = True
        self.words = np.full(blocks.size * self.size // 4, 0xFFFFFFFF, np.uint32)
        self.written = np.zeros(self.words.size, bool)
        # since the last barrier: who wrote, who read
        self.writer = np.full(self.words.size, NOBODY, np.int32)
        self.reader = np.full(self.words.size, NOBODY, np.int32)

    def meet(self, blocks: Array) -> None:
        """These blocks (by their place) have come to a barrier."""
        if self.size:
            for table in (self.writer, self.reader):
                table.reshape(-1, self.size // 4)[blocks] = NOBODY

    def load(self, at: Array, dtype: Any, count: int, lane: Array) -> Array:
        found = np.empty((at.size, dtype.itemsize * count // 4), np.uint32)
        self._check(_load_words(*self._tables, at, lane, found), at, lane)
        return found.view(dtype)

    def store(self, at: Array, values: Array, lane: Array) -> None:
        self._check(_store_words(*self._tables, at, lane, values.view(np.uint32)), at, lane)

    @property
    def _tables(self) -> tuple[Any, ...]:
        tables = self.words, self.written, self.writer, self.reader
        return *tables, self.inside, self.threads, self.size

    def _check(self, result: tuple[int, int], at: Array, lane: Array) -> None:
        fault, where = result
        if fault:
            block, thread = divmod(int(lane[where]), self.threads)
            who = f"thread {thread} of block {self.blocks[block]}"
            raise Fault(f"{who} {_FAULTS[fault]} (byte {at[where]} of shared memory)")


_FAULTS = {
    1: "is out of bounds",
    2: "has a misaligned access",
    3: "reads what nobody has written",
    4: "reads what another thread wrote, with no barrier between",
    5: "writes what another thread wrote or read, with no barrier between",
}


@njit(cache=True)
def _place(inside, threads, size, at, lane, per):
    """The first word of an access, or a fault below zero."""
    if at < 0 or at + 4 * per > size:
        return -1
    if at % (4 * per):
        return -2
    for k in range(at // 4, at // 4 + per):
        if not inside[k]:
            return -1
    return (lane // threads * size + at) // 4


@njit(cache=True)
def _load_words(words, written, writer, reader, inside, threads, size, at, lane, found):
    per = found.shape[1]
    for i in range(at.size):
        place = _place(inside, threads, size, at[i], lane[i], per)
        if place < 0:
            return -place, i
        for k in range(place, place + per):
            if not written[k]:
                return 3, i
            if writer[k] != NOBODY and writer[k] != lane[i]:
                return 4, i
            reader[k] = lane[i] if reader[k] == NOBODY or reader[k] == lane[i] else SEVERAL
            found[i, k - place] = words[k]
    return 0, 0


@njit(cache=True)
def _store_words(words, written, writer, reader, inside, threads, size, at, lane, given):
    per = given.shape[1]
    for i in range(at.size):
        place = _place(inside, threads, size, at[i], lane[i], per)
        if place < 0:
            return -place, i
        for k in range(place, place + per):
            for other in (writer[k], reader[k]):
                if other != NOBODY and other != lane[i]:
                    return 5, i
            writer[k] = lane[i]
            written[k] = True
            words[k] = given[i, k - place]
    return 0, 0
