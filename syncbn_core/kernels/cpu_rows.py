"""Numba CPU kernels for rows `[R, C * B]`: B neighbouring columns belong to one channel.

B (`inner`) is 1 where channels lie innermost (channels_last, `(N, C)`); short planes, as of 7x7, go
through here too, because a loop over one of them would be mostly its ends. Columns are computed
side by side, a block of them at a time; what those of a channel add up to is added in float64.
Narrow rows should come joined, `[R / k, k * C * B]` with the `k` that `joined` says.

Builds, per-channel arguments and remainders: as in `cpu_planes`. Rows are added four at a time, in
an order that the shape alone decides.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core.kernels.cpu_numbers import (
    Twins,
    exact,
    invstd_of,
    maps,
    merge,
    narrow,
    rounded,
    scratch,
    sums,
    widen,
)

WIDTH = 512  # columns of a block: what is kept per column stays in L1
WIDE = 4096  # the same where B = 1: whole rows are read faster than pieces of them
TILE = 32768  # elements of a tile, read twice while they are in L2
MIN_ROWS = 32
MAX_ROWS = 256  # a column is summed one row after the other: longer sums lose digits
MAX_CHUNKS = 64  # independent partial results per block, at most
PIECE = 1 << 18  # elements written by one task, which begins with the constants of its columns


def joined(rows: int, columns: int) -> int:
    """How many narrow rows to take as one: as many as fit into a block, and divide them all."""
    if 2 * columns <= WIDTH:
        for repeats in range(min(rows, WIDTH // columns), 1, -1):
            if rows % repeats == 0:
                return repeats
    return 1


@exact
def _blocks(columns, inner, channels):
    """`(channels per block, blocks, columns per block)`."""
    together = min(channels, WIDE) if inner == 1 else max(1, min(channels, WIDTH // inner))
    blocks = (channels + together - 1) // together
    return together, blocks, columns if blocks == 1 else together * inner


@exact
def _tiles(rows, width, blocks):
    """`(rows per tile, tiles, chunks of tiles)`, a function of the shape only."""
    height = max(MIN_ROWS, min(MAX_ROWS, TILE // width))
    tiles = (rows + height - 1) // height
    return height, tiles, max(1, min(tiles, (MAX_CHUNKS + blocks - 1) // blocks))


@exact
def _pieces(rows, width):
    """`(rows per task, tasks)` of a block."""
    height = max(MIN_ROWS, PIECE // width)
    return height, (rows + height - 1) // height


@maps
def _add(x, left, right, begin, end, total):
    """`total += sum(x)` over the rows `begin` to `end`."""
    for r in range(begin, end - 3, 4):
        # rows are cut one by one: of a block cut at once the compiler knows no unit stride
        a, b = x[r, left:right], x[r + 1, left:right]
        c, d = x[r + 2, left:right], x[r + 3, left:right]
        for i in range(total.shape[0]):
            total[i] += (widen(a[i]) + widen(b[i])) + (widen(c[i]) + widen(d[i]))
    for r in range(end - (end - begin) % 4, end):
        a = x[r, left:right]
        for i in range(total.shape[0]):
            total[i] += widen(a[i])


@maps
def _add_deviations(x, left, right, begin, end, shift, first, second):
    """`first += sum(d)`, `second += sum(d**2)` with `d = x - shift`, over rows."""
    for r in range(begin, end - 3, 4):
        a, b = x[r, left:right], x[r + 1, left:right]
        c, d = x[r + 2, left:right], x[r + 3, left:right]
        for i in range(first.shape[0]):
            s = shift[i]
            p, q = widen(a[i]) - s, widen(b[i]) - s
            u, v = widen(c[i]) - s, widen(d[i]) - s
            first[i] += (p + q) + (u + v)
            second[i] += (p * p + q * q) + (u * u + v * v)
    for r in range(end - (end - begin) % 4, end):
        a = x[r, left:right]
        for i in range(first.shape[0]):
            p = widen(a[i]) - shift[i]
            first[i] += p
            second[i] += p * p


@maps
def _add_products(x, dy, left, right, begin, end, shift, first, second):
    """`first += sum(dy)`, `second += sum(dy * (x - shift))` over rows."""
    for r in range(begin, end):
        a, g = x[r, left:right], dy[r, left:right]
        for i in range(first.shape[0]):
            p = widen(g[i])
            first[i] += p
            second[i] += p * (widen(a[i]) - shift[i])


@maps
def _affine(source, near, scale, shift, target):
    """`target = (source - near) * scale + shift`, each column with its own."""
    for i in range(source.shape[0]):
        target[i] = narrow((widen(source[i]) - near[i]) * scale[i] + shift[i], target)


@maps
def _gradient(source, grad, near, of_dy, of_x, shift, target):
    """`target = grad * of_dy + (source - near) * of_x + shift`, each column with its own."""
    for i in range(source.shape[0]):
        g = widen(grad[i])
        both = g * of_dy[i] + ((widen(source[i]) - near[i]) * of_x[i] + shift[i])
        target[i] = narrow(both, target)


@sums
def _total(columns, begin, size):
    run = columns[begin : begin + size]
    total = 0.0
    for i in range(run.shape[0]):
        total += run[i]
    return total


@exact
def _fold(columns, inner, sums):
    """Adds the columns of each channel to its `sums`, in float64; sets `columns` to 0."""
    count = sums.shape[0]
    for begin in range(0, columns.shape[0], count * inner):
        if inner == 1:
            row = columns[begin : begin + count]
            for c in range(count):
                sums[c] += row[c]
        else:
            for c in range(count):
                sums[c] += _total(columns, begin + c * inner, inner)
    columns[:] = 0


@exact
def _spread(values, inner, columns):
    """What each channel has, rounded, into all of its columns."""
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


@exact
def _merge_in(count, mean, m2, other_count, other_mean, other_m2):
    """`cpu_numbers.merge` for each channel, in place; returns the new count."""
    if count == 0.0:
        for c in range(mean.shape[0]):
            mean[c], m2[c] = other_mean[c], other_m2[c]
    else:
        for c in range(mean.shape[0]):
            mean[c], m2[c] = merge(count, mean[c], m2[c], other_count, other_mean[c], other_m2[c])
    return count + other_count


# In what follows the columns `left` to `right` are those of the channels `low` to `high`.
# Loops over channels go over arrays of just those, from 0: else they would not be vectorized.


@exact
def _chunk_moments(x, left, right, inner, begin, end, height, mean, m2):
    """Moments of the tiles `begin` to `end` of a block, each as in `cpu_planes`; the count."""
    width, channels = right - left, mean.shape[0]
    first, second, shift = scratch(width, x), scratch(width, x), scratch(width, x)
    sums, squares, near = np.empty(channels), np.empty(channels), np.empty(channels)
    count = 0.0
    for t in range(begin, end):
        top, bottom = t * height, min(x.shape[0], (t + 1) * height)
        n = np.float64((bottom - top) * (width // channels))
        _add(x, left, right, top, bottom, first)
        sums[:] = 0.0
        squares[:] = 0.0
        _fold(first, inner, sums)
        for c in range(channels):
            near[c] = rounded(sums[c] / n, x)
            sums[c] = 0.0
        _spread(near, inner, shift)
        _add_deviations(x, left, right, top, bottom, shift, first, second)
        _fold(first, inner, sums)
        _fold(second, inner, squares)
        for c in range(channels):
            mend = sums[c] / n
            near[c] += mend
            squares[c] = max(squares[c] - mend * sums[c], 0.0 * squares[c])
        count = _merge_in(count, mean, m2, n, near, squares)
    return count


@exact
def _merge_chunks(counts, means, m2s, low, high, mean, m2):
    count = 0.0
    for k in range(counts.shape[0]):
        count = _merge_in(
            count, mean[low:high], m2[low:high], counts[k], means[k, low:high], m2s[k, low:high]
        )


@exact
def _normalize(x, left, right, inner, mean, invstd, weight, bias, begin, end, y):
    """The rows `begin` to `end` of a block."""
    width, channels = right - left, mean.shape[0]
    near, scale, shift = scratch(width, x), scratch(width, x), scratch(width, x)
    slope, rest = np.empty(channels), np.empty(channels)
    for c in range(channels):
        slope[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        rest[c] = (np.float64(rounded(mean[c], x)) - mean[c]) * slope[c]
        rest[c] = rest[c] + bias[c] if bias.shape[0] else rest[c]
    _spread(mean, inner, near)
    _spread(slope, inner, scale)
    _spread(rest, inner, shift)
    for r in range(begin, end):
        _affine(x[r, left:right], near, scale, shift, y[r, left:right])


@exact
def _chunk_products(x, dy, left, right, inner, mean, begin, end, height, of_dy, of_both):
    """Sums of `dy` and of `dy * (x - mean)`, mean rounded, over tiles of a block."""
    width = right - left
    first, second, near = scratch(width, x), scratch(width, x), scratch(width, x)
    _spread(mean, inner, near)
    of_dy[:] = 0.0
    of_both[:] = 0.0
    for t in range(begin, end):
        bottom = min(x.shape[0], (t + 1) * height)
        _add_products(x, dy, left, right, t * height, bottom, near, first, second)
        _fold(first, inner, of_dy)
        _fold(second, inner, of_both)


@exact
def _add_chunks(x, firsts, seconds, low, high, mean, invstd, sum_dy, sum_dy_xhat):
    first, second = sum_dy[low:high], sum_dy_xhat[low:high]
    first[:] = 0.0
    second[:] = 0.0
    for k in range(firsts.shape[0]):
        of_dy, of_both = firsts[k, low:high], seconds[k, low:high]
        for c in range(high - low):
            first[c] += of_dy[c]
            second[c] += of_both[c]
    for c in range(low, high):
        rest = np.float64(rounded(mean[c], x)) - mean[c]
        sum_dy_xhat[c] = (sum_dy_xhat[c] + rest * sum_dy[c]) * invstd[c]


@exact
def _input(
    x, dy, left, right, inner, mean, invstd, weight, mean_dy, mean_dy_xhat, begin, end, dx
):  # fmt: skip
    """The rows `begin` to `end` of a block."""
    width, channels = right - left, mean.shape[0]
    near, of_dy = scratch(width, x), scratch(width, x)
    of_x, shift = scratch(width, x), scratch(width, x)
    factor, slope, rest = np.empty(channels), np.empty(channels), np.empty(channels)
    for c in range(channels):
        off = np.float64(rounded(mean[c], x)) - mean[c]
        slope[c] = -invstd[c] * invstd[c] * mean_dy_xhat[c]
        rest[c] = off * slope[c] - invstd[c] * mean_dy[c]
        factor[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
    _spread(mean, inner, near)
    _spread(factor, inner, of_dy)
    _spread(slope, inner, of_x)
    _spread(rest, inner, shift)
    for r in range(begin, end):
        source, grad = x[r, left:right], dy[r, left:right]
        _gradient(source, grad, near, of_dy, of_x, shift, dx[r, left:right])


@Twins
def rows_moments(x, inner, mean, m2):
    """`x` [R, C * B] -> `mean`, `m2` (C,)."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, tiles, chunks = _tiles(x.shape[0], stride, blocks)
    counts = np.empty(chunks)
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    for task in prange(blocks * chunks):
        k, block = task // blocks, task % blocks
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(x.shape[1], (block + 1) * stride)
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        counts[k] = _chunk_moments(
            x, left, right, inner, begin, end, height, means[k, low:high], m2s[k, low:high]
        )
    _merge_chunks(counts, means, m2s, 0, channels, mean, m2)


@Twins
def rows_normalize(x, inner, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`, `x`, `y` [R, C * B]."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, pieces = _pieces(x.shape[0], stride)
    for task in prange(blocks * pieces):
        block = task % blocks
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(x.shape[1], (block + 1) * stride)
        begin = (task // blocks) * height
        end = min(x.shape[0], begin + height)
        _normalize(
            x, left, right, inner, mean[low:high], invstd[low:high],
            weight[low:high], bias[low:high], begin, end, y,
        )  # fmt: skip


@Twins
def rows_backward_reduce(x, dy, inner, mean, invstd, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * (x - mean)) * invstd`; `x`, `dy` [R, C * B]."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, tiles, chunks = _tiles(x.shape[0], stride, blocks)
    firsts = np.empty((chunks, channels))
    seconds = np.empty((chunks, channels))
    for task in prange(blocks * chunks):
        k, block = task // blocks, task % blocks
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(x.shape[1], (block + 1) * stride)
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        _chunk_products(
            x, dy, left, right, inner, mean[low:high], begin, end, height,
            firsts[k, low:high], seconds[k, low:high],
        )  # fmt: skip
    _add_chunks(x, firsts, seconds, 0, channels, mean, invstd, sum_dy, sum_dy_xhat)


@Twins
def rows_backward_input(x, dy, inner, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, [R, C * B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    """
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, pieces = _pieces(x.shape[0], stride)
    for task in prange(blocks * pieces):
        block = task % blocks
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(x.shape[1], (block + 1) * stride)
        begin = (task // blocks) * height
        end = min(x.shape[0], begin + height)
        _input(
            x, dy, left, right, inner, mean[low:high], invstd[low:high], weight[low:high],
            mean_dy[low:high], mean_dy_xhat[low:high], begin, end, dx,
        )  # fmt: skip


# Both steps of a direction, one block after the other, as in `cpu_planes`.


@Twins
def rows_forward(x, inner, weight, bias, eps, clamp, mean, m2, invstd, y):
    """`rows_moments`, then `rows_normalize` by those; `x`, `y` [R, C * B].

    `invstd = 1 / sqrt(m2 / n + eps)`, with `clamp` `1 / sqrt(max(m2 / n, eps))`.
    """
    rows, columns = x.shape
    channels = mean.shape[0]
    together, blocks, stride = _blocks(columns, inner, channels)
    height, tiles, chunks = _tiles(rows, stride, blocks)
    counts = np.empty((blocks, chunks))
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    for block in prange(blocks):
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(columns, (block + 1) * stride)
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            counts[block, k] = _chunk_moments(
                x, left, right, inner, begin, end, height, means[k, low:high], m2s[k, low:high]
            )
        _merge_chunks(counts[block], means, m2s, low, high, mean, m2)
        for c in range(low, high):
            invstd[c] = invstd_of(m2[c] / (rows * (columns // channels)), eps, clamp)
        _normalize(
            x, left, right, inner, mean[low:high], invstd[low:high],
            weight[low:high], bias[low:high], 0, rows, y,
        )  # fmt: skip


@Twins
def rows_backward(x, dy, inner, mean, invstd, weight, frozen, sum_dy, sum_dy_xhat, dx):
    """`rows_backward_reduce`, then `rows_backward_input` by those; all [R, C * B].

    `frozen` (C,) bool: where `invstd` is a constant; empty for nowhere.
    """
    rows, columns = x.shape
    channels = mean.shape[0]
    together, blocks, stride = _blocks(columns, inner, channels)
    height, tiles, chunks = _tiles(rows, stride, blocks)
    firsts, seconds = np.empty((chunks, channels)), np.empty((chunks, channels))
    mean_dy, mean_dy_xhat = np.empty(channels), np.empty(channels)
    count = rows * (columns // channels)
    for block in prange(blocks):
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(columns, (block + 1) * stride)
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            _chunk_products(
                x, dy, left, right, inner, mean[low:high], begin, end, height,
                firsts[k, low:high], seconds[k, low:high],
            )  # fmt: skip
        _add_chunks(x, firsts, seconds, low, high, mean, invstd, sum_dy, sum_dy_xhat)
        for c in range(low, high):
            factor = weight[c] if weight.shape[0] else 1.0
            mean_dy[c] = sum_dy[c] * factor / count
            mean_dy_xhat[c] = sum_dy_xhat[c] * factor / count
            if frozen.shape[0] and frozen[c]:
                mean_dy_xhat[c] = 0.0
        _input(
            x, dy, left, right, inner, mean[low:high], invstd[low:high], weight[low:high],
            mean_dy[low:high], mean_dy_xhat[low:high], 0, rows, dx,
        )  # fmt: skip
