"""Masks: statistics of some elements of x, for steps that take no mask (`Operations.takes_masks`).

The other elements are filled with K, the mean of the valid ones, rounded to the dtype of x. The
moments of the filled x are exact for what it holds, so those of the n valid of its N values per
channel are known:

    mean = K + (mean' - K) N / n        m2 = m2' - n (N - n) / N (mean - K)**2

y and dx are 0 elsewhere, by `where`: so NaN in x or dy stays out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np

from syncbn_core.arrays import Arrays
from syncbn_core.backends.plain import axes_of, column
from syncbn_core.errors import DTypeError, ShapeError
from syncbn_core.moments import Moments

Array = Any
Valid = tuple[Any, Array]  # how many values per channel, and K `(C,)` in all other places


def mask_shape(mask: Sequence[int], x: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape in which a mask of shape and dtype `mask`, `dtype` broadcasts against x.

    `mask`: (N,), (N, *spatial) or (N, 1, *spatial), where each axis may be 1. Raises `ShapeError`,
    and `DTypeError` unless it is bool.
    """
    if dtype != "bool":
        raise DTypeError(f"expected a mask of bool, got {dtype}; use mask != 0 if 0 is padding")
    ones = (1,) * (len(x) - 2)
    shape = tuple(mask)
    if len(shape) == 1:
        shape = (*shape, 1, *ones)
    elif len(shape) == len(x) - 1:
        shape = (shape[0], 1, *shape[1:])
    full = (x[0], 1, *x[2:])
    if len(shape) != len(full) or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise ShapeError(
            f"expected a mask of shape (N,), (N, *spatial) or (N, 1, *spatial) for x of shape "
            f"{tuple(x)}, got {tuple(mask)}; all channels of a position are valid or none"
        )
    return shape


def filled(arrays: Arrays, x: Array, mask: Array) -> tuple[Array, Valid]:
    """`(x with K in the dtype of x where the mask is False, what is known of it)`.

    `mask`: of the shape `mask_shape`.
    """
    known = arrays.constant(x)
    count = arrays.count_of(mask) * (prod((x.shape[0], *x.shape[2:])) // max(prod(mask.shape), 1))
    sums = arrays.sum(arrays.xp.where(mask, known, 0), axes_of(x))
    fill = arrays.cast(sums / (count + (count == 0)), x.dtype)
    return arrays.select(mask, x, column(fill, x)), (count, arrays.cast(fill, arrays.widest(x)))


def without_filled(xp: Any, part: Moments, count: Any, fill: Array) -> Moments:
    """The moments of `count` values of `part`, of one row; all others are `fill`.

    `xp`: the library of the moments and of `fill` `(C,)`. `count`: an int, or an array `()`.
    """
    row = part.rows[0]
    total, n, channels = row[:1], row[:1] * 0 + count, len(row) // 2 - 1
    mean, m2 = row[1 : 1 + channels], row[1 + channels : -1]
    with np.errstate(invalid="ignore", over="ignore") if xp is np else nullcontext():
        delta = (mean - fill) * (total / (n + (n == 0)))
        m2 = m2 - n * (total - n) / (total + (total == 0)) * delta * delta
        new = xp.concatenate([n, (fill + delta) * (n > 0), m2 * (m2 > 0), row[-1:]])
    return Moments(new.reshape(1, -1), count if isinstance(count, int) else None)
