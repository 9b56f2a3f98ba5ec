"""CUDA kernels for rows: `[R, C]`, a row holds all channels (channels_last, `(N, C)`).

A thread has `lanes` neighbouring channels and walks down the rows. A block is `width` threads
wide, which is a tile of channels, and as many rows high as its threads allow. Where C is not a
multiple of the numbers in 16 bytes, a thread has one channel. Reductions: grid (tiles, splits of
the rows); elementwise kernels: grid (tiles, pieces of the rows), last piece first.
"""

from __future__ import annotations

from numba import cuda, types

from syncbn_core.kernels.cuda.constants import UNROLL
from syncbn_core.kernels.cuda.memory import (
    KINDS,
    barrier,
    device,
    each_lane,
    fence,
    load_f64,
    number_access,
    quotient,
    reset,
    small_quotient,
    store_f64,
    vector_access,
    zeros_of,
)
from syncbn_core.kernels.cuda.statistics import (
    add_up,
    gradient_coefficients,
    input_gradient,
    is_last_block,
    merged,
    normalize_coefficients,
    normalized,
    write_moments,
    write_sums,
)

float32, float64, int32, int64 = types.float32, types.float64, types.int32, types.int64


@device
def _partial(partials, at, span, exists):
    """Two sums of a channel that another block has stored; zeros if `exists` is false."""
    if not exists:
        return 0.0, 0.0
    return load_f64(partials, at), load_f64(partials, at + span)


@device
def _store_partials(partials, number, span, tid, firsts, seconds):
    """Store the first `span` shared numbers as partial sums `number`, for other blocks."""
    if tid < span:
        at = number * 2 * span + tid
        store_f64(partials, at, firsts[tid])
        store_f64(partials, at + span, seconds[tid])
        fence()
    barrier()  # thread 0 counts the block after all have stored


@device
def _add_partials(partials, number, size, span, tid, threads, firsts, seconds):
    """Sums over `size` partial sums from `number` on, into the first `span` shared numbers."""
    height = small_quotient(threads, span)
    row = small_quotient(tid, span)
    channel = tid - row * span
    step = height * 2 * span
    f0 = f1 = f2 = f3 = 0.0
    s0 = s1 = s2 = s3 = 0.0
    if row < height:
        # 32 bits, because the compiler divides by the step to unroll the loop
        k, end = int32(row), int32(size)
        at = (number + row) * 2 * span + channel
        while k < end:  # four loads at once, because few other threads hide their latency
            a0, b0 = _partial(partials, at, span, True)
            a1, b1 = _partial(partials, at + step, span, k + height < end)
            a2, b2 = _partial(partials, at + 2 * step, span, k + 2 * height < end)
            a3, b3 = _partial(partials, at + 3 * step, span, k + 3 * height < end)
            f0, f1, f2, f3 = f0 + a0, f1 + a1, f2 + a2, f3 + a3
            s0, s1, s2, s3 = s0 + b0, s1 + b1, s2 + b2, s3 + b3
            k = int32(k + 4 * height)
            at += 4 * step
        firsts[tid] = (f0 + f1) + (f2 + f3)
        seconds[tid] = (s0 + s1) + (s2 + s3)
    add_up(firsts, seconds, tid, row, 1, span, height)


@device
def _sum_splits(
    partials, block_counters, tile, k, splits, group, span, tid, threads, firsts, seconds, flag
):
    """Sums over all splits of a tile, in the first `span` shared numbers of the last block.

    Returns whether this block is the last one. Splits are added up in groups, by the last block
    of each group; groups by the last of those blocks. One block alone would take as long for all
    splits as all blocks took for the activation.
    """
    groups = small_quotient(splits + group - 1, group)
    first = tile * (splits + groups)  # of the partial sums of this tile
    counter = tile * (groups + 1)
    own = small_quotient(k, group)
    members = min(group, splits - own * group)
    _store_partials(partials, first + k, span, tid, firsts, seconds)
    if not is_last_block(block_counters, counter + own, members, tid, flag):
        return False
    if tid == 0:
        reset(block_counters, counter + own)
    _add_partials(partials, first + own * group, members, span, tid, threads, firsts, seconds)
    if groups == 1:
        return True
    _store_partials(partials, first + splits + own, span, tid, firsts, seconds)
    if not is_last_block(block_counters, counter + groups, groups, tid, flag):
        return False
    if tid == 0:
        reset(block_counters, counter + groups)
    _add_partials(partials, first + splits, groups, span, tid, threads, firsts, seconds)
    return True


@device
def _sum_threads(own_firsts, own_seconds, lanes, tid, row, width, height, firsts, seconds):
    """Sums over the rows of the block; thread `tid` finds those of channel `tid` of the tile."""
    if row < height:
        for v in range(lanes):
            firsts[tid * lanes + v] = own_firsts[v]
            seconds[tid * lanes + v] = own_seconds[v]
    add_up(firsts, seconds, tid, row, lanes, width, height)
    if lanes > 1:
        barrier()  # a thread reads a channel that another one has summed


def rows_moments(dtype, lanes, threads):
    """Packed moments of x; grid (tiles, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    share = work(1 / UNROLL)
    zeros = zeros_of(lanes, work)
    numbers = threads * lanes

    def kernel(x, rows, channels, width, splits, group, partials, block_counters, moments):
        firsts = cuda.shared.array(numbers, float64)
        seconds = cuda.shared.array(numbers, float64)
        flag = cuda.shared.array(1, int32)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        pivots = cuda.local.array(lanes, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        height = small_quotient(int64(threads), width)
        row = small_quotient(tid, width)
        base = (tile * width + tid - row * width) * lanes  # the first channel of this thread
        active = row < height and base < channels
        for v in range(lanes):
            own_firsts[v] = 0.0
            own_seconds[v] = 0.0
            pivots[v] = work(0)
        if active:
            for v in range(lanes):
                pivots[v] = load_one(x, base + v)
            stop = quotient(rows * (k + 1), splits)
            r = quotient(rows * k, splits) + row
            step = height * channels
            at = r * channels + base
            while r < stop:
                has1, has2 = r + height < stop, r + 2 * height < stop
                has3 = r + 3 * height < stop
                v0 = load(x, at)
                v1 = load(x, at + step) if has1 else zeros()
                v2 = load(x, at + 2 * step) if has2 else zeros()
                v3 = load(x, at + 3 * step) if has3 else zeros()
                count = int32(1) + int32(has1) + int32(has2) + int32(has3)
                portion = share if has3 else work(1) / work(count)
                n = float64(count)
                for v in range(lanes):
                    mean = ((v0[v] + v1[v]) + (v2[v] + v3[v])) * portion
                    d0 = v0[v] - mean
                    d1 = v1[v] - mean if has1 else work(0)
                    d2 = v2[v] - mean if has2 else work(0)
                    d3 = v3[v] - mean if has3 else work(0)
                    f = float64((d0 + d1) + (d2 + d3))
                    s = float64((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3))
                    shift = float64(mean) - float64(pivots[v])
                    own_firsts[v] += f + n * shift
                    own_seconds[v] += s + shift * (f + f + n * shift)
                r += UNROLL * height
                at += UNROLL * step
        _sum_threads(own_firsts, own_seconds, lanes, tid, row, width, height, firsts, seconds)
        span = width * lanes
        block = span, tid, int64(threads), firsts, seconds, flag
        if splits > 1:
            if not _sum_splits(partials, block_counters, tile, k, splits, group, *block):
                return
        c = tile * span + tid
        if tid < span and c < channels:
            pivot = float64(load_one(x, c))
            write_moments(moments, channels, c, float64(rows), pivot, firsts[tid], seconds[tid])

    return kernel


def rows_backward_reduce(dtype, lanes, threads):
    """Sums of dy and `dy * xhat`, and the gradients of weight and bias; grid (tiles, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    zeros = zeros_of(lanes, work)
    numbers = threads * lanes

    def kernel(
        x,
        dy,
        rows,
        channels,
        width,
        splits,
        group,
        partials,
        block_counters,
        statistics,
        weight,
        weight_code,
        gradient_code,
        sums,
        grad_weight,
        grad_bias,
    ):
        firsts = cuda.shared.array(numbers, float64)
        seconds = cuda.shared.array(numbers, float64)
        flag = cuda.shared.array(1, int32)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        rounded_means = cuda.local.array(lanes, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        height = small_quotient(int64(threads), width)
        row = small_quotient(tid, width)
        base = (tile * width + tid - row * width) * lanes  # the first channel of this thread
        active = row < height and base < channels
        for v in range(lanes):
            own_firsts[v] = 0.0
            own_seconds[v] = 0.0
            rounded_means[v] = work(0)
        if active:
            for v in range(lanes):
                rounded_means[v] = work(load_f64(statistics, 1 + base + v))
            stop = quotient(rows * (k + 1), splits)
            r = quotient(rows * k, splits) + row
            step = height * channels
            at = r * channels + base
            while r < stop:
                more = r + height < stop
                v0, g0 = load(x, at), load(dy, at)
                v1, g1 = (load(x, at + step), load(dy, at + step)) if more else (zeros(), zeros())
                for v in range(lanes):
                    # a missing row has dy = 0, and adds nothing
                    d1 = v1[v] - rounded_means[v] if more else work(0)
                    own_firsts[v] += float64(g0[v] + g1[v])
                    own_seconds[v] += float64(g0[v] * (v0[v] - rounded_means[v]) + g1[v] * d1)
                r += 2 * height
                at += 2 * step
        _sum_threads(own_firsts, own_seconds, lanes, tid, row, width, height, firsts, seconds)
        span = width * lanes
        block = span, tid, int64(threads), firsts, seconds, flag
        if splits > 1:
            if not _sum_splits(partials, block_counters, tile, k, splits, group, *block):
                return
        c = tile * span + tid
        if tid < span and c < channels:
            rounded_mean = float64(work(load_f64(statistics, 1 + c)))
            write_sums(
                c,
                channels,
                rounded_mean,
                firsts[tid],
                seconds[tid],
                statistics,
                weight,
                weight_code,
                gradient_code,
                sums,
                grad_weight,
                grad_bias,
            )

    return kernel


@device
def _piece(tid, tile, k, rows, channels, width, piece, lanes, threads):
    """`(column, r, height, stop, at, step)`: the numbers of piece `k` that a thread takes.

    They are its channels, from `column` of the tile on, in the rows `r`, `r + height`, ... below
    `stop` of the piece; the first is number `at` of x, and from row to row it is `step`.
    """
    height = small_quotient(threads, width)
    row = small_quotient(tid, width)
    column = (tid - row * width) * lanes
    base = tile * (width * lanes) + column
    at = (k * piece + row) * channels + base
    # 32 bits, because the compiler divides by the step to unroll the loop
    stop = int32(min(piece, rows - k * piece) if row < height and base < channels else 0)
    return column, int32(row), int32(height), stop, at, height * channels


def rows_normalize(dtype, lanes, threads):
    """`planes_normalize` for rows; `piece` rows per block.

    Without rows it only writes statistics and updates running ones.
    """
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    @device
    def result(v, x, rounded_means, scales, shifts):
        return normalized(x[v], rounded_means[v], scales[v], shifts[v])

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)

    @device
    def pick(v, table, at):
        return table[at + v]

    picks = each_lane(lanes, pick)

    def kernel(
        x,
        y,
        rows,
        channels,
        width,
        piece,
        weight,
        weight_code,
        bias,
        bias_code,
        parts,
        num_parts,
        eps,
        clamp,
        running_mean,
        running_var,
        running_code,
        tracked,
        factor,
        statistics,
    ):
        rounded_means = cuda.shared.array(threads, work)
        scales = cuda.shared.array(threads, work)
        shifts = cuda.shared.array(threads, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.gridDim.y) - 1 - int64(cuda.blockIdx.y)
        span = width * lanes
        column, r, height, stop, at, step = _piece(
            tid, tile, k, rows, channels, width, piece, lanes, int64(threads)
        )
        # loaded while the table is made
        v0 = load(x, at) if r < stop else zeros()
        v1 = load(x, at + step) if int32(r + height) < stop else zeros()
        c = tile * span + tid
        if tid < span and c < channels:
            rounded_mean, scale, shift = normalize_coefficients(
                work,
                c,
                k == 0,
                channels,
                weight,
                weight_code,
                bias,
                bias_code,
                parts,
                num_parts,
                eps,
                clamp,
                running_mean,
                running_var,
                running_code,
                tracked,
                factor,
                statistics,
            )
            rounded_means[tid] = rounded_mean
            scales[tid] = scale
            shifts[tid] = shift
        barrier()
        if r >= stop:
            return
        rounded_mean, scale, shift = (
            picks(rounded_means, column),
            picks(scales, column),
            picks(shifts, column),
        )
        while r < stop:  # two are loaded while the two before are stored
            v2 = load(x, at + 2 * step) if int32(r + 2 * height) < stop else zeros()
            v3 = load(x, at + 3 * step) if int32(r + 3 * height) < stop else zeros()
            store(y, at, results(v0, rounded_mean, scale, shift))
            if int32(r + height) < stop:
                store(y, at + step, results(v1, rounded_mean, scale, shift))
            r = int32(r + 2 * height)
            at += 2 * step
            v0, v1 = v2, v3

    return kernel


def rows_backward_input(dtype, lanes, threads):
    """`planes_backward_input` for rows; `piece` rows per block."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    @device
    def result(v, x, dy, rounded_means, dy_scales, x_scales, shifts):
        return input_gradient(x[v], dy[v], rounded_means[v], dy_scales[v], x_scales[v], shifts[v])

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)

    @device
    def pick(v, table, at):
        return table[at + v]

    picks = each_lane(lanes, pick)

    def kernel(
        x,
        dy,
        dx,
        rows,
        channels,
        width,
        piece,
        statistics,
        weight,
        weight_code,
        sums,
        eps,
        clamp,
    ):
        rounded_means = cuda.shared.array(threads, work)
        dy_scales = cuda.shared.array(threads, work)
        x_scales = cuda.shared.array(threads, work)
        shifts = cuda.shared.array(threads, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.gridDim.y) - 1 - int64(cuda.blockIdx.y)
        span = width * lanes
        column, r, height, stop, at, step = _piece(
            tid, tile, k, rows, channels, width, piece, lanes, int64(threads)
        )
        # loaded while the table is made
        v0, g0 = (load(x, at), load(dy, at)) if r < stop else (zeros(), zeros())
        c = tile * span + tid
        if tid < span and c < channels:
            rounded_mean, dy_scale, x_scale, shift = gradient_coefficients(
                work, c, channels, statistics, weight, weight_code, sums, eps, clamp
            )
            rounded_means[tid] = rounded_mean
            dy_scales[tid] = dy_scale
            x_scales[tid] = x_scale
            shifts[tid] = shift
        barrier()
        if r >= stop:
            return
        rounded_mean, dy_scale = picks(rounded_means, column), picks(dy_scales, column)
        x_scale, shift = picks(x_scales, column), picks(shifts, column)
        while r < stop:  # the next are loaded while these are stored
            at_next, r_next = at + step, int32(r + height)
            there = r_next < stop
            v1, g1 = (load(x, at_next), load(dy, at_next)) if there else (zeros(), zeros())
            store(dx, at, results(v0, g0, rounded_mean, dy_scale, x_scale, shift))
            at, r, v0, g0 = at_next, r_next, v1, g1

    return kernel


def merge_parts(dtype, lanes, threads):
    """Merges `num_parts` packed moments into one; grid (channels / threads, 1)."""

    def kernel(parts, num_parts, channels, moments):
        c = int64(cuda.blockIdx.x) * threads + int64(cuda.threadIdx.x)
        if c < channels:
            count, mean, m2 = merged(parts, num_parts, channels, c)
            if c == 0:
                store_f64(moments, 0, count)
            store_f64(moments, 1 + c, mean)
            store_f64(moments, 1 + channels + c, m2)

    return kernel
