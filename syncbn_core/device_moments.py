"""Moments that stay on a device, side by side in one array, until a kernel merges them.

Merging two parts takes half a dozen small operations, each as dear to launch as a kernel over the
whole activation. So here parts are only put together, `[P, 2 C + 1]` float64 with a row
`count, mean, m2` per part, and the kernel that normalizes merges them, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from syncbn_core.moments import Moments

__all__ = ["DeviceMoments", "merge_rows"]

Array = Any  # cupy.ndarray or torch.Tensor


class DeviceMoments(Moments):
    """`Moments` of one or many parts, merged when somebody asks for `mean` or `m2`.

    `parts`: `[P, 2 C + 1]` float64; `count`: values per channel over all of them, None where only
    the device knows (asking for it then waits for the device); `join`: the array library's
    function that puts a list of such arrays together, where the first one is.
    """

    __slots__ = ("_merged", "join", "known_count", "parts")

    parts: Array
    join: Callable[[list[Array]], Array]
    _merged: tuple[Array, Array] | None

    known_count: int | None

    def __init__(
        self, parts: Array, count: int | None, join: Callable[[list[Array]], Array]
    ) -> None:
        fields = {"parts": parts, "known_count": count, "join": join, "_merged": None}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """Values per channel."""
        if self.known_count is None:
            object.__setattr__(self, "known_count", int(self.parts[:, 0].sum()))
        return cast(int, self.known_count)

    @property
    def num_features(self) -> int:
        """C."""
        return (int(self.parts.shape[1]) - 1) // 2

    @property
    def mean(self) -> Array:
        """`(C,)`."""
        return self._merge()[0]

    @property
    def m2(self) -> Array:
        """`(C,)`."""
        return self._merge()[1]

    def merge(self, other: Moments) -> Moments:
        return self.merge_with([other])

    def merge_with(self, others: Sequence[Moments]) -> DeviceMoments:
        if not others:
            return self
        every = [self, *cast(Sequence[DeviceMoments], others)]
        counts = [part.known_count for part in every]
        known = [count for count in counts if count is not None]
        count = sum(known) if len(known) == len(counts) else None
        return DeviceMoments(self.join([part.parts for part in every]), count, self.join)

    def one_row(self) -> Array:
        """All parts in one, `(2 C + 1,)`."""
        if len(self.parts) == 1:
            return self.parts[0]
        count = self.parts[:, :1].sum(0)
        return self.join([count, self.mean, self.m2])

    def _merge(self) -> tuple[Array, Array]:
        merged = self._merged
        if merged is None:
            merged = _merged(self.parts)
            object.__setattr__(self, "_merged", merged)
        return merged


def merge_rows(rows: Array) -> Moments:
    """`Moments` of NumPy rows `[P, 2 C + 1]`, added up in their order."""
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is a NaN for the output
        return Moments(int(rows[:, 0].sum()), *_merged(rows))


def _merged(rows: Array) -> tuple[Array, Array]:
    """`(mean, m2)` of all rows: m2 is `sum(m2_i + count_i * (mean_i - mean)**2)`."""
    channels = (int(rows.shape[1]) - 1) // 2
    counts, means, m2s = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    if len(rows) == 1:
        return means[0], m2s[0]
    mean = (counts * means).sum(0) / counts.sum(0).clip(1)
    deviations = means - mean
    return mean, (m2s + counts * deviations * deviations).sum(0)
