"""Numba CPU kernels for rows `[A, C * B]`: B neighbouring columns belong to one channel.

B is 1 where channels lie innermost (channels_last, `(N, C)`); short planes, as of 7x7, go through
here too, because a loop over one of them would be mostly its ends. Columns are computed side by
side, a block of them at a time; narrow rows are taken several at a time, as one. What the columns
of a channel have added up to is added in float64.

Builds, per-channel arguments and remainders: as in `cpu_planes`. Rows are added four at a time, in
an order that the shape alone decides.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core.kernels.cpu_numbers import (
    Twins,
    exact,
    maps,
    merge,
    narrow,
    rounded,
    scratch,
    sums,
    widen,
)

WIDTH = 512  # columns of a block: what is kept per column stays in L1
TILE = 32768  # elements of a tile, read twice while they are in L2
MIN_ROWS = 32
MAX_ROWS = 256  # a column is summed one row after the other: longer sums lose digits
MAX_CHUNKS = 64  # independent partial results per block, at most
PIECE = 32768  # elements written by one task


@exact
def _repeats(rows, columns):
    """How many narrow rows are taken as one: as many as fit, and divide them all."""
    if 2 * columns <= WIDTH:
        for repeats in range(min(rows, WIDTH // columns), 1, -1):
            if rows % repeats == 0:
                return repeats
    return 1


@exact
def _blocks(columns, channels):
    """`(columns per channel, channels per block, blocks)`."""
    inner = columns // channels
    together = max(1, min(channels, WIDTH // inner))
    return inner, together, (channels + together - 1) // together


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
    for r in range(begin, end - 1, 2):
        a, b = x[r, left:right], x[r + 1, left:right]
        g, h = dy[r, left:right], dy[r + 1, left:right]
        for i in range(first.shape[0]):
            s = shift[i]
            p, q = widen(g[i]), widen(h[i])
            first[i] += p + q
            second[i] += p * (widen(a[i]) - s) + q * (widen(b[i]) - s)
    if (end - begin) % 2:
        a, g = x[end - 1, left:right], dy[end - 1, left:right]
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
def _total(run):
    total = 0.0
    for i in range(run.shape[0]):
        total += run[i]
    return total


@exact
def _fold(columns, inner, channels):
    """Sums `(channels,)` over the columns of each channel, in float64; sets `columns` to 0."""
    count = channels.shape[0]
    if inner == 1:
        channels[:] = columns[:count]
        for begin in range(count, columns.shape[0], count):
            channels += columns[begin : begin + count]
    else:
        for c in range(count):
            channels[c] = _total(columns[c * inner : (c + 1) * inner])
        for begin in range(count * inner, columns.shape[0], count * inner):
            for c in range(count):
                channels[c] += _total(columns[begin + c * inner : begin + (c + 1) * inner])
    columns[:] = 0


@exact
def _spread(channels, inner, columns):
    """What each channel has, rounded, into all of its columns."""
    i = 0
    while i < columns.shape[0]:
        for c in range(channels.shape[0]):
            for _ in range(inner):
                columns[i] = channels[c]
                i += 1


@exact
def _chunk_moments(x, left, right, inner, begin, end, height, mean, m2):
    """Moments of the tiles `begin` to `end` of a block; returns their count.

    Each tile as in `cpu_planes`: its sum first, then the deviations from that.
    """
    rows, width = x.shape[0], right - left
    first, second, shift = scratch(width, x), scratch(width, x), scratch(width, x)
    channels = mean.shape[0]
    sums = np.empty(channels)
    squares = np.empty(channels)
    near = np.empty(channels)
    mean[:] = 0.0
    m2[:] = 0.0
    count = 0.0
    for t in range(begin, end):
        top, bottom = t * height, min(rows, (t + 1) * height)
        n = np.float64((bottom - top) * (width // channels))
        _add(x, left, right, top, bottom, first)
        _fold(first, inner, sums)
        for c in range(channels):
            near[c] = rounded(sums[c] / n, x)
        _spread(near, inner, shift)
        _add_deviations(x, left, right, top, bottom, shift, first, second)
        _fold(first, inner, sums)
        _fold(second, inner, squares)
        for c in range(channels):
            mend = sums[c] / n
            tile_m2 = max(squares[c] - mend * sums[c], 0.0 * squares[c])
            mean[c], m2[c] = merge(count, mean[c], m2[c], n, near[c] + mend, tile_m2)
        count += n
    return count


@exact
def _normalize(x, left, right, inner, mean, invstd, weight, bias, begin, end, y):
    """The rows `begin` to `end` of a block."""
    width = right - left
    near, scale, shift = scratch(width, x), scratch(width, x), scratch(width, x)
    slope, rest = np.empty(mean.shape[0]), np.empty(mean.shape[0])
    for c in range(mean.shape[0]):
        slope[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        rest[c] = (np.float64(rounded(mean[c], x)) - mean[c]) * slope[c]
        rest[c] = rest[c] + bias[c] if bias.shape[0] else rest[c]
    _spread(mean, inner, near)
    _spread(slope, inner, scale)
    _spread(rest, inner, shift)
    for r in range(begin, end):
        _affine(x[r, left:right], near, scale, shift, y[r, left:right])


@exact
def _chunk_products(x, dy, left, right, inner, mean, begin, end, height, firsts, seconds):
    """Sums of `dy` and of `dy * (x - mean)`, mean rounded, over tiles of a block."""
    rows, width = x.shape[0], right - left
    first, second, near = scratch(width, x), scratch(width, x), scratch(width, x)
    sums = np.empty(mean.shape[0])
    _spread(mean, inner, near)
    firsts[:] = 0.0
    seconds[:] = 0.0
    for t in range(begin, end):
        bottom = min(rows, (t + 1) * height)
        _add_products(x, dy, left, right, t * height, bottom, near, first, second)
        _fold(first, inner, sums)
        firsts += sums
        _fold(second, inner, sums)
        seconds += sums


@exact
def _input(x, dy, left, right, inner, mean, invstd, weight, mean_dy, mean_dy_xhat, begin, end, dx):
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
def rows_moments(x, mean, m2):
    """`x` [A, C * B] -> `mean`, `m2` (C,)."""
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    view = x.reshape(x.shape[0] // repeats, x.shape[1] * repeats)
    stride = together * inner * repeats
    height, tiles, chunks = _tiles(view.shape[0], stride, blocks)
    counts = np.empty(chunks)
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    for task in prange(blocks * chunks):
        k, block = task // blocks, task % blocks
        own = slice(block * together, min(channels, (block + 1) * together))
        left, right = block * stride, min(view.shape[1], (block + 1) * stride)
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        into = (means[k, own], m2s[k, own])
        counts[k] = _chunk_moments(view, left, right, inner, begin, end, height, into[0], into[1])
    _merge_chunks(counts, means, m2s, mean, m2)


@exact
def _merge_chunks(counts, means, m2s, mean, m2):
    count = counts[0]
    mean[:] = means[0]
    m2[:] = m2s[0]
    for k in range(1, counts.shape[0]):
        for c in range(mean.shape[0]):
            mean[c], m2[c] = merge(count, mean[c], m2[c], counts[k], means[k, c], m2s[k, c])
        count += counts[k]


@Twins
def rows_normalize(x, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`, `x`, `y` [A, C * B]."""
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    shape = (x.shape[0] // repeats, x.shape[1] * repeats)
    view, target = x.reshape(shape), y.reshape(shape)
    stride = together * inner * repeats
    height, pieces = _pieces(shape[0], stride)
    for task in prange(blocks * pieces):
        block = task % blocks
        own = slice(block * together, min(channels, (block + 1) * together))
        left, right = block * stride, min(shape[1], (block + 1) * stride)
        begin = (task // blocks) * height
        end = min(shape[0], begin + height)
        affine = (weight[own], bias[own])
        moments = (mean[own], invstd[own])
        _normalize(
            view,
            left,
            right,
            inner,
            moments[0],
            moments[1],
            affine[0],
            affine[1],
            begin,
            end,
            target,
        )


@Twins
def rows_backward_reduce(x, dy, mean, invstd, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * (x - mean)) * invstd`; `x`, `dy` [A, C * B]."""
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    shape = (x.shape[0] // repeats, x.shape[1] * repeats)
    view, grad = x.reshape(shape), dy.reshape(shape)
    stride = together * inner * repeats
    height, tiles, chunks = _tiles(shape[0], stride, blocks)
    firsts = np.empty((chunks, channels))
    seconds = np.empty((chunks, channels))
    for task in prange(blocks * chunks):
        k, block = task // blocks, task % blocks
        own = slice(block * together, min(channels, (block + 1) * together))
        left, right = block * stride, min(shape[1], (block + 1) * stride)
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        into = (mean[own], firsts[k, own], seconds[k, own])
        _chunk_products(
            view, grad, left, right, inner, into[0], begin, end, height, into[1], into[2]
        )
    for c in range(channels):
        first = 0.0
        second = 0.0
        for k in range(chunks):
            first += firsts[k, c]
            second += seconds[k, c]
        rest = np.float64(rounded(mean[c], x)) - mean[c]
        sum_dy[c] = first
        sum_dy_xhat[c] = (second + rest * first) * invstd[c]


@Twins
def rows_backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, [A, C * B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    """
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    shape = (x.shape[0] // repeats, x.shape[1] * repeats)
    view, grad, target = x.reshape(shape), dy.reshape(shape), dx.reshape(shape)
    stride = together * inner * repeats
    height, pieces = _pieces(shape[0], stride)
    for task in prange(blocks * pieces):
        block = task % blocks
        own = slice(block * together, min(channels, (block + 1) * together))
        left, right = block * stride, min(shape[1], (block + 1) * stride)
        begin = (task // blocks) * height
        end = min(shape[0], begin + height)
        _input(
            view,
            grad,
            left,
            right,
            inner,
            mean[own],
            invstd[own],
            weight[own],
            mean_dy[own],
            mean_dy_xhat[own],
            begin,
            end,
            target,
        )


# Both steps of a direction, one block after the other, as in `cpu_planes`.


@Twins
def rows_forward(x, weight, bias, eps, clamp, mean, m2, y):
    """`rows_moments`, then `rows_normalize` by those; `x`, `y` [A, C * B].

    `invstd = 1 / sqrt(m2 / n + eps)`, with `clamp` `1 / sqrt(max(m2 / n, eps))`.
    """
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    shape = (x.shape[0] // repeats, x.shape[1] * repeats)
    view, target = x.reshape(shape), y.reshape(shape)
    stride = together * inner * repeats
    height, tiles, chunks = _tiles(shape[0], stride, blocks)
    for block in prange(blocks):
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(shape[1], (block + 1) * stride)
        counts = np.empty(chunks)
        means = np.empty((chunks, high - low))
        m2s = np.empty((chunks, high - low))
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            counts[k] = _chunk_moments(
                view, left, right, inner, begin, end, height, means[k], m2s[k]
            )
        _merge_chunks(counts, means, m2s, mean[low:high], m2[low:high])
        invstd = np.empty(high - low)
        for c in range(low, high):
            var = m2[c] / (x.shape[0] * inner)
            wide = (eps if var < eps else var) if clamp else var + eps
            invstd[c - low] = 1.0 / np.sqrt(wide)
        _normalize(
            view,
            left,
            right,
            inner,
            mean[low:high],
            invstd,
            weight[low:high],
            bias[low:high],
            0,
            shape[0],
            target,
        )


@Twins
def rows_backward(x, dy, mean, invstd, weight, frozen, sum_dy, sum_dy_xhat, dx):
    """`rows_backward_reduce`, then `rows_backward_input` by those; all [A, C * B].

    `frozen` (C,) bool: where `invstd` is a constant; empty for nowhere.
    """
    channels = mean.shape[0]
    inner, together, blocks = _blocks(x.shape[1], channels)
    repeats = _repeats(x.shape[0], x.shape[1])
    shape = (x.shape[0] // repeats, x.shape[1] * repeats)
    view, grad, target = x.reshape(shape), dy.reshape(shape), dx.reshape(shape)
    stride = together * inner * repeats
    height, tiles, chunks = _tiles(shape[0], stride, blocks)
    count = x.shape[0] * inner
    for block in prange(blocks):
        low, high = block * together, min(channels, (block + 1) * together)
        left, right = block * stride, min(shape[1], (block + 1) * stride)
        firsts = np.empty(high - low)
        seconds = np.empty(high - low)
        first = np.zeros(high - low)
        second = np.zeros(high - low)
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            near = mean[low:high]
            _chunk_products(
                view, grad, left, right, inner, near, begin, end, height, firsts, seconds
            )
            first += firsts
            second += seconds
        for c in range(low, high):
            own = c - low
            rest = np.float64(rounded(mean[c], x)) - mean[c]
            second[own] = (second[own] + rest * first[own]) * invstd[c]
            sum_dy[c] = first[own]
            sum_dy_xhat[c] = second[own]
            factor = weight[c] if weight.shape[0] else 1.0
            first[own] = first[own] * factor / count
            second[own] = second[own] * factor / count
            if frozen.shape[0] and frozen[c]:
                second[own] = 0.0
        _input(
            view,
            grad,
            left,
            right,
            inner,
            mean[low:high],
            invstd[low:high],
            weight[low:high],
            first,
            second,
            0,
            shape[0],
            target,
        )
