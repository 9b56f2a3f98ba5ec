"""`DeviceMoments`, which stay on a device until a kernel merges them, and `DeviceStatistics`.

To merge two parts takes about six small array operations. Each of them takes as long to launch as
a kernel over the whole activation. So parts are only joined here, as rows of a float64 array
`(P, 2 C + 2)`, and the kernel that normalizes merges them in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncbn_core.moments import Moments, Statistics, merged

__all__ = ["DeviceMoments", "DeviceStatistics", "join_rows"]

Array = Any  # of CuPy or torch


class DeviceMoments(NamedTuple):
    """The moments of P parts of the batch, on a device.

    Attributes:
        rows: float64 `(P, 2 C + 2)`; each row holds count, mean and m2 of a part, and a place for
            the label that members send with it (`exchange`), 0 before.
        known_count: values per channel over all parts; None if only the device knows it.
        join: the library's function that concatenates a list of such arrays along axis 0, on the
            device of the first.
    """

    rows: Array
    known_count: int | None
    join: Callable[[list[Array]], Array]

    @property
    def num_features(self) -> int:
        """The number of channels C."""
        return (int(self.rows.shape[1]) - 2) // 2

    def with_rows(self, rows: Array, known_count: int | None) -> DeviceMoments:
        """The moments in other `rows` of the same library."""
        return DeviceMoments(rows, known_count, self.join)

    def merged(self) -> Moments:
        """The moments of all parts together, as arrays on the device.

        Waits for the device if `known_count` is None.
        """
        rows, channels = self.rows, self.num_features
        count = int(rows[:, 0].sum()) if self.known_count is None else self.known_count
        if len(rows) == 1:
            return Moments(count, rows[0, 1 : 1 + channels], rows[0, 1 + channels : -1])
        mean, m2 = merged(rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels : -1])
        return Moments(count, mean, m2)


class DeviceStatistics(NamedTuple):
    """Statistics of the whole batch on a device.

    Attributes:
        packed: float64 `(3 C + 1,)`: count, mean, m2, invstd.
        label: what backward writes behind its two sums per channel, so that they are `(2 C + 1,)`;
            None: nothing, and they are `(2, C)`.
        label_of_total: the number behind the sums of all members.
    """

    packed: Array
    label: float | None = None
    label_of_total: float = 0.0

    @property
    def mean(self) -> Array:
        """Per channel, `(C,)` float64."""
        return self.packed[1 : 1 + len(self.packed) // 3]

    @property
    def invstd(self) -> Array:
        """Per channel, `(C,)` float64."""
        return self.packed[1 + len(self.packed) // 3 * 2 :]

    @property
    def moments(self) -> Moments:
        """Those of the whole batch; the count is an array `()`."""
        packed, channels = self.packed, len(self.packed) // 3
        return Moments(packed[0], self.mean, packed[1 + channels : 1 + 2 * channels])

    def as_plain(self) -> Statistics:
        """The same as `Statistics`, for `PlainOperations`."""
        return Statistics(self.moments, self.invstd)


def join_rows(parts: Sequence[DeviceMoments]) -> DeviceMoments:
    """All parts as rows of one `DeviceMoments`, in their order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    counts = [part.known_count for part in parts]
    known = [count for count in counts if count is not None]
    rows = first.join([part.rows for part in parts])
    return first.with_rows(rows, sum(known) if len(known) == len(counts) else None)
