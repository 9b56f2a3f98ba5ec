"""Numba CPU kernels for planes `[A, C, B]` (see `syncbn_core.layout`).

Every kernel exists twice from one source: a serial build that releases the GIL, for threads that
fill the cores by themselves, and a parallel build for a single caller. Both give bitwise the same
results with any number of threads, because the shape alone decides how work is cut, and because
the compiler may reorder or contract arithmetic only inside small functions that both builds share
(`builds`).

`x`, `dy`, `y`, `dx` are activations. Per-channel arguments (`mean`, `invstd`, `weight`, `bias`,
sums) are float64 `(C,)`; an empty `weight` or `bias` stands for ones or zeros. `numerics` explains
`power`, `centre` and the coefficients that follow them. `valid` [A, B], uint8, says which elements
of all channels count; others are not read, and are 0 in `y` and `dx`. None: all count.

How work is cut:

    tile    TILE elements of one channel, read twice for its moments while they are in L1: a
            piece of a long run, or several short runs. A run is `x[a, c]`.
    chunk   neighbouring tiles of one channel, summed by one task
    piece   PIECE elements of one run, written by one task
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core._kernels.cpu.activations import activated, incoming, value_of
from syncbn_core._kernels.cpu.builds import SerialParallelKernel, may_contract, may_reorder, strict
from syncbn_core._kernels.cpu.numerics import (
    affine,
    affine_coefficients,
    float32_fails,
    gradient,
    gradient_coefficients,
    kept,
    kept_of,
    merge,
    narrow,
    power_of,
    rounded,
    share,
    unowned,
    valid_part,
    value_or,
    where,
    widen,
    xhat_sum,
)

__all__ = [
    "planes_backward_input",
    "planes_backward_reduce",
    "planes_moments",
    "planes_normalize",
]

TILE = 4096
MAX_CHUNKS = 64  # per channel, at most
PIECE = 16384


# ----------------------------------------------------------------- loops over runs


@may_reorder
def _sum(run, valid, zero):
    """The sum of a run, in the dtype of `zero`."""
    total = zero
    for i in range(run.shape[0]):
        total += where(kept(valid, i), rounded(widen(run[i]), zero), zero)
    return total


@may_reorder
def _deviations(run, valid, shift, zero):
    """`(sum(d), sum(d**2))` with `d = run - shift`, in the dtype of `shift` and `zero`."""
    first = zero
    second = zero
    for i in range(run.shape[0]):
        d = where(kept(valid, i), rounded(widen(run[i]), zero) - shift, zero)
        first += d
        second += d * d
    return first, second


@may_reorder
def _products(x, dy, valid, act, power, centre, scale, shift):
    """`(sum(dz), sum(dz * (x * power - centre)))` of two runs."""
    zero = rounded(0, x)
    first = zero
    second = zero
    for i in range(x.shape[0]):
        g = incoming(act, x[i], dy[i], power, centre, scale, shift)
        first += where(kept(valid, i), g, zero)
        d = widen(value_of(act, x[i])) * power - centre
        second += where(kept(valid, i), g * d, zero)
    return first, second


@may_contract
def _affine(source, valid, act, power, centre, scale, shift, target):
    """Write `y` of one run to `target`."""
    for i in range(source.shape[0]):
        y = activated(act, affine(source[i], power, centre, scale, shift))
        target[i] = narrow(where(kept(valid, i), y, rounded(0, source)), target)


@may_contract
def _gradient(source, grad, valid, act, power, centre, scale, bias, of_dy, of_x, shift, target):
    """Write `dx` of one run to `target`."""
    for i in range(source.shape[0]):
        dz = incoming(act, source[i], grad[i], power, centre, scale, bias)
        dx = gradient(value_of(act, source[i]), dz, power, centre, of_dy, of_x, shift)
        target[i] = narrow(where(kept(valid, i), dx, rounded(0, source)), target)


# ------------------------------------------------------------- how work is cut


@strict
def _tiles(outer, inner):
    """`(tiles per channel, runs per tile, pieces per run)`; `runs` or `pieces` is 1."""
    if inner >= TILE:
        pieces = (inner + TILE - 1) // TILE
        return outer * pieces, 1, pieces
    runs = TILE // inner
    return (outer + runs - 1) // runs, runs, 1


@strict
def _chunks(tiles, channels):
    """Chunks per channel: enough tasks for many cores."""
    return max(1, min(tiles, (MAX_CHUNKS + channels - 1) // channels))


@strict
def _piece(task, channels, inner):
    """`(a, c, begin, end)`: task number `task` of a map writes `x[a, c, begin:end]`."""
    pieces = (inner + PIECE - 1) // PIECE
    plane = task // pieces
    begin = (task % pieces) * PIECE
    return plane // channels, plane % channels, begin, min(inner, begin + PIECE)


@strict
def _map_tasks(x):
    """How many tasks `_piece` cuts `x` into."""
    outer, channels, inner = x.shape
    return outer * channels * ((inner + PIECE - 1) // PIECE)


# -------------------------------------------------------- sums over a chunk


@strict
def _tile_moments(x, valid, c, t, runs, pieces, zero):
    """`(count, shift, sum(d), sum(d**2))` of tile `t` of channel `c`, with `d = x - shift`.

    `shift` is the mean of the tile, rounded to the dtype of `zero`, in which all is computed.
    """
    outer, _, inner = x.shape
    if runs == 1:
        start = (t % pieces) * TILE
        run = x[t // pieces, c, start : min(inner, start + TILE)]
        own = valid_part(valid, (t // pieces, slice(start, min(inner, start + TILE))))
        n = kept_of(own, 0, run.shape[0])
        shift = rounded(_sum(run, own, zero) / max(n, 1), zero)
        first, second = _deviations(run, own, shift, zero)
    else:
        stop = min(outer, (t + 1) * runs)
        n = 0
        total = zero
        for a in range(t * runs, stop):
            n += kept_of(valid_part(valid, a), 0, inner)
            total += _sum(x[a, c], valid_part(valid, a), zero)
        shift = rounded(total / max(n, 1), zero)
        first = zero
        second = zero
        for a in range(t * runs, stop):
            f, s = _deviations(x[a, c], valid_part(valid, a), shift, zero)
            first += f
            second += s
    return np.float64(n), np.float64(shift), np.float64(first), np.float64(second)


@strict
def _chunk_moments(x, valid, c, begin, end, runs, pieces):
    """`(count, mean, m2)` of the tiles `begin` to `end` of channel `c`.

    Each tile is summed for its mean, then its deviations from that mean are summed. Their sum is 0
    but for rounding, and corrects both results (the corrected two-pass algorithm).
    """
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for t in range(begin, end):
        n, shift, first, second = _tile_moments(x, valid, c, t, runs, pieces, rounded(0, x))
        if n == 0:
            continue
        if float32_fails(first, second, n, x):
            n, shift, first, second = _tile_moments(x, valid, c, t, runs, pieces, 0.0)
        correction = first / n
        tile_m2 = max(second - correction * first, 0.0 * second)  # NaN stays NaN
        mean, m2 = merge(count, mean, m2, n, shift + correction, tile_m2)
        count += n
    return count, mean, m2


@strict
def _chunk_products(x, dy, valid, c, act, coefficients, begin, end, runs, pieces):
    """`(sum(dz), sum(dz * (x - rounded_mean)))` of the tiles `begin` to `end` of channel `c`."""
    outer, _, inner = x.shape
    power, centre, scale, shift = coefficients
    first = 0.0
    second = 0.0
    for t in range(begin, end):
        if runs == 1:
            start = (t % pieces) * TILE
            stop = min(inner, start + TILE)
            a = t // pieces
            source, grad = x[a, c, start:stop], dy[a, c, start:stop]
            own = valid_part(valid, (a, slice(start, stop)))
            f, s = _products(source, grad, own, act, power, centre, scale, shift)
            first += f
            second += s
        else:
            for a in range(t * runs, min(outer, (t + 1) * runs)):
                own = valid_part(valid, a)
                f, s = _products(x[a, c], dy[a, c], own, act, power, centre, scale, shift)
                first += f
                second += s
    return first, second / power


# ------------------------------------------------------ coefficients of one channel


@strict
def _affine_arguments(x, mean, invstd, weight, bias):
    """`(power, centre, scale, shift)` of one channel, in the computing dtype of `x`.

    The power stays exact.
    """
    rounded_mean = rounded(mean, x)
    power = rounded(power_of(invstd, rounded_mean), x)
    centre = rounded(rounded_mean * power, x)
    scale, shift = affine_coefficients(mean, rounded_mean, invstd, weight, power)
    return power, centre, rounded(scale, x), rounded(shift + bias, x)


@strict
def _gradient_arguments(x, mean, invstd, weight, mean_dy, mean_dy_xhat, power):
    """`(of_dy, of_x, shift)` of one channel, in the computing dtype of `x`."""
    of_dy, of_x, shift = gradient_coefficients(
        mean, rounded(mean, x), invstd, weight, mean_dy, mean_dy_xhat, power
    )
    return rounded(of_dy, x), rounded(of_x, x), rounded(shift, x)


# -------------------------------------------------------- kernels of one step each


@SerialParallelKernel
def planes_moments(x, valid, mean, m2):
    """Write the moments of `x` [A, C, B] to `mean`, `m2` (C,)."""
    x = unowned(x)
    outer, channels, inner = x.shape
    tiles, runs, pieces = _tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    counts = np.empty((channels, chunks))
    means = np.empty((channels, chunks))
    m2s = np.empty((channels, chunks))
    for task in prange(channels * chunks):
        c, k = task // chunks, task % chunks
        begin, end = share(tiles, k, chunks)
        counts[c, k], means[c, k], m2s[c, k] = _chunk_moments(x, valid, c, begin, end, runs, pieces)
    for c in range(channels):
        count = counts[c, 0]
        mean[c] = means[c, 0]
        m2[c] = m2s[c, 0]
        for k in range(1, chunks):
            if counts[c, k]:
                mean[c], m2[c] = merge(count, mean[c], m2[c], counts[c, k], means[c, k], m2s[c, k])
                count += counts[c, k]


@SerialParallelKernel
def planes_normalize(x, mean, invstd, weight, bias, act, valid, y):
    """`y = act((x - mean) * invstd * weight + bias)`; `x`, `y` [A, C, B]."""
    x, y = unowned(x), unowned(y)
    _, channels, inner = x.shape
    for task in prange(_map_tasks(x)):
        a, c, begin, end = _piece(task, channels, inner)
        power, centre, scale, shift = _affine_arguments(
            x, mean[c], invstd[c], value_or(weight, c, 1.0), value_or(bias, c, 0.0)
        )
        own = valid_part(valid, (a, slice(begin, end)))
        _affine(x[a, c, begin:end], own, act, power, centre, scale, shift, y[a, c, begin:end])


@SerialParallelKernel
def planes_backward_reduce(x, dy, mean, invstd, weight, bias, act, valid, sum_dy, sum_dy_xhat):
    """`sum_dy = sum(dz)`, `sum_dy_xhat = sum(dz * (x - mean)) * invstd`; `x`, `dy` [A, C, B].

    `dz` is dy times the derivative of `act`; only that needs `weight` and `bias`.
    """
    x, dy = unowned(x), unowned(dy)
    outer, channels, inner = x.shape
    tiles, runs, pieces = _tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    firsts = np.empty((channels, chunks))
    seconds = np.empty((channels, chunks))
    for task in prange(channels * chunks):
        c, k = task // chunks, task % chunks
        begin, end = share(tiles, k, chunks)
        coefficients = _affine_arguments(
            x, mean[c], invstd[c], value_or(weight, c, 1.0), value_or(bias, c, 0.0)
        )
        firsts[c, k], seconds[c, k] = _chunk_products(
            x, dy, valid, c, act, coefficients, begin, end, runs, pieces
        )
    for c in range(channels):
        first = 0.0
        second = 0.0
        for k in range(chunks):
            first += firsts[c, k]
            second += seconds[c, k]
        sum_dy[c] = first
        sum_dy_xhat[c] = xhat_sum(first, second, mean[c], rounded(mean[c], x), invstd[c])


@SerialParallelKernel
def planes_backward_input(x, dy, mean, invstd, weight, bias, act, valid, mean_dy, mean_dy_xhat, dx):
    """`dx = invstd * (weight * dz - mean_dy - (x - mean) * invstd * mean_dy_xhat)`, all [A, C, B].

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times `weight`, over the total count.
    `dz`, `bias`: as in `planes_backward_reduce`.
    """
    x, dy, dx = unowned(x), unowned(dy), unowned(dx)
    _, channels, inner = x.shape
    for task in prange(_map_tasks(x)):
        a, c, begin, end = _piece(task, channels, inner)
        w = value_or(weight, c, 1.0)
        power, centre, scale, of_z = _affine_arguments(
            x, mean[c], invstd[c], w, value_or(bias, c, 0.0)
        )
        of_dy, of_x, shift = _gradient_arguments(
            x, mean[c], invstd[c], w, mean_dy[c], mean_dy_xhat[c], power
        )
        source, grad, target = x[a, c, begin:end], dy[a, c, begin:end], dx[a, c, begin:end]
        own = valid_part(valid, (a, slice(begin, end)))
        _gradient(source, grad, own, act, power, centre, scale, of_z, of_dy, of_x, shift, target)
