"""Numba CPU kernels for rows `[R, C * B]`: B neighbouring columns belong to one channel.

B (`inner`) is 1 where channels lie innermost (channels_last, `(N, C)`). Short planes, as of 7x7,
come as rows too, because a loop over one of them would be mostly its ends. Narrow rows should come
joined, `[R / k, k * C * B]` with the `k` that `joined` returns. `valid`: see `row_parts`.

The kernels here cut rows into parts and share those among threads; `row_blocks` says how rows are
cut, `row_parts` computes one part. Builds and per-channel arguments are as in `planes`. `workers`:
how many threads may share the tasks. Each worker has memory of its own (`lines`, `numbers`), and
results do not depend on how many there are.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core._kernels.cpu.builds import SerialParallelKernel
from syncbn_core._kernels.cpu.numerics import share, unowned
from syncbn_core._kernels.cpu.row_blocks import (
    WIDE,
    WIDTH,
    block_sizes,
    channels_per_block,
    joined,
    map_sizes,
    part_of,
    tile_sizes,
    workspace,
)
from syncbn_core._kernels.cpu.row_parts import (
    add_chunks,
    merge_chunks,
    part_gradient,
    part_moments,
    part_normalize,
    part_products,
)

__all__ = [
    "WIDE",
    "WIDTH",
    "channels_per_block",
    "joined",
    "rows_backward_input",
    "rows_backward_reduce",
    "rows_moments",
    "rows_normalize",
]


# ---------------------------------------------------------- kernels of one step each


@SerialParallelKernel
def rows_moments(x, inner, workers, valid, mean, m2):
    """Write the moments of `x` [R, C * B] to `mean`, `m2` (C,)."""
    x = unowned(x)
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, tiles, chunks = tile_sizes(rows, block_columns, blocks)
    counts = np.empty(chunks)
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_task, last_task = share(blocks * chunks, worker, workers)
        for task in range(first_task, last_task):
            k, block = task // blocks, task % blocks
            begin, end = share(tiles, k, chunks)
            part = part_of(
                x, channels, per_block, block_columns, block, begin * height, end * height
            )
            counts[k] = part_moments(
                x, valid, part, inner, height, lines[worker], numbers[worker], means[k], m2s[k]
            )
    merge_chunks(counts, means, m2s, 0, channels, mean, m2)


@SerialParallelKernel
def rows_normalize(x, inner, workers, mean, invstd, weight, bias, act, valid, y):
    """`y = act((x - mean) * invstd * weight + bias)`; `x`, `y` [R, C * B]."""
    x, y = unowned(x), unowned(y)
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, pieces = map_sizes(rows, block_columns)
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_task, last_task = share(blocks * pieces, worker, workers)
        for task in range(first_task, last_task):
            k, block = task // blocks, task % blocks
            part = part_of(
                x, channels, per_block, block_columns, block, k * height, (k + 1) * height
            )
            part_normalize(
                x, part, inner, mean, invstd, weight, bias, act, valid,
                lines[worker], numbers[worker], y,
            )  # fmt: skip


@SerialParallelKernel
def rows_backward_reduce(
    x, dy, inner, workers, mean, invstd, weight, bias, act, valid, sum_dy, sum_dy_xhat
):
    """`sum_dy = sum(dz)`, `sum_dy_xhat = sum(dz * (x - mean)) * invstd`; `x`, `dy` [R, C * B].

    `dz`, `weight`, `bias`: as in `planes_backward_reduce`.
    """
    x, dy = unowned(x), unowned(dy)
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, tiles, chunks = tile_sizes(rows, block_columns, blocks)
    sums_dy = np.empty((chunks, channels))
    sums_dy_x = np.empty((chunks, channels))
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_task, last_task = share(blocks * chunks, worker, workers)
        for task in range(first_task, last_task):
            k, block = task // blocks, task % blocks
            begin, end = share(tiles, k, chunks)
            part = part_of(
                x, channels, per_block, block_columns, block, begin * height, end * height
            )
            part_products(
                x, dy, part, inner, height, mean, invstd, weight, bias, act, valid,
                lines[worker], numbers[worker], sums_dy[k], sums_dy_x[k],
            )  # fmt: skip
    add_chunks(x, sums_dy, sums_dy_x, 0, channels, mean, invstd, sum_dy, sum_dy_xhat)


@SerialParallelKernel
def rows_backward_input(
    x, dy, inner, workers, mean, invstd, weight, bias, act, valid, mean_dy, mean_dy_xhat, dx
):
    """`dx = invstd * (weight * dz - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, [R, C * B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    `dz`, `bias`: as in `planes_backward_reduce`.
    """
    x, dy, dx = unowned(x), unowned(dy), unowned(dx)
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, pieces = map_sizes(rows, block_columns)
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_task, last_task = share(blocks * pieces, worker, workers)
        for task in range(first_task, last_task):
            k, block = task // blocks, task % blocks
            part = part_of(
                x, channels, per_block, block_columns, block, k * height, (k + 1) * height
            )
            part_gradient(
                x, dy, part, inner, mean, invstd, weight, bias, act, valid, mean_dy, mean_dy_xhat,
                lines[worker], numbers[worker], dx,
            )  # fmt: skip
