"""Which CUDA kernel runs, on which grid: the same for CuPy arrays and for torch tensors.

Arrays are passed as `View`s, pointers and sizes; the caller allocates the results. There are two
launches per direction: `moments` and `normalize`, `backward_reduce` and `backward_input`; members
exchange their parts between them. Nothing here waits for the device. Grids are functions of shape
and alignment alone, so results are bitwise the same on every run. Each launch passes its arguments
in the order of `syncbn_core/kernels/cuda/signatures.py`.

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
from typing import Any, NamedTuple, Protocol

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
from syncbn_core.kernels.cuda.signatures import codes_of

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
    "channels_innermost",
    "merge_parts",
    "moments",
    "normalize",
]

Pointer = Any  # an int on a device

# Blocks that a reduction aims at. Over planes: several times as many as 132 multiprocessors run at
# once, so that the last of them leave few multiprocessors idle. Over rows, where each block leaves
# sums of many channels to the last one: only as many as run at once.
BLOCKS = 2112
ROW_BLOCKS = {1: 396, 2: 396, 4: 396, 8: 264}  # by lanes
LONE_GROUP = 32  # up to so many splits of rows are added up by one block; more are added in groups
# An elementwise kernel over rows: least and most rows per thread, and the number of blocks above
# which a thread takes more than the least.
ROWS_PER_THREAD = (4, 32)
ROW_PIECES = 3168
# Threads side by side over rows. Each block's partial sums and coefficients are in proportion to
# it; 256 neighbouring bytes are enough for memory to be fast.
MAX_WIDTH = 32
MAX_GRID_Y = 65535
MAX_PARTS = 16  # so many parts are merged by each block of `normalize`; more are merged once before

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
    """Launches kernels on the current stream of a device, and allocates their scratch memory."""

    threads: int  # per block; `THREADS` on a device

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel; does not wait for it."""

    def scratch(self, size: int) -> tuple[Pointer, Any]:
        """A pointer to `size` float64 for the next launch, and the array that owns them."""

    def block_counters(self, size: int) -> tuple[Pointer, Any]:
        """A pointer to `size` int32 zeros, which kernels leave at zero, and their array."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Pointers to weight and bias, 0 for none, and the `CODES` of their dtypes."""

    weight: Pointer = 0
    weight_code: int = 0
    bias: Pointer = 0
    bias_code: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """Pointers to running statistics, 0 for none, and how to update them.

    `tracked`: pointer to the int64 number of batches, which the kernel increments, or 0. `factor`:
    the share of the batch; below zero it is `1 / (tracked + 1)`, which averages over all batches,
    and the kernel only reads `tracked`.
    """

    mean: Pointer = 0
    var: Pointer = 0
    code: int = 0
    tracked: Pointer = 0
    factor: float = 0.0


NO_RUNNING = Running()


class _Step(NamedTuple):
    """The kernels of a step, for planes and for rows."""

    planes: str
    rows: str


_MOMENTS = _Step("planes_moments", "rows_moments")
_NORMALIZE = _Step("planes_normalize", "rows_normalize")
_BACKWARD_REDUCE = _Step("planes_backward_reduce", "rows_backward_reduce")
_BACKWARD_INPUT = _Step("planes_backward_input", "rows_backward_input")


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
        codes=codes_of(name),
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
    """How a reduction over planes walks over the numbers of a channel."""

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
    """The rows of a tile are shared by `splits` blocks: `groups` groups of at most `group`."""

    splits: int
    group: int
    groups: int

    @property
    def places(self) -> int:
        """How many blocks and groups store partial sums of a tile."""
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


def channels_innermost(x: View) -> bool:
    """Whether kernels for rows take x: all channels side by side, or no number at all."""
    return x.inner <= 1 or x.outer == 0


def _reduce(
    run: Runner, step: _Step, views: tuple[View, ...], pointers: tuple[Pointer, ...], *rest: Any
) -> None:
    """Launch a reduction over the channels of `views`, which must not be empty.

    The kernel's arguments are `pointers` to the views, how they are cut, partial sums and block
    counters, and the `rest`.
    """
    x, ragged = views[0], False
    sizes: tuple[int, ...]
    if channels_innermost(x):
        name, tiles = step.rows, _tiles(run.threads, *views)
        plan = _row_splits(tiles, x.outer)
        lanes, splits, across = tiles.lanes, plan.splits, tiles.tiles
        sizes = (x.outer, x.channels, tiles.width, splits, plan.group)
        pairs, counters = across * plan.places * tiles.width * lanes, across * plan.counters
    else:
        name, walk = step.planes, _walk(run.threads, *views)
        lanes, ragged, splits, across = walk.lanes, walk.ragged, walk.splits, x.channels
        sizes = (walk.skew, x.outer, x.channels, x.inner, walk.slots, splits)
        pairs, counters = across * splits, across
    partials, block_counters, kept = 0, 0, []
    if splits > 1:
        partials, keep = run.scratch(2 * pairs)
        block_counters, keep_too = run.block_counters(counters)
        kept = [keep, keep_too]
    kernel = source(name, x.dtype, lanes, ragged, run.threads)
    run.launch(kernel, (across, splits), *pointers, *sizes, partials, block_counters, *rest)
    del kept


def _elementwise(
    run: Runner, step: _Step, views: tuple[View, ...], pointers: tuple[Pointer, ...], *rest: Any
) -> None:
    """Launch an elementwise kernel over `views`.

    The kernel's arguments are `pointers` to the views, how they are cut, and the `rest`.
    """
    x, ragged = views[0], False
    sizes: tuple[int, ...]
    if channels_innermost(x):
        name, tiles = step.rows, _tiles(run.threads, *views)
        lanes, rows = tiles.lanes, x.outer * x.inner
        piece, pieces = _row_piece(tiles, x.outer)
        grid, sizes = (tiles.tiles, pieces), (rows, x.channels, tiles.width, piece)
    else:
        name, lanes, total = step.planes, _plane_lanes(*views), x.outer * x.channels * x.inner
        ragged = x.inner % lanes != 0
        grid, sizes = (_pieces(run.threads, lanes, total), 1), (total, x.channels, x.inner)
    kernel = source(name, x.dtype, lanes, ragged, run.threads)
    run.launch(kernel, grid, *pointers, *sizes, *rest)


def moments(run: Runner, x: View, into: Pointer) -> None:
    """Packed moments of x, which must not be empty, into `into`."""
    _reduce(run, _MOMENTS, (x,), (x.pointer,), into)


def normalize(
    run: Runner,
    x: View,
    y: View,
    parameters: Parameters,
    parts: Pointer,
    num_parts: int,
    into: Pointer,
    *,
    eps: float,
    clamp: bool,
    running: Running = NO_RUNNING,
) -> None:
    """y from x and the `num_parts` packed moments at `parts`, merged in their order.

    Statistics are written to `into`, and running statistics are updated. Without parts the running
    statistics are those to normalize by. All of this holds for an empty x, too.
    """
    if x.channels == 0:
        return
    keep = None
    if num_parts > MAX_PARTS:
        one, keep = run.scratch(2 * x.channels + 1)
        merge_parts(run, parts, num_parts, x.channels, one)
        parts, num_parts = one, 1
    _elementwise(
        run,
        _NORMALIZE,
        (x, y),
        (x.pointer, y.pointer),
        parameters.weight,
        parameters.weight_code,
        parameters.bias,
        parameters.bias_code,
        parts,
        num_parts,
        eps,
        int(clamp),
        running.mean,
        running.var,
        running.code,
        running.tracked,
        running.factor,
        into,
    )
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
    """This member's sums into `into`, and its gradients of weight and bias, of dtype `code`.

    x and dy must not be empty.
    """
    _reduce(
        run,
        _BACKWARD_REDUCE,
        (x, dy),
        (x.pointer, dy.pointer),
        statistics,
        parameters.weight,
        parameters.weight_code,
        code,
        into,
        grad_weight,
        grad_bias,
    )


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
    """dx from the sums over all members at `sums`; 0 there means that statistics are constant."""
    if x.outer * x.channels * x.inner == 0:
        return
    _elementwise(
        run,
        _BACKWARD_INPUT,
        (x, dy, dx),
        (x.pointer, dy.pointer, dx.pointer),
        statistics,
        parameters.weight,
        parameters.weight_code,
        sums,
        eps,
        int(clamp),
    )


def merge_parts(run: Runner, parts: Pointer, num_parts: int, channels: int, into: Pointer) -> None:
    """One packed moments of `num_parts`, merged in their order."""
    kernel = source("merge_parts", "float64", 1, False, run.threads)
    run.launch(kernel, (-(-channels // run.threads), 1), parts, num_parts, channels, into)
