"""Chooses the CUDA kernel and the grid of each step, for all array libraries.

Arrays are passed as `View`s: a pointer and sizes. The caller allocates the results. Forward is
`moments` then `normalize`, backward is `backward_reduce` then `backward_input`; between the two,
members exchange their parts. Nothing here waits for the device. A grid depends only on shapes,
alignment and the type of the device, so results are bitwise the same on every run. Arguments are
passed in the order of `syncbn_core/_kernels/cuda/signatures.py`.

    packed moments   float64 [2 C + 2]: count, mean, m2, label
    statistics       float64 [3 C + 1]: count, mean, m2, invstd; backward needs them besides x
    sums             float64 [2 C] or [2 C + 1]: sum(dy) * weight, sum(dy * xhat) * weight, and
                     where members are processes a label (`syncbn_core.labels`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from math import isqrt, nan
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from syncbn_core._kernels.cuda.constants import (
    CODES,
    MIN_INNER,
    SIZES,
    THREADS,
    UNROLL,
    VECTOR,
    lanes_of,
)
from syncbn_core._kernels.cuda.signatures import codes_of, signature_of
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.moments import NormRule

__all__ = [
    "CODES",
    "NO_CHECK",
    "NO_LABEL",
    "NO_PARAMETERS",
    "NO_RUNNING",
    "SIZES",
    "THREADS",
    "Check",
    "Parameters",
    "Runner",
    "Running",
    "Sizes",
    "View",
    "backward_input",
    "backward_reduce",
    "channels_innermost",
    "merge_parts",
    "moments",
    "normalize",
    "variant_of",
]

Pointer = Any  # an int on a device

# The wanted number of blocks of a reduction, per multiprocessor: about as many as run at once
# (`_min_blocks`), because a block takes about 2 us besides reading, and the last one adds the sums
# of all others. On an H100 twice as many took up to 1.5 times as long.
PLANE_BLOCKS = 4
ROW_BLOCKS = {1: 3, 2: 3, 4: 3, 8: 2}  # by lanes
LONE_GROUP = 64  # one block adds up to so many partial sums of rows; more are added in groups
# Elementwise kernels over rows: the fewest and most rows per thread, and the number of blocks above
# which a thread gets more than the fewest.
ROWS_PER_THREAD = (4, 32)
ROW_PIECES = 3168
# Threads of a block along the channels of a row, by whether they have one channel each. Wider
# blocks of a reduction have more partial sums, wider elementwise ones more coefficients.
REDUCTION_WIDTH = {True: 32, False: 8}
ELEMENTWISE_WIDTH = {True: 32, False: 16}
MAX_GRID_Y = 65535
MAX_PARTS = 16  # each block of `normalize` merges up to so many; more are merged in advance

_FILES = tuple(
    str(Path(__file__).parents[2] / "_kernels" / "cuda" / f"{name}.py")
    for name in (
        "activations",
        "constants",
        "intrinsics",
        "kinds",
        "memory",
        "planes",
        "rows",
        "statistics",
    )
)


class Sizes(NamedTuple):
    """The dtype of a dense activation, and its sizes as `[outer, channels, inner]`."""

    dtype: str
    outer: int
    channels: int
    inner: int


class View(Protocol):
    """A dense activation."""

    pointer: Pointer
    offset: int  # bytes by which the pointer exceeds a multiple of 16
    sizes: Sizes


class Runner(Protocol):
    """Launches kernels on the current stream of a device, and allocates their scratch memory."""

    threads: int  # threads per block; `THREADS` on a device
    multiprocessors: int  # of the device

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start a kernel without waiting for it."""

    def scratch(self, size: int) -> tuple[Pointer, Any]:
        """A pointer to `size` float64 for the next launches, and the array that owns them."""

    def shared_sums(self, partials: int, counters: int) -> tuple[Any, ...]:
        """Pointers to `partials` float64 and `counters` int32 zeros, and what keeps them.

        For the next launch alone: a later one of the stream may use them too. Kernels reset the
        counters to zero.
        """


class Parameters(NamedTuple):
    """Pointers to weight and bias, 0 if there is none, and the `CODES` of their dtypes."""

    weight: Pointer = 0
    weight_code: int = 0
    bias: Pointer = 0
    bias_code: int = 0


class Running(NamedTuple):
    """Pointers to running statistics, 0 if there are none, and how to update them.

    Attributes:
        mean, var: pointers to `(C,)`; `code`: their dtype, one of `CODES`.
        tracked: pointer to the int64 number of batches, or 0. The kernel increments it, unless
            `factor` is negative.
        factor: the share of the batch. A negative one means `1 / (tracked + 1)`, the average over
            all batches.
    """

    mean: Pointer = 0
    var: Pointer = 0
    code: int = 0
    tracked: Pointer = 0
    factor: float = 0.0


NO_PARAMETERS = Parameters()
NO_RUNNING = Running()
PLAIN_RULE = NormRule()
NO_LABEL = nan


class Check(NamedTuple):
    """What the label in a message has to be, and where to write `place` if it is another.

    `alarm`: address of a float64 in page-locked memory of the host, 0 for none.
    """

    label: float = NO_LABEL
    alarm: Pointer = 0
    place: float = 0.0


NO_CHECK = Check()


class _Step(NamedTuple):
    """The names of a step's kernels, for planes and for rows."""

    planes: str
    rows: str

    def of(self, activation: str | None) -> _Step:
        """The kernels with this activation."""
        return self if activation is None else _Step(*(f"{name}+{activation}" for name in self))


_MOMENTS = _Step("planes_moments", "rows_moments")
_NORMALIZE = _Step("planes_normalize", "rows_normalize")
_BACKWARD_REDUCE = _Step("planes_backward_reduce", "rows_backward_reduce")
_BACKWARD_INPUT = _Step("planes_backward_input", "rows_backward_input")


def _min_blocks(name: str, lanes: int, ragged: bool, activates: bool) -> int:
    """How many blocks of a kernel have to fit on one multiprocessor.

    Else ptxas gives some kernels so many registers that only one fits, and spills registers of
    others to fit more. The numbers are those with which an H100 was fastest. With an activation
    they are those with which ptxas spills (next to) nothing.
    """
    if activates and (lanes == 8 or name == "rows_backward_reduce"):
        return max(1, _min_blocks(name, lanes, ragged, False) - 1)
    if name.endswith(("normalize", "backward_input")):
        return 3
    if name.startswith("rows"):
        return 2 if lanes == 8 else 3
    if name.startswith("planes"):
        return 3 if lanes == 2 or (lanes == 8 and ragged) else 4
    return 1


@cache
def source(name: str, dtype: str, lanes: int, ragged: bool, threads: int) -> Source:
    """The kernel `name` for activations of `dtype`, with `lanes` numbers per load or store.

    `name`: as "planes_moments", or with an activation "planes_normalize+silu".
    """
    base, _, activation = name.partition("+")
    planes, step = base.startswith("planes"), base.partition("_")[2]

    def build() -> Callable[..., None]:
        module = import_module(f"syncbn_core._kernels.cuda.{'planes' if planes else 'rows'}")
        options: tuple[Any, ...] = (ragged, threads) if planes else (threads,)
        with_activation = () if step in ("moments", "parts") else (activation,)
        kernel: Callable[..., None]
        kernel = getattr(module, base)(dtype, lanes, *options, *with_activation)
        return kernel

    return Source(
        key=f"{name}-{dtype}-{lanes}{'-ragged' if ragged else ''}-{threads}",
        build=build,
        codes=codes_of(signature_of(name)),
        threads=threads,
        min_blocks=_min_blocks(base, lanes, ragged, bool(activation)),
        files=_FILES,
        oldest=(8, 0) if dtype == "bfloat16" else (7, 0),  # the instruction that rounds to bfloat16
    )


class Variant(NamedTuple):
    """What a kernel was made for: the arguments of `source`."""

    name: str
    dtype: str
    lanes: int
    ragged: bool


def variant_of(kernel: Source) -> Variant:
    """The variant of a kernel that `source` has made, from its key."""
    name, dtype, lanes, *ragged, _ = kernel.key.split("-")
    return Variant(name, dtype, int(lanes), bool(ragged))


def _aligned(offsets: Sequence[int]) -> bool:
    return not any(offset % VECTOR for offset in offsets)


@dataclass(frozen=True, slots=True)
class _Walk:
    """How a reduction over planes is divided: loads of `lanes` numbers, blocks per channel."""

    lanes: int
    ragged: bool
    skew: int
    slots: int  # whole vectors per plane, at most
    splits: int  # blocks per channel


def _walk(threads: int, multiprocessors: int, x: Sizes, offsets: Sequence[int]) -> _Walk:
    size = SIZES[x.dtype]
    lanes = lanes_of(x.dtype)
    skews = {offset // size % lanes for offset in offsets}
    ragged = skews != {0} or x.inner % lanes != 0
    if x.inner < 2 * lanes or len(skews) > 1:
        lanes, ragged, skews = 1, False, {0}
    slots = x.inner // lanes
    most = x.outer * slots // (threads * UNROLL)
    wanted = PLANE_BLOCKS * multiprocessors
    splits = max(1, min(wanted // x.channels, most, MAX_GRID_Y))
    return _Walk(lanes, ragged, skews.pop(), slots, splits)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How rows are divided: `tiles` groups of channels, blocks of `width` x `height` threads.

    Each thread takes `lanes` adjacent channels of a row.
    """

    lanes: int
    width: int
    height: int
    tiles: int


def _tiles(threads: int, widths: dict[bool, int], x: Sizes, offsets: Sequence[int]) -> _Tiles:
    lanes = lanes_of(x.dtype)
    if x.channels % lanes or not _aligned(offsets):
        lanes = 1
    vectors = x.channels // lanes
    tiles = -(-vectors // max(1, min(widths[lanes == 1], threads // lanes)))
    width = -(-vectors // tiles)
    return _Tiles(lanes, width, threads // width, tiles)


@dataclass(frozen=True, slots=True)
class _Splits:
    """The blocks that share the rows of a tile: `splits` of them in `groups` of up to `group`."""

    splits: int
    group: int
    groups: int

    @property
    def places(self) -> int:
        """The number of partial sums of a tile: one per block and one per group."""
        return self.splits + self.groups

    @property
    def counters(self) -> int:
        return self.groups + 1


def _row_splits(multiprocessors: int, cut: _Tiles, rows: int) -> _Splits:
    wanted = ROW_BLOCKS[cut.lanes] * multiprocessors
    splits = max(1, min(wanted // cut.tiles, rows // (cut.height * UNROLL), MAX_GRID_Y))
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


def _plane_lanes(x: Sizes, offsets: Sequence[int]) -> int:
    """Numbers per load in an elementwise kernel over planes."""
    return lanes_of(x.dtype) if x.inner >= MIN_INNER and _aligned(offsets) else 1


def channels_innermost(x: Sizes) -> bool:
    """Whether the kernels for rows are used: channels are adjacent in memory, or x is empty."""
    return x.inner <= 1 or x.outer == 0


class _Cut(NamedTuple):
    """How a kernel is launched over views.

    `source`: the kernel; `grid`: of blocks; `sizes`: its arguments that say how the views are cut.
    `needs`: how many partial sums and block counters a reduction needs, None for none.
    """

    source: Source
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    needs: tuple[int, int] | None = None


@lru_cache(maxsize=4096)
def _reduction(
    step: _Step, activation: str | None, threads: int, multiprocessors: int, x: Sizes, *offsets: int
) -> _Cut:
    """For a reduction over the channels of views, which must not be empty."""
    step = step.of(activation)
    if channels_innermost(x):
        tiles = _tiles(threads, REDUCTION_WIDTH, x, offsets)
        plan = _row_splits(multiprocessors, tiles, x.outer)
        kernel = source(step.rows, x.dtype, tiles.lanes, False, threads)
        sizes: tuple[int, ...] = (x.outer, x.channels, tiles.width, plan.splits, plan.group)
        pairs = tiles.tiles * plan.places * tiles.width * tiles.lanes
        grid, counters = (tiles.tiles, plan.splits), tiles.tiles * plan.counters
    else:
        walk = _walk(threads, multiprocessors, x, offsets)
        kernel = source(step.planes, x.dtype, walk.lanes, walk.ragged, threads)
        sizes = (walk.skew, x.outer, x.channels, x.inner, walk.slots, walk.splits)
        pairs = x.channels * walk.splits
        grid, counters = (x.channels, walk.splits), x.channels
    return _Cut(kernel, grid, sizes, (2 * pairs, counters) if grid[1] > 1 else None)


@lru_cache(maxsize=4096)
def _elementwise(
    step: _Step, activation: str | None, threads: int, x: Sizes, *offsets: int
) -> _Cut:
    """For an elementwise kernel over views."""
    step = step.of(activation)
    if channels_innermost(x):
        tiles = _tiles(threads, ELEMENTWISE_WIDTH, x, offsets)
        piece, pieces = _row_piece(tiles, x.outer)
        kernel = source(step.rows, x.dtype, tiles.lanes, False, threads)
        return _Cut(
            kernel, (tiles.tiles, pieces), (x.outer * x.inner, x.channels, tiles.width, piece)
        )
    lanes, total = _plane_lanes(x, offsets), x.outer * x.channels * x.inner
    kernel = source(step.planes, x.dtype, lanes, x.inner % lanes != 0, threads)
    return _Cut(kernel, (_pieces(threads, lanes, total), 1), (total, x.channels, x.inner))


def moments(run: Runner, x: View, into: Pointer, label: float = 0.0) -> None:
    """Write the packed moments of x, with this label, to `into`; x must not be empty."""
    cut = _reduction(_MOMENTS, None, run.threads, run.multiprocessors, x.sizes, x.offset)
    partials, counters, *_kept = run.shared_sums(*cut.needs) if cut.needs else (0, 0)
    run.launch(cut.source, cut.grid, x.pointer, *cut.sizes, partials, counters, label, into)


def normalize(
    run: Runner,
    x: View,
    y: View,
    parameters: Parameters,
    parts: Pointer,
    num_parts: int,
    into: Pointer,
    *,
    rule: NormRule,
    running: Running = NO_RUNNING,
    check: Check = NO_CHECK,
) -> None:
    """Write y. Its statistics are the `num_parts` packed moments at `parts`, merged in their order.

    Also writes the statistics to `into` and updates the running statistics. With `num_parts` 0
    (eval) the running statistics normalize x and are not updated. An empty x is allowed.
    `check`: of the labels of the parts.
    """
    sizes, keep = x.sizes, None
    channels = sizes.channels
    if channels == 0:
        return
    if num_parts > MAX_PARTS:
        one, keep = run.scratch(2 * channels + 2)
        merge_parts(run, parts, num_parts, channels, one, check)
        parts, num_parts, check = one, 1, NO_CHECK
    cut = _elementwise(_NORMALIZE, rule.activation, run.threads, sizes, x.offset, y.offset)
    of_x = x.pointer, y.pointer, *cut.sizes
    numbers = *parameters, parts, num_parts, rule.eps, int(rule.clamps), *running, *check, into
    last = () if rule.activation is None else (rule.negative_slope,)
    run.launch(cut.source, cut.grid, *of_x, *numbers, *last)
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
    rule: NormRule = PLAIN_RULE,
    code: int = CODES["float32"],
    label: float = NO_LABEL,
) -> None:
    """Write this member's sums to `into`, and its gradients of weight and bias.

    `code`: the dtype of those gradients, one of `CODES`. `label` is written behind the sums. x and
    dy must not be empty.
    """
    device, offsets = (run.threads, run.multiprocessors), (x.offset, dy.offset)
    cut = _reduction(_BACKWARD_REDUCE, rule.activation, *device, x.sizes, *offsets)
    partials, counters, *_kept = run.shared_sums(*cut.needs) if cut.needs else (0, 0)
    of_x = x.pointer, dy.pointer, *cut.sizes, partials, counters, statistics
    numbers = *parameters[:2], code, label, into, grad_weight, grad_bias
    last = () if rule.activation is None else (*parameters[2:], rule.negative_slope)
    run.launch(cut.source, cut.grid, *of_x, *numbers, *last)


def backward_input(
    run: Runner,
    x: View,
    dy: View,
    dx: View,
    statistics: Pointer,
    parameters: Parameters,
    sums: Pointer,
    *,
    rule: NormRule,
    check: Check = NO_CHECK,
) -> None:
    """Write dx. `sums`: pointer to the sums over all members; 0 for constant statistics (eval).

    `check`: of the number behind the sums; if it is another, dx becomes NaN.
    """
    if 0 in x.sizes:
        return
    offsets = (x.offset, dy.offset, dx.offset)
    cut = _elementwise(_BACKWARD_INPUT, rule.activation, run.threads, x.sizes, *offsets)
    of_x = x.pointer, dy.pointer, dx.pointer, *cut.sizes, statistics
    numbers = *parameters[:2], sums, *check, rule.eps, int(rule.clamps)
    last = () if rule.activation is None else (*parameters[2:], rule.negative_slope)
    run.launch(cut.source, cut.grid, *of_x, *numbers, *last)


def merge_parts(
    run: Runner,
    parts: Pointer,
    num_parts: int,
    channels: int,
    into: Pointer,
    check: Check = NO_CHECK,
) -> None:
    """Merge `num_parts` packed moments, in their order, and write the result to `into`.

    `check`: the label of the result, and of the parts if an alarm is given.
    """
    if channels == 0:
        return
    kernel = source("merge_parts", "float64", 1, False, run.threads)
    blocks = -(-channels // run.threads)
    run.launch(kernel, (blocks, 1), parts, num_parts, channels, *check, into)
