"""Numba CPU kernels for planes `[A, C, B]` (see `syncbn_core.layout`).

Every kernel exists twice from one source: a serial build that releases the GIL, for threads that
fill the cores by themselves, and a parallel build for a single caller. Both give bitwise the same
results with any number of threads, because the shape alone decides how work is cut, and because
the compiler may reorder or contract arithmetic only inside small functions that both builds share
(`builds`).

Without dy a kernel is one of forward, see `elements`. `table`: count, mean, m2, invstd of the batch
`(3 C + 1,)`; `weight`, `bias`: `(C,)` or `(0,)`; all float64. `valid` `(A, B)`, uint8: which
elements of all channels count; None: all do.

    tile    TILE elements of one channel, read twice for its moments while they are in L1: a
            piece of a long run, or several short runs. A run is `x[a, c]`.
    chunk   neighbouring tiles of one channel, summed by one task
    piece   PIECE elements of one run, written by one task
"""

from __future__ import annotations

import numpy as np
from numba import prange

from syncbn_core._kernels.cpu.builds import SerialParallelKernel, strict
from syncbn_core._kernels.cpu.channels import coefficients, finish_products
from syncbn_core._kernels.cpu.elements import float64_sums, sums_of_run, write_run
from syncbn_core._kernels.cpu.numerics import (
    at,
    float32_fails,
    kept_of,
    larger,
    merge,
    rounded,
    scratch,
    share,
    smaller,
    unowned,
)

TILE = 4096
MAX_CHUNKS = 64  # per channel, at most
PIECE = 16384


@strict
def _tiles(outer, channels, inner):
    """`(tiles per channel, runs per tile, pieces per run, chunks per channel)`."""
    runs, pieces = larger(1, TILE // inner), (inner + TILE - 1) // TILE
    tiles = (outer + runs - 1) // runs * pieces
    return tiles, runs, pieces, larger(1, smaller(tiles, (MAX_CHUNKS + channels - 1) // channels))


@strict
def _tile(x, t, runs, pieces):
    """`(top, bottom, left, right)`: tile `t` of a channel is `x[top:bottom, c, left:right]`."""
    top, left = t // pieces * runs, t % pieces * TILE
    return top, smaller(x.shape[0], top + runs), left, smaller(x.shape[2], left + TILE)


@strict
def _tile_sums(x, dy, valid, c, tile, act, m, s, scale, shift):
    """Both sums of a tile of channel `c`, those of its runs added in float64."""
    top, bottom, left, right = tile
    first = second = 0.0
    for a in range(top, bottom):
        run = slice(left, right)
        p, q = sums_of_run(
            x[a, c, run], at(dy, (a, c, run)), at(valid, (a, run)), act, m, s, scale, shift,
        )  # fmt: skip
        first += p
        second += q
    return first, second


@strict
def _float64_moments(x, valid, c, tile, n):
    """`(mean, sum(d), sum(d**2))` of a tile, `d = x - mean`, for values too large for float32."""
    top, bottom, left, right = tile
    mean = first = second = 0.0
    for _ in range(2):  # around 0, then around the mean
        mean += first / n
        first = second = 0.0
        for a in range(top, bottom):
            p, q = float64_sums(x[a, c, left:right], at(valid, (a, slice(left, right))), mean)
            first += p
            second += q
    return mean, first, second


@strict
def _chunk_moments(x, valid, c, begin, end, runs, pieces):
    """`(count, mean, m2)` of the tiles `begin` to `end` of channel `c`.

    The deviations of a tile from its rounded mean add up to 0 but for rounding; their sum corrects
    both results (the corrected two-pass algorithm).
    """
    count = mean = m2 = 0.0
    for t in range(begin, end):
        tile = _tile(x, t, runs, pieces)
        n = float(kept_of(valid, tile))
        total, _ = _tile_sums(x, None, valid, c, tile, None, None, None, None, None)
        rounded_mean = rounded(total / larger(n, 1.0), x)
        d, dd = _tile_sums(x, None, valid, c, tile, None, rounded_mean, None, None, None)
        m = np.float64(rounded_mean)
        if n > 0 and float32_fails(d, dd, n, x):
            m, d, dd = _float64_moments(x, valid, c, tile, n)
        if n > 0:
            tile_m2 = larger(dd - d / n * d, 0.0 * dd)  # NaN stays NaN
            mean, m2 = merge(count, mean, m2, n, m + d / n, tile_m2)
            count += n
    return count, mean, m2


@SerialParallelKernel
def planes_sums(x, dy, table, weight, bias, act, valid, sums):
    """Write `sums` `(2, C)`: mean and m2 of x; with dy `sum(dz)` and `sum(dz * xhat)`."""
    x, grad = unowned(x), unowned(dy)
    outer, channels, inner = x.shape
    tiles, runs, pieces, chunks = _tiles(outer, channels, inner)
    parts = scratch((channels, chunks, 3), 0.0)
    if dy is not None:
        k, s = coefficients(x, table, weight, bias, None)
    for task in prange(channels * chunks):
        c, part = task // chunks, task % chunks
        begin, end = share(tiles, part, chunks)
        if dy is None:
            count, mean, m2 = _chunk_moments(x, valid, c, begin, end, runs, pieces)
            parts[c, part, 0], parts[c, part, 1], parts[c, part, 2] = count, mean, m2
        else:
            parts[c, part, 1] = parts[c, part, 2] = 0.0
            for t in range(begin, end):
                p, q = _tile_sums(
                    x, grad, valid, c, _tile(x, t, runs, pieces), act, k[0, c], s, k[1, c], k[2, c]
                )
                parts[c, part, 1] += p
                parts[c, part, 2] += q
    for c in range(channels):
        count = first = second = 0.0
        for part in range(chunks):
            n, p, q = parts[c, part, 0], parts[c, part, 1], parts[c, part, 2]
            if dy is not None:
                first += p
                second += q
            elif n > 0:
                first, second = merge(count, first, second, n, p, q)
                count += n
        sums[0, c], sums[1, c] = first, second
    if dy is not None:
        finish_products(x, table, k, s, sums)


@SerialParallelKernel
def planes_write(x, dy, table, weight, bias, act, valid, means, target):
    """Write y; with dy and `means` (see `coefficients`) dx."""
    x, grad, target = unowned(x), unowned(dy), unowned(target)
    outer, channels, inner = x.shape
    k, s = coefficients(x, table, weight, bias, means)
    pieces = (inner + PIECE - 1) // PIECE
    for task in prange(outer * channels * pieces):
        a, c, begin = task // pieces // channels, task // pieces % channels, task % pieces * PIECE
        run = slice(begin, smaller(inner, begin + PIECE))
        write_run(
            x[a, c, run], at(grad, (a, c, run)), at(valid, (a, run)), act,
            k[0, c], s, k[1, c], k[2, c], k[3, c], k[4, c], k[5, c], target[a, c, run],
        )  # fmt: skip
