"""CUDA kernels on NumPy arrays, in Numba's simulator: memory that counts, and who launches."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from numba import cuda

from syncbn_core.backends.cuda import SIZES
from syncbn_core.kernels.cuda_memory import KINDS

_simulator = threading.Lock()  # it swaps modules under the kernel that runs

STORAGE = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def to_bfloat16(values):
    """Rounded to nearest even, as uint16; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


class Memory:
    """What a pointer points to; out of bounds is an error, also below zero."""

    def __init__(self, array, dtype=None, offset=0):
        self.array = array
        self.dtype = dtype or array.dtype.name
        self.offset = offset  # bytes from a multiple of 16, as if
        self.read_bytes = 0
        self.written_bytes = 0
        self.written = np.zeros(array.shape, np.int64)

    @classmethod
    def of(cls, values, dtype, offset=0):
        if dtype == "bfloat16":
            return cls(to_bfloat16(values).ravel(), dtype, offset)
        return cls(np.array(values, STORAGE.get(dtype, dtype)).ravel(), dtype, offset)

    @classmethod
    def empty(cls, size, dtype, offset=0):
        kind = np.uint16 if dtype == "bfloat16" else STORAGE.get(dtype, dtype)
        array = np.full(size, 0xABAB, kind) if kind == np.uint16 else np.full(size, -77, kind)
        return cls(array, dtype, offset)

    def _check(self, index, count):
        assert 0 <= index <= self.array.size - count, (index, count, self.array.size)
        if count > 1:
            assert (self.offset + index * SIZES[self.dtype]) % 16 == 0, "misaligned vector"

    def read(self, index, count):
        index = int(index)
        self._check(index, count)
        self.read_bytes += count * self.array.itemsize
        piece = self.array[index : index + count]
        return from_bfloat16(piece) if self.dtype == "bfloat16" else piece.copy()

    def write(self, index, values):
        index = int(index)
        self._check(index, len(values))
        self.written_bytes += len(values) * self.array.itemsize
        self.written[index : index + len(values)] += 1
        if self.dtype == "bfloat16":
            values = to_bfloat16(np.array(values, np.float32))
        self.array[index : index + len(values)] = values

    def values(self):
        """As float64."""
        array = from_bfloat16(self.array) if self.dtype == "bfloat16" else self.array
        return array.astype(np.float64)


@dataclass
class View:
    """An activation in `Memory`, `[outer, channels, inner]`."""

    memory: Memory
    outer: int
    channels: int
    inner: int

    @property
    def pointer(self):
        return self.memory

    @property
    def offset(self):
        return self.memory.offset

    @property
    def dtype(self):
        return self.memory.dtype


@dataclass
class Runner:
    """Launches into the simulator; remembers what ran."""

    threads: int = 8
    launched: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    counters: Memory = field(default_factory=lambda: Memory(np.zeros(4096, np.int32)))

    def launch(self, source, grid, *arguments):
        assert len(arguments) == len(source.codes)
        self.launched.append((source.key, grid))
        with _simulator:
            cuda.jit(source.build())[grid, source.threads](*arguments)

    def scratch(self, size):
        memory = Memory(np.full(size, np.nan))
        return memory, memory

    def tickets(self, size):
        assert not self.counters.array.any(), "a kernel left its tickets behind"
        return self.counters, self.counters


def work_epsilon(dtype):
    """Rounding of one result in the storage dtype, and of the arithmetic behind it."""
    storage = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}[dtype]
    arithmetic = 2**-53 if KINDS[dtype].size == 8 else 2**-24
    return storage, arithmetic
