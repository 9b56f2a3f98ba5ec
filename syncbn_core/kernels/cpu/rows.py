"""Numba CPU kernels for rows `[R, C * B]`: B neighbouring columns belong to one channel.

B (`inner`) is 1 where channels lie innermost (channels_last, `(N, C)`); short planes, as of 7x7, go
through here too, because a loop over one of them would be mostly its ends. Columns are computed
side by side, a block of them at a time; what those of a channel add up to is added in float64.
Narrow rows should come joined, `[R / k, k * C * B]` with the `k` that `joined` says.

Builds, per-channel arguments and remainders: as in `cpu_planes`. Rows are added four at a time, in
an order that the shape alone decides. `workers`: how many threads may share the tasks, each with
memory of its own; results do not depend on it.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core.kernels.cpu.numerics import (
    SerialParallelKernel,
    at,
    doubtful,
    exact,
    invstd_of,
    maps,
    merge,
    narrow,
    power_of,
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
LINES = 5  # of a worker's memory, at most
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
def _add_products(x, dy, left, right, begin, end, power, centre, first, second):
    """`first += sum(dy)`, `second += sum(dy * (x * power - centre))` over rows."""
    for r in range(begin, end):
        a, g = x[r, left:right], dy[r, left:right]
        for i in range(first.shape[0]):
            p = widen(g[i])
            first[i] += p
            second[i] += p * (widen(a[i]) * at(power, i) - centre[i])


@maps
def _affine(source, power, centre, scale, shift, target):
    """`target = (source * power - centre) * scale + shift`, each column with its own.

    `power` may be one number for all, which is faster by a tenth.
    """
    for i in range(source.shape[0]):
        both = (widen(source[i]) * at(power, i) - centre[i]) * scale[i] + shift[i]
        target[i] = narrow(both, target)


@maps
def _gradient(source, grad, power, centre, of_dy, of_x, shift, target):
    """`target = grad * of_dy + (source * power - centre) * of_x + shift`, as `_affine`."""
    for i in range(source.shape[0]):
        d = widen(source[i]) * at(power, i) - centre[i]
        both = widen(grad[i]) * of_dy[i] + (d * of_x[i] + shift[i])
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
def _workspace(x, workers, width, channels):
    """Lines of `width` columns and of float64 `channels`, for each worker.

    Allocated before the parallel loop: a worker's `MemoryError` would be lost. Lines begin where
    cache lines do, an odd number of them apart: no two compete for one place in L1.
    """
    apart = ((width + 15) // 16 | 1) * 16
    return scratch((workers, LINES, apart), x), np.empty((workers, LINES, channels))


@exact
def _wide_moments(x, left, right, c, channels, inner, top, bottom):
    """`(mean, m2)` of channel `c` of a tile, in float64: for values that float32 fails at."""
    count = (bottom - top) * ((right - left) // channels)
    mean = 0.0
    for _ in range(2):  # the second time their mean, of deviations, mends the first
        first = 0.0
        second = 0.0
        for r in range(top, bottom):
            for begin in range(left + c * inner, right, channels * inner):
                for i in range(begin, begin + inner):
                    d = np.float64(widen(x[r, i])) - mean
                    first += d
                    second += d * d
        mend = first / count
        mean += mend
    return mean, max(second - mend * first, 0.0 * second)


@exact
def _chunk_moments(x, left, right, inner, begin, end, height, lines, numbers, mean, m2):
    """Moments of the tiles `begin` to `end` of a block, each as in `cpu_planes`; the count."""
    width, channels = right - left, mean.shape[0]
    first, second, shift = lines[0, :width], lines[1, :width], lines[2, :width]
    sums, squares = numbers[0, :channels], numbers[1, :channels]
    near, m2s = numbers[2, :channels], numbers[3, :channels]
    first[:] = 0
    second[:] = 0
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
        again = 0
        for c in range(channels):
            mend = sums[c] / n
            near[c] += mend
            m2s[c] = max(squares[c] - mend * sums[c], 0.0 * squares[c])
            again += doubtful(sums[c], squares[c], n, x)
        if again:
            for c in range(channels):
                if doubtful(sums[c], squares[c], n, x):
                    near[c], m2s[c] = _wide_moments(
                        x, left, right, c, channels, inner, top, bottom
                    )  # fmt: skip
        count = _merge_in(count, mean, m2, n, near, m2s)
    return count


@exact
def _merge_chunks(counts, means, m2s, low, high, mean, m2):
    count = 0.0
    for k in range(counts.shape[0]):
        count = _merge_in(
            count, mean[low:high], m2[low:high], counts[k], means[k, low:high], m2s[k, low:high]
        )


@exact
def _centre(x, mean, invstd, inner, numbers, power, centre):
    """Fills in by what x is multiplied, and what is subtracted then.

    Returns the former per channel, and whether it is the same for all of them: where they can be
    alike, as everywhere but between channels of extremely different deviations.
    """
    channels = mean.shape[0]
    powers, centres = numbers[0, :channels], numbers[1, :channels]
    low, high = np.inf, 0.0
    for c in range(channels):
        powers[c] = power_of(invstd[c], rounded(mean[c], x))
        low, high = min(low, powers[c]), max(high, powers[c])
    alike = high <= low * 2.0**20
    if alike:
        powers[:] = low
    else:
        _spread(powers, inner, power)
    for c in range(channels):
        centres[c] = np.float64(rounded(mean[c], x)) * powers[c]
    _spread(centres, inner, centre)
    return powers, alike


@exact
def _normalize(x, left, right, inner, mean, invstd, weight, bias, begin, end, lines, numbers, y):
    """The rows `begin` to `end` of a block."""
    width, channels = right - left, mean.shape[0]
    power, centre = lines[0, :width], lines[1, :width]
    scale, shift = lines[2, :width], lines[3, :width]
    slope, rest = numbers[2, :channels], numbers[3, :channels]
    powers, alike = _centre(x, mean, invstd, inner, numbers, power, centre)
    for c in range(channels):
        slope[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        rest[c] = (np.float64(rounded(mean[c], x)) - mean[c]) * slope[c]
        rest[c] = rest[c] + bias[c] if bias.shape[0] else rest[c]
        slope[c] /= powers[c]
    _spread(slope, inner, scale)
    _spread(rest, inner, shift)
    one = rounded(powers[0], x)
    for r in range(begin, end):
        source, target = x[r, left:right], y[r, left:right]
        if alike:
            _affine(source, one, centre, scale, shift, target)
        else:
            _affine(source, power, centre, scale, shift, target)


@exact
def _chunk_products(
    x, dy, left, right, inner, mean, invstd, begin, end, height, lines, numbers, of_dy, of_both
):  # fmt: skip
    """Sums of `dy` and of `dy * (x - mean)`, mean rounded, over tiles of a block."""
    width = right - left
    power, centre = lines[0, :width], lines[1, :width]
    first, second = lines[2, :width], lines[3, :width]
    powers, alike = _centre(x, mean, invstd, inner, numbers, power, centre)
    one = rounded(powers[0], x)
    first[:] = 0
    second[:] = 0
    of_dy[:] = 0.0
    of_both[:] = 0.0
    for t in range(begin, end):
        top, bottom = t * height, min(x.shape[0], (t + 1) * height)
        if alike:
            _add_products(x, dy, left, right, top, bottom, one, centre, first, second)
        else:
            _add_products(x, dy, left, right, top, bottom, power, centre, first, second)
        _fold(first, inner, of_dy)
        _fold(second, inner, of_both)
    for c in range(mean.shape[0]):
        of_both[c] /= powers[c]


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
    x, dy, left, right, inner, mean, invstd, weight, mean_dy, mean_dy_xhat, begin, end,
    lines, numbers, dx,
):  # fmt: skip
    """The rows `begin` to `end` of a block."""
    width, channels = right - left, mean.shape[0]
    power, centre, of_dy = lines[0, :width], lines[1, :width], lines[2, :width]
    of_x, shift = lines[3, :width], lines[4, :width]
    factor, slope = numbers[2, :channels], numbers[3, :channels]
    rest = numbers[4, :channels]
    powers, alike = _centre(x, mean, invstd, inner, numbers, power, centre)
    one = rounded(powers[0], x)
    for c in range(channels):
        off = (np.float64(rounded(mean[c], x)) - mean[c]) * powers[c]
        slope[c] = -invstd[c] * (invstd[c] / powers[c]) * mean_dy_xhat[c]
        rest[c] = off * slope[c] - invstd[c] * mean_dy[c]
        factor[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
    _spread(factor, inner, of_dy)
    _spread(slope, inner, of_x)
    _spread(rest, inner, shift)
    for r in range(begin, end):
        source, grad, target = x[r, left:right], dy[r, left:right], dx[r, left:right]
        if alike:
            _gradient(source, grad, one, centre, of_dy, of_x, shift, target)
        else:
            _gradient(source, grad, power, centre, of_dy, of_x, shift, target)


@SerialParallelKernel
def rows_moments(x, inner, workers, mean, m2):
    """`x` [R, C * B] -> `mean`, `m2` (C,)."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, tiles, chunks = _tiles(x.shape[0], stride, blocks)
    counts = np.empty(chunks)
    means = np.empty((chunks, channels))
    m2s = np.empty((chunks, channels))
    tasks = blocks * chunks
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for task in range(tasks * worker // workers, tasks * (worker + 1) // workers):
            k, block = task // blocks, task % blocks
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(x.shape[1], (block + 1) * stride)
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            counts[k] = _chunk_moments(
                x, left, right, inner, begin, end, height, lines[worker], numbers[worker],
                means[k, low:high], m2s[k, low:high],
            )  # fmt: skip
    _merge_chunks(counts, means, m2s, 0, channels, mean, m2)


@SerialParallelKernel
def rows_normalize(x, inner, workers, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`, `x`, `y` [R, C * B]."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, pieces = _pieces(x.shape[0], stride)
    tasks = blocks * pieces
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for task in range(tasks * worker // workers, tasks * (worker + 1) // workers):
            block = task % blocks
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(x.shape[1], (block + 1) * stride)
            begin = (task // blocks) * height
            end = min(x.shape[0], begin + height)
            _normalize(
                x, left, right, inner, mean[low:high], invstd[low:high],
                weight[low:high], bias[low:high], begin, end, lines[worker], numbers[worker], y,
            )  # fmt: skip


@SerialParallelKernel
def rows_backward_reduce(x, dy, inner, workers, mean, invstd, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * (x - mean)) * invstd`; `x`, `dy` [R, C * B]."""
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, tiles, chunks = _tiles(x.shape[0], stride, blocks)
    firsts = np.empty((chunks, channels))
    seconds = np.empty((chunks, channels))
    tasks = blocks * chunks
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for task in range(tasks * worker // workers, tasks * (worker + 1) // workers):
            k, block = task // blocks, task % blocks
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(x.shape[1], (block + 1) * stride)
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            _chunk_products(
                x, dy, left, right, inner, mean[low:high], invstd[low:high], begin, end, height,
                lines[worker], numbers[worker], firsts[k, low:high], seconds[k, low:high],
            )  # fmt: skip
    _add_chunks(x, firsts, seconds, 0, channels, mean, invstd, sum_dy, sum_dy_xhat)


@SerialParallelKernel
def rows_backward_input(x, dy, inner, workers, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, [R, C * B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    """
    channels = mean.shape[0]
    together, blocks, stride = _blocks(x.shape[1], inner, channels)
    height, pieces = _pieces(x.shape[0], stride)
    tasks = blocks * pieces
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for task in range(tasks * worker // workers, tasks * (worker + 1) // workers):
            block = task % blocks
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(x.shape[1], (block + 1) * stride)
            begin = (task // blocks) * height
            end = min(x.shape[0], begin + height)
            _input(
                x, dy, left, right, inner, mean[low:high], invstd[low:high], weight[low:high],
                mean_dy[low:high], mean_dy_xhat[low:high], begin, end,
                lines[worker], numbers[worker], dx,
            )  # fmt: skip


# Both steps of a direction, one block after the other, as in `cpu_planes`.


@SerialParallelKernel
def rows_forward(x, inner, workers, weight, bias, eps, clamp, mean, m2, invstd, y):
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
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for block in range(blocks * worker // workers, blocks * (worker + 1) // workers):
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(columns, (block + 1) * stride)
            for k in range(chunks):
                begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
                counts[block, k] = _chunk_moments(
                    x, left, right, inner, begin, end, height, lines[worker], numbers[worker],
                    means[k, low:high], m2s[k, low:high],
                )  # fmt: skip
            _merge_chunks(counts[block], means, m2s, low, high, mean, m2)
            for c in range(low, high):
                invstd[c] = invstd_of(m2[c] / (rows * (columns // channels)), eps, clamp)
            _normalize(
                x, left, right, inner, mean[low:high], invstd[low:high],
                weight[low:high], bias[low:high], 0, rows, lines[worker], numbers[worker], y,
            )  # fmt: skip


@SerialParallelKernel
def rows_backward(x, dy, inner, workers, mean, invstd, weight, frozen, sum_dy, sum_dy_xhat, dx):
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
    lines, numbers = _workspace(x, workers, stride, together)
    for worker in prange(workers):
        for block in range(blocks * worker // workers, blocks * (worker + 1) // workers):
            low, high = block * together, min(channels, (block + 1) * together)
            left, right = block * stride, min(columns, (block + 1) * stride)
            for k in range(chunks):
                begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
                _chunk_products(
                    x, dy, left, right, inner, mean[low:high], invstd[low:high], begin, end, height,
                    lines[worker], numbers[worker], firsts[k, low:high], seconds[k, low:high],
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
                mean_dy[low:high], mean_dy_xhat[low:high], 0, rows,
                lines[worker], numbers[worker], dx,
            )  # fmt: skip
