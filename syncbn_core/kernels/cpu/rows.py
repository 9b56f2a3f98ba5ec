"""Numba CPU kernels for rows `[R, C * B]`: B neighbouring columns belong to one channel.

B (`inner`) is 1 where channels lie innermost (channels_last, `(N, C)`). Short planes, as of 7x7,
come as rows too, because a loop over one of them would be mostly its ends. Narrow rows should come
joined, `[R / k, k * C * B]` with the `k` that `joined` returns.

The kernels here cut rows into parts and share those among threads; `row_blocks` says how rows are
cut, `row_parts` computes one part. Builds and per-channel arguments are as in `planes`. `workers`:
how many threads may share the tasks. Each worker has memory of its own (`lines`, `numbers`), and
results do not depend on how many there are.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core.kernels.cpu.builds import SerialParallelKernel
from syncbn_core.kernels.cpu.numerics import invstd_of, mean_gradients, share, value_or
from syncbn_core.kernels.cpu.row_blocks import (
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
from syncbn_core.kernels.cpu.row_parts import (
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
    "rows_backward",
    "rows_backward_input",
    "rows_backward_reduce",
    "rows_forward",
    "rows_moments",
    "rows_normalize",
]


# ---------------------------------------------------------- kernels of one step each


@SerialParallelKernel
def rows_moments(x, inner, workers, mean, m2):
    """Write the moments of `x` [R, C * B] to `mean`, `m2` (C,)."""
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
                x, part, inner, height, lines[worker], numbers[worker], means[k], m2s[k]
            )
    merge_chunks(counts, means, m2s, 0, channels, mean, m2)


@SerialParallelKernel
def rows_normalize(x, inner, workers, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`; `x`, `y` [R, C * B]."""
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
                x, part, inner, mean, invstd, weight, bias, lines[worker], numbers[worker], y
            )


@SerialParallelKernel
def rows_backward_reduce(x, dy, inner, workers, mean, invstd, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * (x - mean)) * invstd`; `x`, `dy` [R, C * B]."""
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
                x, dy, part, inner, height, mean, invstd,
                lines[worker], numbers[worker], sums_dy[k], sums_dy_x[k],
            )  # fmt: skip
    add_chunks(x, sums_dy, sums_dy_x, 0, channels, mean, invstd, sum_dy, sum_dy_xhat)


@SerialParallelKernel
def rows_backward_input(x, dy, inner, workers, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, [R, C * B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    """
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
                x, dy, part, inner, mean, invstd, weight, mean_dy, mean_dy_xhat,
                lines[worker], numbers[worker], dx,
            )  # fmt: skip


# ------------------------------------------------------ kernels of a whole direction
#
# As in `planes`: each block goes through both steps before the next one.


@SerialParallelKernel
def rows_forward(x, inner, workers, weight, bias, eps, clamp, mean, m2, invstd, y):
    """`rows_moments`, then `rows_normalize` with those; `x`, `y` [R, C * B].

    `invstd = 1 / sqrt(m2 / n + eps)`, with `clamp` `1 / sqrt(max(m2 / n, eps))`.
    """
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, tiles, chunks = tile_sizes(rows, block_columns, blocks)
    count = rows * (columns // channels)
    counts = np.empty((blocks, chunks))
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_block, last_block = share(blocks, worker, workers)
        for block in range(first_block, last_block):
            for k in range(chunks):
                begin, end = share(tiles, k, chunks)
                part = part_of(
                    x, channels, per_block, block_columns, block, begin * height, end * height
                )
                counts[block, k] = part_moments(
                    x, part, inner, height, lines[worker], numbers[worker], means[k], m2s[k]
                )
            part = part_of(x, channels, per_block, block_columns, block, 0, rows)
            merge_chunks(counts[block], means, m2s, part.low, part.high, mean, m2)
            for c in range(part.low, part.high):
                invstd[c] = invstd_of(m2[c] / count, eps, clamp)
            part_normalize(
                x, part, inner, mean, invstd, weight, bias, lines[worker], numbers[worker], y
            )


@SerialParallelKernel
def rows_backward(x, dy, inner, workers, mean, invstd, weight, clamped, sum_dy, sum_dy_xhat, dx):
    """`rows_backward_reduce`, then `rows_backward_input` with those; all [R, C * B].

    `clamped` (C,) bool: see `numerics.mean_gradients`; empty if no channel is clamped.
    """
    rows, columns = x.shape
    channels = mean.shape[0]
    per_block, blocks, block_columns = block_sizes(columns, inner, channels)
    height, tiles, chunks = tile_sizes(rows, block_columns, blocks)
    count = rows * (columns // channels)
    sums_dy, sums_dy_x = np.empty((chunks, channels)), np.empty((chunks, channels))
    mean_dy, mean_dy_xhat = np.empty(channels), np.empty(channels)
    lines, numbers = workspace(x, workers, block_columns, per_block)
    for worker in prange(workers):
        first_block, last_block = share(blocks, worker, workers)
        for block in range(first_block, last_block):
            for k in range(chunks):
                begin, end = share(tiles, k, chunks)
                part = part_of(
                    x, channels, per_block, block_columns, block, begin * height, end * height
                )
                part_products(
                    x, dy, part, inner, height, mean, invstd,
                    lines[worker], numbers[worker], sums_dy[k], sums_dy_x[k],
                )  # fmt: skip
            part = part_of(x, channels, per_block, block_columns, block, 0, rows)
            low, high = part.low, part.high
            add_chunks(x, sums_dy, sums_dy_x, low, high, mean, invstd, sum_dy, sum_dy_xhat)
            for c in range(low, high):
                mean_dy[c], mean_dy_xhat[c] = mean_gradients(
                    sum_dy[c], sum_dy_xhat[c],
                    value_or(weight, c, 1.0), count, value_or(clamped, c, False),
                )  # fmt: skip
            part_gradient(
                x, dy, part, inner, mean, invstd, weight, mean_dy, mean_dy_xhat,
                lines[worker], numbers[worker], dx,
            )  # fmt: skip
