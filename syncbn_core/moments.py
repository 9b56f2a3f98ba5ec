"""The maths of batch statistics, in one place.

Per channel, a part of the batch is `(count, mean, m2)` with `m2 = sum((x - mean)**2)`. Parts merge
exactly, as the total of squared deviations splits into those within parts and those between them
("analysis of variance"; Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for
computing sample variances", give the same for two parts):

    n    = sum(n_i)
    mean = sum(n_i / n * mean_i)
    m2   = sum(m2_i + n_i * (mean_i - mean)**2)

Everything here is float64 and always in the order of the parts, so that every member of a group,
and every run, gets bitwise the same statistics. Sums of squares are never formed:
`E[x**2] - E[x]**2` has lost all digits of float32 at mean 1e3, std 1.

The functions use arithmetic operators and methods that NumPy, CuPy, torch and JAX spell alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from syncbn_core.errors import BatchSizeError

__all__ = [
    "EpsMode",
    "Moments",
    "NormRule",
    "Statistics",
    "averaging_factor",
    "blend",
    "mean_gradients",
    "merge_moments",
    "merged",
    "require_more_than_one_value",
]

EpsMode = Literal["plus", "clamp"]
Array = Any  # numpy.ndarray or cupy.ndarray


class NormRule(NamedTuple):
    """How a variance becomes an inverse standard deviation: a setting, the same for all members.

    `mode` "plus": `1 / sqrt(var + eps)`; "clamp": `1 / sqrt(max(var, eps))`.
    """

    eps: float = 1e-5
    mode: EpsMode = "plus"

    @property
    def clamps(self) -> bool:
        """Whether small variances are replaced by eps."""
        return self.mode == "clamp"

    def invstd(self, var: Array) -> Array:
        """`1 / sqrt(var + eps)` or `1 / sqrt(max(var, eps))`; NaN stays NaN in both."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1.0 / np.sqrt(np.maximum(var, self.eps) if self.clamps else var + self.eps)

    def clamped(self, var: Array) -> Array | None:
        """`(C,)` bool: where invstd is a constant and passes no gradient on; None for nowhere."""
        return var < self.eps if self.clamps else None


class Moments(NamedTuple):
    """Moments of one part of the batch: `count` values per channel, `mean` and `m2` `(C,)` float64.

    An empty part is `count == 0` with zeros, and merges like any other. `count` is an array ()
    where a library traces the computation.
    """

    count: Any
    mean: Array
    m2: Array

    @classmethod
    def empty(cls, num_features: int) -> Moments:
        """The empty part."""
        return cls(0, np.zeros(num_features), np.zeros(num_features))

    @property
    def known_count(self) -> int | None:
        """`count` where it is a number, else None."""
        return self.count if isinstance(self.count, int) else None

    @property
    def num_features(self) -> int:
        """C."""
        return int(self.mean.shape[0])

    @property
    def var(self) -> Array:
        """Biased variance `m2 / count`, `(C,)`; zeros for an empty part."""
        return self.m2 / max(self.count, 1)

    @property
    def unbiased_var(self) -> Array:
        """`m2 / (count - 1)`, `(C,)`: what running statistics take. Needs `count > 1`."""
        require_more_than_one_value(self.count)
        return self.m2 / (self.count - 1)


class Statistics(NamedTuple):
    """Statistics of the whole batch on the host: its `moments`, and `invstd` `(C,)` float64."""

    moments: Moments
    invstd: Array

    @property
    def mean(self) -> Array:
        """`(C,)` float64."""
        return self.moments.mean


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Moments of `parts` (NumPy, one or more) together, added up in their order."""
    if len(parts) == 1:
        return parts[0]
    rows = np.array([[part.count] for part in parts], np.float64)
    means, m2s = (np.stack([getattr(part, name) for part in parts]) for name in ("mean", "m2"))
    return Moments(sum(part.count for part in parts), *merged(rows, means, m2s))


def merged(counts: Array, means: Array, m2s: Array) -> tuple[Array, Array]:
    """`(mean, m2)` of P parts in their order: `counts` (P, 1), `means` and `m2s` (P, C)."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is a NaN for the output
        # shares first: then one part among empty ones keeps its mean to the bit
        total = counts.sum(0)
        mean = (counts / (total + (total == 0)) * means).sum(0)
        deviations = means - mean
        return mean, (m2s + counts * deviations * deviations).sum(0)


def mean_gradients(sums: Array, count: int, clamped: Array | None) -> tuple[Array, Array]:
    """What `sum(dy), sum(dy * xhat)` times weight, (2, C), over all members, give each value.

    `clamped`: as `NormRule.clamped` gives it.
    """
    mean_dy, mean_dy_xhat = sums / max(count, 1)
    return mean_dy, mean_dy_xhat if clamped is None else np.where(clamped, 0.0, mean_dy_xhat)


def averaging_factor(momentum: float | None, num_batches_tracked: Any | None) -> float:
    """Share of the new batch in the running statistics.

    `momentum`, or for None the cumulative average `1 / (num_batches_tracked + 1)`: the counter does
    not count the new batch yet. Without a counter nothing can be averaged, and the share is 0.
    """
    if momentum is not None:
        return momentum
    return 0.0 if num_batches_tracked is None else 1.0 / (int(num_batches_tracked) + 1)


def blend(running: Array, batch: Array, factor: float) -> Array:
    """`(1 - factor) * running + factor * batch`: the update of a running statistic."""
    return (1.0 - factor) * running + factor * batch


def require_more_than_one_value(count: int | None, shape: Sequence[int] | None = None) -> None:
    """Raise `BatchSizeError` when a batch of `count` values per channel can't be trained on.

    None, a count that only a device knows, is not asked for: that would wait.
    """
    if count == 1:
        size = f", got input size torch.Size({list(shape)})" if shape is not None else ""
        raise BatchSizeError(
            f"Expected more than 1 value per channel when training{size}; "
            "one value has no variance: use a larger batch, or eval()"
        )
