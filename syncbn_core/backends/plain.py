"""`PlainOperations`: the steps in plain array operations, shared by NumPy, torch, JAX and others.

    mean, m2 = moments of the batch           invstd = 1 / sqrt(m2 / n + eps)
    xhat     = (x - mean) * invstd            y      = xhat * weight + bias
    dx       = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n)

The code never reads a number out of an array and never writes in place (unless `out` is given), so
a library can trace, compile, vectorize and differentiate the steps, also twice. It computes in the
widest floating dtype of the device, float64 if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from syncbn_core.backends.base import Affine, Forward, Operations, RunningStatistics, Sums
from syncbn_core.moments import (
    Moments,
    NormRule,
    Statistics,
    averaging_factor,
    blend,
    merged,
)

__all__ = ["Namespace", "PlainOperations"]

Array = Any


class Namespace(Protocol):
    """One array library: `xp` is its module; the methods are what libraries name differently."""

    @property
    def xp(self) -> Any:
        """The module with `sqrt`, `stack`, `where`, `concatenate`."""

    def cast(self, values: Array, dtype: Any) -> Array:
        """`values` converted to `dtype`, a dtype of the library."""

    def widest(self, values: Array) -> Any:
        """The widest floating dtype on the device of `values`, float64 if it has that."""

    def number(self, value: Any, like: Array) -> Array:
        """A number, which may be traced, as an array `()` with the dtype and device of `like`."""

    def constant(self, values: Array) -> Array:
        """`values`, detached: no gradient flows through the result."""


class PlainOperations(Operations):
    """The steps for the library of `namespace`. Returns new arrays as running statistics."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.xp = namespace.xp

    def moments(self, x: Array) -> Moments:
        wide, axes = self._wide(x), _axes(x)
        count = math.prod(x.shape[axis] for axis in axes) if x.shape[1] else 0
        mean = wide.sum(axes) / self._at_least_one(count)
        deviations = wide - column(mean, x)
        return Moments(count, mean, (deviations * deviations).sum(axes))

    def merge(self, parts: Sequence[Moments]) -> Moments:
        if len(parts) == 1:
            return parts[0]
        return self.merge_rows(self.xp.stack([self.row(part) for part in parts]), parts)

    def row(self, part: Moments) -> Array:
        """`part` as one row `(2 C + 1,)`: count, mean, m2."""
        count = self.namespace.number(part.count, part.mean).reshape(1)
        return self.xp.concatenate([count, part.mean, part.m2])

    def merge_rows(self, rows: Array, parts: Sequence[Moments] = ()) -> Moments:
        """Merge P parts, given as `rows` `(P, 2 C + 1)`.

        `parts`: the same parts, if available: their counts are summed on the host if all
        are plain numbers.
        """
        channels = rows.shape[1] // 2
        counts = rows[:, :1]
        mean, m2 = merged(counts, rows[:, 1 : 1 + channels], rows[:, 1 + channels :])
        known = [part.count for part in parts if isinstance(part.count, int)]
        all_known = len(known) == len(parts) > 0
        return Moments(sum(known) if all_known else counts.sum(0).reshape(()), mean, m2)

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        var = self._var(total)
        # `where`, not `maximum`, whose gradient at var == eps is 1/2
        var = self.xp.where(var < rule.eps, rule.eps, var) if rule.clamps else var + rule.eps
        return Statistics(total, 1.0 / self.xp.sqrt(var))

    def forward(
        self,
        x: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        y = self._xhat(x, statistics)
        if affine.weight is not None:
            y = y * column(self._wide(affine.weight), x)
        if affine.bias is not None:
            y = y + column(self._wide(affine.bias), x)
        new = None if running is None else self.update_running(running, statistics)
        return Forward(self._result(y, x, out), statistics, new)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        mean, var = self._wide(running.mean), self._wide(running.var)
        statistics = self.statistics(Moments(1, mean, var), rule)
        return self.forward(x, statistics, affine, rule, None, out)

    def backward_reduce(
        self, x: Array, dy: Array, statistics: Statistics, affine: Affine, rule: NormRule
    ) -> Sums:
        wide, axes = self._wide(dy), _axes(x)
        sums = self.xp.stack([wide.sum(axes), (wide * self._xhat(x, statistics)).sum(axes)])
        dtype = x.dtype if affine.weight is None else affine.weight.dtype
        exchange = sums if affine.weight is None else sums * self._wide(affine.weight)
        cast = self.namespace.cast
        return Sums(exchange, cast(sums[1], dtype), cast(sums[0], dtype))

    def backward_input(
        self,
        x: Array,
        dy: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        total: Array | None,
        out: Array | None = None,
    ) -> Array:
        moments, invstd = statistics
        inner = self._wide(dy)
        if affine.weight is not None:
            inner = inner * column(self._wide(affine.weight), x)
        if total is not None:
            mean_dy, mean_dy_xhat = total / self._at_least_one(moments.count)
            if rule.clamps:
                mean_dy_xhat = self.xp.where(self._var(moments) < rule.eps, 0.0, mean_dy_xhat)
            inner = inner - column(mean_dy, x) - self._xhat(x, statistics) * column(mean_dy_xhat, x)
        return self._result(inner * column(invstd, x), x, out)

    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        mean, var, tracked, momentum = running
        total = statistics.moments
        if mean is not None and var is not None:
            factor = self._factor(momentum, tracked)
            unbiased = total.m2 / self._at_least_one(total.count - 1)
            mean = self._blended(mean, total.mean, total.count, factor)
            var = self._blended(var, unbiased, total.count, factor)
        counted = None if tracked is None else tracked + 1
        return RunningStatistics(mean, var, counted, momentum)

    def _factor(self, momentum: float | None, tracked: Array | None) -> Any:
        if momentum is None and tracked is not None:
            return 1.0 / (self._wide(tracked) + 1)
        return averaging_factor(momentum, tracked)

    def _blended(self, old: Array, batch: Array, count: Any, factor: Any) -> Array:
        """The new running statistic; the old one if the batch is empty."""
        if isinstance(count, int) and count == 0:
            return old
        wide = self._wide(old)
        new = blend(wide, self.namespace.constant(batch), factor)
        if not isinstance(count, int):
            new = self.xp.where(count > 0, new, wide)
        return self.namespace.cast(new, old.dtype)

    def _wide(self, values: Array) -> Array:
        return self.namespace.cast(values, self.namespace.widest(values))

    def _xhat(self, x: Array, statistics: Statistics) -> Array:
        return (self._wide(x) - column(statistics.moments.mean, x)) * column(statistics.invstd, x)

    def _var(self, moments: Moments) -> Array:
        return moments.m2 / self._at_least_one(moments.count)

    def _at_least_one(self, count: Any) -> Any:
        return max(count, 1) if isinstance(count, int) else self.xp.where(count < 1, 1, count)

    def _result(self, values: Array, x: Array, out: Array | None) -> Array:
        result = self.namespace.cast(values, x.dtype)
        if out is None:
            return result
        out[...] = result
        return out


def column(values: Array, like: Array) -> Array:
    """Per-channel `values` `(C,)`, reshaped to broadcast with `like` `(N, C, *spatial)`."""
    return values.reshape((1, -1) + (1,) * (like.ndim - 2))


def _axes(x: Array) -> tuple[int, ...]:
    """All axes except the channel axis 1."""
    return (0, *range(2, x.ndim))
