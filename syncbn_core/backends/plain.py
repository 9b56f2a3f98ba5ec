"""`PlainOperations`: the steps in plain array operations, shared by NumPy, torch, CuPy and others.

    mean, m2 = moments of the batch           invstd = 1 / sqrt(m2 / n + eps)
    xhat     = (x - mean) * invstd            y      = xhat * weight + bias
    dx       = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n)

The code never reads a number out of an array, so a library can trace, compile, vectorize and
differentiate the steps, also twice.

Numbers per channel have the widest floating dtype of the device, float64 if there is one. Temporary
arrays of the size of x have the `working` dtype, which may be float32. To keep the digits of
deviations in it, the rounded mean is subtracted from x first. The rest of the mean is subtracted
per channel, in the widest dtype. docs/internals/numerics.md counts the passes over x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from syncbn_core.arrays import Arrays
from syncbn_core.labels import Labels
from syncbn_core.moments import (
    Moments,
    NormRule,
    Statistics,
    averaging_factor,
    blend,
    merged_rows,
    total_count,
)
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

Array = Any


class PlainOperations(Operations):
    """The steps for one array library."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.xp: Any = arrays.xp

    def moments(self, x: Array, labels: Labels | None = None) -> Moments:
        arrays, axes = self.arrays, axes_of(x)
        count = math.prod([x.shape[axis] for axis in axes]) if x.shape[1] else 0
        if count == 0:
            zeros = arrays.sum(x, axes)
            return self.of_one_part(0, zeros, zeros, labels)
        shift = self.shift(x)
        deviations = arrays.difference(x, column(shift, x))
        mean, m2 = arrays.mean_and_m2(deviations, axes, count)
        return self.of_one_part(count, self.wide(shift) + mean, m2, labels)

    def moments_of_sums(self, count: Any, shift: Array, sum_: Array, squares: Array) -> Moments:
        """Those of `count` values: given the sums of `values - shift`, and of their squares."""
        mean, squares = self.wide(sum_) / self.at_least_one(count), self.wide(squares)
        m2 = squares - count * mean * mean
        return self.of_one_part(count, self.wide(shift) + mean, self.xp.where(m2 < 0, 0.0, m2))

    def shift(self, x: Array) -> Array:
        """A number near the mean of each channel, `(C,)` in the working dtype.

        The mean of the first n/16 of n values. It is at most 4 standard deviations from the mean,
        because these n/16 values alone add n/16 times its squared distance to m2 (Cauchy-Schwarz).
        """
        first = x[: -(-x.shape[0] // 16)]
        size = math.prod(first.shape) // x.shape[1]
        mean = self.arrays.sum(first, axes_of(x)) / size
        mean = self.xp.where(self.xp.isfinite(mean), mean, 0.0)
        return self.arrays.constant(self.arrays.cast(mean, self.arrays.working(x)))

    def of_one_part(
        self, count: Any, mean: Array, m2: Array, labels: Labels | None = None
    ) -> Moments:
        """Moments of one row; `count` may be traced."""
        label = 0 if labels is None else labels.own
        ends = [self.arrays.number(each, mean).reshape(1) for each in (count, label)]
        row = self.xp.concatenate([ends[0], mean, m2, ends[1]])
        return Moments(row.reshape(1, -1), count if isinstance(count, int) else None)

    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        if len(parts) == 1:
            return parts[0]
        near = [self.arrays.near(part.rows, parts[0].rows) for part in parts]
        count, mean, m2 = merged_rows(self.xp.concatenate(near))
        known = total_count(parts)
        return self.of_one_part(count if known is None else known, mean, m2, labels)

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        if total.labels is not None:
            total.labels.check_rows(total.rows)
        count, mean, m2 = merged_rows(total.rows)
        var = m2 / self.at_least_one(count if total.count is None else total.count)
        # `where`, not `maximum`, whose gradient at var == eps is 1/2
        var = self.xp.where(var < rule.eps, rule.eps, var) if rule.clamps else var + rule.eps
        table = self.xp.concatenate([count, mean, m2, 1.0 / self.xp.sqrt(var)])
        return Statistics(table, total.count)

    def forward(
        self,
        x: Array,
        norm: Norm,
        running: RunningStatistics | None = None,
        out: Any = None,
        total: Moments | None = None,
    ) -> Array:
        y = self.normalized(x, self.of_forward(norm, self.arrays.working(x)), norm.rule)
        if running is not None:
            self.update_running(running, norm.statistics)
        return self._result(y, x, out)

    def of_forward(self, norm: Norm, dtype: Any) -> Array:
        """Numbers a, b, c of each channel, `(3, C)` of `dtype`: `z = (x - a) * b + c`."""
        rounded, rest = self._rounded(norm, dtype)
        scale, bias = self._scale(norm), norm.affine.bias
        shift = -rest * scale
        if bias is not None:
            shift = shift + self.wide(bias)
        return self._stacked(dtype, rounded, scale, shift)

    def normalized(self, x: Array, numbers: Array, rule: NormRule) -> Array:
        """y, given the numbers of `of_forward`."""
        dtype = x.dtype if rule.activation is None else numbers.dtype
        return self._activated(self._line(x, numbers, dtype), rule)

    def _line(self, x: Array, numbers: Array, dtype: Any) -> Array:
        """`(x - a) * b + c` as `dtype`."""
        mean, scale, shift = [column(numbers[n], x) for n in range(3)]
        return self.arrays.scaled(self.arrays.difference(x, mean), scale, shift, dtype)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        mean, var = self.wide(running.mean), self.wide(running.var)
        statistics = self.statistics(self.of_one_part(1, mean, var), rule)
        return self.forward(x, Norm(statistics, affine, rule), None, out), statistics

    def backward_reduce(
        self, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        working, weight = self.arrays.working(x), norm.affine.weight
        rounded, _ = self._rounded(norm, working)
        dy = self._through_activation(x, dy, norm)
        sums = self.of_sums(norm, *self.two_sums(x, dy, rounded), working)
        exchange = sums if weight is None else sums * self.wide(weight)
        grad_bias, grad_weight = self.arrays.cast(sums, (x if weight is None else weight).dtype)
        return Sums(exchange, grad_weight, grad_bias)

    def two_sums(self, x: Array, dy: Array, mean: Array) -> tuple[Array, Array]:
        """`sum(dy)` and `sum(dy * (x - mean))`, `(C,)`; the mean is rounded."""
        arrays, axes = self.arrays, axes_of(x)
        deviations = arrays.difference(x, column(mean, x))
        return arrays.sum(dy, axes), arrays.sum(arrays.product(deviations, dy), axes)

    def of_sums(self, norm: Norm, sum_dy: Array, sum_dy_deviations: Array, dtype: Any) -> Array:
        """`sum(dy)` and `sum(dy * xhat)`, `(2, C)`, of `two_sums` with a mean of `dtype`."""
        _, rest = self._rounded(norm, dtype)
        sum_dy = self.wide(sum_dy)
        sum_dy_deviations = self.wide(sum_dy_deviations) - rest * sum_dy
        return self._stacked(rest.dtype, sum_dy, sum_dy_deviations * norm.statistics.invstd)

    def backward_input(
        self,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        working = self.arrays.working(x)
        if total is not None and labels is not None and len(total.shape) == 1:
            wrong = labels.check_total(total)
            total = self.xp.where(wrong, math.nan, total[:-1]).reshape(2, -1)
        dy = self._through_activation(x, dy, norm)
        if total is None:
            of_dy = self.arrays.cast(self._scale(norm), working)
            return self._result(self.arrays.multiple(dy, column(of_dy, x)), x, out)
        dx = self.gradient(x, dy, self.of_backward(norm, total, working))
        return self._result(dx, x, out)

    def of_backward(self, norm: Norm, total: Array, dtype: Any) -> Array:
        """Numbers of each channel, `(4, C)` of `dtype`: `dx = (x - a) * b + c + dy * d`.

        `total`: the sums of all members, `(2, C)`.
        """
        statistics, _, rule = norm
        invstd, count = statistics.invstd, self.at_least_one(_count(statistics))
        mean_dy, mean_dy_xhat = total / count
        if rule.clamps:
            mean_dy_xhat = self.xp.where(statistics.m2 / count < rule.eps, 0.0, mean_dy_xhat)
        slope = mean_dy_xhat * invstd * invstd
        rounded, rest = self._rounded(norm, dtype)
        shift = rest * slope - mean_dy * invstd
        return self._stacked(dtype, rounded, -slope, shift, self._scale(norm))

    def gradient(self, x: Array, dy: Array, numbers: Array) -> Array:
        """dx, given the numbers of `of_backward`."""
        values = self._line(x, numbers, numbers.dtype)
        return self.arrays.plus_scaled(values, dy, column(numbers[3], x), x.dtype)

    def _through_activation(self, x: Array, dy: Array, norm: Norm) -> Array:
        if norm.rule.activation is None:
            return dy
        numbers = self.of_forward(norm, self.arrays.working(x))
        return self.through_activation(x, dy, numbers, norm.rule)

    def through_activation(self, x: Array, dy: Array, numbers: Array, rule: NormRule) -> Array:
        """The gradient by z, given the numbers of `of_forward`."""
        z = self._line(x, numbers, numbers.dtype)
        return self.arrays.product(self._slope(z, rule), dy)

    def _activated(self, z: Array, rule: NormRule) -> Array:
        """The activation of z."""
        where = self.xp.where
        match rule.activation:
            case "relu":
                return where(z <= 0, 0, z)
            case "leaky_relu":
                return where(z <= 0, z * rule.negative_slope, z)
            case "silu":
                return z * self.arrays.sigmoid(z)
            case "hardswish":
                return where(z <= -3, 0, where(z >= 3, z, z * (z + 3) / 6))
            case "relu6":
                return where(z <= 0, 0, where(z >= 6, 6, z))
        return z

    def _slope(self, z: Array, rule: NormRule) -> Array:
        """The derivative of the activation at z."""
        where, one = self.xp.where, self.xp.ones_like(z)
        match rule.activation:
            case "relu":
                return where(z <= 0, 0, one)
            case "leaky_relu":
                return where(z <= 0, rule.negative_slope, one)
            case "silu":
                s = self.arrays.sigmoid(z)
                return s * (1 + z * (1 - s))
            case "hardswish":
                return where(z <= -3, 0, where(z >= 3, one, z / 3 + 0.5))
            case "relu6":
                return where(z <= 0, 0, where(z >= 6, 0, one))
        return one

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        self.arrays.assign(running.held, self.updated(running, statistics))

    def updated(self, running: RunningStatistics, statistics: Statistics) -> list[Array]:
        """The new running statistics, as many as are held."""
        mean, var, tracked, momentum = running
        count, new = _count(statistics), []
        if mean is not None and var is not None:
            factor = self._factor(momentum, tracked)
            unbiased = statistics.m2 / self.at_least_one(count - 1)
            new = [self._blended(mean, statistics.mean, count, factor)]
            new.append(self._blended(var, unbiased, count, factor))
        return new if tracked is None else [*new, tracked + 1]

    def _factor(self, momentum: float | None, tracked: Array | None) -> Any:
        if momentum is None and tracked is not None:
            return 1.0 / (self.wide(tracked) + 1)
        return averaging_factor(momentum, tracked)

    def _blended(self, old: Array, batch: Array, count: Any, factor: Any) -> Array:
        """The new running statistic; the old one if the batch is empty."""
        if isinstance(count, int) and count == 0:
            return old
        wide = self.wide(old)
        new = blend(wide, self.arrays.constant(batch), factor)
        if not isinstance(count, int):
            new = self.xp.where(count > 0, new, wide)
        return self.arrays.cast(new, old.dtype)

    def wide(self, values: Array) -> Array:
        return self.arrays.cast(values, self.arrays.widest(values))

    def _rounded(self, norm: Norm, dtype: Any) -> tuple[Array, Array]:
        """The mean, rounded to `dtype`, and what it lacks then; both `(C,)`."""
        mean = norm.statistics.mean
        rounded = self.arrays.constant(self.arrays.cast(mean, dtype))
        return rounded, mean - self.wide(rounded)

    def _scale(self, norm: Norm) -> Array:
        """`weight * invstd`, `(C,)`."""
        invstd, weight = norm.statistics.invstd, norm.affine.weight
        return invstd if weight is None else invstd * self.wide(weight)

    def _stacked(self, dtype: Any, *values: Array) -> Array:
        """`(K, C)`. A compiler stores what is stacked; else it would compute it per element."""
        return self.xp.stack([self.arrays.cast(each, dtype) for each in values])

    def at_least_one(self, count: Any) -> Any:
        return self.xp.where(count < 1, 1, count) if hasattr(count, "shape") else max(count, 1)

    def _result(self, values: Array, x: Array, out: Array | None) -> Array:
        result = self.arrays.cast(values, x.dtype)
        if out is None:
            return result
        out[...] = result
        return out


def _count(statistics: Statistics) -> Any:
    """Values per channel: an int, or an array `()`."""
    return statistics.table[0] if statistics.count is None else statistics.count


def column(values: Array, like: Array) -> Array:
    """Per-channel `values` `(C,)`, reshaped to broadcast with `like` `(N, C, *spatial)`."""
    return values.reshape((1, -1) + (1,) * (like.ndim - 2))


def axes_of(x: Array) -> tuple[int, ...]:
    """All axes except the channel axis 1."""
    return (0, *range(2, x.ndim))
