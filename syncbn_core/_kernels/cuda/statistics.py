"""What the CUDA kernels for planes and rows share: formulas per channel, and sums of blocks.

    packed moments   float64 [2 C + 2]: count, mean, m2, label; several of them are the parts that
                     `merged` merges, after `compare_labels`
    statistics       float64 [3 C + 1]: count, mean, m2, invstd

Within a kernel, sums over many values are float64 sums of deviations from a *pivot*, one value of
the channel. All threads and blocks have the same pivot, so their sums only have to be added, in a
fixed order; moments are made of them once, at the end.
"""

from __future__ import annotations

import math

from numba import types

from syncbn_core._kernels.cuda.memory import (
    barrier,
    count_up,
    device,
    fence,
    given,
    load_f64,
    load_parameter,
    product,
    read_count,
    store_f64,
    store_parameter,
    write_count,
)

float64, int32, int64 = types.float64, types.int32, types.int64


# ------------------------------------------------------------------- statistics of a channel


@device
def merged(parts, channels, c):
    """`(count, mean, m2)` of channel `c` over packed moments, in the order of the parts.

        mean = sum(n_i / n * mean_i)
        m2   = sum(m2_i + n_i * (mean_i - mean)**2)

    The same as `merged` in `syncbn_core/moments.py`, with the same roundings and so the same bits.
    A single part stays as it is.
    """
    parts, num_parts = parts
    if num_parts == 1:
        return load_f64(parts, 0), load_f64(parts, 1 + c), load_f64(parts, 1 + channels + c)
    stride = 2 * channels + 2
    count = 0.0
    for p in range(num_parts):
        count += load_f64(parts, p * stride)
    divisor = count if count > 0.0 else 1.0
    mean = 0.0
    at = 0  # counted on: a product gives code with more instructions
    for _ in range(num_parts):
        mean += product(load_f64(parts, at) / divisor, load_f64(parts, at + 1 + c))
        at += stride
    m2 = 0.0
    at = 0
    for _ in range(num_parts):
        delta = load_f64(parts, at + 1 + c) - mean
        between = product(product(load_f64(parts, at), delta), delta)
        m2 += load_f64(parts, at + 1 + channels + c) + between
        at += stride
    return count, mean, m2


@device
def differ(label, other):
    """As `differ` in `syncbn_core/labels.py`: whether two labels of forward are not of one layer.

    A call without a layer, whose number is 1 there, goes with any.
    """
    of_something_else = not (other >= 32.0 and other < 2.0**53)  # NaN too
    a, b = int64(label), int64(other)
    known = ((a >> 5) & 0x7FFFF) != 1 and ((b >> 5) & 0x7FFFF) != 1
    unlike = (a ^ b) & (0xFFFFFFFFF if known else 31)
    return of_something_else or unlike != 0


@device
def sound(alarm, place):
    """Write `place` to `alarm`, memory of the host, unless another call has been there before."""
    if load_f64(alarm, 0) == 0.0:
        store_f64(alarm, 0, place)


@device
def compare_labels(parts, channels, c, check):
    """Sound the alarm if a part has a label that differs from `label`.

    Thread `c` of `channels` looks at every `channels`-th part.
    """
    (parts, num_parts), (label, alarm, place) = parts, check
    p = c
    while p < num_parts:
        if differ(label, load_f64(parts, p * (2 * channels + 2) + 2 * channels + 1)):
            sound(alarm, place)
            return  # so that the compiler does not unroll the loop
        p += channels


@device
def is_clamped(var, rule):
    """Whether "clamp" makes invstd the constant `1 / sqrt(eps)`, which has no gradient."""
    eps, clamp = rule
    return clamp != 0 and var < eps


@device
def inverse_deviation(count, m2, rule):
    """`1 / sqrt(var + eps)`, or with `clamp` `1 / sqrt(max(var, eps))`; NaN stays NaN."""
    eps, clamp = rule
    var = m2 / count if count > 0.0 else 0.0
    if is_clamped(var, rule):
        var = eps
    elif clamp == 0:
        var += eps
    return 1.0 / math.sqrt(var)


@device
def update_running(running, c, count, mean, m2):
    """Blend the batch into the running statistics of channel `c`; an empty batch changes nothing.

    `factor` is the share of the batch; below zero the share is `1 / (tracked + 1)`, so that
    running statistics are the average over all batches.
    """
    running_mean, running_var, code, tracked, factor = running
    if count > 0.0:
        share = factor
        if share < 0.0:
            share = 1.0 / (read_count(tracked) + 1)
        old = load_parameter(code, running_mean, c)
        store_parameter(code, running_mean, c, (1.0 - share) * old + share * mean)
        unbiased = m2 / (count - 1.0) if count > 1.0 else m2
        old = load_parameter(code, running_var, c)
        store_parameter(code, running_var, c, (1.0 - share) * old + share * unbiased)


@device
def weight_of(weight, c):
    """The weight of channel `c` as float64; 1 without weights. `weight`: and its code."""
    return load_parameter(weight[1], weight[0], c) if given(weight[0]) else 1.0


@device
def around_rounded_mean(work, mean, scale):
    """`(rounded_mean, shift)`: `(x - mean) * scale = (x - rounded_mean) * scale + shift`.

    `rounded_mean` has the precision of the registers, so that `x - rounded_mean` is exact near it.
    """
    rounded_mean = work(mean)
    return rounded_mean, (float64(rounded_mean) - mean) * scale


# ------------------------------------------------------------------------- normalize


@device
def normalized(x, rounded_mean, scale, shift):
    """y of one value, by the coefficients of its channel."""
    return (x - rounded_mean) * scale + shift


@device
def normalize_coefficients(
    work, c, writes, channels, affine, parts, rule, running, check, statistics
):
    """`(rounded_mean, scale, shift)` of channel `c`, for `normalized`.

    Statistics are those of the merged parts; without parts they are the running ones. One thread
    of the grid `writes` the statistics of the channel, updates its running ones, compares labels.
    """
    _, _, bias, bias_code = affine
    running_mean, running_var, running_code, tracked, factor = running
    num_parts = parts[1]
    if num_parts == 0:
        count = 1.0
        mean = load_parameter(running_code, running_mean, c)
        m2 = load_parameter(running_code, running_var, c)
    else:
        count, mean, m2 = merged(parts, channels, c)
    invstd = inverse_deviation(count, m2, rule)
    scale = invstd * weight_of(affine, c)
    rounded_mean, shift = around_rounded_mean(work, mean, scale)
    if given(bias):
        shift += load_parameter(bias_code, bias, c)
    if writes:
        if given(check[1]):
            compare_labels(parts, channels, c, check)
        if c == 0:
            store_f64(statistics, 0, count)
        store_f64(statistics, 1 + c, mean)
        store_f64(statistics, 1 + channels + c, m2)
        store_f64(statistics, 1 + 2 * channels + c, invstd)
        if num_parts > 0 and given(running_mean):
            update_running(running, c, count, mean, m2)
        if c == 0 and given(tracked) and factor >= 0.0:
            write_count(tracked, read_count(tracked) + 1)
    return rounded_mean, work(scale), work(shift)


# -------------------------------------------------------------------------- backward


@device
def input_gradient(x, dy, rounded_mean, dy_scale, x_scale, shift):
    """dx of one value, by the coefficients of its channel."""
    return dy * dy_scale + ((x - rounded_mean) * x_scale + shift)


@device
def gradient_coefficients(work, c, channels, statistics, weight, sums, check, rule):
    """`(rounded_mean, dy_scale, x_scale, shift)` of channel `c`, for `input_gradient`.

    Without `sums` the statistics are constants: no gradient flows through them. Unless `label` is
    NaN, the sums must end with this number; else all gradients become NaN and the alarm sounds.
    """
    label, alarm, place = check
    mean = load_f64(statistics, 1 + c)
    invstd = load_f64(statistics, 1 + 2 * channels + c)
    mean_dy = 0.0
    mean_dy_xhat = 0.0
    if given(sums):
        count = load_f64(statistics, 0)
        if count > 0.0:
            mean_dy = load_f64(sums, c) / count
            var = load_f64(statistics, 1 + channels + c) / count
            if not is_clamped(var, rule):
                mean_dy_xhat = load_f64(sums, channels + c) / count
        if not math.isnan(label) and load_f64(sums, 2 * channels) != label:
            mean_dy = math.nan
            if c == 0 and given(alarm):
                sound(alarm, place)
    dy_scale = invstd * weight_of(weight, c)
    x_scale = -invstd * invstd * mean_dy_xhat
    rounded_mean, shift = around_rounded_mean(work, mean, x_scale)
    return rounded_mean, work(dy_scale), work(x_scale), work(shift - invstd * mean_dy)


# ------------------------------------------------------------- results of the reductions


@device
def write_moments(label, moments, channels, c, count, pivot, first, second):
    """Packed moments of channel `c` from its sums of `d` and `d**2`, `d = x - pivot`."""
    shift = first / count
    m2 = second - first * shift
    if m2 < 0.0:
        m2 = 0.0
    if c == 0:
        store_f64(moments, 0, count)
        store_f64(moments, 1 + 2 * channels, label)
    store_f64(moments, 1 + c, pivot + shift)
    store_f64(moments, 1 + channels + c, m2)


@device
def write_sums(c, channels, rounded_mean, first, second, statistics, weight, results):
    """From sums of dy and `dy * (x - rounded_mean)`: gradients of weight and bias, sums for dx.

    `sums` are `sum(dy) * weight`, `sum(dy * xhat) * weight`, which the members add up. `label` is
    written behind them, unless it is NaN.
    """
    gradient_code = weight[2]
    label, sums, grad_weight, grad_bias = results
    mean = load_f64(statistics, 1 + c)
    invstd = load_f64(statistics, 1 + 2 * channels + c)
    second = (second + (rounded_mean - mean) * first) * invstd
    if given(grad_weight):
        store_parameter(gradient_code, grad_weight, c, second)
    if given(grad_bias):
        store_parameter(gradient_code, grad_bias, c, first)
    if c == 0 and not math.isnan(label):
        store_f64(sums, 2 * channels, label)
    scale = weight_of(weight, c)
    store_f64(sums, c, first * scale)
    store_f64(sums, channels + c, second * scale)


# ----------------------------------------------------------------- sums of a block, of blocks


@device
def top_reach(height):
    """The smallest power of 4 that is at least `height`."""
    reach = int64(1)
    while reach < height:
        reach *= 4
    return reach


@device
def add_up(first, second, tid, row, width, height, firsts, seconds):
    """`(first, second)`: sums over rows of `width` threads, in the threads of row 0.

    Every thread calls it; `row` is its own, and rows from `height` on do not count. The order of
    the sums is fixed. A thread keeps its sums in registers. Row 0 writes nothing to the shared
    tables, which have a number per thread; call a barrier before you write to their other places.
    """
    reach = top_reach(height)
    while reach > 1:
        above = reach
        reach >>= 2
        if reach <= row and row < above and row < height:
            firsts[tid] = first
            seconds[tid] = second
        barrier()
        if row < reach:
            for i in range(1, 4):
                if row + i * reach < height:
                    first += firsts[tid + i * reach * width]
                    second += seconds[tid + i * reach * width]
    return first, second


@device
def is_last_block(block_counters, index, blocks, tid, flag):
    """Whether this block is the last of `blocks` that call this with the counter `index`.

    The last one sees what the others wrote before; it has to `reset` the counter. Every thread
    calls it. A thread that wrote something for the last block calls `fence` before; if other
    threads than thread 0 wrote, a barrier must follow. `flag`: a shared table of `add_up`, which
    leaves the first number to thread 0.
    """
    if tid == 0:
        flag[0] = 1.0 if count_up(block_counters, index) == blocks - 1 else 0.0
    barrier()
    if flag[0] == 0.0:
        return False
    fence()
    return True
