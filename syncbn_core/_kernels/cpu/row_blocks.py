"""How rows `[R, C * B]` are cut into blocks, and how columns and channels of a block meet.

A row holds B neighbouring columns (`inner`) of channel 0, then B of channel 1, and so on; joined
rows repeat that. Kernels take the columns of a *block* of channels side by side:

    channels   0 .................... | per_block ........ | 2 * per_block ..  C
    columns    0 .................... | block_columns .... | ................  C * B
               first block              second block

Only one block can hold repeats: if all channels fit into it, it holds the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from syncbn_core._kernels.cpu.builds import may_reorder, strict
from syncbn_core._kernels.cpu.numerics import scratch

__all__ = [
    "WIDE",
    "WIDTH",
    "Part",
    "block_sizes",
    "channels_per_block",
    "fill_columns",
    "joined",
    "map_sizes",
    "part_of",
    "sum_columns",
    "tile_sizes",
    "workspace",
]

WIDTH = 512  # columns of a block: what is kept per column stays in L1
WIDE = 4096  # the same for B = 1: whole rows are read faster than pieces of them
TILE = 32768  # elements of a tile, read twice while they are in L2
MIN_ROWS = 32
MAX_ROWS = 256  # of a tile: a column is summed row by row, and longer sums lose digits
MAX_CHUNKS = 64  # independent partial results per block, at most
PIECE = 1 << 18  # elements written by one task, which begins with the coefficients of its columns
LINES = 7  # the most that any task needs of a workspace


def joined(rows: int, columns: int) -> int:
    """How many narrow rows to take as one: as many as fit into a block and divide `rows`."""
    if 2 * columns <= WIDTH:
        for repeats in range(min(rows, WIDTH // columns), 1, -1):
            if rows % repeats == 0:
                return repeats
    return 1


@register_jitable
def channels_per_block(channels: int, inner: int) -> int:
    """How many channels a block has, if there are so many; the last block may have fewer."""
    width = WIDE if inner == 1 else WIDTH
    return max(1, min(channels, width // inner))


@strict
def block_sizes(columns, inner, channels):
    """`(per_block, blocks, block_columns)`: channels per block, blocks, columns per block."""
    per_block = channels_per_block(channels, inner)
    blocks = (channels + per_block - 1) // per_block
    return per_block, blocks, columns if blocks == 1 else per_block * inner


@strict
def tile_sizes(rows, block_columns, blocks):
    """`(height, tiles, chunks)` of a block for sums: rows per tile, tiles, chunks of tiles."""
    height = max(MIN_ROWS, min(MAX_ROWS, TILE // block_columns))
    tiles = (rows + height - 1) // height
    return height, tiles, max(1, min(tiles, (MAX_CHUNKS + blocks - 1) // blocks))


@strict
def map_sizes(rows, block_columns):
    """`(height, tasks)` of a block for maps: rows per task, tasks."""
    height = max(MIN_ROWS, PIECE // block_columns)
    return height, (rows + height - 1) // height


class Part(NamedTuple):
    """The part of `x` that one task computes: some rows of one block.

    Rows `top` to `bottom`; columns `left` to `right`, which belong to the channels `low` to `high`.
    """

    top: int
    bottom: int
    left: int
    right: int
    low: int
    high: int


@strict
def part_of(x, channels, per_block, block_columns, block, top, bottom):
    """The rows `top` to `bottom` of block number `block`, as far as `x` has them."""
    return Part(
        top,
        min(x.shape[0], bottom),
        block * block_columns,
        min(x.shape[1], (block + 1) * block_columns),
        block * per_block,
        min(channels, (block + 1) * per_block),
    )


@strict
def workspace(x, workers, block_columns, per_block):
    """`(lines, numbers)`: scratch memory of each worker.

    `lines` [workers, LINES, columns] are in the computing dtype of `x`, `numbers`
    [workers, LINES, channels] in float64. Kernels call this before their parallel loop, because a
    `MemoryError` of a worker would be lost. Each line has an odd number of cache lines, so that no
    two lines compete for one place in L1.
    """
    length = ((block_columns + 15) // 16 | 1) * 16
    return scratch((workers, LINES, length), x), np.empty((workers, LINES, per_block))


@may_reorder
def _run_sum(columns, begin, size):
    run = columns[begin : begin + size]
    total = 0.0
    for i in range(run.shape[0]):
        total += run[i]
    return total


@strict
def sum_columns(columns, inner, sums):
    """Add the columns of each channel to its `sums`, in float64; then set `columns` to 0."""
    count = sums.shape[0]
    for begin in range(0, columns.shape[0], count * inner):
        if inner == 1:
            row = columns[begin : begin + count]
            for c in range(count):
                sums[c] += row[c]
        else:
            for c in range(count):
                sums[c] += _run_sum(columns, begin + c * inner, inner)
    columns[:] = 0


@strict
def fill_columns(values, inner, columns):
    """Write the value of each channel, rounded to the dtype of `columns`, to all its columns."""
    count = values.shape[0]
    if inner == 1:
        for begin in range(0, columns.shape[0], count):
            row = columns[begin : begin + count]
            for c in range(count):
                row[c] = values[c]
        return
    i = 0
    while i < columns.shape[0]:
        for c in range(count):
            for _ in range(inner):
                columns[i] = values[c]
                i += 1
