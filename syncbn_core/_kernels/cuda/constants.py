"""Numbers that CUDA kernels and the backends that launch them share; imports nothing."""

from __future__ import annotations

from typing import Final

THREADS: Final = 256  # per block
UNROLL: Final = 4  # vectors of a thread per step of a reduction, or per piece
CHUNK: Final = 32  # rows, or UNROLL values, that a thread sums in the precision of the registers
VECTOR: Final = 16  # bytes
MIN_INNER: Final = 16  # elementwise kernels read shorter planes number by number
TABLE: Final = 520  # most planes that a block of an elementwise kernel has numbers of

SIZES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# The dtype of parameters and running statistics, as an argument of kernels; 0 stands for none.
CODES: Final = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}


def lanes_of(dtype: str) -> int:
    """Numbers in a vector."""
    return VECTOR // SIZES[dtype]
