"""CUDA kernels for planes: `[A, C, B]` with a channel's numbers in runs of B > 1.

Reductions: a block per (channel, split of it). Its threads walk over *slots* of 16 bytes, four at
a time. A thread sums chunks of them in the precision of its registers: deviations from the mean of
the first numbers of the chunk, and the squares of these deviations. In float64 it refers these sums
to the pivot of the channel, and adds them to its own. The block that finishes last adds the sums of
the splits in their order. So sums depend on the plan alone, and are the same on every run.

Where planes do not begin at multiples of 16 bytes (`ragged`), slots do. Then a plane shares the
slots at its two ends with its neighbours. Threads read these after all others: the whole slot,
without the numbers of the neighbour.

Elementwise kernels treat the whole activation as one run. Each block has a piece of it, and the
last piece comes first: what the reduction has read last is still in the L2 cache.
"""

from __future__ import annotations

from numba import cuda, types

from syncbn_core._kernels.cuda.activations import of_kernel
from syncbn_core._kernels.cuda.constants import CHUNK, TABLE, UNROLL
from syncbn_core._kernels.cuda.memory import (
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
from syncbn_core._kernels.cuda.statistics import (
    add_up,
    gradient_coefficients,
    input_gradient,
    is_last_block,
    normalize_coefficients,
    normalized,
    write_moments,
    write_sums,
)

float64, int32, int64 = types.float64, types.int32, types.int64

LONG_PLANE = 1 << 31  # far longer than a piece


def _slot_finder(lanes, ragged):
    """`find_slot(skew, inner, start, slot)`: where whole slot `slot` of a plane is, if it has it.

    `start`: number of x with which the plane begins. `skew`: numbers by which the pointer is off
    the grid of slots. A plane has `inner // lanes` whole slots; if it is ragged, maybe one less.
    """
    if not ragged:

        @device
        def find_slot(skew, inner, start, slot):
            return start + slot * lanes, True

        return find_slot

    @device
    def find_slot(skew, inner, start, slot):
        offset = slot * lanes + ((-(start + skew)) & (lanes - 1))
        return start + offset, offset + lanes <= inner

    return find_slot


def _edge_finder(lanes):
    """`find_edge(skew, inner, start, side)`: a slot that a ragged plane shares with another one.

    `(at, mask, count)`: where the slot is, which of its numbers are the plane's, and how many.
    `side`: 0 for the slot before the first whole one, 1 for the one after the last.
    """

    @device
    def find_edge(skew, inner, start, side):
        head = (-(start + skew)) & (lanes - 1)
        if side == 0:
            count = int32(head)
            return (
                start + head - lanes,
                ((int32(1) << count) - int32(1)) << int32(lanes - count),
                count,
            )
        tail = (inner - head) & (lanes - 1)
        count = int32(tail)
        return start + inner - tail, (int32(1) << count) - int32(1), count

    return find_edge


def _keeper(lanes):
    """`keep(values, mask, other)`: the numbers whose bit is set in `mask`, else `other`."""

    @device
    def kept(v, values, mask, other):
        return values[v] if (mask >> v) & 1 else other

    return each_lane(lanes, kept)


def _edge_reader(dtype, lanes):
    """`read_edge(pointer, at, mask, total, other)`: the numbers in `mask` of a slot, else `other`.

    A slot that is not wholly within the `total` numbers of the activation is read one by one.
    """
    load, _ = vector_access(dtype, lanes)
    load_one, _ = number_access(dtype)

    @device
    def number(v, pointer, at, mask, other):
        return load_one(pointer, at + v) if (mask >> v) & 1 else other

    read, keep = each_lane(lanes, number), _keeper(lanes)

    @device
    def read_edge(pointer, at, mask, total, other):
        if at >= 0 and at + lanes <= total:
            return keep(load(pointer, at), mask, other)
        return read(pointer, at, mask, other)

    return read_edge


@device
def _first_slot(tid, threads, outer, channels, inner, slots, c, k, splits):
    """The first slot of a thread in split `k` of channel `c`.

    `(j, stop, start, slot, start_on, slots_on)`: slot number j of the channel, before `stop`, is
    slot `slot` of the plane that begins with number `start`. For slot j + threads, they are
    `start_on` and `slots_on` more.
    """
    total = outer * slots
    stop = quotient(total * (k + 1), splits)
    j = quotient(total * k, splits) + tid
    plane = quotient(j, slots)
    slot = j - plane * slots
    planes_on = small_quotient(threads, slots) if slots <= threads else int64(0)
    slots_on = threads - planes_on * slots
    start = (plane * channels + c) * inner
    return j, stop, start, slot, planes_on * channels * inner, slots_on


@device
def _next_slot(start, slot, slots, start_on, slots_on, plane_on):
    """`(start, slot)`, advanced by a step; `plane_on`: the distance from one plane to the next."""
    start += start_on
    slot += slots_on
    if slot >= slots:
        slot -= slots
        start += plane_on
    return start, slot


@device
def _is_last_split(scratch, c, k, splits, tid, first, second, firsts):
    """Store the sums of thread 0 for split `k` of channel `c`; True if it is the last split."""
    partials, block_counters = scratch
    if tid == 0:
        at = (c * splits + k) * 2
        store_f64(partials, at, first)
        store_f64(partials, at + 1, second)
        fence()
    return is_last_block(block_counters, c, splits, tid, firsts)


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


@device
def _from_pivot(first, second, f, s, n, center, pivot):
    """Add sums `f`, `s` of n deviations from `center` and of their squares, as from `pivot`."""
    shift = float64(center) - pivot
    wide_f, wide_s, count = float64(f), float64(s), float64(n)
    return (
        first + (wide_f + count * shift),
        second + (wide_s + shift * (wide_f + wide_f + count * shift)),
    )


def planes_moments(dtype, lanes, ragged, threads):
    """Packed moments of x; grid (C, splits).

    A thread sums some `CHUNK * UNROLL` numbers in the precision of the registers: deviations from
    the mean of the first of them, and their squares. Then it refers the sums to the pivot of the
    channel, in float64. The error is bounded as in `rows_moments`, where n is at most 152 and g is
    32 or 16 (16 bits, float32), but may be one slot where planes are ragged: then 110 times.
    """
    work = KINDS[dtype].work
    load_one, _ = number_access(dtype)
    load, _ = vector_access(dtype, lanes)
    find_slot, find_edge = _slot_finder(lanes, ragged), _edge_finder(lanes)
    read_edge, keep, zeros = _edge_reader(dtype, lanes), _keeper(lanes), zeros_of(lanes, work)
    group = UNROLL * lanes
    share = work(1 / group)

    @device
    def total_of(v0, v1, v2, v3):
        total = work(0)
        for v in range(lanes):
            total += (v0[v] + v1[v]) + (v2[v] + v3[v])
        return total

    @device
    def add_slot(values, center, f, s):
        for v in range(lanes):
            d = values[v] - center
            f += d
            s += d * d
        return f, s

    @device
    def add_slots(v0, v1, v2, v3, center, f, s):
        f0 = f1 = s0 = s1 = work(0)
        for v in range(lanes):
            d0, d1, d2, d3 = v0[v] - center, v1[v] - center, v2[v] - center, v3[v] - center
            f0 += d0 + d1
            f1 += d2 + d3
            s0 += d0 * d0
            s1 += d1 * d1
            s0 += d2 * d2
            s1 += d3 * d3
        return f + (f0 + f1), s + (s0 + s1)

    def kernel(x, sizes, scratch, label, moments):
        skew, outer, channels, inner, slots, splits = sizes
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        pivot = float64(load_one(x, c * inner))
        j, stop, start, slot, start_on, slots_on = _first_slot(
            tid, int64(threads), outer, channels, inner, slots, c, k, splits
        )
        plane_on = channels * inner
        first = 0.0
        second = 0.0
        while j < stop:
            n = int32(0)
            center = f = s = work(0)
            while n < CHUNK * UNROLL and j < stop:
                a1, r1 = _next_slot(start, slot, slots, start_on, slots_on, plane_on)
                a2, r2 = _next_slot(a1, r1, slots, start_on, slots_on, plane_on)
                a3, r3 = _next_slot(a2, r2, slots, start_on, slots_on, plane_on)
                at0, has0 = find_slot(skew, inner, start, slot)
                at1, has1 = find_slot(skew, inner, a1, r1)
                at2, has2 = find_slot(skew, inner, a2, r2)
                at3, has3 = find_slot(skew, inner, a3, r3)
                if j + 3 * threads < stop and has0 and has1 and has2 and has3:
                    v0, v1, v2, v3 = load(x, at0), load(x, at1), load(x, at2), load(x, at3)
                    if n == 0:
                        center = total_of(v0, v1, v2, v3) * share
                    f, s = add_slots(v0, v1, v2, v3, center, f, s)
                    n = int32(n + group)
                else:
                    has1 = has1 and j + threads < stop
                    has2 = has2 and j + 2 * threads < stop
                    has3 = has3 and j + 3 * threads < stop
                    v0 = load(x, at0) if has0 else zeros()
                    v1 = load(x, at1) if has1 else zeros()
                    v2 = load(x, at2) if has2 else zeros()
                    v3 = load(x, at3) if has3 else zeros()
                    more = int32(has0) + int32(has1) + int32(has2) + int32(has3)
                    if n == 0 and more > 0:
                        center = total_of(v0, v1, v2, v3) / work(lanes * more)
                    if has0:
                        f, s = add_slot(v0, center, f, s)
                    if has1:
                        f, s = add_slot(v1, center, f, s)
                    if has2:
                        f, s = add_slot(v2, center, f, s)
                    if has3:
                        f, s = add_slot(v3, center, f, s)
                    n = int32(n + lanes * more)
                j += UNROLL * threads
                start, slot = _next_slot(a3, r3, slots, start_on, slots_on, plane_on)
            first, second = _from_pivot(first, second, f, s, n, center, pivot)
        if ragged:
            e = k * threads + tid  # slot of side `e & 1` of plane `e >> 1`
            while e < 2 * outer:
                start = ((e >> 1) * channels + c) * inner
                at, mask, n = find_edge(skew, inner, start, e & 1)
                if n > 0:
                    v = read_edge(x, at, mask, outer * plane_on, work(0))
                    center = total_of(v, zeros(), zeros(), zeros()) / work(n)
                    f, s = add_slot(keep(v, mask, center), center, work(0), work(0))
                    first, second = _from_pivot(first, second, f, s, n, center, pivot)
                e += splits * threads
        line = tid, tid, int64(1), int64(threads), firsts, seconds
        first, second = add_up(first, second, *line)
        if splits > 1:
            if not _is_last_split(scratch, c, k, splits, tid, first, second, firsts):
                return
            first, second = _sum_splits(scratch[0], c, splits, tid, int64(threads))
            first, second = add_up(first, second, *line)
        if tid == 0:
            if splits > 1:
                reset(scratch[1], c)
            count = float64(outer * inner)
            write_moments(label, moments, channels, c, count, pivot, first, second)

    return kernel


def planes_backward_reduce(dtype, lanes, ragged, threads, activation=""):
    """Sums of dy and `dy * xhat`, and the gradients of weight and bias; grid (C, splits)."""
    work = KINDS[dtype].work
    load, _ = vector_access(dtype, lanes)
    find_slot, find_edge = _slot_finder(lanes, ragged), _edge_finder(lanes)
    read_edge, zeros = _edge_reader(dtype, lanes), zeros_of(lanes, work)
    functions = of_kernel(activation, work, lanes, TABLE)
    incoming, value, of_channel = functions.incoming, functions.value, functions.of_channel

    @device
    def add_slot(values, gradients, rounded_mean, z, f, s):
        for v in range(lanes):
            # twice, which is computed once: so the kernel without activation is what it was
            f += incoming(gradients[v], values[v], rounded_mean, z)
            s += incoming(gradients[v], values[v], rounded_mean, z) * (
                value(values[v], z) - rounded_mean
            )
        return f, s

    def kernel(x, dy, sizes, scratch, statistics, weight, results, act):
        skew, outer, channels, inner, slots, splits = sizes
        firsts = cuda.shared.array(threads, float64)
        seconds = cuda.shared.array(threads, float64)
        tid = int64(cuda.threadIdx.x)
        c = int64(cuda.blockIdx.x)
        k = int64(cuda.blockIdx.y)
        rounded_mean = work(load_f64(statistics, 1 + c))
        z = of_channel(c, channels, statistics, weight, act)
        j, stop, start, slot, start_on, slots_on = _first_slot(
            tid, int64(threads), outer, channels, inner, slots, c, k, splits
        )
        plane_on = channels * inner
        first = 0.0
        second = 0.0
        while j < stop:
            a1, r1 = _next_slot(start, slot, slots, start_on, slots_on, plane_on)
            at0, has0 = find_slot(skew, inner, start, slot)
            at1, has1 = find_slot(skew, inner, a1, r1)
            has1 = has1 and j + threads < stop
            v0, g0 = (load(x, at0), load(dy, at0)) if has0 else (zeros(), zeros())
            v1, g1 = (load(x, at1), load(dy, at1)) if has1 else (zeros(), zeros())
            f = s = work(0)
            if has0:
                f, s = add_slot(v0, g0, rounded_mean, z, f, s)
            if has1:
                f, s = add_slot(v1, g1, rounded_mean, z, f, s)
            first += float64(f)
            second += float64(s)
            j += 2 * threads
            start, slot = _next_slot(a1, r1, slots, start_on, slots_on, plane_on)
        if ragged:
            e = k * threads + tid  # slot of side `e & 1` of plane `e >> 1`
            while e < 2 * outer:
                start = ((e >> 1) * channels + c) * inner
                at, mask, n = find_edge(skew, inner, start, e & 1)
                if n > 0:
                    v = read_edge(x, at, mask, outer * plane_on, rounded_mean)
                    g = read_edge(dy, at, mask, outer * plane_on, work(0))
                    f, s = add_slot(v, g, rounded_mean, z, work(0), work(0))
                    first += float64(f)
                    second += float64(s)
                e += splits * threads
        line = tid, tid, int64(1), int64(threads), firsts, seconds
        first, second = add_up(first, second, *line)
        if splits > 1:
            if not _is_last_split(scratch, c, k, splits, tid, first, second, firsts):
                return
            first, second = _sum_splits(scratch[0], c, splits, tid, int64(threads))
            first, second = add_up(first, second, *line)
        if tid == 0:
            if splits > 1:
                reset(scratch[1], c)
            mean = float64(rounded_mean)
            write_sums(c, channels, mean, first, second, statistics, weight, results)

    return kernel


@device
def _plane_of(at, inner):
    """`(plane, left)`: the plane of number `at`, and how many numbers of it are left from there.

    `at` counts from the first plane of a piece. So it is less than a piece, or exceeds `inner` by
    less than a piece.
    """
    if at < inner:
        i = int64(0)
    elif inner >= LONG_PLANE:
        i = int64(1)
    else:
        i = small_quotient(at, inner)
    return i, (i + 1) * inner - at


def planes_normalize(dtype, lanes, ragged, threads, activation=""):
    """`y = applied((x - mean) * invstd * weight + bias)`; writes statistics, updates running ones.

    Statistics are those of `num_parts` packed moments, merged; without parts they are the running
    ones, which do not change. Grid (pieces, 1). `ragged`: a slot may belong to two planes.
    """
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)
    applied = of_kernel(activation, work, lanes, TABLE).applied

    @device
    def result(v, x, left, i, rounded_means, scales, shifts, act):
        k = i + 1 if ragged and v >= left else i
        return applied(normalized(x[v], rounded_means[k], scales[k], shifts[k]), act)

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)
    step = threads * lanes

    @device
    def write(y, at, v, position, inner, rounded_means, scales, shifts, act):
        i, left = _plane_of(position, inner)
        store(y, at, results(v, left, i, rounded_means, scales, shifts, act))

    def kernel(x, y, sizes, affine, parts, rule, running, check, statistics, act):
        total, channels, inner = sizes
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
                work, c, writes, channels, affine, parts, rule, running, check, statistics
            )
            rounded_means[i] = rounded_mean
            scales[i] = scale
            shifts[i] = shift
            i += threads
        barrier()
        first = plane * inner
        tables = rounded_means, scales, shifts, act
        if whole:
            write(y, at, v0, at - first, inner, *tables)
            write(y, at + step, v1, at + step - first, inner, *tables)
            at += 2 * step
            v0, v1 = load(x, at), load(x, at + step)
            write(y, at, v0, at - first, inner, *tables)
            write(y, at + step, v1, at + step - first, inner, *tables)
            return
        left = int32(end - at)
        v0 = load(x, at) if left >= lanes else zeros()
        v1 = load(x, at + step) if left >= step + lanes else zeros()
        v2 = load(x, at + 2 * step) if left >= 2 * step + lanes else zeros()
        v3 = load(x, at + 3 * step) if left >= 3 * step + lanes else zeros()
        if left >= lanes:
            write(y, at, v0, at - first, inner, *tables)
        if left >= step + lanes:
            write(y, at + step, v1, at + step - first, inner, *tables)
        if left >= 2 * step + lanes:
            write(y, at + 2 * step, v2, at + 2 * step - first, inner, *tables)
        if left >= 3 * step + lanes:
            write(y, at + 3 * step, v3, at + 3 * step - first, inner, *tables)
        if ragged:  # the numbers at the end that fill no vector
            at = end - ((end - begin) & (lanes - 1)) + tid
            if at < end:
                i = small_quotient(at - first, inner) if at - first >= inner else 0
                v = load_one(x, at)
                z = normalized(v, rounded_means[i], scales[i], shifts[i])
                store_one(y, at, applied(z, act))

    return kernel


def planes_backward_input(dtype, lanes, ragged, threads, activation=""):
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; grid (pieces, 1)."""
    work = KINDS[dtype].work
    load, store = vector_access(dtype, lanes)
    load_one, store_one = number_access(dtype)

    functions = of_kernel(activation, work, lanes, TABLE)
    incoming, value, of_channel = functions.incoming, functions.value, functions.of_channel
    shared, hold, held = functions.shared, functions.hold, functions.held

    @device
    def gradient_at(x, dy, k, rounded_means, dy_scales, x_scales, shifts, more, act):
        z = held(more, k, act)
        g, own = incoming(dy, x, rounded_means[k], z), value(x, z)
        return input_gradient(own, g, rounded_means[k], dy_scales[k], x_scales[k], shifts[k])

    @device
    def result(v, x, dy, left, i, rounded_means, dy_scales, x_scales, shifts, more, act):
        k = i + 1 if ragged and v >= left else i
        tables = rounded_means, dy_scales, x_scales, shifts
        return gradient_at(x[v], dy[v], k, *tables, more, act)

    results = each_lane(lanes, result)
    zeros = zeros_of(lanes, work)
    step = threads * lanes

    @device
    def write(dx, at, v, g, position, inner, rounded_means, dy_scales, x_scales, shifts, more, act):
        i, left = _plane_of(position, inner)
        tables = rounded_means, dy_scales, x_scales, shifts
        store(dx, at, results(v, g, left, i, *tables, more, act))

    def kernel(x, dy, dx, sizes, statistics, weight, sums, check, rule, act):
        total, channels, inner = sizes
        rounded_means = cuda.shared.array(TABLE, work)
        dy_scales = cuda.shared.array(TABLE, work)
        x_scales = cuda.shared.array(TABLE, work)
        shifts = cuda.shared.array(TABLE, work)
        more = shared()
        tid = int64(cuda.threadIdx.x)
        piece = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        begin = piece * (UNROLL * step)
        end = min(begin + UNROLL * step, total)
        whole = end - begin == UNROLL * step
        at = begin + tid * lanes
        none = zeros(), zeros()
        # loaded while the table is made
        v0, g0 = (load(x, at), load(dy, at)) if whole else none
        v1, g1 = (load(x, at + step), load(dy, at + step)) if whole else none
        plane = quotient(begin, inner)
        i = tid
        while (plane + i) * inner < end:
            c = (plane + i) - quotient(plane + i, channels) * channels
            rounded_mean, dy_scale, x_scale, shift = gradient_coefficients(
                work, c, channels, statistics, weight, sums, check, rule
            )
            rounded_means[i] = rounded_mean
            dy_scales[i] = dy_scale
            x_scales[i] = x_scale
            shifts[i] = shift
            hold(more, i, of_channel(c, channels, statistics, weight, act))
            i += threads
        barrier()
        ahead = begin - plane * inner
        tables = rounded_means, dy_scales, x_scales, shifts, more, act
        if whole:
            ahead += tid * lanes
            write(dx, at, v0, g0, ahead, inner, *tables)
            write(dx, at + step, v1, g1, ahead + step, inner, *tables)
            at, ahead = at + 2 * step, ahead + 2 * step
            v0, g0 = load(x, at), load(dy, at)
            v1, g1 = load(x, at + step), load(dy, at + step)
            write(dx, at, v0, g0, ahead, inner, *tables)
            write(dx, at + step, v1, g1, ahead + step, inner, *tables)
            return
        i = tid * lanes  # one vector after the other: two would need more registers
        size = end - begin
        while i + lanes <= size:
            at = begin + i
            write(dx, at, load(x, at), load(dy, at), ahead + i, inner, *tables)
            i += step
        if ragged:  # the numbers at the end that fill no vector
            i = size - (size & (lanes - 1)) + tid
            if i < size:
                at = begin + i
                i = small_quotient(ahead + i, inner) if ahead + i >= inner else 0
                v, g = load_one(x, at), load_one(dy, at)
                store_one(dx, at, gradient_at(v, g, i, *tables))

    return kernel
