"""`Plan`: how the CPU kernels see an activation; depends on its shape, strides and dtype only."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import numba
import numpy as np

from syncbn_core.kernels.cpu import planes, rows
from syncbn_core.kernels.cpu.builds import SerialParallelKernel
from syncbn_core.kernels.cpu.numerics import has_half
from syncbn_core.layout import Layout, layout_of_strides

__all__ = ["Plan", "kernel_dtype", "plan_of"]

Array = np.ndarray[Any, Any]

PARALLEL_SIZE = 32768  # elements; for smaller arrays, threads cost more than they save
CACHE = 1 << 20  # bytes that stay in a core's own cache until they are read again
SHORT = 64  # elements; shorter planes are computed by the kernels for rows
_STEPS = ("moments", "normalize", "backward_reduce", "backward_input", "forward", "backward")
_Kernels = dict[str, SerialParallelKernel]
_PLANES: _Kernels = {step: getattr(planes, f"planes_{step}") for step in _STEPS}
_ROWS: _Kernels = {step: getattr(rows, f"rows_{step}") for step in _STEPS}


@lru_cache(maxsize=64)
def kernel_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that the kernels use for arrays of `dtype`: one of the same size, or float32.

    16-bit floats are passed as integers with the same bits (see `kernels.cpu.numerics`).
    """
    if dtype.itemsize > 2:
        return dtype.newbyteorder("=")
    if dtype.name in ("bfloat16", "uint16"):
        return np.dtype(np.uint16)
    return np.dtype(np.int16 if dtype.name in ("float16", "int16") and has_half() else np.float32)


class Plan:
    """How the kernels see dense memory of one shape, strides and dtype.

    Attributes:
        layout: the layout of the array.
        dtype, shape: of the view that the kernels get: `[A, C, B]`, or rows `[R, C * B]`.
        channels: C; `count`: values per channel; `size`: number of elements.
        channels_innermost: whether the kernels for rows are used.
        kernels: the kernel of each step.
    """

    __slots__ = (
        "_memory",
        "channels",
        "channels_innermost",
        "count",
        "dtype",
        "kernels",
        "layout",
        "shape",
        "size",
    )

    def __init__(self, layout: Layout, dtype: np.dtype[Any]) -> None:
        self.layout = layout
        self.dtype = dtype
        self.channels = layout.channels
        self.count = layout.outer * layout.inner
        self.size = self.count * self.channels
        self.shape: tuple[int, ...] = (layout.outer, layout.channels, layout.inner)
        self.channels_innermost = layout.inner == 1 or (layout.inner <= SHORT and layout.outer >= 8)
        self.kernels = _PLANES
        if self.channels_innermost:
            columns = layout.channels * layout.inner
            repeats = rows.joined(layout.outer, columns)
            self.shape = (layout.outer // repeats, columns * repeats)
            self.kernels = _ROWS
        self._memory = ctypes.c_char * (prod(self.shape) * dtype.itemsize)

    def view(self, array: Array) -> Array:
        """`array`, which has this layout, as the view that the kernels get; shares memory."""
        seen: Array = self.layout.view(array).reshape(self.shape)
        return seen

    def at(self, address: int) -> Array:
        """The view of the memory at `address`; the caller must keep that memory alive."""
        memory: Any = self._memory.from_address(address)
        return np.ndarray(self.shape, self.dtype, memory)

    def leading(self, threads: int) -> tuple[int, ...]:
        """The kernel arguments between the activations and the per-channel arguments."""
        return (self.layout.inner, threads) if self.channels_innermost else ()

    def worth_threads(self, parallel: bool) -> bool:
        """Whether a step is allowed to use threads and large enough for them."""
        return parallel and self.size >= PARALLEL_SIZE

    def fits_cache(self, arrays: int, parallel: bool) -> bool:
        """Whether one kernel should compute a whole forward or backward, channel by channel.

        That is faster if one channel (for rows, one block of channels) of so many `arrays` fits the
        cache, and there are enough channels for all threads.
        """
        together = 1
        if self.channels_innermost:
            inner = self.layout.inner
            width = rows.WIDE if inner == 1 else rows.WIDTH
            together = max(1, min(self.channels, width // inner))
        if self.count * together * self.dtype.itemsize * arrays > CACHE:
            return False
        if not self.worth_threads(parallel):
            return True
        return self.channels // together >= 4 * numba.get_num_threads()


@lru_cache(maxsize=1024)
def plan_of(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], unit: int = 1
) -> Plan | None:
    """The plan for an `(N, C, *spatial)` array; None if the kernels can't use it in place.

    That is so if it is empty, not dense, or its dtype must be converted. `unit`: the stride of
    adjacent elements, 1 for strides in elements, the itemsize for strides in bytes.
    """
    in_kernels = kernel_dtype(dtype)
    if 0 in shape or not dtype.isnative or in_kernels.itemsize != dtype.itemsize:
        return None
    layout = layout_of_strides(shape, strides, unit)
    return None if layout is None else Plan(layout, in_kernels)
