"""Any dense `(N, C, *spatial)` array as `[A, C, B]`, without a copy.

Batch normalization cares about one axis. Sort the axes by stride; everything outside the
channel axis collapses to A, everything inside it to B:

    NCHW (8, 64, 56, 56)            -> [8, 64, 3136]
    channels_last (8, 64, 56, 56)   -> [8 * 3136, 64, 1]
    (N, C) row-major                -> [N, C, 1]
    (N, C) column-major             -> [1, C, N]

B == 1 is called *rows* (a row holds all channels), else *planes*. Arrays with gaps,
overlaps, negative strides or foreign byte order have no such view and are copied first.
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
    """How a dense array lies in memory: `axes` outermost first, and the three sizes."""

    axes: tuple[int, ...]
    outer: int
    channels: int
    inner: int

    def view(self, array: Array) -> Array:
        """`array` (of this layout) as `[outer, channels, inner]`; shares memory."""
        return array.transpose(self.axes).reshape(self.outer, self.channels, self.inner)


def layout_of(array: Array) -> Layout | None:
    """Layout of an `(N, C, *spatial)` array of rank 2 or more, or None when it is not dense."""
    return layout_of_strides(array.shape, array.strides, array.itemsize)


@lru_cache(maxsize=1024)
def layout_of_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1
) -> Layout | None:
    """`layout_of` for strides in units of so many per element: in elements, as torch has them."""
    if 0 in shape:  # nothing lies anywhere; CuPy gives strides of 0
        return Layout(tuple(range(len(shape))), shape[0], shape[1], prod(shape[2:]))
    # Axes of size 1 have arbitrary strides; outermost, they leave a single channel one long run.
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
    """Carries an `__array_interface__`, and keeps its array alive."""

    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


def writable_view(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A NumPy array over the same memory without its read-only mark; for those who only read it.

    Numba takes a read-only array for another type and compiles every kernel once more.
    """
    return array if array.flags.writeable else np.asarray(_Interface(array))
