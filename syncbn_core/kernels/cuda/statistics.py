"""What the CUDA kernels for planes and rows share: statistics of a channel, sums of a block.

Packed moments are `count, mean[C], m2[C]`, statistics `count, mean[C], m2[C], invstd[C]`, all
float64. Sums over many values are taken in float64 relative to a *pivot*, one value of the
channel, so that they add up plainly and in a fixed order.
"""

from __future__ import annotations

import math

from numba import types

from syncbn_core.kernels.cuda.memory import (
    barrier,
    device,
    given,
    load_f64,
    load_parameter,
    read_count,
    store_f64,
    store_parameter,
)

float64 = types.float64


@device
def merged(parts, size, channels, c):
    """`(count, mean, m2)` of channel `c` over `size` packed moments, merged in their order."""
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for p in range(size):
        base = p * (2 * channels + 1)
        n = load_f64(parts, base)
        if n > 0.0:
            total = count + n
            delta = load_f64(parts, base + 1 + c) - mean
            mean += delta * (n / total)
            m2 += load_f64(parts, base + 1 + channels + c) + delta * delta * (count * n / total)
            count = total
    return count, mean, m2


@device
def inverse_deviation(count, m2, eps, clamp):
    """`1 / sqrt(var + eps)`, or with `clamp` `1 / sqrt(max(var, eps))`; NaN stays NaN."""
    var = m2 / count if count > 0.0 else 0.0
    if clamp == 0:
        var += eps
    elif var < eps:
        var = eps
    return 1.0 / math.sqrt(var)


@device
def channel_statistics(parts, size, channels, c, running_mean, running_var, code, eps, clamp):
    """`(count, mean, m2, invstd)` of channel `c`; with no parts they are the running ones."""
    if size == 0:
        count = 1.0
        mean = load_parameter(code, running_mean, c)
        m2 = load_parameter(code, running_var, c)
    else:
        count, mean, m2 = merged(parts, size, channels, c)
    return count, mean, m2, inverse_deviation(count, m2, eps, clamp)


@device
def keep(statistics, channels, c, count, mean, m2, invstd):
    """Write what backward needs of channel `c`."""
    if c == 0:
        store_f64(statistics, 0, count)
    store_f64(statistics, 1 + c, mean)
    store_f64(statistics, 1 + channels + c, m2)
    store_f64(statistics, 1 + 2 * channels + c, invstd)


@device
def update_running(running_mean, running_var, code, tracked, factor, c, count, mean, m2):
    """Blend the batch into the running statistics of channel `c`; all empty: leave them.

    `factor` is the share of the batch; below zero it is `1 / (tracked + 1)`, the average.
    """
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
def slope_and_shift(work, c, mean, invstd, weight, weight_code, bias, bias_code):
    """`(near, scale, shift)`: y = (x - near) * scale + shift, in registers' precision.

    `near` is the rounded mean, from which x is subtracted exactly; `shift` has the remainder.
    """
    slope = invstd
    if given(weight):
        slope *= load_parameter(weight_code, weight, c)
    near = work(mean)
    shift = (float64(near) - mean) * slope
    if given(bias):
        shift += load_parameter(bias_code, bias, c)
    return near, work(slope), work(shift)


@device
def gradient_slopes(work, statistics, sums, channels, c, weight, weight_code, eps, clamp):
    """`(near, of_dy, of_x, shift)`: dx = dy * of_dy + (x - near) * of_x + shift.

    Without `sums` no gradient flows through the statistics; where "clamp" made the deviation a
    constant none flows through that.
    """
    mean = load_f64(statistics, 1 + c)
    invstd = load_f64(statistics, 1 + 2 * channels + c)
    mean_dy = 0.0
    mean_dy_xhat = 0.0
    if given(sums):
        count = load_f64(statistics, 0)
        if count > 0.0:
            mean_dy = load_f64(sums, c) / count
            var = load_f64(statistics, 1 + channels + c) / count
            if clamp == 0 or not var < eps:
                mean_dy_xhat = load_f64(sums, channels + c) / count
    of_dy = invstd
    if given(weight):
        of_dy *= load_parameter(weight_code, weight, c)
    of_x = -invstd * invstd * mean_dy_xhat
    near = work(mean)
    shift = (float64(near) - mean) * of_x - invstd * mean_dy
    return near, work(of_dy), work(of_x), work(shift)


@device
def write_moments(moments, channels, c, count, pivot, first, second):
    """Packed moments of channel `c` from its sums of `d` and `d**2`, `d = x - pivot`."""
    shift = first / count
    m2 = second - first * shift
    if m2 < 0.0:
        m2 = 0.0
    if c == 0:
        store_f64(moments, 0, count)
    store_f64(moments, 1 + c, pivot + shift)
    store_f64(moments, 1 + channels + c, m2)


@device
def write_sums(
    statistics,
    channels,
    c,
    near,
    first,
    second,
    weight,
    weight_code,
    code,
    sums,
    grad_weight,
    grad_bias,
):
    """From sums of dy and `dy * (x - near)`: gradients of weight and bias, and sums for dx.

    `sums` are `sum(dy) * weight`, `sum(dy * xhat) * weight`: what the members add up.
    """
    mean = load_f64(statistics, 1 + c)
    invstd = load_f64(statistics, 1 + 2 * channels + c)
    second = (second + (near - mean) * first) * invstd
    if given(grad_weight):
        store_parameter(code, grad_weight, c, second)
    if given(grad_bias):
        store_parameter(code, grad_bias, c, first)
    scale = load_parameter(weight_code, weight, c) if given(weight) else 1.0
    store_f64(sums, c, first * scale)
    store_f64(sums, channels + c, second * scale)


@device
def add_up(first, second, tid, row, per, width, height):
    """Sum the rows of two shared tables into their first row, in a fixed order.

    A row is `width` threads with `per` neighbouring numbers each; `row` is the thread's. Every
    thread calls it. Threads of the first row see their own sums; for those of others a barrier
    must follow.
    """
    stride = width * per
    reach = types.int64(1)
    while reach < height:
        reach *= 2
    while reach > 1:
        reach >>= 1
        barrier()
        if row < reach and row + reach < height:
            for v in range(per):
                i = tid * per + v
                first[i] += first[i + reach * stride]
                second[i] += second[i + reach * stride]
