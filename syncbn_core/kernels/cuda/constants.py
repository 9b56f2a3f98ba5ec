"""Numbers that CUDA kernels and those who launch them agree on; imports nothing."""

from __future__ import annotations

from typing import Final

THREADS: Final = 256  # per block
UNROLL: Final = 4  # vectors that a thread has in flight
VECTOR: Final = 16  # bytes
MIN_INNER: Final = 16  # planes shorter than this are not taken by vectors in elementwise kernels
TABLE: Final = 520  # planes that a block of an elementwise kernel may touch

SIZES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# How a kernel is told the dtype of parameters and running statistics; 0 is for none.
CODES: Final = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}


def lanes_of(dtype: str) -> int:
    """Numbers in a vector."""
    return VECTOR // SIZES[dtype]
