"""Which CUDA kernel runs, on which grid: the same for CuPy arrays and for torch tensors.

Arrays come as `View`s, pointers and sizes; who calls allocates the results. Two launches per
direction: `moments` and `normalize`, `backward_reduce` and `backward_input`; between them lies
the exchange with other members. Nothing here waits for the device. Grids are functions of the
shape alone, so results are bitwise the same on every run.

    packed moments   float64 [2 C + 1]: count, mean, m2
    statistics       float64 [3 C + 1]: count, mean, m2, invstd; what backward needs besides x
    sums             float64 [2 C]: sum(dy) * weight, sum(dy * xhat) * weight
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any, Protocol

from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.kernels.cuda.constants import (
    CODES,
    MIN_INNER,
    SIZES,
    THREADS,
    UNROLL,
    VECTOR,
    lanes_of,
)

__all__ = [
    "CODES",
    "NO_RUNNING",
    "SIZES",
    "THREADS",
    "Parameters",
    "Runner",
    "Running",
    "View",
    "backward_input",
    "backward_reduce",
    "merge_parts",
    "moments",
    "normalize",
]

Pointer = Any  # an int on a device

# Blocks that a reduction aims at: over planes some goes of what 132 multiprocessors run at once, so
# that the last go is a small part; over rows, where each hands on sums of many channels, just one.
BLOCKS = 2112
ROW_BLOCKS = {1: 396, 2: 396, 4: 396, 8: 264}  # by lanes
LONE_GROUP = 32  # splits of rows that one block adds up; more are added up in groups
# An elementwise kernel over rows: rows per thread, and blocks from which on they grow.
ROWS_PER_THREAD = (4, 32)
ROW_PIECES = 3168
# Threads side by side over rows. What blocks hand on, and look up, is in proportion to it; 256
# bytes of a row are enough for the memory.
MAX_WIDTH = 32
MAX_GRID_Y = 65535
MAX_PARTS = 16  # that every block of `normalize` merges for itself; more are merged once before

# One letter per argument: q an integer or pointer, d a float64.
_ARGUMENTS = {
    "planes_moments": "q" * 10,
    "planes_normalize": "q" * 11 + "d" + "q" * 5 + "d" + "q",
    "planes_backward_reduce": "q" * 17,
    "planes_backward_input": "q" * 10 + "dq",
    "rows_moments": "q" * 9,
    "rows_normalize": "q" * 12 + "d" + "q" * 5 + "d" + "q",
    "rows_backward_reduce": "q" * 16,
    "rows_backward_input": "q" * 11 + "dq",
    "merge_parts": "q" * 4,
}
_FILES = tuple(
    str(Path(__file__).parents[2] / "kernels" / "cuda" / f"{name}.py")
    for name in ("constants", "intrinsics", "kinds", "memory", "planes", "rows", "statistics")
)


class View(Protocol):
    """A dense activation as `[outer, channels, inner]`."""

    pointer: Pointer
    offset: int  # of the pointer from a multiple of 16, in bytes
    dtype: str
    outer: int
    channels: int
    inner: int


class Runner(Protocol):
    """Who launches: a device, the stream that is current there, and its memory."""

    threads: int  # per block; `THREADS` on a device

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel; does not wait for it."""

    def scratch(self, size: int) -> tuple[Pointer, Any]:
        """`size` float64 until the launch that follows, and what keeps them."""

    def tickets(self, size: int) -> tuple[Pointer, Any]:
        """`size` int32 zeros, which kernels leave as zeros, and what keeps them."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Pointers to weight and bias, 0 for none, and the `CODES` of their dtypes."""

    weight: Pointer = 0
    weight_code: int = 0
    bias: Pointer = 0
    bias_code: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """Pointers to running statistics, and how to update them.

    `tracked`: an int64 counter that the kernel increments, or 0. `factor`: share of the batch;
    below zero `1 / (tracked + 1)`, the average over all, and then the counter is only read.
    """

    mean: Pointer = 0
    var: Pointer = 0
    code: int = 0
    tracked: Pointer = 0
    factor: float = 0.0


NO_RUNNING = Running()


@cache
def source(name: str, dtype: str, lanes: int, ragged: bool, threads: int) -> Source:
    """The kernel `name` for activations of `dtype`, `lanes` numbers at a time."""
    planes = name.startswith("planes")

    def build() -> Callable[..., None]:
        module = import_module(f"syncbn_core.kernels.cuda.{'planes' if planes else 'rows'}")
        make = getattr(module, name)
        kernel: Callable[..., None]
        kernel = make(dtype, lanes, ragged, threads) if planes else make(dtype, lanes, threads)
        return kernel

    return Source(
        key=f"{name}-{dtype}-{lanes}{'-ragged' if ragged else ''}-{threads}",
        build=build,
        codes=_ARGUMENTS[name],
        threads=threads,
        # without, ptxas aims at more blocks by spilling registers in some of these
        min_blocks=3 if name.endswith(("normalize", "backward_input")) else 1,
        files=_FILES,
        oldest=(8, 0) if dtype == "bfloat16" else (7, 0),  # rounded by one instruction
    )


def _aligned(*views: View) -> bool:
    return all(view.offset % VECTOR == 0 for view in views)


@dataclass(frozen=True, slots=True)
class _Walk:
    """How the numbers of a channel are walked over by a reduction of planes."""

    lanes: int
    ragged: bool
    skew: int
    slots: int  # per plane
    splits: int


def _walk(threads: int, x: View, *others: View) -> _Walk:
    size = SIZES[x.dtype]
    lanes = lanes_of(x.dtype)
    skews = {view.offset // size % lanes for view in (x, *others)}
    ragged = skews != {0} or x.inner % lanes != 0
    if x.inner < 2 * lanes or len(skews) > 1:
        lanes, ragged, skews = 1, False, {0}
    slots = (x.inner + 2 * lanes - 2) // lanes if ragged else x.inner // lanes
    most = x.outer * slots // (threads * UNROLL)
    splits = max(1, min(BLOCKS // x.channels, most, MAX_GRID_Y))
    return _Walk(lanes, ragged, skews.pop(), slots, splits)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How rows are cut: blocks of `width` threads times `lanes` channels, `height` rows high."""

    lanes: int
    width: int
    height: int
    tiles: int


def _tiles(threads: int, x: View, *others: View) -> _Tiles:
    lanes = lanes_of(x.dtype)
    if x.channels % lanes or not _aligned(x, *others):
        lanes = 1
    vectors = x.channels // lanes
    tiles = -(
        -vectors // max(1, min(MAX_WIDTH if lanes == 1 else MAX_WIDTH // 2, threads // lanes))
    )
    width = -(-vectors // tiles)
    return _Tiles(lanes, width, threads // width, tiles)


@dataclass(frozen=True, slots=True)
class _Splits:
    """How the rows of a tile are shared by blocks, and those by `groups` of `group` blocks."""

    splits: int
    group: int
    groups: int

    @property
    def places(self) -> int:
        """Partial sums of a tile."""
        return self.splits + self.groups

    @property
    def counters(self) -> int:
        return self.groups + 1


def _row_splits(cut: _Tiles, rows: int) -> _Splits:
    splits = max(
        1, min(ROW_BLOCKS[cut.lanes] // cut.tiles, rows // (cut.height * UNROLL), MAX_GRID_Y)
    )
    group = splits if splits <= LONE_GROUP else isqrt(splits - 1) + 1
    return _Splits(splits, group, -(-splits // group))


def _row_piece(cut: _Tiles, rows: int) -> tuple[int, int]:
    """Rows per block of an elementwise kernel, and the number of blocks (at least one)."""
    least, most = ROWS_PER_THREAD
    wanted = round(rows * cut.tiles / (cut.height * ROW_PIECES * UNROLL)) * UNROLL
    piece = max(cut.height * min(max(wanted, least), most), -(-rows // MAX_GRID_Y))
    return piece, max(1, -(-rows // piece))


def _pieces(threads: int, lanes: int, total: int) -> int:
    return -(-total // (threads * UNROLL * lanes))


def _plane_lanes(*views: View) -> int:
    """Numbers at a time in an elementwise kernel over planes."""
    lanes = lanes_of(views[0].dtype)
    return lanes if views[0].inner >= MIN_INNER and _aligned(*views) else 1


def _is_rows(x: View) -> bool:
    return x.inner <= 1 or x.outer == 0  # an empty array has no planes to walk over


def moments(run: Runner, x: View, into: Pointer) -> None:
    """Packed moments of x, which must not be empty, into `into`."""
    tickets, partials, keeps = 0, 0, []
    head: tuple[Any, ...]
    if _is_rows(x):
        cut = _tiles(run.threads, x)
        plan = _row_splits(cut, x.outer)
        splits, counters = plan.splits, cut.tiles * plan.counters
        name, lanes, ragged, channels = "rows_moments", cut.lanes, False, cut.tiles
        head = (x.pointer, x.outer, x.channels, cut.width, splits, plan.group)
        pairs = cut.tiles * plan.places * cut.width * cut.lanes
    else:
        walk = _walk(run.threads, x)
        splits = walk.splits
        name, lanes, ragged, channels = "planes_moments", walk.lanes, walk.ragged, x.channels
        head = (x.pointer, walk.skew, x.outer, x.channels, x.inner, walk.slots, splits)
        pairs, counters = x.channels * splits, x.channels
    if splits > 1:
        partials, keep = run.scratch(2 * pairs)
        tickets, keep_too = run.tickets(counters)
        keeps = [keep, keep_too]
    kernel = source(name, x.dtype, lanes, ragged, run.threads)
    run.launch(kernel, (channels, splits), *head, partials, tickets, into)
    del keeps


def normalize(
    run: Runner,
    x: View,
    y: View,
    parameters: Parameters,
    parts: Pointer,
    size: int,
    into: Pointer,
    *,
    eps: float,
    clamp: bool,
    running: Running = NO_RUNNING,
) -> None:
    """y from x and the `size` packed moments at `parts`, merged in their order.

    Statistics go into `into`; running statistics are updated. With `size` 0 the running
    statistics are those to normalize by. An empty x has its statistics and updates too.
    """
    if x.channels == 0:
        return
    keep = None
    if size > MAX_PARTS:
        one, keep = run.scratch(2 * x.channels + 1)
        merge_parts(run, parts, size, x.channels, one)
        parts, size = one, 1
    tail = (
        parameters.weight,
        parameters.weight_code,
        parameters.bias,
        parameters.bias_code,
        parts,
        size,
        eps,
        int(clamp),
        running.mean,
        running.var,
        running.code,
        running.tracked,
        running.factor,
        into,
    )
    if _is_rows(x):
        cut = _tiles(run.threads, x, y)
        piece, blocks = _row_piece(cut, x.outer)
        kernel = source("rows_normalize", x.dtype, cut.lanes, False, run.threads)
        head = (x.pointer, y.pointer, x.outer * x.inner, x.channels, cut.width, piece)
        run.launch(kernel, (cut.tiles, blocks), *head, *tail)
    else:
        total = x.outer * x.channels * x.inner
        lanes = _plane_lanes(x, y)
        kernel = source("planes_normalize", x.dtype, lanes, x.inner % lanes != 0, run.threads)
        grid = (_pieces(run.threads, lanes, total), 1)
        run.launch(kernel, grid, x.pointer, y.pointer, total, x.channels, x.inner, *tail)
    del keep


def backward_reduce(
    run: Runner,
    x: View,
    dy: View,
    statistics: Pointer,
    parameters: Parameters,
    into: Pointer,
    grad_weight: Pointer = 0,
    grad_bias: Pointer = 0,
    *,
    code: int = CODES["float32"],
) -> None:
    """This member's sums into `into`, its gradients of weight and bias (dtype `code`) too.

    x and dy must not be empty.
    """
    tickets, partials, keeps = 0, 0, []
    head: tuple[Any, ...]
    if _is_rows(x):
        cut = _tiles(run.threads, x, dy)
        plan = _row_splits(cut, x.outer)
        splits, counters = plan.splits, cut.tiles * plan.counters
        name, lanes, ragged, channels = "rows_backward_reduce", cut.lanes, False, cut.tiles
        head = (x.pointer, dy.pointer, x.outer, x.channels, cut.width, splits, plan.group)
        pairs = cut.tiles * plan.places * cut.width * cut.lanes
    else:
        walk = _walk(run.threads, x, dy)
        splits, sizes = walk.splits, (x.outer, x.channels, x.inner, walk.slots)
        name, lanes, ragged = "planes_backward_reduce", walk.lanes, walk.ragged
        channels, pairs, counters = x.channels, x.channels * splits, x.channels
        head = (x.pointer, dy.pointer, walk.skew, *sizes, splits)
    if splits > 1:
        partials, keep = run.scratch(2 * pairs)
        tickets, keep_too = run.tickets(counters)
        keeps = [keep, keep_too]
    kernel = source(name, x.dtype, lanes, ragged, run.threads)
    weight = (parameters.weight, parameters.weight_code, code)
    tail = (partials, tickets, statistics, *weight, into, grad_weight, grad_bias)
    run.launch(kernel, (channels, splits), *head, *tail)
    del keeps


def backward_input(
    run: Runner,
    x: View,
    dy: View,
    dx: View,
    statistics: Pointer,
    parameters: Parameters,
    sums: Pointer,
    *,
    eps: float,
    clamp: bool,
) -> None:
    """dx from the sums over all members at `sums`, 0 for constant statistics."""
    if x.channels == 0:
        return
    total = x.outer * x.channels * x.inner
    if total == 0:
        return
    weight = (parameters.weight, parameters.weight_code)
    tail = (statistics, *weight, sums, eps, int(clamp))
    pointers = (x.pointer, dy.pointer, dx.pointer)
    if _is_rows(x):
        cut = _tiles(run.threads, x, dy, dx)
        piece, blocks = _row_piece(cut, x.outer)
        kernel = source("rows_backward_input", x.dtype, cut.lanes, False, run.threads)
        head = (x.outer, x.channels, cut.width, piece)
        run.launch(kernel, (cut.tiles, blocks), *pointers, *head, *tail)
        return
    lanes = _plane_lanes(x, dy, dx)
    kernel = source("planes_backward_input", x.dtype, lanes, x.inner % lanes != 0, run.threads)
    grid = (_pieces(run.threads, lanes, total), 1)
    run.launch(kernel, grid, *pointers, total, x.channels, x.inner, *tail)


def merge_parts(run: Runner, parts: Pointer, size: int, channels: int, into: Pointer) -> None:
    """Packed moments of `size` members into one."""
    kernel = source("merge_parts", "float64", 1, False, run.threads)
    run.launch(kernel, (-(-channels // run.threads), 1), parts, size, channels, into)
