"""`Layout`: views any dense `(N, C, *spatial)` array as `[A, C, B]`, without a copy.

Only the channel axis C matters for batch normalization. If the axes are sorted by stride, those
outside the channel axis become A, and those inside become B:

    NCHW (8, 64, 56, 56)            -> [8, 64, 3136]
    channels_last (8, 64, 56, 56)   -> [8 * 3136, 64, 1]
    (N, C) row-major                -> [N, C, 1]
    (N, C) column-major             -> [1, C, N]

If B is 1 the view is called *rows* (a row holds all channels), else *planes*. Arrays with gaps,
overlaps or negative strides have no such view; callers copy them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

__all__ = ["Layout", "layout_of", "layout_of_strides", "writable_view"]

Array = Any


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory order of a dense array: `axes`, outermost first, and the sizes A, C, B."""

    axes: tuple[int, ...]
    outer: int
    channels: int
    inner: int

    def view(self, array: Array) -> Array:
        """`array`, which has this layout, as `[outer, channels, inner]`; shares memory."""
        return array.transpose(self.axes).reshape(self.outer, self.channels, self.inner)


def layout_of(array: Array) -> Layout | None:
    """The layout of an `(N, C, *spatial)` array of rank 2 or more; None if it is not dense."""
    return layout_of_strides(array.shape, array.strides, array.itemsize)


@lru_cache(maxsize=1024)
def layout_of_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1
) -> Layout | None:
    """`layout_of` from shape and strides.

    `unit`: the stride of adjacent elements; 1 for strides in elements (torch), the itemsize for
    strides in bytes (NumPy, CuPy).
    """
    if 0 in shape:  # empty: strides mean nothing; those of CuPy are 0
        return Layout(tuple(range(len(shape))), shape[0], shape[1], prod(shape[2:]))
    # Axes of size 1 have arbitrary strides. As outermost axes they let a single channel be one run.
    long_axes = [axis for axis, size in enumerate(shape) if size != 1]
    long_axes.sort(key=lambda axis: -strides[axis])
    run = unit
    for axis in reversed(long_axes):
        if strides[axis] != run:
            return None
        run *= shape[axis]
    unit_axes = [axis for axis, size in enumerate(shape) if size == 1]
    axes = tuple(unit_axes + long_axes)
    at = axes.index(1)
    return Layout(
        axes,
        outer=prod(shape[axis] for axis in axes[:at]),
        channels=shape[1],
        inner=prod(shape[axis] for axis in axes[at + 1 :]),
    )


class _Interface:
    """Holds an `__array_interface__` with write access, and keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


def writable_view(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A writable view of a read-only array; do not write to it.

    Numba treats read-only arrays as another type and would compile every kernel a second time.
    """
    # the interface has no name for bfloat16: it comes as 16-bit void
    return np.asarray(_Interface(array)).view(array.dtype)
