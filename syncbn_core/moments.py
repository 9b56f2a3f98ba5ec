"""The maths of batch statistics, in one place.

Per channel, a part of the batch is `(count, mean, m2)` with `m2 = sum((x - mean)**2)`. Two
parts merge exactly (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm
for computing sample variances"):

    n    = n_a + n_b
    d    = mean_b - mean_a
    mean = mean_a + d * n_b / n
    m2   = m2_a + m2_b + d**2 * n_a * n_b / n

Everything here is float64 and always in the order of the parts, so that every member of a
group, and every run, gets bitwise the same statistics. Sums of squares are never formed:
`E[x**2] - E[x]**2` has lost all digits of float32 at mean 1e3, std 1.

The functions use arithmetic operators and NumPy's ufuncs only, which CuPy arrays answer too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np

from syncbn_core.errors import ArgumentError, BatchSizeError

__all__ = [
    "EpsMode",
    "Moments",
    "averaging_factor",
    "blend",
    "check_eps",
    "check_eps_mode",
    "check_momentum",
    "mean_gradients",
    "merge_all",
    "require_more_than_one_value",
]

EpsMode = Literal["plus", "clamp"]
Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of one part of the batch: `count` values per channel, `mean` and `m2` `(C,)` float64.

    An empty part is `count == 0` with zeros, and merges like any other.
    """

    count: int
    mean: Array
    m2: Array

    @classmethod
    def empty(cls, num_features: int) -> Moments:
        return cls(0, np.zeros(num_features), np.zeros(num_features))

    @property
    def known_count(self) -> int | None:
        """`count` where it is known without waiting for a device, else None."""
        return self.count

    @property
    def num_features(self) -> int:
        """C."""
        return int(self.mean.shape[0])

    def merge(self, other: Moments) -> Moments:
        """Moments of both parts together; the operands stay as they are."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        # inf - inf is a NaN that has to reach the output, not a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            delta = other.mean - self.mean
            mean = self.mean + delta * (other.count / count)
            m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def merge_with(self, others: Sequence[Moments]) -> Moments:
        """Moments of this part and `others`, merged pairwise from the left."""
        total = self
        for part in others:
            total = total.merge(part)
        return total

    @property
    def var(self) -> Array:
        """Biased variance `m2 / count`, `(C,)`; zeros for an empty part."""
        return self.m2 / max(self.count, 1)

    @property
    def unbiased_var(self) -> Array:
        """`m2 / (count - 1)`, `(C,)`: what running statistics take. Needs `count > 1`."""
        require_more_than_one_value(self.count)
        return self.m2 / (self.count - 1)

    def invstd(self, eps: float, eps_mode: EpsMode = "plus") -> Array:
        """`1 / sqrt(var + eps)`, or for "clamp" `1 / sqrt(max(var, eps))`; `(C,)` float64."""
        return invstd_from_var(self.var, eps, eps_mode)


def invstd_from_var(var: Array, eps: float, eps_mode: EpsMode) -> Array:
    """`1 / sqrt(var + eps)` or `1 / sqrt(max(var, eps))`; NaN stays NaN in both."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1.0 / np.sqrt(np.maximum(var, eps) if eps_mode == "clamp" else var + eps)


def merge_all(parts: Sequence[Moments]) -> Moments:
    """Merge `parts` (at least one) from the left: in replica or rank order."""
    return parts[0].merge_with(parts[1:])


def mean_gradients(sums: Array, count: int, frozen: Array | None) -> tuple[Array, Array]:
    """What `sum(dy), sum(dy * xhat)` times weight, (2, C), over all members, give each value.

    `frozen` (C,) bool: where the deviation is a constant ("clamp"), through which none flows.
    """
    mean_dy, mean_dy_xhat = sums / max(count, 1)
    return mean_dy, mean_dy_xhat if frozen is None else np.where(frozen, 0.0, mean_dy_xhat)


def averaging_factor(momentum: float | None, num_batches_tracked: int) -> float:
    """Share of the new batch in the running statistics.

    `momentum`, or for None the cumulative average `1 / num_batches_tracked`, where the counter
    already counts the new batch.
    """
    return 1.0 / max(num_batches_tracked, 1) if momentum is None else momentum


def blend(running: Array, batch: Array, factor: float) -> Array:
    """`(1 - factor) * running + factor * batch`: the update of a running statistic."""
    return (1.0 - factor) * running + factor * batch


def require_more_than_one_value(count: int, shape: Sequence[int] | None = None) -> None:
    """Raise `BatchSizeError` when a batch of `count` values per channel can't be trained on."""
    if count == 1:
        size = f", got input size torch.Size({list(shape)})" if shape is not None else ""
        raise BatchSizeError(
            f"Expected more than 1 value per channel when training{size}; "
            "one value has no variance: use a larger batch, or eval()"
        )


def check_eps(eps: float) -> float:
    """`eps` as a float, or `ArgumentError` unless it is finite and positive."""
    if not (isinstance(eps, Real) and math.isfinite(eps) and eps > 0):
        raise ArgumentError(f"expected eps to be a finite number > 0, got {eps!r}")
    return float(eps)


def check_eps_mode(eps_mode: str) -> EpsMode:
    """`eps_mode`, or `ArgumentError` unless it is "plus" or "clamp"."""
    if eps_mode not in get_args(EpsMode):
        raise ArgumentError(
            f'expected eps_mode "plus" (1/sqrt(var + eps)) or "clamp" '
            f"(1/sqrt(max(var, eps))), got {eps_mode!r}"
        )
    return eps_mode  # type: ignore[return-value]


def check_momentum(momentum: float | None) -> float | None:
    """`momentum`, or `ArgumentError` unless it is None or a number from 0 to 1."""
    if momentum is not None and not (isinstance(momentum, Real) and 0 <= momentum <= 1):
        raise ArgumentError(
            "expected momentum to be None (cumulative average) or a number from 0 to 1 "
            f"(the share of the new batch), got {momentum!r}"
        )
    return momentum
