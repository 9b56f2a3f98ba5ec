"""CUDA kernels for rows: `[R, C]`, a row holds all channels (channels_last, `(N, C)`).

A thread owns `lanes` neighbouring channels and walks down the rows; a block is `width` threads
wide and as many rows high as its threads allow. Where C is not a multiple of the numbers in
16 bytes a thread owns one channel. Reductions: grid (tiles of channels, splits of the rows),
elementwise kernels: grid (tiles, pieces of rows), last piece first.
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
    given,
    load_f64,
    number_access,
    quotient,
    read_count,
    reset,
    small_quotient,
    store_f64,
    ticket,
    vector_access,
    write_count,
)
from syncbn_core.kernels.cuda.statistics import (
    add_up,
    channel_statistics,
    gradient_slopes,
    keep,
    merged,
    slope_and_shift,
    update_running,
    write_moments,
    write_sums,
)

float32, float64, int32, int64 = types.float32, types.float64, types.int32, types.int64


def _zero(work):
    @device
    def zero(v):
        return work(0)

    return zero


@device
def _pair(partials, at, span, there):
    """Two sums of a channel; zeros where there are none."""
    if not there:
        return 0.0, 0.0
    return load_f64(partials, at), load_f64(partials, at + span)


@device
def _put(partials, number, span, tid, firsts, seconds):
    """The first `span` shared numbers into place `number`, for other blocks."""
    if tid < span:
        at = number * 2 * span + tid
        store_f64(partials, at, firsts[tid])
        store_f64(partials, at + span, seconds[tid])
        fence()


@device
def _take(partials, number, size, span, tid, threads, firsts, seconds):
    """Sums over `size` places from `number` on, into the first `span` shared numbers."""
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
        while k < end:  # four on their way: one block alone has few loads to hide latency with
            a0, b0 = _pair(partials, at, span, True)
            a1, b1 = _pair(partials, at + step, span, k + height < end)
            a2, b2 = _pair(partials, at + 2 * step, span, k + 2 * height < end)
            a3, b3 = _pair(partials, at + 3 * step, span, k + 3 * height < end)
            f0, f1, f2, f3 = f0 + a0, f1 + a1, f2 + a2, f3 + a3
            s0, s1, s2, s3 = s0 + b0, s1 + b1, s2 + b2, s3 + b3
            k = int32(k + 4 * height)
            at += 4 * step
        firsts[tid] = (f0 + f1) + (f2 + f3)
        seconds[tid] = (s0 + s1) + (s2 + s3)
    add_up(firsts, seconds, tid, row, 1, span, height)


@device
def _comes_last(tickets, number, size, tid, flag):
    """Whether `size - 1` blocks have come here before this one, which then sees their numbers."""
    barrier()
    if tid == 0:
        flag[0] = int32(ticket(tickets, number) == size - 1)
    barrier()
    if flag[0] == 0:
        return False
    fence()
    if tid == 0:
        reset(tickets, number)
    return True


@device
def _has_all(partials, tickets, tile, k, splits, group, span, tid, threads, firsts, seconds, flag):
    """Whether this block is the one that has the sums of all splits of its tile, in shared memory.

    Splits are added up in groups, by the last block of each, and groups by the last of those: one
    block alone would be as long at it as all blocks were at the activation.
    """
    groups = small_quotient(splits + group - 1, group)
    place = tile * (splits + groups)
    counter = tile * (groups + 1)
    mine = small_quotient(k, group)
    members = min(group, splits - mine * group)
    _put(partials, place + k, span, tid, firsts, seconds)
    if not _comes_last(tickets, counter + mine, members, tid, flag):
        return False
    _take(partials, place + mine * group, members, span, tid, threads, firsts, seconds)
    if groups == 1:
        return True
    _put(partials, place + splits + mine, span, tid, firsts, seconds)
    if not _comes_last(tickets, counter + groups, groups, tid, flag):
        return False
    _take(partials, place + splits, groups, span, tid, threads, firsts, seconds)
    return True


def rows_moments(dtype, lanes, threads):
    """Packed moments of x; grid (tiles, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    share = work(1 / UNROLL)
    zeros = each_lane(lanes, _zero(work))
    places = threads * lanes

    def kernel(x, rows, channels, width, splits, group, partials, tickets, moments):
        firsts = cuda.shared.array(places, float64)
        seconds = cuda.shared.array(places, float64)
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
        span = width * lanes
        if row < height:
            for v in range(lanes):
                firsts[tid * lanes + v] = own_firsts[v]
                seconds[tid * lanes + v] = own_seconds[v]
        add_up(firsts, seconds, tid, row, lanes, width, height)
        if lanes > 1:
            barrier()  # from here on a thread reads a channel that another has summed
        if splits > 1:
            everything = (tile, k, splits, group, span, tid, int64(threads), firsts, seconds, flag)
            if not _has_all(partials, tickets, *everything):
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
    zeros = each_lane(lanes, _zero(work))
    places = threads * lanes

    def kernel(
        x,
        dy,
        rows,
        channels,
        width,
        splits,
        group,
        partials,
        tickets,
        statistics,
        weight,
        weight_code,
        code,
        sums,
        grad_weight,
        grad_bias,
    ):
        firsts = cuda.shared.array(places, float64)
        seconds = cuda.shared.array(places, float64)
        flag = cuda.shared.array(1, int32)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        nears = cuda.local.array(lanes, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        height = small_quotient(int64(threads), width)
        row = small_quotient(tid, width)
        base = (tile * width + tid - row * width) * lanes
        active = row < height and base < channels
        for v in range(lanes):
            own_firsts[v] = 0.0
            own_seconds[v] = 0.0
            nears[v] = work(0)
        if active:
            for v in range(lanes):
                nears[v] = work(load_f64(statistics, 1 + base + v))
            stop = quotient(rows * (k + 1), splits)
            r = quotient(rows * k, splits) + row
            step = height * channels
            at = r * channels + base
            while r < stop:
                more = r + height < stop
                v0, g0 = load(x, at), load(dy, at)
                v1, g1 = (load(x, at + step), load(dy, at + step)) if more else (zeros(), zeros())
                for v in range(lanes):
                    # with dy = 0 a missing row adds nothing
                    d1 = v1[v] - nears[v] if more else work(0)
                    own_firsts[v] += float64(g0[v] + g1[v])
                    own_seconds[v] += float64(g0[v] * (v0[v] - nears[v]) + g1[v] * d1)
                r += 2 * height
                at += 2 * step
        span = width * lanes
        if row < height:
            for v in range(lanes):
                firsts[tid * lanes + v] = own_firsts[v]
                seconds[tid * lanes + v] = own_seconds[v]
        add_up(firsts, seconds, tid, row, lanes, width, height)
        if lanes > 1:
            barrier()  # from here on a thread reads a channel that another has summed
        if splits > 1:
            everything = (tile, k, splits, group, span, tid, int64(threads), firsts, seconds, flag)
            if not _has_all(partials, tickets, *everything):
                return
        c = tile * span + tid
        if tid < span and c < channels:
            near = float64(work(load_f64(statistics, 1 + c)))
            write_sums(
                statistics,
                channels,
                c,
                near,
                firsts[tid],
                seconds[tid],
                weight,
                weight_code,
                code,
                sums,
                grad_weight,
                grad_bias,
            )

    return kernel


def rows_normalize(dtype, lanes, threads):
    """`planes_normalize` for rows; `piece` rows per block. No rows: only the running update."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    @device
    def result(v, x, nears, scales, shifts):
        return (x[v] - nears[v]) * scales[v] + shifts[v]

    results = each_lane(lanes, result)
    zeros = each_lane(lanes, _zero(work))

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
        size,
        eps,
        clamp,
        running_mean,
        running_var,
        running_code,
        tracked,
        factor,
        statistics,
    ):
        nears = cuda.shared.array(threads, work)
        scales = cuda.shared.array(threads, work)
        shifts = cuda.shared.array(threads, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.gridDim.y) - 1 - int64(cuda.blockIdx.y)
        height = small_quotient(int64(threads), width)
        row = small_quotient(tid, width)
        column = (tid - row * width) * lanes
        span = width * lanes
        base = tile * span + column
        # rows of the piece; 32 bits, because the compiler divides by the step to unroll the loop
        r, high = int32(row), int32(height)
        stop = int32(min(piece, rows - k * piece) if row < height and base < channels else 0)
        at = (k * piece + row) * channels + base
        step = height * channels
        # on their way while the table is made
        v0 = load(x, at) if r < stop else zeros()
        v1 = load(x, at + step) if int32(r + high) < stop else zeros()
        c = tile * span + tid
        if tid < span and c < channels:
            count, mean, m2, invstd = channel_statistics(
                parts, size, channels, c, running_mean, running_var, running_code, eps, clamp
            )
            near, scale, shift = slope_and_shift(
                work, c, mean, invstd, weight, weight_code, bias, bias_code
            )
            nears[tid] = near
            scales[tid] = scale
            shifts[tid] = shift
            if k == 0:
                keep(statistics, channels, c, count, mean, m2, invstd)
                if size > 0 and given(running_mean):
                    update_running(
                        running_mean, running_var, running_code, tracked, factor, c, count, mean, m2
                    )
                if c == 0 and given(tracked) and factor >= 0.0:
                    write_count(tracked, read_count(tracked) + 1)
        barrier()
        if r >= stop:
            return
        near, scale, shift = picks(nears, column), picks(scales, column), picks(shifts, column)
        while r < stop:  # two are loaded while the two before are stored
            v2 = load(x, at + 2 * step) if int32(r + 2 * high) < stop else zeros()
            v3 = load(x, at + 3 * step) if int32(r + 3 * high) < stop else zeros()
            store(y, at, results(v0, near, scale, shift))
            if int32(r + high) < stop:
                store(y, at + step, results(v1, near, scale, shift))
            r = int32(r + 2 * high)
            at += 2 * step
            v0, v1 = v2, v3

    return kernel


def rows_backward_input(dtype, lanes, threads):
    """`planes_backward_input` for rows; `piece` rows per block."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    @device
    def result(v, x, dy, nears, of_dys, of_xs, shifts):
        return dy[v] * of_dys[v] + ((x[v] - nears[v]) * of_xs[v] + shifts[v])

    results = each_lane(lanes, result)
    zeros = each_lane(lanes, _zero(work))

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
        nears = cuda.shared.array(threads, work)
        of_dys = cuda.shared.array(threads, work)
        of_xs = cuda.shared.array(threads, work)
        shifts = cuda.shared.array(threads, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.gridDim.y) - 1 - int64(cuda.blockIdx.y)
        height = small_quotient(int64(threads), width)
        row = small_quotient(tid, width)
        column = (tid - row * width) * lanes
        span = width * lanes
        base = tile * span + column
        # rows of the piece; 32 bits, because the compiler divides by the step to unroll the loop
        r, high = int32(row), int32(height)
        stop = int32(min(piece, rows - k * piece) if row < height and base < channels else 0)
        at = (k * piece + row) * channels + base
        step = height * channels
        # on their way while the table is made
        v0, g0 = (load(x, at), load(dy, at)) if r < stop else (zeros(), zeros())
        c = tile * span + tid
        if tid < span and c < channels:
            near, of_dy, of_x, shift = gradient_slopes(
                work, statistics, sums, channels, c, weight, weight_code, eps, clamp
            )
            nears[tid] = near
            of_dys[tid] = of_dy
            of_xs[tid] = of_x
            shifts[tid] = shift
        barrier()
        if r >= stop:
            return
        near, of_dy = picks(nears, column), picks(of_dys, column)
        of_x, shift = picks(of_xs, column), picks(shifts, column)
        while r < stop:  # the next are loaded while these are stored
            at_next, r_next = at + step, int32(r + high)
            there = r_next < stop
            v1, g1 = (load(x, at_next), load(dy, at_next)) if there else (zeros(), zeros())
            store(dx, at, results(v0, g0, near, of_dy, of_x, shift))
            at, r, v0, g0 = at_next, r_next, v1, g1

    return kernel


def merge_parts(dtype, lanes, threads):
    """Packed moments of many members into one; grid (channels / threads, 1)."""

    def kernel(parts, size, channels, moments):
        c = int64(cuda.blockIdx.x) * threads + int64(cuda.threadIdx.x)
        if c < channels:
            count, mean, m2 = merged(parts, size, channels, c)
            if c == 0:
                store_f64(moments, 0, count)
            store_f64(moments, 1 + c, mean)
            store_f64(moments, 1 + channels + c, m2)

    return kernel
