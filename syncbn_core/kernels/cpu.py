"""Numba CPU kernels for `[A, C, B]` planes and `[A, C]` rows (see `syncbn_core.layout`).

Every kernel exists twice from one source: serial and `nogil`, for threads that fill the cores
by themselves, and `parallel` for a single caller. Both give bitwise the same result with any
number of threads: how work is cut depends on the shape only, and what the compiler may reorder or
contract is in functions of its own, compiled once for both; around them arithmetic is strict.

Per-channel arguments (`mean`, `invstd`, `weight`, `bias`, sums) are float64 `(C,)`; an empty
`weight` or `bias` stands for ones or zeros. A float32 activation minus a mean of 1e6 rounded
to float32 would be off by 0.03: kernels subtract the rounded mean, which is exact near it,
and carry the remainder, known in float64, in the additive constant.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import prange

# Sums vectorise only when they may be reordered. Never plain `fastmath=True`: it assumes
# that NaN and infinity do not occur and drops them.
SUM_FLAGS = {"reassoc", "contract", "nsz", "arcp"}
MAP_FLAGS = {"contract"}

TILE = 4096  # elements read twice while they are in L1
MAX_CHUNKS = 64  # independent partial results per channel, at most
PIECE = 16384  # elements of one plane written by one task


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with an on-disk cache where there is a place to write it."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable cache directory, for example a read-only container
            return numba.njit(**options)(function)

    return decorate


class Twins:
    """The serial and the parallel build of one kernel; each compiles when first called."""

    def __init__(self, function: Callable[..., None]) -> None:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        self.serial = _jit(**options)(function)
        self.parallel = _jit(parallel=True, **options)(_renamed(function, "_parallel"))


def _renamed(function: Callable[..., None], suffix: str) -> Callable[..., None]:
    """A copy under another name: Numba's disk cache tells builds apart by name, not by options."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__ + suffix)
    copy.__qualname__ = function.__qualname__ + suffix
    copy.__module__ = function.__module__
    return copy


_sums = _jit(nogil=True, error_model="numpy", fastmath=SUM_FLAGS)
_maps = _jit(nogil=True, error_model="numpy", fastmath=MAP_FLAGS)
_exact = _jit(nogil=True, error_model="numpy")


@_sums
def _sum(run):
    total = run.dtype.type(0)
    for i in range(run.shape[0]):
        total += run[i]
    return total


@_sums
def _deviations(run, shift):
    """Sums of `d` and `d**2` with `d = run - shift`."""
    first = run.dtype.type(0)
    second = run.dtype.type(0)
    for i in range(run.shape[0]):
        d = run[i] - shift
        first += d
        second += d * d
    return first, second


@_sums
def _products(x, dy, shift):
    """Sums of `dy` and `dy * (x - shift)`."""
    first = x.dtype.type(0)
    second = x.dtype.type(0)
    for i in range(x.shape[0]):
        g = dy[i]
        first += g
        second += g * (x[i] - shift)
    return first, second


@_maps
def _affine(source, near, scale, shift, target):
    """`target = (source - near) * scale + shift` over one run of one channel."""
    for i in range(source.shape[0]):
        target[i] = (source[i] - near) * scale + shift


@_maps
def _gradient(source, grad, near, of_dy, of_x, shift, target):
    """`target = grad * of_dy + (source - near) * of_x + shift` over one run of one channel."""
    for i in range(source.shape[0]):
        target[i] = grad[i] * of_dy + ((source[i] - near) * of_x + shift)


@_maps
def _channel_affine(x, c, near, scale, shift, y):
    """`_affine` over all runs of channel `c`: for short ones a call each would cost as much."""
    for a in range(x.shape[0]):
        source = x[a, c]
        target = y[a, c]
        for i in range(source.shape[0]):
            target[i] = (source[i] - near) * scale + shift


@_maps
def _channel_gradient(x, dy, c, near, of_dy, of_x, shift, dx):
    """`_gradient` over all runs of channel `c`."""
    for a in range(x.shape[0]):
        source = x[a, c]
        grad = dy[a, c]
        target = dx[a, c]
        for i in range(source.shape[0]):
            target[i] = grad[i] * of_dy + ((source[i] - near) * of_x + shift)


@_maps
def _row_affine(source, near, scale, shift, target):
    """`_affine` over one row, a channel per element."""
    for c in range(source.shape[0]):
        target[c] = (source[c] - near[c]) * scale[c] + shift[c]


@_maps
def _row_gradient(source, grad, near, of_dy, of_x, shift, target):
    """`_gradient` over one row, a channel per element."""
    for c in range(source.shape[0]):
        target[c] = grad[c] * of_dy[c] + ((source[c] - near[c]) * of_x[c] + shift[c])


@_exact
def _merge(count, mean, m2, tile_count, tile_mean, tile_m2):
    """Chan's merge of one channel: the formula of `syncbn_core.moments`, for scalars."""
    total = count + tile_count
    delta = tile_mean - mean
    share = tile_count / total
    return mean + delta * share, m2 + tile_m2 + delta * delta * (count * share)


@_exact
def _plane_tiles(outer, inner):
    """`(tiles per channel, runs per tile, pieces per run)`: cut long runs, join short ones."""
    if inner >= TILE:
        pieces = (inner + TILE - 1) // TILE
        return outer * pieces, 1, pieces
    runs = TILE // inner
    return (outer + runs - 1) // runs, runs, 1


@_exact
def _chunks(tiles, channels):
    """Partial results per channel: enough tasks for many cores, a function of the shape only."""
    return max(1, min(tiles, (MAX_CHUNKS + channels - 1) // channels))


@_exact
def _chunk_moments(x, c, begin, end, runs, pieces):
    """`(count, mean, m2)` of the tiles `begin` to `end` of channel `c`.

    A tile is summed, then its deviations from that (rounded) mean are: the second sum of
    deviations mends the rounding of the first (the corrected two-pass algorithm).
    """
    outer, _, inner = x.shape
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for t in range(begin, end):
        if runs == 1:
            start = (t % pieces) * TILE
            run = x[t // pieces, c, start : min(inner, start + TILE)]
            n = run.shape[0]
            shift = x.dtype.type(_sum(run) / n)
            first, second = _deviations(run, shift)
        else:
            stop = min(outer, (t + 1) * runs)
            n = (stop - t * runs) * inner
            total = x.dtype.type(0)
            for a in range(t * runs, stop):
                total += _sum(x[a, c])
            shift = x.dtype.type(total / n)
            first = x.dtype.type(0)
            second = x.dtype.type(0)
            for a in range(t * runs, stop):
                f, s = _deviations(x[a, c], shift)
                first += f
                second += s
        mend = np.float64(first) / n
        tile_m2 = max(np.float64(second) - mend * first, 0.0 * second)
        mean, m2 = _merge(count, mean, m2, np.float64(n), np.float64(shift) + mend, tile_m2)
        count += n
    return count, mean, m2


@Twins
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
            mean[c], m2[c] = _merge(count, mean[c], m2[c], counts[c, k], means[c, k], m2s[c, k])
            count += counts[c, k]


@Twins
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
        slope = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        near = x.dtype.type(mean[c])
        scale = x.dtype.type(slope)
        rest = (np.float64(near) - mean[c]) * slope
        shift = x.dtype.type(rest + bias[c] if bias.shape[0] else rest)
        _affine(x[a, c, begin:stop], near, scale, shift, y[a, c, begin:stop])


@_exact
def _chunk_products(x, dy, c, near, begin, end, runs, pieces):
    """Sums of `dy` and `dy * (x - near)` over the tiles `begin` to `end` of channel `c`."""
    outer, _, inner = x.shape
    first = 0.0
    second = 0.0
    for t in range(begin, end):
        if runs == 1:
            start = (t % pieces) * TILE
            stop = min(inner, start + TILE)
            a = t // pieces
            f, s = _products(x[a, c, start:stop], dy[a, c, start:stop], near)
            first += f
            second += s
        else:
            for a in range(t * runs, min(outer, (t + 1) * runs)):
                f, s = _products(x[a, c], dy[a, c], near)
                first += f
                second += s
    return first, second


@Twins
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
        near = x.dtype.type(mean[c])
        begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
        firsts[c, k], seconds[c, k] = _chunk_products(x, dy, c, near, begin, end, runs, pieces)
    for c in range(channels):
        first = 0.0
        second = 0.0
        for k in range(chunks):
            first += firsts[c, k]
            second += seconds[c, k]
        rest = np.float64(x.dtype.type(mean[c])) - mean[c]
        sum_dy[c] = first
        sum_dy_xhat[c] = (second + rest * first) * invstd[c]


@Twins
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
        near = x.dtype.type(mean[c])
        slope = -invstd[c] * invstd[c] * mean_dy_xhat[c]
        rest = (np.float64(near) - mean[c]) * slope - invstd[c] * mean_dy[c]
        of_dy = x.dtype.type(invstd[c] * weight[c] if weight.shape[0] else invstd[c])
        of_x = x.dtype.type(slope)
        shift = x.dtype.type(rest)
        source, grad, target = x[a, c, begin:stop], dy[a, c, begin:stop], dx[a, c, begin:stop]
        _gradient(source, grad, near, of_dy, of_x, shift, target)


# Both steps of a direction, one channel after the other: for a batch that nobody else has a part
# of, whose channel is still in a near cache when the second step comes to it. What they compute
# is bitwise what the two kernels of the direction do.


@Twins
def planes_forward(x, weight, bias, eps, clamp, mean, m2, y):
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
            channel_mean, channel_m2 = _merge(count, channel_mean, channel_m2, n, other, other_m2)
            count += n
        mean[c] = channel_mean
        m2[c] = channel_m2
        var = channel_m2 / count
        wide = (eps if var < eps else var) if clamp else var + eps
        invstd = 1.0 / np.sqrt(wide)
        slope = invstd * weight[c] if weight.shape[0] else invstd
        near = x.dtype.type(channel_mean)
        scale = x.dtype.type(slope)
        rest = (np.float64(near) - channel_mean) * slope
        shift = x.dtype.type(rest + bias[c] if bias.shape[0] else rest)
        _channel_affine(x, c, near, scale, shift, y)


@Twins
def planes_backward(x, dy, mean, invstd, weight, frozen, sum_dy, sum_dy_xhat, dx):
    """`planes_backward_reduce`, then `planes_backward_input` by those; all [A, C, B].

    `frozen` (C,) bool: where `invstd` is a constant; empty for nowhere.
    """
    outer, channels, inner = x.shape
    tiles, runs, pieces = _plane_tiles(outer, inner)
    chunks = _chunks(tiles, channels)
    count = outer * inner
    for c in prange(channels):
        near = x.dtype.type(mean[c])
        first = 0.0
        second = 0.0
        for k in range(chunks):
            begin, end = tiles * k // chunks, tiles * (k + 1) // chunks
            f, s = _chunk_products(x, dy, c, near, begin, end, runs, pieces)
            first += f
            second += s
        off = np.float64(near) - mean[c]
        second = (second + off * first) * invstd[c]
        sum_dy[c] = first
        sum_dy_xhat[c] = second
        factor = weight[c] if weight.shape[0] else 1.0
        mean_dy = first * factor / count
        mean_dy_xhat = second * factor / count
        if frozen.shape[0] and frozen[c]:
            mean_dy_xhat = 0.0
        slope = -invstd[c] * invstd[c] * mean_dy_xhat
        rest = off * slope - invstd[c] * mean_dy
        of_dy = x.dtype.type(invstd[c] * factor)
        of_x = x.dtype.type(slope)
        shift = x.dtype.type(rest)
        _channel_gradient(x, dy, c, near, of_dy, of_x, shift, dx)


ROW_TILE = 16384  # elements of a tile of whole rows
MIN_ROWS = 32
MAX_ROWS = 256  # a channel is summed one row after the other: longer sums lose digits
ROW_CHUNKS = 32


@_exact
def _row_tiles(rows, channels):
    """`(rows per tile, tiles, chunks of tiles)`, a function of the shape only."""
    height = max(MIN_ROWS, min(MAX_ROWS, ROW_TILE // channels))
    tiles = (rows + height - 1) // height
    return height, tiles, max(1, min(tiles, ROW_CHUNKS))


@_sums
def _rows_add(x, shift, first, second):
    """`first += sum(d)`, `second += sum(d**2)` with `d = x - shift`, over the rows of `x`."""
    for r in range(x.shape[0]):
        run = x[r]
        for c in range(run.shape[0]):
            d = run[c] - shift[c]
            first[c] += d
            second[c] += d * d


@_sums
def _rows_add_products(x, dy, shift, first, second):
    for r in range(x.shape[0]):
        run = x[r]
        grad = dy[r]
        for c in range(run.shape[0]):
            g = grad[c]
            first[c] += g
            second[c] += g * (run[c] - shift[c])


@_sums
def _rows_sum(x, total):
    for r in range(x.shape[0]):
        run = x[r]
        for c in range(run.shape[0]):
            total[c] += run[c]


@Twins
def rows_moments(x, mean, m2):
    """`x` [R, C] -> `mean`, `m2` (C,): `planes_moments` with all channels abreast."""
    rows, channels = x.shape
    height, tiles, chunks = _row_tiles(rows, channels)
    counts = np.empty(chunks)
    means = np.zeros((chunks, channels))
    m2s = np.zeros((chunks, channels))
    for k in prange(chunks):
        count = 0.0
        for t in range(tiles * k // chunks, tiles * (k + 1) // chunks):
            tile = x[t * height : min(rows, (t + 1) * height)]
            n = np.float64(tile.shape[0])
            shift = np.zeros(channels, x.dtype)
            first = np.zeros(channels, x.dtype)
            second = np.zeros(channels, x.dtype)
            _rows_sum(tile, shift)
            for c in range(channels):
                shift[c] /= tile.shape[0]
            _rows_add(tile, shift, first, second)
            for c in range(channels):
                mend = np.float64(first[c]) / n
                tile_m2 = max(np.float64(second[c]) - mend * first[c], 0.0 * second[c])
                means[k, c], m2s[k, c] = _merge(
                    count, means[k, c], m2s[k, c], n, np.float64(shift[c]) + mend, tile_m2
                )
            count += n
        counts[k] = count
    count = counts[0]
    mean[:] = means[0]
    m2[:] = m2s[0]
    for k in range(1, chunks):
        for c in range(channels):
            mean[c], m2[c] = _merge(count, mean[c], m2[c], counts[k], means[k, c], m2s[k, c])
        count += counts[k]


@Twins
def rows_normalize(x, mean, invstd, weight, bias, y):
    """`y = (x - mean) * invstd * weight + bias`, `x`, `y` [R, C]."""
    rows, channels = x.shape
    near = np.empty(channels, x.dtype)
    scale = np.empty(channels, x.dtype)
    shift = np.empty(channels, x.dtype)
    for c in range(channels):
        slope = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        near[c] = mean[c]
        scale[c] = slope
        rest = (np.float64(near[c]) - mean[c]) * slope
        shift[c] = rest + bias[c] if bias.shape[0] else rest
    for r in prange(rows):
        _row_affine(x[r], near, scale, shift, y[r])


@Twins
def rows_backward_reduce(x, dy, mean, invstd, sum_dy, sum_dy_xhat):
    """`planes_backward_reduce` for `x`, `dy` [R, C]."""
    rows, channels = x.shape
    height, tiles, chunks = _row_tiles(rows, channels)
    near = np.empty(channels, x.dtype)
    for c in range(channels):
        near[c] = mean[c]
    firsts = np.zeros((chunks, channels))
    seconds = np.zeros((chunks, channels))
    for k in prange(chunks):
        for t in range(tiles * k // chunks, tiles * (k + 1) // chunks):
            stop = min(rows, (t + 1) * height)
            first = np.zeros(channels, x.dtype)
            second = np.zeros(channels, x.dtype)
            _rows_add_products(x[t * height : stop], dy[t * height : stop], near, first, second)
            for c in range(channels):
                firsts[k, c] += first[c]
                seconds[k, c] += second[c]
    for c in range(channels):
        sum_dy[c] = 0.0
        sum_dy_xhat[c] = 0.0
    for k in range(chunks):
        for c in range(channels):
            sum_dy[c] += firsts[k, c]
            sum_dy_xhat[c] += seconds[k, c]
    for c in range(channels):
        rest = np.float64(near[c]) - mean[c]
        sum_dy_xhat[c] = (sum_dy_xhat[c] + rest * sum_dy[c]) * invstd[c]


@Twins
def rows_backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, dx):
    """`planes_backward_input` for `x`, `dy`, `dx` [R, C]."""
    rows, channels = x.shape
    near = np.empty(channels, x.dtype)
    of_dy = np.empty(channels, x.dtype)
    of_x = np.empty(channels, x.dtype)
    shift = np.empty(channels, x.dtype)
    for c in range(channels):
        near[c] = mean[c]
        slope = -invstd[c] * invstd[c] * mean_dy_xhat[c]
        of_dy[c] = invstd[c] * weight[c] if weight.shape[0] else invstd[c]
        of_x[c] = slope
        shift[c] = (np.float64(near[c]) - mean[c]) * slope - invstd[c] * mean_dy[c]
    for r in prange(rows):
        _row_gradient(x[r], dy[r], near, of_dy, of_x, shift, dx[r])
