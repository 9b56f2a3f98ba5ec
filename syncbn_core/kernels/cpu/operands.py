"""`look`: read the DLTensors of the arrays of a step, check them, and fill in a call (`calls`).

A DLTensor is DLPack's description of an array: address, device, dtype, shape, strides. Objects of
a library with DLPack's C exchange API are asked for theirs here, without Python, which takes less
time than asking an object for its address (`syncbn_core.borrow`). A borrowed shape belongs to its
array, so all that later steps need is copied to the call.

`look` holds the interpreter lock; kernels, which release it, only get the call.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from syncbn_core.kernels.cpu.builds import holding_lock
from syncbn_core.kernels.cpu.calls import (
    BFLOAT16,
    BORROWED,
    CHANNELS,
    COUNTER,
    DY,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INNER,
    MEAN,
    SHAPE,
    TENSORS,
    VAR,
    VECTORS,
    WORDS,
    WORKERS,
    A,
    X,
    size_of,
)
from syncbn_core.kernels.cpu.pointers import ask, peek, poke, struct_of
from syncbn_core.kernels.cpu.row_blocks import WIDE, WIDTH, joined

__all__ = [
    "ANYWHERE",
    "ARRAY_STRUCTS",
    "DLTENSORS",
    "FUSED",
    "KIND",
    "PARALLEL",
    "PARALLEL_SIZE",
    "REFUSED",
    "ROWS",
    "look",
]

# How `look` reads arrays, if not by a function.
DLTENSORS, ARRAY_STRUCTS = 0, 1
ANYWHERE = np.empty(0, np.int64)  # no address is expected

# What `look` returns: a dtype, and these. A negative number: kernels can't use the arrays.
ROWS, FUSED, PARALLEL = 4, 8, 16
KIND = ROWS | 3  # what tells kernels apart: the dtype, and planes or rows
REFUSED = -1

PARALLEL_SIZE = 32768  # elements; for smaller arrays, threads cost more than they save
CACHE = 1 << 20  # bytes that stay in a core's own cache until they are read again
SHORT = 64  # elements; shorter planes may be computed by the kernels for rows
NEAR = 1 << 22  # bytes that stay in the last cache; from more, planes far apart are read slowly

# Numbers of DLPack: kinds of dtypes, and the device. A flag of a `PyArrayInterface`.
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
_CPU = 1
_NATIVE = 0x200
_V, _U, _F, _I = map(ord, "Vufi")  # kinds of NumPy's dtypes


# --------------------------------------------------- reading DLTensors, given by their address


@register_jitable
def _word(tensor, index):
    """Word `index` of a DLTensor, or of another array of int64."""
    return peek(tensor + 8 * index, np.int64(0))


@register_jitable
def _read_struct(struct, tensor):
    """Write a `PyArrayInterface` as a DLTensor, but with strides in bytes."""
    rank, flags = _word(struct, 0) >> 32, _word(struct, 2) & 0xFFFFFFFF
    kind, size = _word(struct, 1) & 0xFF, _word(struct, 1) >> 32
    code = 255
    if flags & _NATIVE:
        if size == 2:  # the bits of a bfloat16 or float16 count as these
            if kind == _V or kind == _U:
                code = _BFLOAT
            elif kind == _F or kind == _I:
                code = _FLOAT
        elif kind == _F:
            code = _FLOAT
        elif kind == _I or kind == _U:
            code = _INT
    poke(tensor, _word(struct, 5))
    poke(tensor + 8, _CPU | size << 32)
    poke(tensor + 16, rank | code << 32 | size << 43 | np.int64(1) << 48)
    poke(tensor + 24, _word(struct, 3))
    poke(tensor + 32, _word(struct, 4))
    poke(tensor + 40, np.int64(0))


@register_jitable
def _float_of(tensor, half):
    """The code of the floating dtype of a DLTensor; -1 for others."""
    kind = _word(tensor, 2)
    code, bits, lanes = (kind >> 32) & 0xFF, (kind >> 40) & 0xFF, (kind >> 48) & 0xFFFF
    if lanes != 1:
        return -1
    if code == _FLOAT:
        if bits == 32:
            return FLOAT32
        if bits == 64:
            return FLOAT64
        return FLOAT16 if bits == 16 and half else -1
    return BFLOAT16 if code == _BFLOAT and bits == 16 else -1


@register_jitable
def _address(tensor, size):
    """The address of the first element; 0 if it is none of aligned memory of the CPU."""
    memory, device = _word(tensor, 0), _word(tensor, 1) & 0xFFFFFFFF
    address = memory + _word(tensor, 5)
    return address if memory != 0 and device == _CPU and address % size == 0 else 0


@register_jitable
def _rank(tensor):
    return _word(tensor, 2) & 0xFFFFFFFF


@register_jitable
def _shape(tensor, axis):
    return _word(_word(tensor, 3), axis)


@register_jitable
def _stride(tensor, axis):
    """In elements; in bytes for NumPy. That of rows in order if the DLTensor has none."""
    if _word(tensor, 4) != 0:
        return _word(_word(tensor, 4), axis)
    run = 1
    for inner in range(axis + 1, _rank(tensor)):
        run *= _shape(tensor, inner)
    return run


@register_jitable
def _unit(tensor):
    """The stride of adjacent elements: 1, but in NumPy an element's bytes."""
    return max(1, _word(tensor, 1) >> 32)


@register_jitable
def _layout(tensor, call):
    """Write `[A, C, B]` of a dense array (`syncbn_core.layout`); whether it is dense."""
    rank = _rank(tensor)
    if rank < 2 or rank > 60:
        return False
    todo = 0
    for axis in range(rank):
        if _shape(tensor, axis) == 0:
            return False
        todo += _shape(tensor, axis) != 1
    done = 0  # bits of axes
    run = 1
    inner = 0  # so far the channel axis was not met
    while todo > 0:
        found = -1
        for axis in range(rank):
            if _stride(tensor, axis) == run * _unit(tensor) and not (done >> axis) & 1:
                if _shape(tensor, axis) != 1:
                    found = axis
        if found < 0:
            return False
        if found == 1:
            inner = run
        done |= 1 << found
        run *= _shape(tensor, found)
        todo -= 1
    channels = _shape(tensor, 1)
    if channels == 1:
        inner = run
    call[A], call[CHANNELS], call[INNER] = run // (inner * channels), channels, inner
    return True


@register_jitable
def _same_axes(tensor, other):
    """Whether two dense arrays have the same shape and layout."""
    if _rank(tensor) != _rank(other):
        return False
    for axis in range(_rank(tensor)):
        if _shape(tensor, axis) != _shape(other, axis):
            return False
        if _shape(tensor, axis) != 1 and _stride(tensor, axis) != _stride(other, axis):
            return False
    return True


@register_jitable
def _vector(tensor, half, call, slot):
    """Write a per-channel operand to the call; whether kernels can use it."""
    code = _float_of(tensor, half)
    if code < 0 or _rank(tensor) != 1 or _shape(tensor, 0) != call[CHANNELS]:
        return False
    unit = _unit(tensor)
    stride = _stride(tensor, 0) // unit
    if call[CHANNELS] > 1 and (stride < 1 or stride * unit != _stride(tensor, 0)):
        return False
    call[slot], call[slot + 1], call[slot + 2] = _address(tensor, size_of(code)), code, stride
    return call[slot] != 0


@register_jitable
def _counter(tensor, call):
    """Write the counter to the call; whether kernels can use it."""
    kind = _word(tensor, 2)
    code, bits, lanes = (kind >> 32) & 0xFF, (kind >> 40) & 0xFF, kind >> 48
    if not (code == _INT or code == _UINT) or lanes != 1 or bits % 8 != 0:
        return False
    for axis in range(_rank(tensor)):
        if _shape(tensor, axis) != 1:
            return False
    size = bits // 8
    call[COUNTER], call[COUNTER + 1] = _address(tensor, size), size
    return call[COUNTER] != 0


@register_jitable
def _apart(call):
    """Whether the running statistics have memory of their own."""
    one, two = VECTORS + 3 * MEAN, VECTORS + 3 * VAR
    begin, end = call[one], call[two]
    if begin == 0 or end == 0:
        return begin == end
    if begin > end:
        begin, end, one = end, begin, two
    last = call[one + 2] * (call[CHANNELS] - 1) + 1
    return begin + last * size_of(call[one + 1]) <= end


@register_jitable
def _shape_for_kernels(call, size):
    """Choose planes or rows, and write the shape; returns the flag. `size`: bytes an element."""
    outer, channels, inner = call[A], call[CHANNELS], call[INNER]
    # Rows pay for the coefficients of each column, planes for the ends of each plane.
    far = outer * channels * inner * size > NEAR
    if inner == 1 or (inner <= SHORT and outer >= 8 and (far or outer >= inner)):
        columns = channels * inner
        repeats = _joined(outer, columns)
        call[SHAPE], call[SHAPE + 1], call[SHAPE + 2] = outer // repeats, columns * repeats, 0
        return ROWS
    call[SHAPE], call[SHAPE + 1], call[SHAPE + 2] = outer, channels, inner
    return 0


_joined = register_jitable(joined)


@register_jitable
def _fits_cache(call, rows, size, arrays, threads):
    """Whether one kernel should compute a whole direction, channel by channel.

    That is faster if one channel (for rows, one block of channels) of so many `arrays` fits the
    cache, and there are enough channels for all threads. `size`: bytes of an element.
    """
    outer, channels, inner = call[A], call[CHANNELS], call[INNER]
    together = 1
    if rows:
        width = WIDE if inner == 1 else WIDTH
        together = max(1, min(channels, width // inner))
    if outer * inner * together * size * arrays > CACHE:
        return False
    return threads == 1 or channels // together >= 4 * threads


@holding_lock
def look(function, nothing, objects, threads, half, calls, expected):
    """Write to `calls` what kernels need of the arrays; returns how to compute, or `REFUSED`.

    `calls`: one for each part of the batch, `(P, CALL)`. `objects`: the addresses of objects, eight
    for each part: x, dy, out, four vectors, the counter; `nothing` for an absent one. `function`:
    the address of the function that gives the DLTensor of an object. Or `ARRAY_STRUCTS`, for
    objects that are the `__array_struct__` of arrays, or `DLTENSORS`, for addresses of DLTensors.
    `threads`: how many may be used. `half`: whether kernels take float16. Without x, a call has to
    hold the number of channels, and only vectors and counter are looked at. `expected`: the
    addresses that vectors and counter must have, or an empty array.

    All parts are computed in one way: `REFUSED` if they differ in dtype, or suit different kernels.
    """
    code = 0
    for part in range(calls.shape[0]):
        own, call = objects[8 * part : 8 * part + 8], calls[part]
        found = _look_at_part(function, nothing, own, threads, half, call, expected)
        if found < 0 or (part > 0 and (found ^ code) & KIND):
            return REFUSED
        code |= found
    return code


@register_jitable
def _look_at_part(function, nothing, objects, threads, half, call, expected):
    """`look` at one part."""
    memory = call.ctypes.data
    tensors = call[TENSORS : TENSORS + 8]
    for i in range(8):
        place = memory + 8 * (BORROWED + WORDS * i)
        tensors[i] = objects[i]
        if tensors[i] == nothing:
            tensors[i] = 0
        elif function == ARRAY_STRUCTS:
            _read_struct(struct_of(tensors[i]), place)
            tensors[i] = place
        elif function != DLTENSORS:
            if not ask(function, tensors[i], place):
                return REFUSED
            tensors[i] = place
    code = 0
    for i in range(3):
        call[i] = 0
        tensor = tensors[i]
        if tensor == 0:
            continue
        kind = _float_of(tensor, half)
        if i == 0:
            code = kind
            if kind < 0 or not _layout(tensor, call):
                return REFUSED
        elif kind != code or not _same_axes(tensor, tensors[0]):
            return REFUSED
        call[i] = _address(tensor, size_of(kind))
        if call[i] == 0:
            return REFUSED
    for i in range(4):
        slot = VECTORS + 3 * i
        call[slot] = 0
        if tensors[3 + i] != 0 and not _vector(tensors[3 + i], half, call, slot):
            return REFUSED
    call[COUNTER] = 0
    if tensors[7] != 0 and not _counter(tensors[7], call):
        return REFUSED
    for i in range(expected.shape[0]):
        if expected[i] != call[VECTORS + 3 * i]:  # the counter's follows those of the vectors
            return REFUSED
    if call[X] == 0:
        return code
    if call[DY] == 0 and not _apart(call):
        return REFUSED
    large = call[A] * call[CHANNELS] * call[INNER] >= PARALLEL_SIZE
    call[WORKERS] = threads if large and threads > 1 else 1
    size = size_of(code)
    rows = _shape_for_kernels(call, size)
    code |= rows
    if call[WORKERS] > 1:
        code |= PARALLEL
    if _fits_cache(call, rows, size, 1 + (call[DY] != 0), call[WORKERS]):
        code |= FUSED
    return code
