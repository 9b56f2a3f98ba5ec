"""Activations in the CPU kernels: applied where y is written, their derivative where dy is read.

    y = activated(act, z)        dz = dy * slope(act, z)        z = xhat * weight + bias

`act` is None, or an instance of a class below, by whose type the compiler chooses the functions
that it builds in. Backward computes z again from x.

The derivative is a factor. To choose between 0 and dy itself would be a masked load with AVX-512,
which takes 1.4 times as long where dy is not in the cache. So an infinite dy where the derivative
is 0 gives NaN. NaN in z stays NaN.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from syncbn_core._kernels.cpu.builds import may_contract, overload
from syncbn_core._kernels.cpu.numerics import larger, rounded, smaller, where, widen


class Relu(NamedTuple):
    negative_slope: float


class LeakyRelu(NamedTuple):
    negative_slope: float


class InverseLeakyRelu(NamedTuple):
    """Of backward in place: x is `LeakyRelu` of what the kernel is about."""

    negative_slope: float


class Silu(NamedTuple):
    negative_slope: float


class Hardswish(NamedTuple):
    negative_slope: float


class Relu6(NamedTuple):
    negative_slope: float


def _power_of_two(typing_context, exponent):
    """2 to the power of an int32 from -126 to 127, in float32."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), generate


_two_to: Any = intrinsic(_power_of_two)


@may_contract
def _exp32(z):
    """e to the power of a float32, by the polynomial of Cephes' `expf`.

    For `math.exp` the compiler calls a library, number by number.
    """
    f = np.float32
    z = smaller(larger(z, f(-87.0)), f(88.0))
    n = np.floor(z * f(1.44269504) + f(0.5))
    r = (z - n * f(0.693359375)) - n * f(-2.12194440e-4)
    p = f(1.9875691500e-4)
    p = p * r + f(1.3981999507e-3)
    p = p * r + f(8.3334519073e-3)
    p = p * r + f(4.1665795894e-2)
    p = p * r + f(1.6666665459e-1)
    p = p * r + f(5.0000001201e-1)
    return ((p * r) * r + r + f(1)) * _two_to(np.int32(n))


def _sigmoid(z: Any) -> Any:
    raise NotImplementedError


@overload(_sigmoid)
def _sigmoid_of(z):
    if z == types.float64:
        return lambda z: 1.0 / (1.0 + math.exp(-z))
    return lambda z: np.float32(1) / (np.float32(1) + _exp32(-z))


# ------------------------------------------------- the functions, and their derivatives


@may_contract
def _relu(z, negative_slope):
    return where(z <= 0, rounded(0, z), z)


@may_contract
def _relu_slope(z, negative_slope):
    return where(z <= 0, rounded(0, z), rounded(1, z))


@may_contract
def _leaky_relu(z, negative_slope):
    return where(z <= 0, z * rounded(negative_slope, z), z)


@may_contract
def _leaky_relu_slope(z, negative_slope):
    return where(z <= 0, rounded(negative_slope, z), rounded(1, z))


@may_contract
def _silu(z, negative_slope):
    return z * _sigmoid(z)


@may_contract
def _silu_slope(z, negative_slope):
    s = _sigmoid(z)
    return s * (rounded(1, z) + z * (rounded(1, z) - s))


@may_contract
def _hardswish(z, negative_slope):
    return z * (
        smaller(larger(z + rounded(3, z), rounded(0, z)), rounded(6, z)) * rounded(1 / 6, z)
    )


@may_contract
def _hardswish_slope(z, negative_slope):
    inner = z * rounded(1 / 3, z) + rounded(0.5, z)
    return where(z <= -3, rounded(0, z), where(z >= 3, rounded(1, z), inner))


@may_contract
def _relu6(z, negative_slope):
    return where(z <= 0, rounded(0, z), where(z >= 6, rounded(6, z), z))


@may_contract
def _relu6_slope(z, negative_slope):
    return where((z <= 0) | (z >= 6), rounded(0, z), rounded(1, z))


_FUNCTIONS = {
    "relu": (Relu, _relu, _relu_slope),
    "leaky_relu": (LeakyRelu, _leaky_relu, _leaky_relu_slope),
    "silu": (Silu, _silu, _silu_slope),
    "hardswish": (Hardswish, _hardswish, _hardswish_slope),
    "relu6": (Relu6, _relu6, _relu6_slope),
    # of backward only; but the compiler looks at forward too
    "inverse_leaky_relu": (InverseLeakyRelu, _leaky_relu, _leaky_relu_slope),
}
_OF_CLASS = {kind: functions for kind, *functions in _FUNCTIONS.values()}


@lru_cache(maxsize=64)
def activation_of(name: str | None, negative_slope: float) -> Any:
    """What kernels take as `act` for an activation of `syncbn_core.moments.NormRule`."""
    return None if name is None else _FUNCTIONS[name][0](negative_slope)


def activated(act: Any, z: Any) -> Any:
    """y of one element."""
    raise NotImplementedError


@overload(activated)
def _activated(act, z):
    if act == types.none:
        return lambda act, z: z
    function, _ = _OF_CLASS[act.instance_class]
    return lambda act, z: function(z, act.negative_slope)


def incoming(act: Any, x: Any, dy: Any, z: Any) -> Any:
    """The gradient by z of one element."""
    raise NotImplementedError


@overload(incoming)
def _incoming(act, x, dy, z):
    if act == types.none:
        return lambda act, x, dy, z: widen(dy)
    _, slope = _OF_CLASS[act.instance_class]
    if act.instance_class is InverseLeakyRelu:
        return lambda act, x, dy, z: widen(dy) * slope(widen(x), act.negative_slope)
    return lambda act, x, dy, z: widen(dy) * slope(z, act.negative_slope)


def value_of(act: Any, x: Any) -> Any:
    """What an element of x stands for: itself, except in place."""
    raise NotImplementedError


@overload(value_of)
def _value_of(act, x):
    if act != types.none and act.instance_class is InverseLeakyRelu:
        return lambda act, x: where(
            widen(x) <= 0, widen(x) * rounded(1 / act.negative_slope, x), widen(x)
        )
    return lambda act, x: x
