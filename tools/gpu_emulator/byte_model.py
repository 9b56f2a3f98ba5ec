"""Bytes that each CUDA kernel moves, as a function of the shape.

An activation of B bytes takes at least 3 B forward (statistics read x, normalization reads it
again and writes y) and 5 B backward (the sums read x and dy, the gradient reads both again and
writes dx): that is `read` and `written`. Everything else is small or in a cache, and is counted
apart: statistics, parameters, partial sums, and the pivot that each thread of a reduction reads.
All counts are exact except `shared_read`, which is an upper bound: a compiler may leave out the
load of a number that a thread already has, or does not need. Tests compare them with the loads and
stores of compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm

from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.backends.cuda.grid import SIZES, THREADS, View
from syncbn_core.kernels.cuda.constants import UNROLL

__all__ = [
    "MULTIPROCESSORS",
    "Traffic",
    "backward_input",
    "backward_reduce",
    "moments",
    "normalize",
]

_F64 = 8
_COUNTER = 4


MULTIPROCESSORS = 132  # of an H100


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes: `read`, `written` of activations, `shared_read`, `shared_written` of all else."""

    read: int
    written: int
    shared_read: int
    shared_written: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _nbytes(x: View) -> int:
    return x.outer * x.channels * x.inner * SIZES[x.dtype]


def _reads(threads: int, x: View, *others: View) -> int:
    """Bytes of x that a reduction reads: those of vectors that planes share are read twice."""
    nbytes = _nbytes(x)
    walk = None if cuda.channels_innermost(x) else cuda._walk(threads, MULTIPROCESSORS, x, *others)
    if walk is None or not walk.ragged:
        return nbytes
    lanes, total = walk.lanes, x.outer * x.channels * x.inner
    for start in range(0, total, x.inner):
        head = -(start + walk.skew) % lanes
        tail = (x.inner - head) % lanes
        for own, first in ((head, start + head - lanes), (tail, start + x.inner - tail)):
            if own and first >= 0 and first + lanes <= total:
                nbytes += (lanes - own) * SIZES[x.dtype]
    return nbytes


def _partial_sums(places: int, span: int, counters: int) -> tuple[int, int]:
    """Read and written when blocks leave `span` pairs of sums at `places` for the last of them.

    Each block also reads and writes a block counter, and the last one sets it to 0.
    """
    both = places * (2 * span * _F64 + _COUNTER)
    return both, both + counters * _COUNTER


def _reduction(threads: int, x: View, *others: View) -> tuple[int, int, int]:
    """Read and written for splits, and how often threads read one number of a channel."""
    if cuda.channels_innermost(x):
        cut = cuda._tiles(threads, cuda.REDUCTION_WIDTH, x, *others)
        plan = cuda._row_splits(MULTIPROCESSORS, cut, x.outer)
        again = plan.groups if plan.groups > 1 else 0
        places, counters = plan.splits + again, plan.groups + (again > 0)
        splits, span, size = plan.splits, cut.width * cut.lanes, cut.tiles
        per_channel = cut.height * x.channels * splits
    else:
        splits, span, size = cuda._walk(threads, MULTIPROCESSORS, x, *others).splits, 1, x.channels
        places, counters = splits, 1
        per_channel = x.channels * splits * threads
    if splits == 1:
        return 0, 0, per_channel
    return *_partial_sums(size * places, span, size * counters), per_channel


def _entries(threads: int, x: View, *others: View) -> int:
    """How many channels all blocks of an elementwise kernel read, each block its own."""
    if cuda.channels_innermost(x):
        cut = cuda._tiles(threads, cuda.ELEMENTWISE_WIDTH, x, *others)
        return x.channels * cuda._row_piece(cut, x.outer)[1]
    total = x.outer * x.channels * x.inner
    lanes = cuda._plane_lanes(x, *others)
    pieces = cuda._pieces(threads, lanes, total)
    both = (total - 1) // lcm(threads * UNROLL * lanes, x.inner)  # where one of each ends
    return pieces + x.outer * x.channels - 1 - both


def moments(x: View, *, threads: int = THREADS) -> Traffic:
    """Of an x that is not empty."""
    read, written, pivots = _reduction(threads, x)
    if cuda.channels_innermost(x):
        pivots += x.channels  # read again by the thread that has the sums
    packed = (2 * x.channels + 2) * _F64
    return Traffic(_reads(threads, x), 0, read + pivots * SIZES[x.dtype], written + packed)


def normalize(
    x: View,
    y: View,
    *,
    parts: int = 1,
    parameters: int = 8,
    running: int = 4,
    counter: bool = True,
    threads: int = THREADS,
) -> Traffic:
    """Of moments in `parts` parts, at most `cuda.MAX_PARTS`.

    Of several parts, counts are read three times and means twice: for the count of the whole batch,
    for its mean, and for the deviations from that.
    `parameters`: bytes of weight and bias per channel; `running`: of a running statistic, 0 for
    none; `counter`: whether the kernel increments one.
    """
    channels = x.channels
    each = (3 if parts == 1 else 6 * parts) * _F64 + parameters
    updates = 2 * channels * running + (8 if counter else 0)
    statistics = (3 * channels + 1) * _F64
    entries = _entries(threads, x, y)
    return Traffic(_nbytes(x), _nbytes(x), entries * each + updates, statistics + updates)


def backward_reduce(
    x: View, dy: View, *, weight: int = 4, gradients: int = 8, threads: int = THREADS
) -> Traffic:
    """`weight`: bytes of it per channel, 0 for none; `gradients`: of those of weight and bias."""
    read, written, means = _reduction(threads, x, dy)
    channels = x.channels
    read += means * _F64 + channels * (2 * _F64 + weight)
    once = _reads(threads, x, dy)
    return Traffic(2 * once, 0, read, written + channels * (2 * _F64 + gradients))


def backward_input(
    x: View, dy: View, dx: View, *, weight: int = 4, threads: int = THREADS
) -> Traffic:
    """With sums over all members."""
    each = 6 * _F64 + weight  # mean, invstd, count, m2 and two sums
    return Traffic(2 * _nbytes(x), _nbytes(x), _entries(threads, x, dy, dx) * each, 0)
