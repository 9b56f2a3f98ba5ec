"""A *call*: what kernels know of the arrays of a step, an int64 array that `operands` fills in.

    addresses   of the activations x, dy and out (y or dx)
    sizes       the layout [A, C, B] of the activations, and the shape in which kernels get them
    vectors     address, dtype and stride of each per-channel operand; address 0 for an absent one
    counter     address and bytes of the counter of batches

The functions here are compiled into those that get a call (`entries`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from syncbn_core.kernels.cpu.builds import strict
from syncbn_core.kernels.cpu.numerics import has_half, narrow, widen
from syncbn_core.kernels.cpu.pointers import add_one, peek, pointer, poke

__all__ = [
    "BFLOAT16",
    "BIAS",
    "BORROWED",
    "CALL",
    "CHANNELS",
    "COUNTER",
    "DY",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "GRAD_BIAS",
    "GRAD_WEIGHT",
    "INNER",
    "MEAN",
    "OUT",
    "SHAPE",
    "TENSORS",
    "VAR",
    "VECTORS",
    "WEIGHT",
    "WORDS",
    "WORKERS",
    "A",
    "X",
    "count_batch",
    "plane_sizes",
    "plane_view",
    "read_vector",
    "row_sizes",
    "row_view",
    "size_of",
    "write_vector",
]

X, DY, OUT = 0, 1, 2
A, CHANNELS, INNER = 3, 4, 5
SHAPE = 6  # three sizes; of rows only two count
WORKERS = 9
VECTORS = 10  # address, dtype, stride of four
COUNTER = 22  # address, bytes
TENSORS = 24  # the addresses of eight DLTensors; only `operands` uses these, and the rest
BORROWED = 32  # room for them
WORDS = 6  # int64 of a DLTensor
CALL = BORROWED + 8 * WORDS  # length

# Vectors of a forward, and of a backward. Numba compiles a function once more for each constant
# `int` that it is passed; NumPy integers avoid that.
WEIGHT, BIAS, MEAN, VAR = map(np.int64, range(4))
GRAD_WEIGHT, GRAD_BIAS = BIAS, MEAN

# Dtypes. Where the processor does not convert float16, there is none.
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = 0, 1, 2, 3
_FLOAT16 = np.int16(0) if has_half() else np.uint16(0)


@register_jitable
def plane_view(call, slot, like):
    """An activation as planes `[A, C, B]`, with the dtype of the array `like`."""
    shape = (call[SHAPE], call[SHAPE + 1], call[SHAPE + 2])
    return carray(pointer(call[slot]), shape, like.dtype)


@register_jitable
def row_view(call, slot, like):
    """An activation as rows `[R, C * B]`."""
    return carray(pointer(call[slot]), (call[SHAPE], call[SHAPE + 1]), like.dtype)


@register_jitable
def plane_sizes(call):
    """What kernels for planes get between activations and per-channel arguments: nothing."""
    return ()


@register_jitable
def row_sizes(call):
    """What kernels for rows get there: neighbouring columns of a channel, and workers."""
    return call[INNER], call[WORKERS]


@register_jitable
def size_of(code):
    """Bytes of an element."""
    return 4 if code == FLOAT32 else 8 if code == FLOAT64 else 2


@strict
def _read(address, code):
    """A number of the dtype `code`, in float64."""
    if code == FLOAT32:
        return np.float64(peek(address, np.float32(0)))
    if code == FLOAT64:
        return peek(address, np.float64(0))
    if code == BFLOAT16:
        return np.float64(widen(peek(address, np.uint16(0))))
    return np.float64(widen(peek(address, _FLOAT16)))


@strict
def _write(address, code, value):
    """Round a float64 to the dtype `code`."""
    if code == FLOAT32:
        poke(address, np.float32(value))
    elif code == FLOAT64:
        poke(address, value)
    elif code == BFLOAT16:
        poke(address, narrow(np.float32(value), np.uint16(0)))
    else:
        poke(address, narrow(np.float32(value), _FLOAT16))


@strict
def read_vector(call, i):
    """A per-channel operand in float64 `(C,)`; `(0,)` for an absent one."""
    address, code, stride = (
        call[VECTORS + 3 * i],
        call[VECTORS + 3 * i + 1],
        call[VECTORS + 3 * i + 2],
    )
    values = np.empty(call[CHANNELS] if address != 0 else 0)
    for c in range(values.shape[0]):
        values[c] = _read(address + c * stride * size_of(code), code)
    return values


@strict
def write_vector(call, i, values):
    """Round float64 `values` to a per-channel operand, if there is one."""
    address, code, stride = (
        call[VECTORS + 3 * i],
        call[VECTORS + 3 * i + 1],
        call[VECTORS + 3 * i + 2],
    )
    for c in range(values.shape[0] if address != 0 else 0):
        _write(address + c * stride * size_of(code), code, values[c])


@strict
def count_batch(call):
    """Add 1 to the counter of batches; returns how many there were, -1 if there is no counter."""
    address, size = call[COUNTER], call[COUNTER + 1]
    if address == 0:
        return -1
    if size == 8:
        return _raised(address, np.int64(0))
    if size == 4:
        return _raised(address, np.int32(0))
    if size == 2:
        return _raised(address, np.int16(0))
    return _raised(address, np.int8(0))


@register_jitable
def _raised(address, zero):
    """Add 1 to an integer of the type of `zero`; returns what it was."""
    before: Any = peek(address, zero)
    poke(address, add_one(before))
    return np.int64(before)
