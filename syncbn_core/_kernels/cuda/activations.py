"""Activations in the CUDA kernels: applied where y is written, their derivative where dy is read.

    y = applied(z)      dz = dy * slope(z)      z = (x - rounded_mean) * scale + shift

A kernel is made for each activation that is asked for, with the functions of `of_kernel` built in;
backward computes z again from x. `act`, the last argument of such a kernel, is a tuple of numbers:
`(negative_slope,)` in normalize, `(bias, bias_code, negative_slope)` in backward. Without an
activation it is empty, and the functions do nothing.

"inverse_leaky_relu" is for backward in place: x is `leaky_relu` of what the kernel is about.

The formulas are those of `_kernels/cpu/activations.py`: the derivative is a factor, so an infinite
dy where it is 0 gives NaN, and NaN in z stays NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

from syncbn_core._kernels.cuda.memory import (
    device,
    each_lane,
    given,
    load_f64,
    load_parameter,
)

__all__ = ["ACTIVATIONS", "Functions", "of_kernel"]

float32, float64 = types.float32, types.float64


class Functions(NamedTuple):
    """What a kernel calls; `z` is what is known of a channel, `(scale, shift, slope)` or `()`.

    Attributes:
        applied: `(z, act)`: y of one value.
        incoming: `(dy, x, rounded_mean, z)`: the gradient by z of one value.
        value: `(x, z)`: what a number of x stands for: itself, except in place.
        of_channel: `(c, channels, statistics, weight, act)`: the `z` of channel `c`.
        shared, local: make tables for several channels, of a block or of a thread.
        hold: `(tables, i, z)`: keep the `z` of a channel in place `i`.
        held: `(tables, i, act)`: the `z` in place `i`.
        picked: `(tables, i, act)`: those in the places from `i` on, one per lane.
    """

    applied: Any
    incoming: Any
    value: Any
    of_channel: Any
    shared: Any
    local: Any
    hold: Any
    held: Any
    picked: Any


def _power_of_two(work):
    """2 to the power of an integer n, given `n + magic`, whose last bits are those of n."""
    word, kind, mantissa, bias = (
        (ir.IntType(32), ir.FloatType(), 23, 127)
        if work == float32
        else (ir.IntType(64), ir.DoubleType(), 52, 1023)
    )

    @intrinsic
    def power(typing_context, shifted):
        def generate(context, builder, signature, arguments):
            exponent = builder.shl(builder.bitcast(arguments[0], word), ir.Constant(word, mantissa))
            bits = builder.add(exponent, ir.Constant(word, bias << mantissa))
            return builder.bitcast(bits, kind)

        return work(work), generate

    return power


def _exponential(work):
    """`exp(z)`; below -87 or -708 the value there, above 88 the same, above 709 infinity.

    It is `2**n * exp(r)`, with r from -ln(2)/2 to ln(2)/2, by the Taylor series. ln(2) is
    subtracted in two parts, of which the first has so few digits that n times it is exact.
    """
    single = work == float32
    above = work(math.inf)
    magic = work(12582912.0 if single else 6755399441055744.0)  # 1.5 * 2**23, 1.5 * 2**52
    least, most = (work(-87.0), work(88.0)) if single else (work(-708.0), work(709.0))
    high = work(0.693359375 if single else 0.693147180369123816490)
    low = work(-2.12194440e-4 if single else 1.90821492927058770002e-10)
    log2e = work(1.4426950408889634)
    power = _power_of_two(work)
    terms = 8 if single else 14
    inverses = tuple(work(1 / n) for n in range(terms, 0, -1))

    @device
    def exponential(z):
        inner = least if z < least else z
        inner = most if inner > most else inner
        shifted = inner * log2e + magic
        n = shifted - magic
        r = (inner - n * high) - n * low
        total = work(1)
        for inverse in inverses:
            total = total * r * inverse + work(1)
        total *= power(shifted)
        return total if single or z <= most else above

    return exponential


def _relu(work):
    @device
    def relu(z, negative_slope):
        return work(0) if z <= work(0) else z

    @device
    def slope(z, negative_slope):
        return work(0) if z <= work(0) else work(1)

    return relu, slope


def _leaky_relu(work):
    @device
    def leaky_relu(z, negative_slope):
        return z * negative_slope if z <= work(0) else z

    @device
    def slope(z, negative_slope):
        return negative_slope if z <= work(0) else work(1)

    return leaky_relu, slope


def _silu(work):
    exponential = _exponential(work)

    @device
    def silu(z, negative_slope):
        return z * (work(1) / (work(1) + exponential(-z)))

    @device
    def slope(z, negative_slope):
        s = work(1) / (work(1) + exponential(-z))
        return s * (work(1) + z * (work(1) - s))

    return silu, slope


def _hardswish(work):
    @device
    def hardswish(z, negative_slope):
        inner = z + work(3)
        inner = work(0) if inner < work(0) else inner
        inner = work(6) if inner > work(6) else inner
        return z * (inner * work(1 / 6))

    @device
    def slope(z, negative_slope):
        inner = z * work(1 / 3) + work(0.5)
        inner = work(0) if z <= work(-3) else inner
        return work(1) if z >= work(3) else inner

    return hardswish, slope


def _relu6(work):
    @device
    def relu6(z, negative_slope):
        y = work(0) if z <= work(0) else z
        return work(6) if y >= work(6) else y

    @device
    def slope(z, negative_slope):
        inner = work(0) if z <= work(0) else work(1)
        return work(0) if z >= work(6) else inner

    return relu6, slope


ACTIVATIONS = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "silu": _silu,
    "hardswish": _hardswish,
    "relu6": _relu6,
}


@device
def _nothing(*_):
    return ()


def of_kernel(activation, work, lanes, places):
    """The `Functions` of a kernel. `places`: of a table that a block shares."""
    if not activation:
        return _without(lanes)
    if activation == "inverse_leaky_relu":
        return _in_place(work, lanes)
    function, slope = ACTIVATIONS[activation](work)
    return _with(function, slope, work, lanes, places)


def _without(lanes):
    @device
    def unchanged(z, act):
        return z

    @device
    def passed(dy, x, rounded_mean, z):
        return dy

    none = each_lane(lanes, _nothing)
    return Functions(
        unchanged, passed, unchanged, _nothing, _nothing, _nothing, _nothing, _nothing, none
    )


def _in_place(work, lanes):
    """`z` is `(1 / negative_slope, negative_slope)`, the same for all channels."""

    @device
    def incoming(dy, x, rounded_mean, z):
        return dy * z[1] if x <= work(0) else dy

    @device
    def value(x, z):
        return x * z[0] if x <= work(0) else x

    @device
    def of_channel(c, channels, statistics, weight, act):
        return work(1.0 / act[2]), work(act[2])

    @device
    def held(tables, i, act):
        return work(1.0 / act[2]), work(act[2])

    @device
    def pick(v, tables, i, act):
        return held(tables, i, act)

    picked = each_lane(lanes, pick)
    return Functions(None, incoming, value, of_channel, _nothing, _nothing, _nothing, held, picked)


def _with(function, slope, work, lanes, places):
    @device
    def applied(z, act):
        return function(z, work(act[0]))

    @device
    def incoming(dy, x, rounded_mean, z):
        return dy * slope((x - rounded_mean) * z[0] + z[1], z[2])

    @device
    def itself(x, z):
        return x

    @device
    def of_channel(c, channels, statistics, weight, act):
        bias, bias_code, negative_slope = act
        mean = load_f64(statistics, 1 + c)
        scale = load_f64(statistics, 1 + 2 * channels + c)
        if given(weight[0]):
            scale *= load_parameter(weight[1], weight[0], c)
        shift = (float64(work(mean)) - mean) * scale
        if given(bias):
            shift += load_parameter(bias_code, bias, c)
        return work(scale), work(shift), work(negative_slope)

    @device
    def shared():
        return cuda.shared.array(places, work), cuda.shared.array(places, work)

    @device
    def local():
        return cuda.local.array(lanes, work), cuda.local.array(lanes, work)

    @device
    def hold(tables, i, z):
        tables[0][i] = z[0]
        tables[1][i] = z[1]

    @device
    def held(tables, i, act):
        return tables[0][i], tables[1][i], work(act[2])

    @device
    def pick(v, tables, i, act):
        return held(tables, i + v, act)

    picked = each_lane(lanes, pick)
    return Functions(applied, incoming, itself, of_channel, shared, local, hold, held, picked)
