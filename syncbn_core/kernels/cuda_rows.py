"""CUDA kernels for rows: `[R, C]`, a row holds all channels (channels_last, `(N, C)`).

A thread owns `lanes` neighbouring channels and walks down the rows; a block is `width` threads
wide and as many rows high as its threads allow. Where C is not a multiple of the numbers in
16 bytes a thread owns one channel. Reductions: grid (tiles of channels, splits of the rows),
elementwise kernels: grid (tiles, pieces of rows), last piece first.
"""

from __future__ import annotations

from numba import cuda, types

from syncbn_core.kernels.cuda_constants import UNROLL
from syncbn_core.kernels.cuda_memory import (
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
    store_f64,
    ticket,
    vector_access,
    write_count,
)
from syncbn_core.kernels.cuda_statistics import (
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


@device
def _add_splits(partials, tile, splits, span, tid, threads, firsts, seconds):
    """Sums of all splits of a tile of `span` channels, into the first `span` shared numbers."""
    groups = quotient(threads, span)
    group = quotient(tid, span)
    channel = tid - group * span
    first = 0.0
    second = 0.0
    if group < groups:
        k = group
        while k < splits:
            here = (tile * splits + k) * 2 * span + channel
            first += load_f64(partials, here)
            second += load_f64(partials, here + span)
            k += groups
        firsts[tid] = first
        seconds[tid] = second
    add_up(firsts, seconds, tid, 1, span, groups)


def rows_moments(dtype, lanes, threads):
    """Packed moments of x; grid (tiles, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    share = work(1 / UNROLL)

    @device
    def zero(v):
        return work(0)

    zeros = each_lane(lanes, zero)
    places = threads * lanes

    def kernel(x, rows, channels, width, splits, partials, tickets, moments):
        firsts = cuda.shared.array(places, float64)
        seconds = cuda.shared.array(places, float64)
        is_last = cuda.shared.array(1, int32)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        pivots = cuda.local.array(lanes, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        height = quotient(int64(threads), width)
        row = quotient(tid, width)
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
                left = quotient(stop - r + height - 1, height)  # rows of this thread from here on
                count = min(left, UNROLL)
                v0 = load(x, at)
                v1 = load(x, at + step) if count > 1 else zeros()
                v2 = load(x, at + 2 * step) if count > 2 else zeros()
                v3 = load(x, at + 3 * step) if count > 3 else zeros()
                portion = share if count == UNROLL else work(1) / work(count)
                n = float64(count)
                for v in range(lanes):
                    mean = ((v0[v] + v1[v]) + (v2[v] + v3[v])) * portion
                    d0 = v0[v] - mean
                    d1 = v1[v] - mean if count > 1 else work(0)
                    d2 = v2[v] - mean if count > 2 else work(0)
                    d3 = v3[v] - mean if count > 3 else work(0)
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
        add_up(firsts, seconds, tid, lanes, width, height)
        if splits > 1:
            if tid < span:
                here = (tile * splits + k) * 2 * span + tid
                store_f64(partials, here, firsts[tid])
                store_f64(partials, here + span, seconds[tid])
                fence()
            barrier()
            if tid == 0:
                is_last[0] = int32(ticket(tickets, tile) == splits - 1)
            barrier()
            if is_last[0] == 0:
                return
            fence()
            _add_splits(partials, tile, splits, span, tid, int64(threads), firsts, seconds)
            if tid == 0:
                reset(tickets, tile)
        c = tile * span + tid
        if tid < span and c < channels:
            pivot = float64(load_one(x, c))
            write_moments(moments, channels, c, float64(rows), pivot, firsts[tid], seconds[tid])

    return kernel


def rows_backward_reduce(dtype, lanes, threads):
    """Sums of dy and `dy * xhat`, and the gradients of weight and bias; grid (tiles, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)

    @device
    def zero(v):
        return work(0)

    zeros = each_lane(lanes, zero)
    places = threads * lanes

    def kernel(
        x,
        dy,
        rows,
        channels,
        width,
        splits,
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
        is_last = cuda.shared.array(1, int32)
        own_firsts = cuda.local.array(lanes, float64)
        own_seconds = cuda.local.array(lanes, float64)
        nears = cuda.local.array(lanes, work)
        tid = int64(cuda.threadIdx.x)
        tile = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        height = quotient(int64(threads), width)
        row = quotient(tid, width)
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
        add_up(firsts, seconds, tid, lanes, width, height)
        if splits > 1:
            if tid < span:
                here = (tile * splits + k) * 2 * span + tid
                store_f64(partials, here, firsts[tid])
                store_f64(partials, here + span, seconds[tid])
                fence()
            barrier()
            if tid == 0:
                is_last[0] = int32(ticket(tickets, tile) == splits - 1)
            barrier()
            if is_last[0] == 0:
                return
            fence()
            _add_splits(partials, tile, splits, span, tid, int64(threads), firsts, seconds)
            if tid == 0:
                reset(tickets, tile)
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
        height = quotient(int64(threads), width)
        row = quotient(tid, width)
        column = (tid - row * width) * lanes
        span = width * lanes
        base = tile * span + column
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
        if row >= height or base >= channels:
            return
        near, scale, shift = picks(nears, column), picks(scales, column), picks(shifts, column)
        stop = min((k + 1) * piece, rows)
        r = k * piece + row
        at = r * channels + base
        step = height * channels
        while r + 3 * height < stop:
            v0, v1 = load(x, at), load(x, at + step)
            v2, v3 = load(x, at + 2 * step), load(x, at + 3 * step)
            store(y, at, results(v0, near, scale, shift))
            store(y, at + step, results(v1, near, scale, shift))
            store(y, at + 2 * step, results(v2, near, scale, shift))
            store(y, at + 3 * step, results(v3, near, scale, shift))
            r += 4 * height
            at += 4 * step
        while r < stop:
            store(y, at, results(load(x, at), near, scale, shift))
            r += height
            at += step

    return kernel


def rows_backward_input(dtype, lanes, threads):
    """`planes_backward_input` for rows; `piece` rows per block."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)

    @device
    def result(v, x, dy, nears, of_dys, of_xs, shifts):
        return dy[v] * of_dys[v] + ((x[v] - nears[v]) * of_xs[v] + shifts[v])

    results = each_lane(lanes, result)

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
        height = quotient(int64(threads), width)
        row = quotient(tid, width)
        column = (tid - row * width) * lanes
        span = width * lanes
        base = tile * span + column
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
        if row >= height or base >= channels:
            return
        near, of_dy = picks(nears, column), picks(of_dys, column)
        of_x, shift = picks(of_xs, column), picks(shifts, column)
        stop = min((k + 1) * piece, rows)
        r = k * piece + row
        at = r * channels + base
        step = height * channels
        while r + height < stop:
            v0, v1 = load(x, at), load(x, at + step)
            g0, g1 = load(dy, at), load(dy, at + step)
            store(dx, at, results(v0, g0, near, of_dy, of_x, shift))
            store(dx, at + step, results(v1, g1, near, of_dy, of_x, shift))
            r += 2 * height
            at += 2 * step
        while r < stop:
            store(dx, at, results(load(x, at), load(dy, at), near, of_dy, of_x, shift))
            r += height
            at += step

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
