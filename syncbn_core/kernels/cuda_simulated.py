"""The functions of `cuda_intrinsics` for Numba's CUDA simulator: kernels on NumPy's numbers.

A pointer is an object with `read(index, count)`, which gives an array of numbers, and
`write(index, values)`.
"""

from __future__ import annotations

import threading

from syncbn_core.kernels.cuda_kinds import KINDS


def device(function):
    """Mark a function that kernels call."""
    return function


_one_block = threading.Lock()


def vector_access(dtype, lanes):
    """`load(pointer, index)` and `store(pointer, index, values)` of `lanes` numbers."""
    work = KINDS[dtype].work

    def load(pointer, index):
        return tuple(work(number) for number in pointer.read(index, lanes))

    def store(pointer, index, values):
        pointer.write(index, values)

    return load, store


def number_access(dtype):
    """`load_one(pointer, index)` and `store_one(pointer, index, value)`."""
    load, store = vector_access(dtype, 1)
    return lambda p, i: load(p, i)[0], lambda p, i, value: store(p, i, (value,))


def ticket(pointer, index):
    """How many blocks have come before; atomic."""
    with _one_block:
        number = int(pointer.read(index, 1)[0])
        pointer.write(index, (number + 1,))
    return number


def reset(pointer, index):
    """Make the ticket 0 again."""
    pointer.write(index, (0,))


def read_count(pointer):
    """The int64 at `pointer`."""
    return int(pointer.read(0, 1)[0])


def write_count(pointer, value):
    """Store an int64."""
    pointer.write(0, (value,))


def quotient(a, b):
    """`a // b` for numbers that are not negative."""
    return a // b


def given(pointer):
    """Whether an optional pointer is there."""
    return pointer != 0


def barrier():
    """Wait for all threads of the block."""
    threading.current_thread().syncthreads()


def fence():
    """What this thread has written is there before what it writes from now on."""
