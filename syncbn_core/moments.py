"""The arithmetic of batch statistics.

Per channel, a part of the batch has the moments `(count, mean, m2)` with
`m2 = sum((x - mean)**2)`. Moments of parts merge exactly, because the sum of squared deviations is
the sum within the parts plus the sum between them ("analysis of variance"; for two parts see Chan,
Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"):

    n    = sum(n_i)
    mean = sum(n_i / n * mean_i)
    m2   = sum(m2_i + n_i * (mean_i - mean)**2)

The computation is in float64 and in the order of the parts, so all members and all runs get
bitwise the same statistics. `E[x**2] - E[x]**2` is never used: in float32 it loses all digits at
mean 1e3, std 1.

`merged` and `blend` use only operators and methods that NumPy, CuPy, torch and JAX have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from syncbn_core.errors import BatchSizeError
from syncbn_core.labels import Labels

__all__ = [
    "ACTIVATIONS",
    "ActivationName",
    "EpsMode",
    "Moments",
    "NormRule",
    "Statistics",
    "averaging_factor",
    "blend",
    "columns",
    "mean_gradients",
    "merged",
    "merged_rows",
    "require_more_than_one_value",
    "total_count",
]

EpsMode = Literal["plus", "clamp"]
ActivationName = Literal["relu", "leaky_relu", "silu", "hardswish", "relu6"]
ACTIVATIONS = (None, *get_args(ActivationName))
Array = Any  # numpy.ndarray or cupy.ndarray


class NormRule(NamedTuple):
    """The settings of a layer apart from arrays; the same for all members.

    `mode` "plus": `invstd = 1 / sqrt(var + eps)`; "clamp": `1 / sqrt(max(var, eps))`.
    `activation`: one of `ACTIVATIONS`, of `xhat * weight + bias`.
    `negative_slope`: that of "leaky_relu".
    """

    eps: float = 1e-5
    mode: EpsMode = "plus"
    activation: str | None = None
    negative_slope: float = 0.01

    @property
    def extra_setting(self) -> str | None:
        """The setting that the batch norm of other libraries does not have, None for none."""
        return 'eps_mode="clamp"' if self.mode == "clamp" else None

    @property
    def clamps(self) -> bool:
        """Whether variances less than eps are replaced by eps."""
        return self.mode == "clamp"

    def clamped(self, var: Array) -> Array | None:
        """`(C,)` bool: channels whose invstd is constant, without a gradient; None for "plus"."""
        return var < self.eps if self.clamps else None


class Moments(NamedTuple):
    """The moments of P parts of the batch; those of one part until members exchange them.

    Attributes:
        rows: `(P, 2 C + 2)` of any array library, float64, or the widest floating dtype of the
            device. Each row holds count, mean `(C,)`, m2 `(C,)` (the sum of squared deviations from
            that mean), and a place for the label that members send with it (`labels`). An empty
            part has zeros, and merges like any other.
        count: values per channel in all parts; None if only the rows know it: the host would have
            to wait for a device, or the array library traces the code.
        labels: where the labels in the rows of all members have yet to be compared, else None.
    """

    rows: Array
    count: Any  # an int or None; tuples have a method of this name, of another type
    labels: Labels | None = None

    @classmethod
    def of(cls, count: int, mean: Array, m2: Array) -> Moments:
        """Those of one part, in NumPy."""
        return cls(np.concatenate([[count], mean, m2, [0]])[None], count)

    @property
    def num_features(self) -> int:
        """The number of channels C."""
        return int(self.rows.shape[1]) // 2 - 1

    @property
    def mean(self) -> Array:
        """`(C,)`, of the first part."""
        return self.rows[0, 1 : 1 + self.num_features]

    @property
    def m2(self) -> Array:
        """`(C,)`, of the first part."""
        return self.rows[0, 1 + self.num_features : -1]


class Statistics(NamedTuple):
    """Statistics of the whole batch.

    Attributes:
        table: `(3 C + 1,)`, like a row of `Moments`: count, mean, m2, invstd.
        count: as of `Moments`.
    """

    table: Array
    count: Any

    @property
    def mean(self) -> Array:
        """Per channel, `(C,)`."""
        return self.table[1 : 1 + len(self.table) // 3]

    @property
    def m2(self) -> Array:
        """`(C,)`."""
        channels = len(self.table) // 3
        return self.table[1 + channels : 1 + 2 * channels]

    @property
    def invstd(self) -> Array:
        """`(C,)`."""
        return self.table[1 + len(self.table) // 3 * 2 :]

    def as_moments(self) -> Moments:
        """Those of the whole batch, as one part; with any number in the place of a label."""
        return Moments(self.table[None, : 2 + len(self.table) // 3 * 2], self.count)


def total_count(parts: Sequence[Moments]) -> int | None:
    """The count of all parts together, None if one is not known."""
    counts = [part.count for part in parts if part.count is not None]
    return sum(counts) if len(counts) == len(parts) else None


def columns(rows: Array) -> tuple[Array, Array, Array]:
    """Counts `(P, 1)`, means `(P, C)` and m2s `(P, C)` of `Moments.rows`."""
    channels = rows.shape[1] // 2 - 1
    return rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels : -1]


def merged(counts: Array, means: Array, m2s: Array) -> tuple[Array, Array]:
    """`(mean, m2)`, each `(C,)`, of P parts: `counts` `(P, 1)`, `means` and `m2s` `(P, C)`."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf gives NaN, as wanted
        # Divide first: then the only non-empty part keeps exactly its mean.
        total = counts.sum(0)
        mean = (counts / (total + (total == 0)) * means).sum(0)
        deviations = means - mean
        return mean, (m2s + counts * deviations * deviations).sum(0)


def mean_gradients(sums: Array, count: int, clamped: Array | None) -> Array:
    """`sum_dy / n` and `sum_dy_xhat / n`, `(2, C)`: the terms that backward subtracts.

    `sums`: `(2, C)`, `sum(dy)` and `sum(dy * xhat)`, times weight, over all members. `count`: n.
    `clamped`: from `NormRule.clamped`; the second term is 0 in these channels.
    """
    means = sums / max(count, 1)
    if clamped is not None:
        means[1][clamped] = 0.0
    return means


def merged_rows(rows: Array) -> tuple[Array, Array, Array]:
    """Count `(1,)`, mean and m2 `(C,)` of all `Moments.rows` together."""
    counts, means, m2s = columns(rows)
    if len(rows) == 1:
        return counts[0], means[0], m2s[0]
    return counts.sum(0), *merged(counts, means, m2s)


def averaging_factor(momentum: float | None, num_batches_tracked: Any | None) -> float:
    """The share of the new batch in the running statistics.

    It is `momentum`, or for None `1 / (num_batches_tracked + 1)`, the cumulative average; the
    counter does not include the new batch yet. If both are None it is 0.
    """
    if momentum is not None:
        return momentum
    return 0.0 if num_batches_tracked is None else 1.0 / (int(num_batches_tracked) + 1)


def blend(running: Array, batch: Array, factor: float) -> Array:
    """`(1 - factor) * running + factor * batch`: the update of a running statistic."""
    return (1.0 - factor) * running + factor * batch


def require_more_than_one_value(
    count: int | None, shape: Sequence[int] | None = None, members: int = 1
) -> None:
    """Raise `BatchSizeError` if `count`, the values per channel of a training batch, is 1.

    A count of None, known only to the device, is not checked, because the host would have to wait.
    `shape`: the shape of x of this member, for the error message.
    """
    if count == 1:
        size = f", got input size torch.Size({list(shape)})" if shape is not None else ""
        if members > 1:
            size += f" here, and 1 value per channel in all {members} members"
        raise BatchSizeError(
            f"Expected more than 1 value per channel when training{size}; "
            "one value has no variance: use a larger batch, or eval()"
        )
