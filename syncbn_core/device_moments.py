"""Moments that stay on a device, until a kernel merges them.

Merging two parts takes half a dozen small operations, each as slow to launch as a kernel over the
whole activation. So parts are only joined here, `[P, 2 C + 1]` float64 with a row `count, mean, m2`
per part, and the kernel that normalizes merges them, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncbn_core.moments import Moments, merged

__all__ = ["DeviceMoments", "join_rows"]

Array = Any  # of CuPy or torch


class DeviceMoments(NamedTuple):
    """Moments of one part of the batch or of several, on a device.

    `rows`: `[P, 2 C + 1]` float64. `known_count`: values per channel over all parts, None where
    only the device knows. `join`: the array library's function that joins a list of such arrays
    along their first axis, where the first one is.
    """

    rows: Array
    known_count: int | None
    join: Callable[[list[Array]], Array]

    @property
    def num_features(self) -> int:
        """C."""
        return (int(self.rows.shape[1]) - 1) // 2

    def with_rows(self, rows: Array, known_count: int | None) -> DeviceMoments:
        """Other rows of the same library."""
        return DeviceMoments(rows, known_count, self.join)

    def wait(self) -> Moments:
        """The moments of all parts together, on the device; waits for it to know the count."""
        rows, channels = self.rows, self.num_features
        count = int(rows[:, 0].sum()) if self.known_count is None else self.known_count
        if len(rows) == 1:
            return Moments(count, rows[0, 1 : 1 + channels], rows[0, 1 + channels :])
        mean, m2 = merged(rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :])
        return Moments(count, mean, m2)


def join_rows(parts: Sequence[DeviceMoments]) -> DeviceMoments:
    """The rows of all parts, in their order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    counts = [part.known_count for part in parts]
    known = [count for count in counts if count is not None]
    rows = first.join([part.rows for part in parts])
    return first.with_rows(rows, sum(known) if len(known) == len(counts) else None)
