"""What CUDA kernels need of the device: memory, barriers, and dtypes that are known at run time.

Activations are float16, bfloat16, float32 or float64 in memory and float32 or float64 (`work`)
in registers; per-channel numbers are float64.
"""

from __future__ import annotations

from numba import types

from syncbn_core._kernels.cuda.intrinsics import (
    barrier,
    count_up,
    device,
    fence,
    given,
    number_access,
    product,
    quotient,
    read_count,
    reset,
    small_quotient,
    vector_access,
    write_count,
)
from syncbn_core._kernels.cuda.kinds import KINDS

__all__ = [
    "KINDS",
    "barrier",
    "count_up",
    "device",
    "each_lane",
    "fence",
    "given",
    "load_f64",
    "load_parameter",
    "number_access",
    "product",
    "quotient",
    "read_count",
    "reset",
    "small_quotient",
    "store_f64",
    "store_parameter",
    "vector_access",
    "write_count",
    "zeros_of",
]


def each_lane(lanes, function):
    """A function that gives the tuple `(function(0, *a), ..., function(lanes - 1, *a))`."""
    if lanes == 1:

        @device
        def apply(*a):
            return (function(0, *a),)

    elif lanes == 2:

        @device
        def apply(*a):
            return function(0, *a), function(1, *a)

    elif lanes == 4:

        @device
        def apply(*a):
            return function(0, *a), function(1, *a), function(2, *a), function(3, *a)

    else:

        @device
        def apply(*a):
            return (
                function(0, *a),
                function(1, *a),
                function(2, *a),
                function(3, *a),
                function(4, *a),
                function(5, *a),
                function(6, *a),
                function(7, *a),
            )

    return apply


def zeros_of(lanes, work):
    """A function without arguments that gives `lanes` zeros."""

    @device
    def zero(v):
        return work(0)

    return each_lane(lanes, zero)


load_f32, store_f32 = number_access("float32")
load_f64, store_f64 = number_access("float64")
_load_f16, _store_f16 = number_access("float16")
_load_bf16, _store_bf16 = number_access("bfloat16")


@device
def load_parameter(code, pointer, index):
    """A number of the dtype that `code` stands for, as float64."""
    if code == 1:
        return types.float64(load_f32(pointer, index))
    if code == 2:
        return load_f64(pointer, index)
    if code == 3:
        return types.float64(_load_f16(pointer, index))
    return types.float64(_load_bf16(pointer, index))


@device
def store_parameter(code, pointer, index, value):
    """Store a float64 where `load_parameter` reads."""
    if code == 1:
        store_f32(pointer, index, types.float32(value))
    elif code == 2:
        store_f64(pointer, index, value)
    elif code == 3:
        _store_f16(pointer, index, types.float32(value))
    else:
        _store_bf16(pointer, index, types.float32(value))
