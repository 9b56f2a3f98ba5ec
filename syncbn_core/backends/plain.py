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
        (shift,) = self.stored(self._shift(x))
        deviations = arrays.difference(x, column(shift, x))
        mean, m2 = arrays.mean_and_m2(deviations, axes, count)
        return self.of_one_part(count, self._wide(shift) + mean, m2, labels)

    def _shift(self, x: Array) -> Array:
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
        var = m2 / self._at_least_one(count if total.count is None else total.count)
        clamps = rule.mode == "clamp"
        # `where`, not `maximum`, whose gradient at var == eps is 1/2
        var = self.xp.where(var < rule.eps, rule.eps, var) if clamps else var + rule.eps
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
        statistics, affine, rule = norm
        mean, _, scale = per_channel(statistics)
        rounded, rest = self._rounded(x, mean)
        if affine.weight is not None:
            scale = scale * self._wide(affine.weight)
        shift = -rest * scale
        if affine.bias is not None:
            shift = shift + self._wide(affine.bias)
        rounded, scale, shift = self._columns(x, rounded, scale, shift)
        deviations = self.arrays.difference(x, rounded)
        if rule.activation is None:
            y = self.arrays.scaled(deviations, scale, shift, x.dtype)
        else:
            z = self.arrays.scaled(deviations, scale, shift, deviations.dtype)
            y = self._activated(z, rule)
        if running is not None:
            self.update_running(running, statistics)
        return self._result(y, x, out)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        mean, var = self._wide(running.mean), self._wide(running.var)
        statistics = self.statistics(self.of_one_part(1, mean, var), rule)
        return self.forward(x, Norm(statistics, affine, rule), None, out), statistics

    def backward_reduce(
        self, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        statistics, affine, _ = norm
        arrays, axes, (mean, _, invstd) = self.arrays, axes_of(x), per_channel(statistics)
        dy = self.through_activation(x, dy, norm)
        sum_dy = arrays.sum(dy, axes)
        rounded, rest = self._rounded(x, mean)
        deviations = arrays.difference(x, *self._columns(x, rounded))
        sum_dy_deviations = arrays.sum(arrays.product(deviations, dy), axes) - rest * sum_dy
        sums = self.xp.stack([sum_dy, sum_dy_deviations * invstd])
        dtype = x.dtype if affine.weight is None else affine.weight.dtype
        exchange = sums if affine.weight is None else sums * self._wide(affine.weight)
        cast = self.arrays.cast
        return Sums(exchange, cast(sums[1], dtype), cast(sums[0], dtype))

    def backward_input(
        self,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        statistics, affine, rule = norm
        mean, m2, invstd = per_channel(statistics)
        if total is not None and labels is not None and len(total.shape) == 1:
            wrong = labels.check_total(total)
            total = self.xp.where(wrong, math.nan, total[:-1]).reshape(2, -1)
        dy = self.through_activation(x, dy, norm)
        scale = invstd
        if affine.weight is not None:
            scale = scale * self._wide(affine.weight)
        if total is None:
            of_dy = self.arrays.cast(scale, self.arrays.working(x))
            return self._result(self.arrays.multiple(dy, column(of_dy, x)), x, out)
        count = self._at_least_one(_count(statistics))
        mean_dy, mean_dy_xhat = total / count
        if rule.mode == "clamp":
            mean_dy_xhat = self.xp.where(m2 / count < rule.eps, 0.0, mean_dy_xhat)
        slope = mean_dy_xhat * invstd * invstd
        rounded, rest = self._rounded(x, mean)
        numbers = rounded, -slope, rest * slope - mean_dy * invstd, scale
        rounded, slope, shift, scale = self._columns(x, *numbers)
        deviations = self.arrays.difference(x, rounded)
        values = self.arrays.scaled(deviations, slope, shift, deviations.dtype)
        dx = self.arrays.plus_scaled(values, dy, scale, x.dtype)
        return self._result(dx, x, out)

    def through_activation(self, x: Array, dy: Array, norm: Norm) -> Array:
        """The gradient by `z = xhat * weight + bias`, the input of the activation."""
        rule = norm.rule
        if rule.activation is None:
            return dy
        wide = self.arrays.cast(x, self.arrays.working(x))
        z = self.forward(wide, norm._replace(rule=rule._replace(activation=None)))
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
        mean, var, tracked, momentum = running
        count = _count(statistics)
        if mean is not None and var is not None:
            factor = self._factor(momentum, tracked)
            own, m2, _ = per_channel(statistics)
            unbiased = m2 / self._at_least_one(count - 1)
            mean = self._blended(mean, own, count, factor)
            var = self._blended(var, unbiased, count, factor)
        new = mean, var, None if tracked is None else tracked + 1
        pairs = [(o, n) for o, n in zip(running, new, strict=False) if o is not None]
        self.arrays.assign([own for own, _ in pairs], [value for _, value in pairs])

    def _factor(self, momentum: float | None, tracked: Array | None) -> Any:
        if momentum is None and tracked is not None:
            return 1.0 / (self._wide(tracked) + 1)
        return averaging_factor(momentum, tracked)

    def _blended(self, old: Array, batch: Array, count: Any, factor: Any) -> Array:
        """The new running statistic; the old one if the batch is empty."""
        if isinstance(count, int) and count == 0:
            return old
        wide = self._wide(old)
        new = blend(wide, self.arrays.constant(batch), factor)
        if not isinstance(count, int):
            new = self.xp.where(count > 0, new, wide)
        return self.arrays.cast(new, old.dtype)

    def _wide(self, values: Array) -> Array:
        return self.arrays.cast(values, self.arrays.widest(values))

    def _rounded(self, x: Array, mean: Array) -> tuple[Array, Array]:
        """The mean, rounded to the working dtype, and what it lacks then; both `(C,)`."""
        rounded = self.arrays.constant(self.arrays.cast(mean, self.arrays.working(x)))
        return rounded, mean - self._wide(rounded)

    def _columns(self, x: Array, *values: Array) -> list[Array]:
        """Numbers per channel in the working dtype, as `column`."""
        dtype = self.arrays.working(x)
        rounded = [self.arrays.cast(each, dtype) for each in values]
        return [column(each, x) for each in self.stored(*rounded)]

    def stored(self, *values: Array) -> Sequence[Array]:
        """Numbers per channel, `(C,)` of one dtype, with which each element of x is computed.

        A compiler may else compute them anew for each element.
        """
        return values

    def _at_least_one(self, count: Any) -> Any:
        return max(count, 1) if isinstance(count, int) else self.xp.where(count < 1, 1, count)

    def _result(self, values: Array, x: Array, out: Array | None) -> Array:
        result = self.arrays.cast(values, x.dtype)
        if out is None:
            return result
        out[...] = result
        return out


def per_channel(statistics: Statistics) -> tuple[Array, Array, Array]:
    """Mean, m2 and invstd. torch.compile 2.10 traces no properties of tuples."""
    table, channels = statistics.table, len(statistics.table) // 3
    end = 1 + 2 * channels
    return table[1 : 1 + channels], table[1 + channels : end], table[end:]


def _count(statistics: Statistics) -> Any:
    """Values per channel: an int, or an array `()`."""
    return statistics.table[0] if statistics.count is None else statistics.count


def column(values: Array, like: Array) -> Array:
    """Per-channel `values` `(C,)`, reshaped to broadcast with `like` `(N, C, *spatial)`."""
    return values.reshape((1, -1) + (1,) * (like.ndim - 2))


def axes_of(x: Array) -> tuple[int, ...]:
    """All axes except the channel axis 1."""
    return (0, *range(2, x.ndim))
