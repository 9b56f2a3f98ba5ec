"""CUDA kernels for rows: `[R, C]`, a row holds all channels (channels_last, `(N, C)`).

A thread has `lanes` neighbouring channels and walks down the rows. A block is `width` threads
wide, which is a tile of channels, and as many rows high as its threads allow. Where C is not a
multiple of the numbers in 16 bytes, a thread has one channel. Reductions: grid (tiles, splits of
the rows); elementwise kernels: grid (tiles, pieces of the rows), last piece first.
"""

from __future__ import annotations

from numba import cuda, types

from syncbn_core._kernels.cuda.activations import of_kernel
from syncbn_core._kernels.cuda.constants import CHUNK, UNROLL
from syncbn_core._kernels.cuda.memory import (
    KINDS,
    barrier,
    device,
    each_lane,
    fence,
    given,
    load_f64,
    number_access,
    quotient,
    reset,
    small_quotient,
    store_f64,
    vector_access,
    zeros_of,
)
from syncbn_core._kernels.cuda.statistics import (
    add_up,
    compare_labels,
    gradient_coefficients,
    input_gradient,
    is_last_block,
    merged,
    normalize_coefficients,
    normalized,
    top_reach,
    write_moments,
    write_sums,
)

float64, int32, int64 = types.float64, types.int32, types.int64


@device
def _partial(partials, at, span, exists):
    """Two sums of a channel that another block has stored; zeros if `exists` is false."""
    if not exists:
        return 0.0, 0.0
    return load_f64(partials, at), load_f64(partials, at + span)


@device
def _store_partials(partials, number, span, tid, first, second):
    """Store two sums of each of the first `span` threads, where `number` tells other blocks."""
    if tid < span:
        at = number * 2 * span + tid
        store_f64(partials, at, first)
        store_f64(partials, at + span, second)
        fence()
    barrier()  # thread 0 counts the block after all have stored


@device
def _add_partials(partials, number, size, span, tid, threads, firsts, seconds):
    """Sums over `size` partial sums from `number` on: each of the first `span` threads gets two."""
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
    first, second = (f0 + f1) + (f2 + f3), (s0 + s1) + (s2 + s3)
    return add_up(first, second, tid, row, span, height, firsts, seconds)


@device
def _sum_splits(
    scratch, tile, k, splits, group, span, tid, threads, first, second, firsts, seconds
):
    """`(is_last, first, second)`: sums over all splits of a tile, in the last block.

    Each of the first `span` threads of a block passes two sums of its split and gets two of all.
    Splits are added up in groups, by the last block of each group; groups by the last of those
    blocks. One block alone would take as long for all splits as all blocks took for the activation.
    """
    partials, block_counters = scratch
    groups = small_quotient(splits + group - 1, group)
    base = tile * (splits + groups)  # of the partial sums of this tile
    counter = tile * (groups + 1)
    own = small_quotient(k, group)
    members = min(group, splits - own * group)
    _store_partials(partials, base + k, span, tid, first, second)
    if not is_last_block(block_counters, counter + own, members, tid, firsts):
        return False, first, second
    if tid == 0:
        reset(block_counters, counter + own)
    shared = span, tid, threads, firsts, seconds
    first, second = _add_partials(partials, base + own * group, members, *shared)
    if groups == 1:
        return True, first, second
    _store_partials(partials, base + splits + own, span, tid, first, second)
    if not is_last_block(block_counters, counter + groups, groups, tid, firsts):
        return False, first, second
    if tid == 0:
        reset(block_counters, counter + groups)
    first, second = _add_partials(partials, base + splits, groups, *shared)
    return True, first, second


@device
def _sum_threads(own_firsts, own_seconds, lanes, tid, row, width, height, threads, firsts, seconds):
    """Sums over the rows of the block; thread `tid` gets those of channel `tid` of the tile.

    As `add_up`, for `lanes` channels of each thread. In the shared tables, number v of a thread is
    at `v * threads + tid`, so that neighbouring threads use different banks.
    """
    reach = top_reach(height)
    while reach > 1:
        above = reach
        reach >>= 2
        if reach <= row and row < above and row < height:
            for v in range(lanes):
                firsts[v * threads + tid] = own_firsts[v]
                seconds[v * threads + tid] = own_seconds[v]
        barrier()
        if row < reach:
            for i in range(1, 4):
                if row + i * reach < height:
                    other = tid + i * reach * width
                    for v in range(lanes):
                        own_firsts[v] += firsts[v * threads + other]
                        own_seconds[v] += seconds[v * threads + other]
    if lanes == 1:
        return own_firsts[0], own_seconds[0]
    barrier()  # the tables are used again
    if row == 0:
        for v in range(lanes):
            firsts[tid * lanes + v] = own_firsts[v]
            seconds[tid * lanes + v] = own_seconds[v]
    barrier()
    return (firsts[tid], seconds[tid]) if tid < width * lanes else (0.0, 0.0)


def rows_moments(dtype, lanes, threads):
    """Packed moments of x; grid (tiles, splits).

    A thread sums up to about `CHUNK` rows in the precision of the registers: deviations from the
    mean of the first four of these rows, and their squares. Then it refers the sums to the pivot,
    in float64. The squares of n deviations from the mean of g values add up to at most `1 + n / g`
    times the m2 of the n values (Cauchy-Schwarz). So the relative error of that m2 is at most some
    `3 * (1 + n / g)` times the one of a sum of n numbers of one sign: here 30 times.
    """
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    share = work(1 / UNROLL)
    zeros = zeros_of(lanes, work)
    numbers = threads * lanes

    def kernel(x, sizes, scratch, label, moments):
        rows, channels, width, splits, group = sizes
        firsts = cuda.shared.array(numbers, float64)
        seconds = cuda.shared.array(numbers, float64)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        pivots = cuda.local.array(lanes, work)
        centers = cuda.local.array(lanes, work)
        near_firsts = cuda.local.array(lanes, work)
        near_seconds = cuda.local.array(lanes, work)
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
                n = int32(0)
                for v in range(lanes):
                    near_firsts[v] = work(0)
                    near_seconds[v] = work(0)
                while n < CHUNK and r < stop:
                    v0 = load(x, at)
                    if r + 3 * height < stop:
                        v1, v2, v3 = (
                            load(x, at + step),
                            load(x, at + 2 * step),
                            load(x, at + 3 * step),
                        )
                        for v in range(lanes):
                            if n == 0:
                                centers[v] = ((v0[v] + v1[v]) + (v2[v] + v3[v])) * share
                            d0, d1 = v0[v] - centers[v], v1[v] - centers[v]
                            d2, d3 = v2[v] - centers[v], v3[v] - centers[v]
                            near_firsts[v] += (d0 + d1) + (d2 + d3)
                            near_seconds[v] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
                        n = int32(n + 4)
                        r += 4 * height
                        at += 4 * step
                    else:  # the last rows of the thread
                        has1, has2 = r + height < stop, r + 2 * height < stop
                        v1 = load(x, at + step) if has1 else zeros()
                        v2 = load(x, at + 2 * step) if has2 else zeros()
                        more = int32(1) + int32(has1) + int32(has2)
                        portion = work(1) / work(more)
                        for v in range(lanes):
                            if n == 0:
                                centers[v] = ((v0[v] + v1[v]) + v2[v]) * portion
                            d0 = v0[v] - centers[v]
                            d1 = v1[v] - centers[v] if has1 else work(0)
                            d2 = v2[v] - centers[v] if has2 else work(0)
                            near_firsts[v] += (d0 + d1) + d2
                            near_seconds[v] += (d0 * d0 + d1 * d1) + d2 * d2
                        n = int32(n + more)
                        r = stop
                count = float64(n)
                for v in range(lanes):
                    f, s = float64(near_firsts[v]), float64(near_seconds[v])
                    shift = float64(centers[v]) - float64(pivots[v])
                    own_firsts[v] += f + count * shift
                    own_seconds[v] += s + shift * (f + f + count * shift)
        first, second = _sum_threads(
            own_firsts, own_seconds, lanes, tid, row, width, height, int64(threads), firsts, seconds
        )
        span = width * lanes
        if splits > 1:
            block = span, tid, int64(threads), first, second, firsts, seconds
            is_last, first, second = _sum_splits(scratch, tile, k, splits, group, *block)
            if not is_last:
                return
        c = tile * span + tid
        if tid < span and c < channels:
            pivot = float64(load_one(x, c))
            write_moments(label, moments, channels, c, float64(rows), pivot, first, second)

    return kernel


def rows_backward_reduce(dtype, lanes, threads, activation=""):
    """Sums of dy and `dy * xhat`, and the gradients of weight and bias; grid (tiles, splits).

    A thread adds up to `CHUNK` rows in the precision of the registers, and these sums in float64.
    """
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    zeros = zeros_of(lanes, work)
    numbers = threads * lanes
    functions = of_kernel(activation, work, lanes, threads)
    incoming, value, of_channel = functions.incoming, functions.value, functions.of_channel
    local, hold, held = functions.local, functions.hold, functions.held

    @device
    def gradient(v, dy, x, rounded_means, more, act):
        return incoming(dy[v], x[v], rounded_means[v], held(more, v, act))

    @device
    def standing_for(v, x, more, act):
        return value(x[v], held(more, v, act))

    # written out: loops would keep their tables in memory
    through, values = each_lane(lanes, gradient), each_lane(lanes, standing_for)

    def kernel(x, dy, sizes, scratch, statistics, weight, results, act):
        rows, channels, width, splits, group = sizes
        firsts = cuda.shared.array(numbers, float64)
        seconds = cuda.shared.array(numbers, float64)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        rounded_means = cuda.local.array(lanes, work)
        near_firsts = cuda.local.array(lanes, work)
        near_seconds = cuda.local.array(lanes, work)
        more = local()
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
                z = of_channel(base + v, channels, statistics, weight, act)
                hold(more, v, z)
            stop = quotient(rows * (k + 1), splits)
            r = quotient(rows * k, splits) + row
            step = height * channels
            at = r * channels + base
            while r < stop:
                for v in range(lanes):
                    near_firsts[v] = work(0)
                    near_seconds[v] = work(0)
                n = int32(0)
                while n < CHUNK and r < stop:
                    two = r + height < stop
                    v0, g0 = load(x, at), load(dy, at)
                    v1, g1 = (
                        (load(x, at + step), load(dy, at + step)) if two else (zeros(), zeros())
                    )
                    g0 = through(g0, v0, rounded_means, more, act)
                    g1 = through(g1, v1, rounded_means, more, act)
                    v0, v1 = values(v0, more, act), values(v1, more, act)
                    for v in range(lanes):
                        # a missing row has dy = 0, and adds nothing
                        d1 = v1[v] - rounded_means[v] if two else work(0)
                        near_firsts[v] += g0[v] + g1[v]
                        near_seconds[v] += g0[v] * (v0[v] - rounded_means[v]) + g1[v] * d1
                    n = int32(n + 2)
                    r += 2 * height
                    at += 2 * step
                for v in range(lanes):
                    own_firsts[v] += float64(near_firsts[v])
                    own_seconds[v] += float64(near_seconds[v])
        first, second = _sum_threads(
            own_firsts, own_seconds, lanes, tid, row, width, height, int64(threads), firsts, seconds
        )
        span = width * lanes
        if splits > 1:
            block = span, tid, int64(threads), first, second, firsts, seconds
            is_last, first, second = _sum_splits(scratch, tile, k, splits, group, *block)
            if not is_last:
                return
        c = tile * span + tid
        if tid < span and c < channels:
            rounded_mean = float64(work(load_f64(statistics, 1 + c)))
            write_sums(c, channels, rounded_mean, first, second, statistics, weight, results)

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


def rows_normalize(dtype, lanes, threads, activation=""):
    """`planes_normalize` for rows; `piece` rows per block.

    Without rows it only writes statistics and updates running ones.
    """
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    applied = of_kernel(activation, work, lanes, threads).applied

    @device
    def result(v, x, rounded_means, scales, shifts, act):
        return applied(normalized(x[v], rounded_means[v], scales[v], shifts[v]), act)

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)

    @device
    def pick(v, table, at):
        return table[at + v]

    picks = each_lane(lanes, pick)

    def kernel(x, y, sizes, affine, parts, rule, running, check, statistics, act):
        rows, channels, width, piece = sizes
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
                work, c, k == 0, channels, affine, parts, rule, running, check, statistics
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
            store(y, at, results(v0, rounded_mean, scale, shift, act))
            if int32(r + height) < stop:
                store(y, at + step, results(v1, rounded_mean, scale, shift, act))
            r = int32(r + 2 * height)
            at += 2 * step
            v0, v1 = v2, v3

    return kernel


def rows_backward_input(dtype, lanes, threads, activation=""):
    """`planes_backward_input` for rows; `piece` rows per block."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    functions = of_kernel(activation, work, lanes, threads)
    incoming, value, of_channel = functions.incoming, functions.value, functions.of_channel
    shared, hold, picked = functions.shared, functions.hold, functions.picked

    @device
    def result(v, x, dy, rounded_means, dy_scales, x_scales, shifts, z):
        g = incoming(dy[v], x[v], rounded_means[v], z[v])
        own = value(x[v], z[v])
        return input_gradient(own, g, rounded_means[v], dy_scales[v], x_scales[v], shifts[v])

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)

    @device
    def pick(v, table, at):
        return table[at + v]

    picks = each_lane(lanes, pick)

    def kernel(x, dy, dx, sizes, statistics, weight, sums, check, rule, act):
        rows, channels, width, piece = sizes
        rounded_means = cuda.shared.array(threads, work)
        dy_scales = cuda.shared.array(threads, work)
        x_scales = cuda.shared.array(threads, work)
        shifts = cuda.shared.array(threads, work)
        more = shared()
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
                work, c, channels, statistics, weight, sums, check, rule
            )
            rounded_means[tid] = rounded_mean
            dy_scales[tid] = dy_scale
            x_scales[tid] = x_scale
            shifts[tid] = shift
            hold(more, tid, of_channel(c, channels, statistics, weight, act))
        barrier()
        if r >= stop:
            return
        rounded_mean, dy_scale = picks(rounded_means, column), picks(dy_scales, column)
        x_scale, shift = picks(x_scales, column), picks(shifts, column)
        z = picked(more, column, act)
        while r < stop:  # the next are loaded while these are stored
            at_next, r_next = at + step, int32(r + height)
            there = r_next < stop
            v1, g1 = (load(x, at_next), load(dy, at_next)) if there else (zeros(), zeros())
            store(dx, at, results(v0, g0, rounded_mean, dy_scale, x_scale, shift, z))
            at, r, v0, g0 = at_next, r_next, v1, g1

    return kernel


def merge_parts(dtype, lanes, threads):
    """Merges `num_parts` packed moments into one; grid (channels / threads, 1)."""

    def kernel(parts, channels, check, moments):
        c = int64(cuda.blockIdx.x) * threads + int64(cuda.threadIdx.x)
        if c < channels:
            if given(check[1]):
                compare_labels(parts, channels, c, check)
            count, mean, m2 = merged(parts, channels, c)
            if c == 0:
                store_f64(moments, 0, count)
                store_f64(moments, 1 + 2 * channels, check[0])
            store_f64(moments, 1 + c, mean)
            store_f64(moments, 1 + channels + c, m2)

    return kernel
