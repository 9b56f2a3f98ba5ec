"""Numba CPU kernels for `[A, C, B]` planes (see `syncbn_core.layout`).

Every kernel exists twice from one source: serial and `nogil`, for threads that fill the cores
by themselves, and `parallel` for a single caller. Both give bitwise the same result with any
number of threads: how work is cut depends on the shape only, and what the compiler may reorder or
contract is in functions of its own, compiled once for both; around them arithmetic is strict.

Per-channel arguments (`mean`, `invstd`, `weight`, `bias`, sums) are float64 `(C,)`; an empty
`weight` or `bias` stands for ones or zeros. A float32 activation minus a mean of 1e6 rounded
to float32 would be off by 0.03: kernels subtract the rounded mean, which is exact near it,
and carry the remainder, known in float64, in the additive constant. Before that x is multiplied
by a power of two (`cpu_numbers.power_of`), so that the constants fit into float32.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core.kernels.cpu.numerics import (
    SerialParallelKernel,
    doubtful,
    exact,
    invstd_of,
    maps,
    merge,
    narrow,
    power_of,
    rounded,
    sums,
    widen,
)

TILE = 4096  # elements read twice while they are in L1
MAX_CHUNKS = 64  # independent partial results per channel, at most
PIECE = 16384  # elements of one plane written by one task


@sums
def _sum(run, zero):
    """The sum, in the dtype of `zero`."""
    total = zero
    for i in range(run.shape[0]):
        total += widen(run[i])
    return total


@sums
def _deviations(run, shift, zero):
    """Sums of `d` and `d**2` with `d = run - shift`, in the dtype of `shift` and `zero`."""
    first = zero
    second = zero
    for i in range(run.shape[0]):
        d = widen(run[i]) - shift
        first += d
        second += d * d
    return first, second


@sums
def _products(x, dy, power, centre):
    """Sums of `dy` and `dy * (x * power - centre)`."""
    first = rounded(0, x)
    second = rounded(0, x)
    for i in range(x.shape[0]):
        g = widen(dy[i])
        first += g
        second += g * (widen(x[i]) * power - centre)
    return first, second


@maps
def _affine(source, power, centre, scale, shift, target):
    """`target = (source * power - centre) * scale + shift` over one run of one channel."""
    for i in range(source.shape[0]):
        target[i] = narrow((widen(source[i]) * power - centre) * scale + shift, target)


@maps
def _gradient(source, grad, power, centre, of_dy, of_x, shift, target):
    """`target = grad * of_dy + (source * power - centre) * of_x + shift` over one run."""
    for i in range(source.shape[0]):
        d = widen(source[i]) * power - centre
        target[i] = narrow(widen(grad[i]) * of_dy + (d * of_x + shift), target)


@maps
def _channel_affine(x, c, power, centre, scale, shift, y):
    """`_affine` over all runs of channel `c`: for short ones a call each would cost as much."""
    for a in range(x.shape[0]):
        source = x[a, c]
        target = y[a, c]
        for i in range(source.shape[0]):
            target[i] = narrow((widen(source[i]) * power - centre) * scale + shift, target)


@maps
def _channel_gradient(x, dy, c, power, centre, of_dy, of_x, shift, dx):
    """`_gradient` over all runs of channel `c`."""
    for a in range(x.shape[0]):
        source = x[a, c]
        grad = dy[a, c]
        target = dx[a, c]
        for i in range(source.shape[0]):
            g = widen(grad[i])
            target[i] = narrow(
                g * of_dy + ((widen(source[i]) * power - centre) * of_x + shift), target
            )


@exact
def _plane_tiles(outer, inner):
    """`(tiles per channel, runs per tile, pieces per run)`: cut long runs, join short ones."""
    if inner >= TILE:
        pieces = (inner + TILE - 1) // TILE
        return outer * pieces, 1, pieces
    runs = TILE // inner
    return (outer + runs - 1) // runs, runs, 1


@exact
def _chunks(tiles, channels):
    """Partial results per channel: enough tasks for many cores, a function of the shape only."""
    return max(1, min(tiles, (MAX_CHUNKS + channels - 1) // channels))


@exact
def _tile_moments(x, c, t, runs, pieces, zero):
    """`(count, mean, sum(d), sum(d**2))` of a tile, `d = x - mean` rounded, in `zero`'s dtype."""
    outer, _, inner = x.shape
    if runs == 1:
        start = (t % pieces) * TILE
        run = x[t // pieces, c, start : min(inner, start + TILE)]
        n = run.shape[0]
        shift = rounded(_sum(run, zero) / n, zero)
        first, second = _deviations(run, shift, zero)
    else:
        stop = min(outer, (t + 1) * runs)
        n = (stop - t * runs) * inner
        total = zero
        for a in range(t * runs, stop):
            total += _sum(x[a, c], zero)
        shift = rounded(total / n, zero)
        first = zero
        second = zero
        for a in range(t * runs, stop):
            f, s = _deviations(x[a, c], shift, zero)
            first += f
            second += s
    return np.float64(n), np.float64(shift), np.float64(first), np.float64(second)


@exact
def _chunk_moments(x, c, begin, end, runs, pieces):
    """`(count, mean, m2)` of the tiles `begin` to `end` of channel `c`.

    A tile is summed, then its deviations from that (rounded) mean are: the second sum of
    deviations mends the rounding of the first (the corrected two-pass algorithm).
    """
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for t in range(begin, end):
        n, shift, first, second = _tile_moments(x, c, t, runs, pieces, rounded(0, x))
        if doubtful(first, second, n, x):
            n, shift, first, second = _tile_moments(x, c, t, runs, pieces, 0.0)
        mend = first / n
        tile_m2 = max(second - mend * first, 0.0 * second)
        mean, m2 = merge(count, mean, m2, n, shift + mend, tile_m2)
        count += n
    return count, mean, m2


@exact
def _affine_constants(x, mean, invstd, factor, offset):
    """`(power, centre, scale, shift)` for `_affine`: `(x - mean) * invstd * factor + offset`."""
    near = rounded(mean, x)
    power = power_of(invstd, near)
    slope = invstd * factor
    shift = (np.float64(near) - mean) * slope + offset
    centre = rounded(near * power, x)
    return rounded(power, x), centre, rounded(slope / power, x), rounded(shift, x)


@exact
def _gradient_constants(x, mean, invstd, factor, mean_dy, mean_dy_xhat):
    """`(power, centre, of_dy, of_x, shift)` for `_gradient`, see `planes_backward_input`."""
    near = rounded(mean, x)
    power = power_of(invstd, near)
    slope = -invstd * (invstd / power) * mean_dy_xhat
    shift = (np.float64(near) - mean) * power * slope - invstd * mean_dy
    centre = rounded(near * power, x)
    of_dy = rounded(invstd * factor, x)
    return rounded(power, x), centre, of_dy, rounded(slope, x), rounded(shift, x)


@SerialParallelKernel
def planes_moments(x, mean, m2):
    """`x` [A, C, B] -> `mean`, `m2` (C,)."""
    outer, channels, inner = x.shape
    tiles, runs, pieces = _plane_tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    counts = np.empty((channels, chunks))
    means = np.empty((channels, chunks))
    m2s = np.empty((channels, chunks))
    for task in prange(channels * chunks):
        c = task // chunks
        k = task % chunks
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        counts[c, k], means[c, k], m2s[c, k] = _chunk_moments(x, c, begin, end, runs, pieces)
    for c in range(channels):
        count = counts[c, 0]
        mean[c] = means[c, 0]
        m2[c] = m2s[c, 0]
        for k in range(1, chunks):
            mean[c], m2[c] = merge(count, mean[c], m2[c], counts[c, k], means[c, k], m2s[c, k])
            count += counts[c, k]


@SerialParallelKernel
def planes_normalize(x, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`, `x`, `y` [A, C, B]."""
    outer, channels, inner = x.shape
    pieces = (inner + PIECE - 1) // PIECE
    for task in prange(outer * channels * pieces):
        plane = task // pieces
        a = plane // channels
        c = plane % channels
        begin = (task % pieces) * PIECE
        stop = min(inner, begin + PIECE)
        factor = weight[c] if weight.shape[0] else 1.0
        offset = bias[c] if bias.shape[0] else 0.0
        power, centre, scale, shift = _affine_constants(x, mean[c], invstd[c], factor, offset)
        _affine(x[a, c, begin:stop], power, centre, scale, shift, y[a, c, begin:stop])


@exact
def _chunk_products(x, dy, c, mean, invstd, begin, end, runs, pieces):
    """Sums of `dy` and `dy * (x - mean)`, mean rounded, over the tiles `begin` to `end` of `c`."""
    outer, _, inner = x.shape
    near = rounded(mean, x)
    scale = power_of(invstd, near)
    power, centre = rounded(scale, x), rounded(near * scale, x)
    first = 0.0
    second = 0.0
    for t in range(begin, end):
        if runs == 1:
            start = (t % pieces) * TILE
            stop = min(inner, start + TILE)
            a = t // pieces
            f, s = _products(x[a, c, start:stop], dy[a, c, start:stop], power, centre)
            first += f
            second += s
        else:
            for a in range(t * runs, min(outer, (t + 1) * runs)):
                f, s = _products(x[a, c], dy[a, c], power, centre)
                first += f
                second += s
    return first, second / scale


@SerialParallelKernel
def planes_backward_reduce(x, dy, mean, invstd, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * (x - mean)) * invstd`; `x`, `dy` [A, C, B]."""
    outer, channels, inner = x.shape
    tiles, runs, pieces = _plane_tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    firsts = np.empty((channels, chunks))
    seconds = np.empty((channels, chunks))
    for task in prange(channels * chunks):
        c = task // chunks
        k = task % chunks
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        firsts[c, k], seconds[c, k] = _chunk_products(
            x, dy, c, mean[c], invstd[c], begin, end, runs, pieces
        )
    for c in range(channels):
        first = 0.0
        second = 0.0
        for k in range(chunks):
            first += firsts[c, k]
            second += seconds[c, k]
        rest = np.float64(rounded(mean[c], x)) - mean[c]
        sum_dy[c] = first
        sum_dy_xhat[c] = (second + rest * first) * invstd[c]


@SerialParallelKernel
def planes_backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dy - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, all [A, C, B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    """
    outer, channels, inner = x.shape
    pieces = (inner + PIECE - 1) // PIECE
    for task in prange(outer * channels * pieces):
        plane = task // pieces
        a = plane // channels
        c = plane % channels
        begin = (task % pieces) * PIECE
        stop = min(inner, begin + PIECE)
        factor = weight[c] if weight.shape[0] else 1.0
        power, centre, of_dy, of_x, shift = _gradient_constants(
            x, mean[c], invstd[c], factor, mean_dy[c], mean_dy_xhat[c]
        )
        source, grad, target = x[a, c, begin:stop], dy[a, c, begin:stop], dx[a, c, begin:stop]
        _gradient(source, grad, power, centre, of_dy, of_x, shift, target)


# Both steps of a direction, one channel after the other: for a batch that nobody else has a part
# of, whose channel is still in a near cache when the second step comes to it. What they compute
# is bitwise what the two kernels of the direction do.


@SerialParallelKernel
def planes_forward(x, weight, bias, eps, clamp, mean, m2, invstd, y):
    """`planes_moments`, then `planes_normalize` by those; `x`, `y` [A, C, B].

    `invstd = 1 / sqrt(m2 / n + eps)`, with `clamp` `1 / sqrt(max(m2 / n, eps))`.
    """
    outer, channels, inner = x.shape
    tiles, runs, pieces = _plane_tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    for c in prange(channels):
        count, channel_mean, channel_m2 = _chunk_moments(x, c, 0, tiles // chunks, runs, pieces)
        for k in range(1, chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            n, other, other_m2 = _chunk_moments(x, c, begin, end, runs, pieces)
            channel_mean, channel_m2 = merge(count, channel_mean, channel_m2, n, other, other_m2)
            count += n
        mean[c] = channel_mean
        m2[c] = channel_m2
        invstd[c] = invstd_of(channel_m2 / count, eps, clamp)
        factor = weight[c] if weight.shape[0] else 1.0
        offset = bias[c] if bias.shape[0] else 0.0
        power, centre, scale, shift = _affine_constants(x, channel_mean, invstd[c], factor, offset)
        _channel_affine(x, c, power, centre, scale, shift, y)


@SerialParallelKernel
def planes_backward(x, dy, mean, invstd, weight, frozen, sum_dy, sum_dy_xhat, dx):
    """`planes_backward_reduce`, then `planes_backward_input` by those; all [A, C, B].

    `frozen` (C,) bool: where `invstd` is a constant; empty for nowhere.
    """
    outer, channels, inner = x.shape
    tiles, runs, pieces = _plane_tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    count = outer * inner
    for c in prange(channels):
        first = 0.0
        second = 0.0
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            f, s = _chunk_products(x, dy, c, mean[c], invstd[c], begin, end, runs, pieces)
            first += f
            second += s
        rest = np.float64(rounded(mean[c], x)) - mean[c]
        second = (second + rest * first) * invstd[c]
        sum_dy[c] = first
        sum_dy_xhat[c] = second
        factor = weight[c] if weight.shape[0] else 1.0
        mean_dy = first * factor / count
        mean_dy_xhat = second * factor / count
        if frozen.shape[0] and frozen[c]:
            mean_dy_xhat = 0.0
        power, centre, of_dy, of_x, shift = _gradient_constants(
            x, mean[c], invstd[c], factor, mean_dy, mean_dy_xhat
        )
        _channel_gradient(x, dy, c, power, centre, of_dy, of_x, shift, dx)
