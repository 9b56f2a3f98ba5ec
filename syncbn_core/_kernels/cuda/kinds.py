"""The dtypes that CUDA kernels take, in Numba's terms."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from syncbn_core._kernels.cuda.constants import SIZES


class Kind(NamedTuple):
    """A number in memory: bytes, and the type it has in registers."""

    size: int
    work: Any


KINDS = {
    dtype: Kind(size, types.float64 if dtype == "float64" else types.float32)
    for dtype, size in SIZES.items()
}
