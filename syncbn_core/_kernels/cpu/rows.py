"""Numba CPU kernels for rows `[R, C * B]`: B neighbouring columns (`inner`) belong to one channel.

B is 1 where channels lie innermost (channels_last, `(N, C)`). Short planes, as of 7x7, come as rows
too, because a loop over one of them would be mostly its ends. Narrow rows should come joined,
`[R / k, k * C * B]` with the `k` that `joined` returns. Arguments are as in `planes`; `valid` (R,),
uint8: which rows count, if B is 1 and rows are not joined. `workers`: how many threads may share
the tasks; results do not depend on it.

    block   columns of some neighbouring channels, computed side by side with coefficients each.
            Only one block can hold joined rows: then it holds the whole row.
    tile    rows of a block, read twice for their moments while they are in L2
    chunk   neighbouring tiles of a block, summed by one task
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core._kernels.cpu.builds import SerialParallelKernel, loop, may_reorder, strict
from syncbn_core._kernels.cpu.channels import coefficients, finish_products
from syncbn_core._kernels.cpu.elements import add_rows, float64_sums, write_run
from syncbn_core._kernels.cpu.numerics import (
    at,
    float32_fails,
    kept,
    larger,
    merge,
    rounded,
    scratch,
    share,
    smaller,
    unowned,
)

WIDTH = 512  # columns of a block: what is kept per column stays in L1
WIDE = 4096  # the same for B = 1: whole rows are read faster than pieces of them
TILE = 32768  # elements of a tile, read twice while they are in L2
MIN_ROWS = 32
MAX_ROWS = 256  # of a tile: a column is summed row by row, and longer sums lose digits
MAX_CHUNKS = 64  # independent partial results per block, at most
PIECE = 1 << 18  # elements written by one task, which begins with the coefficients of its columns


def joined(rows: int, columns: int) -> int:
    """How many narrow rows to take as one: as many as fit into a block and divide `rows`."""
    if 2 * columns <= WIDTH:
        for repeats in range(min(rows, WIDTH // columns), 1, -1):
            if rows % repeats == 0:
                return repeats
    return 1


@strict
def _blocks(x, inner, channels):
    """`(channels per block, blocks, columns per block)`; the last block may have fewer."""
    per_block = larger(1, smaller(channels, (WIDE if inner == 1 else WIDTH) // inner))
    blocks = (channels + per_block - 1) // per_block
    return per_block, blocks, x.shape[1] if blocks == 1 else per_block * inner


@may_reorder
def _run_sum(columns, begin, size):
    run = columns[begin : begin + size]
    total = 0.0
    for i in range(run.shape[0]):
        total += run[i]
    return total


@loop
def _add_columns(columns, inner, sums):
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


@loop
def _fill_columns(values, inner, columns):
    """Write the value of each channel to all its columns."""
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


@strict
def _tile_moments(x, valid, left, right, begin, end, n, inner, lines, mean, d, dd):
    """Write mean, `sum(d)` and `sum(d**2)` of channels, `d = x - mean`."""
    m, first, second = lines[0, : right - left], lines[1, : right - left], lines[2, : right - left]
    first[:] = 0
    add_rows(x, None, valid, left, right, begin, end, None, None, None, None, None, first, None)
    mean[:] = 0
    _add_columns(first, inner, mean)
    for c in range(mean.shape[0]):
        mean[c] = rounded(mean[c] / n, m)
    _fill_columns(mean, inner, m)
    second[:] = 0
    add_rows(x, None, valid, left, right, begin, end, None, m, None, None, None, first, second)
    d[:] = 0
    dd[:] = 0
    _add_columns(first, inner, d)
    _add_columns(second, inner, dd)


@strict
def _kept_rows(valid, begin, end):
    if valid is None:
        return end - begin
    count = 0
    for r in range(begin, end):
        count += valid[r]
    return count


@strict
def _float64_moments(x, valid, n, left, right, step, inner, top, bottom):
    """`(mean, sum(d), sum(d**2))` of a channel of a tile: for values with which float32 fails."""
    mean = first = second = 0.0
    for _ in range(2):  # around 0, then around the mean
        mean += first / n
        first = second = 0.0
        for r in range(top, bottom):
            for begin in range(left, right if kept(valid, r) else left, step):
                p, q = float64_sums(x[r, begin : begin + inner], None, mean)
                first += p
                second += q
    return mean, first, second


@loop
def _merge_tile(count, means, m2s, n, mean, d, dd):
    """Merge a tile into `means` and `m2s`; its sums of deviations correct both of its moments."""
    for c in range(means.shape[0]):
        rest = d[c] / n
        m2 = larger(dd[c] - rest * d[c], 0.0 * dd[c])  # NaN stays NaN
        means[c], m2s[c] = merge(count, means[c], m2s[c], n, mean[c] + rest, m2)


@strict
def _part_moments(x, valid, left, right, top, bottom, height, inner, lines, numbers, means, m2s):
    """Write mean and m2 of some rows of a block to `means`, `m2s`; returns the count.

    Each tile is computed as in `planes`.
    """
    channels = means.shape[0]
    mean, d, dd = numbers[0, :channels], numbers[1, :channels], numbers[2, :channels]
    count = 0.0
    for begin in range(top, bottom, height):
        end = smaller(bottom, begin + height)
        n = np.float64(_kept_rows(valid, begin, end) * ((right - left) // channels))
        if n == 0:
            continue
        _tile_moments(x, valid, left, right, begin, end, n, inner, lines, mean, d, dd)
        failed = 0
        for c in range(channels):
            failed += float32_fails(d[c], dd[c], n, x)
        if failed:
            for c in range(channels):
                if float32_fails(d[c], dd[c], n, x):
                    mean[c], d[c], dd[c] = _float64_moments(
                        x, valid, n, left + c * inner, right, channels * inner, inner, begin, end
                    )
        _merge_tile(count, means, m2s, n, mean, d, dd)
        count += n
    return count


@strict
def _part_products(
    x, dy, valid, left, right, top, bottom, height, inner, act, k, s, low, high, lines, sum_dz,
    sum_dz_d,
):  # fmt: skip
    """Add `sum(dz)`, `sum(dz * d)` of some rows of a block to the last two (channels,)."""
    width = right - left
    first, second = lines[0, :width], lines[1, :width]
    first[:] = 0
    second[:] = 0
    m, scale, shift = lines[2, :width], lines[3, :width], lines[4, :width]
    for i in range(1 if act is None else 3):
        _fill_columns(k[i, low:high], inner, lines[2 + i, :width])
    for begin in range(top, bottom, height):
        end = smaller(bottom, begin + height)
        add_rows(x, dy, valid, left, right, begin, end, act, m, s, scale, shift, first, second)
        _add_columns(first, inner, sum_dz)
        _add_columns(second, inner, sum_dz_d)


@loop
def _add_chunk(dy, count, first, second, other_count, others, other_seconds):
    """Add the sums of a chunk; without dy merge its moments."""
    if dy is not None:
        for c in range(first.shape[0]):
            first[c] += others[c]
            second[c] += other_seconds[c]
    elif other_count > 0:
        for c in range(first.shape[0]):
            first[c], second[c] = merge(
                count, first[c], second[c], other_count, others[c], other_seconds[c]
            )


@SerialParallelKernel
def rows_sums(x, dy, inner, workers, table, weight, bias, act, valid, sums):
    """`planes_sums` for rows."""
    x, grad = unowned(x), unowned(dy)
    rows, channels = x.shape[0], sums.shape[1]
    per_block, blocks, width = _blocks(x, inner, channels)
    height = larger(MIN_ROWS, smaller(MAX_ROWS, TILE // width))
    tiles = (rows + height - 1) // height
    chunks = larger(1, smaller(tiles, (MAX_CHUNKS + blocks - 1) // blocks))
    counts, parts = scratch((chunks,), 0.0), scratch((chunks, 2, channels), 0.0)
    # made here, because a `MemoryError` of a worker would be lost; an odd number of cache lines
    # each, so that no two of them compete for one place in L1
    length = ((width + 15) // 16 | 1) * 16
    lines = scratch((workers, 6, length), x)
    numbers = scratch((workers, 3, per_block), 0.0)
    if dy is not None:
        k, s = coefficients(x, table, weight, bias, None)
    for worker in prange(workers):
        first_task, last_task = share(blocks * chunks, worker, workers)
        for task in range(first_task, last_task):
            chunk, block = task // blocks, task % blocks
            begin, end = share(tiles, chunk, chunks)
            top, bottom = begin * height, smaller(rows, end * height)
            left, right = block * width, smaller(x.shape[1], (block + 1) * width)
            low, high = block * per_block, smaller(channels, (block + 1) * per_block)
            first, second = parts[chunk, 0, low:high], parts[chunk, 1, low:high]
            first[:] = 0
            second[:] = 0
            if dy is None:
                counts[chunk] = _part_moments(
                    x, valid, left, right, top, bottom, height, inner, lines[worker],
                    numbers[worker], first, second,
                )  # fmt: skip
            else:
                _part_products(
                    x, grad, valid, left, right, top, bottom, height, inner, act, k, s, low, high,
                    lines[worker], first, second,
                )  # fmt: skip
    count, first, second = 0.0, sums[0], sums[1]
    sums[:] = 0.0
    for chunk in range(chunks):
        _add_chunk(dy, count, first, second, counts[chunk], parts[chunk, 0], parts[chunk, 1])
        count += counts[chunk]
    if dy is not None:
        finish_products(x, table, k, s, sums)


@SerialParallelKernel
def rows_write(x, dy, inner, workers, table, weight, bias, act, valid, means, target):
    """`planes_write` for rows."""
    x, grad, target = unowned(x), unowned(dy), unowned(target)
    rows, channels = x.shape[0], table.shape[0] // 3
    per_block, blocks, width = _blocks(x, inner, channels)
    k, s = coefficients(x, table, weight, bias, means)
    height = larger(MIN_ROWS, PIECE // width)
    lines = scratch((workers, 6, ((width + 15) // 16 | 1) * 16), x)
    for worker in prange(workers):
        first_task, last_task = share(blocks * ((rows + height - 1) // height), worker, workers)
        for task in range(first_task, last_task):
            top, block = task // blocks * height, task % blocks
            left, right = block * width, smaller(x.shape[1], (block + 1) * width)
            for i in range(6 if dy is not None else 3):
                own = k[i, block * per_block : smaller(channels, (block + 1) * per_block)]
                _fill_columns(own, inner, lines[worker, i, : right - left])
            m, scale, shift, of_dz, of_x, of_one = (
                lines[worker, 0, : right - left], lines[worker, 1, : right - left],
                lines[worker, 2, : right - left], lines[worker, 3, : right - left],
                lines[worker, 4, : right - left], lines[worker, 5, : right - left],
            )  # fmt: skip
            for r in range(top, smaller(rows, top + height)):
                place = (r, slice(left, right))
                if kept(valid, r):
                    write_run(
                        x[place], at(grad, place), None, act, m, s, scale, shift, of_dz, of_x,
                        of_one, target[place],
                    )  # fmt: skip
                else:
                    target[r, left:right] = 0
