"""CUDA kernels for planes: `[A, C, B]` with a channel's numbers in runs of B > 1.

Reductions: a block per (channel, split of it). Its threads walk over *slots* of 16 bytes. A thread
takes four slots at a time, keeps their numbers in registers, and sums first the numbers and then
their deviations from their own mean (the corrected two-pass algorithm). It converts these sums, in
float64, to deviations from the pivot of the channel, and adds them to its own. The block that
finishes last adds the sums of the splits in their order. So sums depend on the shape alone, and
are the same on every run.

Where planes do not begin at multiples of 16 bytes (`ragged`), slots do: then the first and the
last slot of a plane are only partly its own, and those numbers are read one by one.

Elementwise kernels treat the whole activation as one run. Each block has a piece of it, and the
last piece comes first: what the reduction has read last is still in the L2 cache.
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
    load_f64,
    number_access,
    quotient,
    reset,
    small_quotient,
    store_f64,
    sum_of_lanes,
    vector_access,
    zeros_of,
)
from syncbn_core.kernels.cuda.statistics import (
    add_up,
    gradient_coefficients,
    input_gradient,
    is_last_block,
    normalize_coefficients,
    normalized,
    write_moments,
    write_sums,
)

float32, float64, int32, int64 = types.float32, types.float64, types.int32, types.int64


def _slot_reader(dtype, lanes, ragged):
    """`read_slot(pointer, at, mask)`: the numbers of a slot whose bit is set in `mask`, else 0.

    Only ragged planes have slots that are partly their own; others have masks of all or of none.
    """
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)
    work = KINDS[dtype].work
    whole = (1 << lanes) - 1
    zeros = zeros_of(lanes, work)

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
def _first_slot(tid, threads, outer, slots, k, splits):
    """The first slot of a thread in split `k` of a channel.

    `(j, stop, plane, slot, planes_on, slots_on)`: slot number j of the channel, before `stop`, is
    slot `slot` of plane `plane`. Slot j + threads is `planes_on` planes and `slots_on` slots on.
    """
    total = outer * slots
    stop = quotient(total * (k + 1), splits)
    j = quotient(total * k, splits) + tid
    plane = quotient(j, slots)
    slot = j - plane * slots
    planes_on = small_quotient(threads, slots) if slots <= threads else int64(0)
    slots_on = threads - planes_on * slots
    return j, stop, plane, slot, planes_on, slots_on


@device
def _next_slot(plane, slot, slots, planes_on, slots_on):
    """`(plane, slot)` of the slot that is so many planes and slots on."""
    plane += planes_on
    slot += slots_on
    if slot >= slots:
        slot -= slots
        plane += 1
    return plane, slot


@device
def _is_last_split(partials, block_counters, c, k, splits, tid, firsts, seconds, flag):
    """Store the sums of split `k` of channel `c`; True if all other splits have stored theirs."""
    if tid == 0:
        at = (c * splits + k) * 2
        store_f64(partials, at, firsts[0])
        store_f64(partials, at + 1, seconds[0])
        fence()
    return is_last_block(block_counters, c, splits, tid, flag)


# Numba inlines it: when NVVM does, ptxas needs more registers for the loop over x, and spills.
@device(inline="always")
def _sum_splits(partials, c, splits, tid, threads):
    """`(first, second)`: sums over every `threads`-th split of channel `c`, from `tid` on."""
    first = 0.0
    second = 0.0
    i = tid
    while i < splits:
        at = (c * splits + i) * 2
        first += load_f64(partials, at)
        second += load_f64(partials, at + 1)
        i += threads
    return first, second


def planes_moments(dtype, lanes, ragged, threads):
    """Packed moments of x; grid (C, splits)."""
    work = KINDS[dtype].work
    read_slot = _slot_reader(dtype, lanes, ragged)
    load_one, _ = number_access(dtype)
    owned = _owner(lanes, ragged)
    load, _ = vector_access(dtype, lanes)
    share = work(1 / (UNROLL * lanes))

    @device
    def add_deviations(mean, n, f, s, pivot, first, second):
        """Add sums `f`, `s` of n deviations from `mean` and of their squares, as from `pivot`."""
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
        return add_deviations(mean, n, f, s, pivot, first, second)

    # No loop over lanes: masks make its body long, so the compiler would not unroll it, and would
    # find each lane through a chain of branches.

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
        return add_deviations(mean, float64(count), float64(f), float64(s), pivot, first, second)

    def kernel(x, skew, outer, channels, inner, slots, splits, partials, block_counters, moments):
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        flag = cuda.shared.array(1, int32)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        pivot = float64(load_one(x, c * inner))
        j, stop, plane, slot, planes_on, slots_on = _first_slot(
            tid, int64(threads), outer, slots, k, splits
        )
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
            shared = firsts, seconds, flag
            if not _is_last_split(partials, block_counters, c, k, splits, tid, *shared):
                return
            firsts[tid], seconds[tid] = _sum_splits(partials, c, splits, tid, int64(threads))
            add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if tid == 0:
            if splits > 1:
                reset(block_counters, c)
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
    def add(v0, v1, g0, g1, rounded_mean, first, second):
        f = s = work(0)
        for v in range(lanes):
            f += g0[v] + g1[v]
            s += g0[v] * (v0[v] - rounded_mean)
            s += g1[v] * (v1[v] - rounded_mean)
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
        block_counters,
        statistics,
        weight,
        weight_code,
        gradient_code,
        sums,
        grad_weight,
        grad_bias,
    ):
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        flag = cuda.shared.array(1, int32)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        rounded_mean = work(load_f64(statistics, 1 + c))
        j, stop, plane, slot, planes_on, slots_on = _first_slot(
            tid, int64(threads), outer, slots, k, splits
        )
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
            first, second = add(v0, v1, g0, g1, rounded_mean, first, second)
            j += 2 * threads
            plane, slot = _next_slot(p1, r1, slots, planes_on, slots_on)
        firsts[tid] = first
        seconds[tid] = second
        add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if splits > 1:
            shared = firsts, seconds, flag
            if not _is_last_split(partials, block_counters, c, k, splits, tid, *shared):
                return
            firsts[tid], seconds[tid] = _sum_splits(partials, c, splits, tid, int64(threads))
            add_up(firsts, seconds, tid, tid, 1, 1, threads)
        if tid == 0:
            if splits > 1:
                reset(block_counters, c)
            write_sums(
                c,
                channels,
                float64(rounded_mean),
                firsts[0],
                seconds[0],
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
def _plane_of(at, inner):
    """`(plane, left)`: the plane of number `at`, and how many numbers of it are left from there."""
    i = 0 if at < inner else quotient(at, inner)
    return i, (i + 1) * inner - at


def planes_normalize(dtype, lanes, ragged, threads):
    """`y = (x - mean) * invstd * weight + bias`; writes statistics and updates running ones.

    Statistics are those of `num_parts` packed moments, merged; without parts they are the running
    ones, which do not change. Grid (pieces, 1). `ragged`: a slot may belong to two planes.
    """
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)

    @device
    def result(v, x, left, i, rounded_means, scales, shifts):
        k = i + 1 if ragged and v >= left else i
        return normalized(x[v], rounded_means[k], scales[k], shifts[k])

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)
    step = threads * lanes

    @device
    def write(y, at, v, position, inner, rounded_means, scales, shifts):
        i, left = _plane_of(position, inner)
        store(y, at, results(v, left, i, rounded_means, scales, shifts))

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
        rounded_means = cuda.shared.array(TABLE, work)
        scales = cuda.shared.array(TABLE, work)
        shifts = cuda.shared.array(TABLE, work)
        tid = int64(cuda.threadIdx.x)
        piece = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        begin = piece * (UNROLL * step)
        end = min(begin + UNROLL * step, total)
        whole = end - begin == UNROLL * step
        at = begin + tid * lanes
        # loaded while the table is made
        v0 = load(x, at) if whole else zeros()
        v1 = load(x, at + step) if whole else zeros()
        plane = quotient(begin, inner)
        i = tid
        while (plane + i) * inner < end:
            c = (plane + i) - quotient(plane + i, channels) * channels
            # true in one block: that with the first number of the channel
            writes = (plane + i) * inner >= begin and plane + i < channels
            rounded_mean, scale, shift = normalize_coefficients(
                work,
                c,
                writes,
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
            rounded_means[i] = rounded_mean
            scales[i] = scale
            shifts[i] = shift
            i += threads
        barrier()
        ahead = begin - plane * inner
        if whole:
            ahead += tid * lanes
            write(y, at, v0, ahead, inner, rounded_means, scales, shifts)
            write(y, at + step, v1, ahead + step, inner, rounded_means, scales, shifts)
            at, ahead = at + 2 * step, ahead + 2 * step
            v0, v1 = load(x, at), load(x, at + step)
            write(y, at, v0, ahead, inner, rounded_means, scales, shifts)
            write(y, at + step, v1, ahead + step, inner, rounded_means, scales, shifts)
            return
        at = begin + tid
        while at < end:  # the last piece is taken number by number
            i = quotient(ahead + at - begin, inner)
            v = load_one(x, at)
            store_one(y, at, normalized(v, rounded_means[i], scales[i], shifts[i]))
            at += threads

    return kernel


def planes_backward_input(dtype, lanes, ragged, threads):
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; grid (pieces, 1)."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)

    @device
    def result(v, x, dy, left, i, rounded_means, dy_scales, x_scales, shifts):
        k = i + 1 if ragged and v >= left else i
        return input_gradient(x[v], dy[v], rounded_means[k], dy_scales[k], x_scales[k], shifts[k])

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)
    step = threads * lanes

    @device
    def write(dx, at, v, g, position, inner, rounded_means, dy_scales, x_scales, shifts):
        i, left = _plane_of(position, inner)
        store(dx, at, results(v, g, left, i, rounded_means, dy_scales, x_scales, shifts))

    def kernel(
        x, dy, dx, total, channels, inner, statistics, weight, weight_code, sums, eps, clamp
    ):
        rounded_means = cuda.shared.array(TABLE, work)
        dy_scales = cuda.shared.array(TABLE, work)
        x_scales = cuda.shared.array(TABLE, work)
        shifts = cuda.shared.array(TABLE, work)
        tid = int64(cuda.threadIdx.x)
        piece = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        begin = piece * (UNROLL * step)
        end = min(begin + UNROLL * step, total)
        whole = end - begin == UNROLL * step
        at = begin + tid * lanes
        # loaded while the table is made
        v0, g0 = (load(x, at), load(dy, at)) if whole else (zeros(), zeros())
        v1, g1 = (load(x, at + step), load(dy, at + step)) if whole else (zeros(), zeros())
        plane = quotient(begin, inner)
        i = tid
        while (plane + i) * inner < end:
            c = (plane + i) - quotient(plane + i, channels) * channels
            rounded_mean, dy_scale, x_scale, shift = gradient_coefficients(
                work, c, channels, statistics, weight, weight_code, sums, eps, clamp
            )
            rounded_means[i] = rounded_mean
            dy_scales[i] = dy_scale
            x_scales[i] = x_scale
            shifts[i] = shift
            i += threads
        barrier()
        ahead = begin - plane * inner
        if whole:
            ahead += tid * lanes
            write(dx, at, v0, g0, ahead, inner, rounded_means, dy_scales, x_scales, shifts)
            write(
                dx,
                at + step,
                v1,
                g1,
                ahead + step,
                inner,
                rounded_means,
                dy_scales,
                x_scales,
                shifts,
            )
            at, ahead = at + 2 * step, ahead + 2 * step
            v0, g0 = load(x, at), load(dy, at)
            v1, g1 = load(x, at + step), load(dy, at + step)
            write(dx, at, v0, g0, ahead, inner, rounded_means, dy_scales, x_scales, shifts)
            write(
                dx,
                at + step,
                v1,
                g1,
                ahead + step,
                inner,
                rounded_means,
                dy_scales,
                x_scales,
                shifts,
            )
            return
        at = begin + tid
        while at < end:
            i = quotient(ahead + at - begin, inner)
            v, g = load_one(x, at), load_one(dy, at)
            coefficients = rounded_means[i], dy_scales[i], x_scales[i], shifts[i]
            store_one(dx, at, input_gradient(v, g, *coefficients))
            at += threads

    return kernel
