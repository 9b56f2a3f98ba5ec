"""The formulas in plain float64 NumPy: slow, obviously right, the oracle of every test."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncbn_core.moments import Moments

__all__ = ["backward_input", "backward_reduce", "moments", "normalize"]

Array = np.ndarray[Any, Any]


def _axes(x: Array) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != 1)


def _column(values: Array | None, x: Array, default: float) -> Array:
    """Per-channel `values` shaped to broadcast against `x`."""
    filled = np.full(x.shape[1], default) if values is None else np.asarray(values, np.float64)
    return filled.reshape(1, -1, *[1] * (x.ndim - 2))


def _give(result: Array, x: Array, out: Array | None) -> Array:
    if out is None:
        return result.astype(x.dtype)
    out[...] = result
    return out


def moments(x: Array, *, parallel: bool = True) -> Moments:
    """`mean = sum(x) / n`, `m2 = sum((x - mean)**2)` over every axis but 1."""
    wide = x.astype(np.float64)
    count = x.size // x.shape[1] if x.shape[1] else 0
    if count == 0:
        return Moments.empty(x.shape[1])
    mean = wide.sum(_axes(x)) / count
    return Moments(count, mean, ((wide - _column(mean, x, 0)) ** 2).sum(_axes(x)))


def normalize(
    x: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`y = (x - mean) * invstd * weight + bias`."""
    xhat = (x.astype(np.float64) - _column(mean, x, 0)) * _column(invstd, x, 1)
    return _give(xhat * _column(weight, x, 1) + _column(bias, x, 0), x, out)


def backward_reduce(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * xhat)` over every axis but 1."""
    xhat = (x.astype(np.float64) - _column(mean, x, 0)) * _column(invstd, x, 1)
    wide = dy.astype(np.float64)
    return wide.sum(_axes(x)), (wide * xhat).sum(_axes(x))


def backward_input(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    mean_dy: Array,
    mean_dy_xhat: Array,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`.

    `mean_dy` and `mean_dy_xhat` are the sums over all members, times `weight`, over the total
    count. Ioffe and Szegedy 2015, "Batch Normalization", section 3, with their three partial
    derivatives gathered.
    """
    scale = _column(invstd, x, 1)
    xhat = (x.astype(np.float64) - _column(mean, x, 0)) * scale
    inner = dy.astype(np.float64) * _column(weight, x, 1)
    inner = inner - _column(mean_dy, x, 0) - xhat * _column(mean_dy_xhat, x, 0)
    return _give(scale * inner, x, out)
