"""CUDA kernels for planes: `[A, C, B]` with a channel's numbers in runs of B > 1.

Reductions: a block per (channel, split of it). Its threads walk over *slots*, 16 bytes each,
four at a time: those numbers stay in registers, are summed, and their deviations from their own
mean are (the corrected two-pass algorithm); in float64 they are referred to the pivot of the
channel and added up. The block that finishes last adds the splits in their order. So sums
depend on the shape alone, and are the same on every run.

Where planes do not begin on 16 bytes (`ragged`), slots lie on the grid of addresses, and a
plane owns a part of its first and last one; those numbers are read one by one.

Elementwise kernels take the whole activation as one run, a block per piece of it, last piece
first: what the reduction has read last is still in the L2 cache.
"""

from __future__ import annotations

from numba import cuda, types

from syncbn_core.kernels.cuda.constants import TABLE, UNROLL
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
    sum_of_lanes,
    ticket,
    vector_access,
    write_count,
)
from syncbn_core.kernels.cuda.statistics import (
    add_up,
    channel_statistics,
    gradient_slopes,
    keep,
    slope_and_shift,
    update_running,
    write_moments,
    write_sums,
)

float32, float64, int32, int64 = types.float32, types.float64, types.int32, types.int64


def _slot_reader(dtype, lanes, ragged):
    """`read_slot(pointer, at, mask)`: the numbers of a slot whose bit is set in `mask`, else 0.

    Only ragged planes have slots of which some numbers are theirs: else it is all or none.
    """
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    work = KINDS[dtype].work
    whole = (1 << lanes) - 1
    zeros = each_lane(lanes, _zero(work))

    @device
    def number(v, pointer, at, mask):
        return load_one(pointer, at + v) if (mask >> v) & 1 else work(0)

    part = each_lane(lanes, number)

    @device
    def read_slot(pointer, at, mask):
        return load(pointer, at) if mask == whole else part(pointer, at, mask)

    @device
    def read_all_or_none(pointer, at, mask):
        return load(pointer, at) if mask != 0 else zeros()

    return read_slot if ragged else read_all_or_none


def _zero(work):
    @device
    def zero(v):
        return work(0)

    return zero


def _owner(lanes, ragged):
    """`owned(skew, channels, inner, c, plane, slot)`: where a slot is, and a mask of its numbers.

    `skew`: numbers by which the pointer is off the grid of slots.
    """
    if not ragged:

        @device
        def owned(skew, channels, inner, c, plane, slot):
            return (plane * channels + c) * inner + slot * lanes, int32((1 << lanes) - 1)

        return owned

    @device
    def owned(skew, channels, inner, c, plane, slot):
        start = (plane * channels + c) * inner
        offset = slot * lanes - ((start + skew) & (lanes - 1))  # of the slot in its plane
        mask = (1 << lanes) - 1
        if offset < 0:
            mask = (mask << -offset) & mask
        left = inner - offset
        if left < lanes:
            mask &= (1 << max(left, 0)) - 1
        return start + offset, int32(mask)

    return owned


@device
def _next_slot(plane, slot, slots, planes_on, slots_on):
    """The position that many planes and slots on."""
    plane += planes_on
    slot += slots_on
    if slot >= slots:
        slot -= slots
        plane += 1
    return plane, slot


def planes_moments(dtype, lanes, ragged, threads):
    """Packed moments of x; grid (C, splits)."""
    work = KINDS[dtype].work
    read_slot = _slot_reader(dtype, lanes, ragged)
    load_one, _ = number_access(dtype)
    owned = _owner(lanes, ragged)
    load, _ = vector_access(dtype, lanes)
    share = work(1 / (UNROLL * lanes))

    @device
    def refer(mean, n, f, s, pivot, first, second):
        """Add sums of deviations from `mean` to those from `pivot`."""
        shift = float64(mean) - pivot
        return first + (f + n * shift), second + (s + shift * (f + f + n * shift))

    @device
    def add_whole(v0, v1, v2, v3, pivot, first, second):
        total = work(0)
        for v in range(lanes):
            total += (v0[v] + v1[v]) + (v2[v] + v3[v])
        mean = total * share
        f0 = f1 = s0 = s1 = work(0)
        for v in range(lanes):
            d0, d1, d2, d3 = v0[v] - mean, v1[v] - mean, v2[v] - mean, v3[v] - mean
            f0 += d0 + d1
            f1 += d2 + d3
            s0 += d0 * d0
            s1 += d1 * d1
            s0 += d2 * d2
            s1 += d3 * d3
        n = float64(UNROLL * lanes)
        f, s = float64(f0) + float64(f1), float64(s0) + float64(s1)
        return refer(mean, n, f, s, pivot, first, second)

    # No loop over lanes: the compiler does not unroll one that masks make long, and then looks
    # each lane up in a chain of branches.

    @device
    def lane_total(v, v0, v1, v2, v3):
        return (v0[v] + v1[v]) + (v2[v] + v3[v])

    @device
    def lane_count(v, m0, m1, m2, m3):
        both = ((m0 >> v) & 1) + ((m1 >> v) & 1)
        return int32(both + ((m2 >> v) & 1) + ((m3 >> v) & 1))

    @device
    def deviation(v, values, mask, mean):
        return values[v] - mean if (mask >> v) & 1 else work(0)

    deviations = each_lane(lanes, deviation)

    @device
    def lane_squares(v, d0, d1, d2, d3):
        return (d0[v] * d0[v] + d1[v] * d1[v]) + (d2[v] * d2[v] + d3[v] * d3[v])

    totals, counts = each_lane(lanes, lane_total), each_lane(lanes, lane_count)
    squares, add_lanes = each_lane(lanes, lane_squares), sum_of_lanes(lanes)

    @device
    def add_some(v0, v1, v2, v3, m0, m1, m2, m3, pivot, first, second):
        count = int32(add_lanes(counts(m0, m1, m2, m3)))
        if count == 0:
            return first, second
        mean = add_lanes(totals(v0, v1, v2, v3)) / work(count)
        d0, d1 = deviations(v0, m0, mean), deviations(v1, m1, mean)
        d2, d3 = deviations(v2, m2, mean), deviations(v3, m3, mean)
        f = add_lanes(totals(d0, d1, d2, d3))
        s = add_lanes(squares(d0, d1, d2, d3))
        return refer(mean, float64(count), float64(f), float64(s), pivot, first, second)

    def kernel(x, skew, outer, channels, inner, slots, splits, partials, tickets, moments):
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        is_last = cuda.shared.array(1, int32)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        pivot = float64(load_one(x, c * inner))
        total = outer * slots
        stop = quotient(total * (k + 1), splits)
        j = quotient(total * k, splits) + tid
        plane = quotient(j, slots)
        slot = j - plane * slots
        planes_on = small_quotient(int64(threads), slots) if slots <= threads else int64(0)
        slots_on = int64(threads) - planes_on * slots
        first = 0.0
        second = 0.0
        while j < stop:
            p1, r1 = _next_slot(plane, slot, slots, planes_on, slots_on)
            p2, r2 = _next_slot(p1, r1, slots, planes_on, slots_on)
            p3, r3 = _next_slot(p2, r2, slots, planes_on, slots_on)
            at0, m0 = owned(skew, channels, inner, c, plane, slot)
            at1, m1 = owned(skew, channels, inner, c, p1, r1)
            at2, m2 = owned(skew, channels, inner, c, p2, r2)
            at3, m3 = owned(skew, channels, inner, c, p3, r3)
            if not ragged and j + 3 * threads < stop:
                v0, v1, v2, v3 = load(x, at0), load(x, at1), load(x, at2), load(x, at3)
                first, second = add_whole(v0, v1, v2, v3, pivot, first, second)
            else:
                m1 = m1 if j + threads < stop else int32(0)
                m2 = m2 if j + 2 * threads < stop else int32(0)
                m3 = m3 if j + 3 * threads < stop else int32(0)
                v0, v1 = read_slot(x, at0, m0), read_slot(x, at1, m1)
                v2, v3 = read_slot(x, at2, m2), read_slot(x, at3, m3)
                first, second = add_some(v0, v1, v2, v3, m0, m1, m2, m3, pivot, first, second)
            j += UNROLL * threads
            plane, slot = _next_slot(p3, r3, slots, planes_on, slots_on)
        firsts[tid] = first
        seconds[tid] = second
        add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if splits > 1:
            if tid == 0:
                here = (c * splits + k) * 2
                store_f64(partials, here, firsts[0])
                store_f64(partials, here + 1, seconds[0])
                fence()
                is_last[0] = int32(ticket(tickets, c) == splits - 1)
            barrier()
            if is_last[0] == 0:
                return
            fence()
            first = 0.0
            second = 0.0
            i = tid
            while i < splits:
                here = (c * splits + i) * 2
                first += load_f64(partials, here)
                second += load_f64(partials, here + 1)
                i += threads
            firsts[tid] = first
            seconds[tid] = second
            add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if tid == 0:
            if splits > 1:
                reset(tickets, c)
            count = float64(outer * inner)
            write_moments(moments, channels, c, count, pivot, firsts[0], seconds[0])

    return kernel


def planes_backward_reduce(dtype, lanes, ragged, threads):
    """Sums of dy and `dy * xhat`, and the gradients of weight and bias; grid (C, splits)."""
    work = KINDS[dtype].work
    read_slot = _slot_reader(dtype, lanes, ragged)
    load, _ = vector_access(dtype, lanes)
    owned = _owner(lanes, ragged)

    @device
    def add(v0, v1, g0, g1, near, first, second):
        f = s = work(0)
        for v in range(lanes):
            f += g0[v] + g1[v]
            s += g0[v] * (v0[v] - near)
            s += g1[v] * (v1[v] - near)
        return first + float64(f), second + float64(s)

    def kernel(
        x,
        dy,
        skew,
        outer,
        channels,
        inner,
        slots,
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
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        is_last = cuda.shared.array(1, int32)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        near = work(load_f64(statistics, 1 + c))
        total = outer * slots
        stop = quotient(total * (k + 1), splits)
        j = quotient(total * k, splits) + tid
        plane = quotient(j, slots)
        slot = j - plane * slots
        planes_on = small_quotient(int64(threads), slots) if slots <= threads else int64(0)
        slots_on = int64(threads) - planes_on * slots
        first = 0.0
        second = 0.0
        while j < stop:
            p1, r1 = _next_slot(plane, slot, slots, planes_on, slots_on)
            at0, m0 = owned(skew, channels, inner, c, plane, slot)
            at1, m1 = owned(skew, channels, inner, c, p1, r1)
            if not ragged and j + threads < stop:
                v0, v1, g0, g1 = load(x, at0), load(x, at1), load(dy, at0), load(dy, at1)
            else:
                m1 = m1 if j + threads < stop else int32(0)
                v0, v1 = read_slot(x, at0, m0), read_slot(x, at1, m1)
                g0, g1 = read_slot(dy, at0, m0), read_slot(dy, at1, m1)
            first, second = add(v0, v1, g0, g1, near, first, second)
            j += 2 * threads
            plane, slot = _next_slot(p1, r1, slots, planes_on, slots_on)
        firsts[tid] = first
        seconds[tid] = second
        add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if splits > 1:
            if tid == 0:
                here = (c * splits + k) * 2
                store_f64(partials, here, firsts[0])
                store_f64(partials, here + 1, seconds[0])
                fence()
                is_last[0] = int32(ticket(tickets, c) == splits - 1)
            barrier()
            if is_last[0] == 0:
                return
            fence()
            first = 0.0
            second = 0.0
            i = tid
            while i < splits:
                here = (c * splits + i) * 2
                first += load_f64(partials, here)
                second += load_f64(partials, here + 1)
                i += threads
            firsts[tid] = first
            seconds[tid] = second
            add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if tid == 0:
            if splits > 1:
                reset(tickets, c)
            write_sums(
                statistics,
                channels,
                c,
                float64(near),
                firsts[0],
                seconds[0],
                weight,
                weight_code,
                code,
                sums,
                grad_weight,
                grad_bias,
            )

    return kernel


@device
def _plane_of(at, inner):
    """`(plane, numbers of it from there on)` of number `at`."""
    i = 0 if at < inner else quotient(at, inner)
    return i, (i + 1) * inner - at


def planes_normalize(dtype, lanes, ragged, threads):
    """`y = (x - mean) * invstd * weight + bias`, statistics kept and running ones updated.

    Statistics come merged from `size` packed moments; with none of them they are the running
    ones, which stay as they are. Grid (pieces, 1). `ragged`: a slot may belong to two planes.
    """
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)

    @device
    def result(v, x, left, i, nears, scales, shifts):
        k = i + 1 if ragged and v >= left else i
        return (x[v] - nears[k]) * scales[k] + shifts[k]

    results = each_lane(lanes, result)
    zeros = each_lane(lanes, _zero(work))
    step = threads * lanes

    @device
    def write(y, at, v, position, inner, nears, scales, shifts):
        i, left = _plane_of(position, inner)
        store(y, at, results(v, left, i, nears, scales, shifts))

    def kernel(
        x,
        y,
        total,
        channels,
        inner,
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
        nears = cuda.shared.array(TABLE, work)
        scales = cuda.shared.array(TABLE, work)
        shifts = cuda.shared.array(TABLE, work)
        tid = int64(cuda.threadIdx.x)
        piece = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        begin = piece * (UNROLL * step)
        end = min(begin + UNROLL * step, total)
        whole = end - begin == UNROLL * step
        at = begin + tid * lanes
        # on their way while the table is made
        v0 = load(x, at) if whole else zeros()
        v1 = load(x, at + step) if whole else zeros()
        plane = quotient(begin, inner)
        i = tid
        while (plane + i) * inner < end:
            c = (plane + i) - quotient(plane + i, channels) * channels
            count, mean, m2, invstd = channel_statistics(
                parts, size, channels, c, running_mean, running_var, running_code, eps, clamp
            )
            near, scale, shift = slope_and_shift(
                work, c, mean, invstd, weight, weight_code, bias, bias_code
            )
            nears[i] = near
            scales[i] = scale
            shifts[i] = shift
            if (plane + i) * inner >= begin and plane + i < channels:  # one block has that of c
                keep(statistics, channels, c, count, mean, m2, invstd)
                if size > 0 and given(running_mean):
                    update_running(
                        running_mean, running_var, running_code, tracked, factor, c, count, mean, m2
                    )
            i += threads
        if piece == 0 and tid == 0 and given(tracked) and factor >= 0.0:
            write_count(tracked, read_count(tracked) + 1)
        barrier()
        ahead = begin - plane * inner
        if whole:
            ahead += tid * lanes
            write(y, at, v0, ahead, inner, nears, scales, shifts)
            write(y, at + step, v1, ahead + step, inner, nears, scales, shifts)
            at, ahead = at + 2 * step, ahead + 2 * step
            v0, v1 = load(x, at), load(x, at + step)
            write(y, at, v0, ahead, inner, nears, scales, shifts)
            write(y, at + step, v1, ahead + step, inner, nears, scales, shifts)
            return
        at = begin + tid
        while at < end:  # the last piece, number by number
            i = quotient(ahead + at - begin, inner)
            store_one(y, at, (load_one(x, at) - nears[i]) * scales[i] + shifts[i])
            at += threads

    return kernel


def planes_backward_input(dtype, lanes, ragged, threads):
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; grid (pieces, 1)."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)

    @device
    def gradient(x, dy, k, nears, of_dys, of_xs, shifts):
        return dy * of_dys[k] + ((x - nears[k]) * of_xs[k] + shifts[k])

    @device
    def result(v, x, dy, left, i, nears, of_dys, of_xs, shifts):
        k = i + 1 if ragged and v >= left else i
        return gradient(x[v], dy[v], k, nears, of_dys, of_xs, shifts)

    results = each_lane(lanes, result)
    zeros = each_lane(lanes, _zero(work))
    step = threads * lanes

    @device
    def write(dx, at, v, g, position, inner, nears, of_dys, of_xs, shifts):
        i, left = _plane_of(position, inner)
        store(dx, at, results(v, g, left, i, nears, of_dys, of_xs, shifts))

    def kernel(
        x, dy, dx, total, channels, inner, statistics, weight, weight_code, sums, eps, clamp
    ):
        nears = cuda.shared.array(TABLE, work)
        of_dys = cuda.shared.array(TABLE, work)
        of_xs = cuda.shared.array(TABLE, work)
        shifts = cuda.shared.array(TABLE, work)
        tid = int64(cuda.threadIdx.x)
        piece = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        begin = piece * (UNROLL * step)
        end = min(begin + UNROLL * step, total)
        whole = end - begin == UNROLL * step
        at = begin + tid * lanes
        # on their way while the table is made
        v0, g0 = (load(x, at), load(dy, at)) if whole else (zeros(), zeros())
        v1, g1 = (load(x, at + step), load(dy, at + step)) if whole else (zeros(), zeros())
        plane = quotient(begin, inner)
        i = tid
        while (plane + i) * inner < end:
            c = (plane + i) - quotient(plane + i, channels) * channels
            near, of_dy, of_x, shift = gradient_slopes(
                work, statistics, sums, channels, c, weight, weight_code, eps, clamp
            )
            nears[i] = near
            of_dys[i] = of_dy
            of_xs[i] = of_x
            shifts[i] = shift
            i += threads
        barrier()
        ahead = begin - plane * inner
        if whole:
            ahead += tid * lanes
            write(dx, at, v0, g0, ahead, inner, nears, of_dys, of_xs, shifts)
            write(dx, at + step, v1, g1, ahead + step, inner, nears, of_dys, of_xs, shifts)
            at, ahead = at + 2 * step, ahead + 2 * step
            v0, g0 = load(x, at), load(dy, at)
            v1, g1 = load(x, at + step), load(dy, at + step)
            write(dx, at, v0, g0, ahead, inner, nears, of_dys, of_xs, shifts)
            write(dx, at + step, v1, g1, ahead + step, inner, nears, of_dys, of_xs, shifts)
            return
        at = begin + tid
        while at < end:
            i = quotient(ahead + at - begin, inner)
            a, b = load_one(x, at), load_one(dy, at)
            store_one(dx, at, gradient(a, b, i, nears, of_dys, of_xs, shifts))
            at += threads

    return kernel
