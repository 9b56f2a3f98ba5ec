"""`PlainDeviceOperations`: the steps without kernels, by operations of the array library.

Parts, statistics and sums have the same form as those of `CudaOperations`, so that single steps of
the two can be exchanged, within a member and between members.
"""

from __future__ import annotations

from typing import Any

from syncbn_core.arrays import DeviceArrays
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Norm, Operations, RunningStatistics

__all__ = ["PlainDeviceOperations", "first_array"]

Array = Any


def first_array(first: Any) -> Array:
    """Of the first argument of a step: x, or the rows of the first of several moments."""
    return first[0].rows if type(first) is list else first


def _plainly(name: str) -> Any:
    """The step of `plain`, while the device of its arrays is current."""

    def step(self: PlainDeviceOperations, first: Any, *rest: Any, **settings: Any) -> Any:
        with self.arrays.at(first_array(first)):
            return getattr(self.plain, name)(first, *rest, **settings)

    return step


class PlainDeviceOperations(Operations):
    """The steps on CUDA devices by operations of the array library."""

    def __init__(self, arrays: DeviceArrays) -> None:
        self.arrays, self.plain = arrays, PlainOperations(arrays)

    moments: Any = _plainly("moments")
    merge: Any = _plainly("merge")
    forward_eval: Any = _plainly("forward_eval")
    backward_reduce: Any = _plainly("backward_reduce")
    backward_input: Any = _plainly("backward_input")

    def contiguous(self, array: Array) -> Array:
        """The array, or a row-major copy of it."""
        return array if self.arrays.is_contiguous(array) else self.arrays.copy(array)

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        rows = self.contiguous(total.rows)
        index = self.arrays.device_of(rows)
        table = self.arrays.empty((3 * total.num_features + 1,), "float64", index)
        return Statistics(table, total.count, rows, total.labels)

    def forward(
        self, x: Array, norm: Norm, running: RunningStatistics | None = None, out: Any = None
    ) -> Array:
        plain = self.plain
        with self.arrays.at(x):
            statistics = norm.statistics
            total = Moments(statistics.rows, statistics.count, statistics.labels)
            known = plain.statistics(total, norm.rule)
            statistics.table[...] = known.table
            return plain.forward(x, norm._replace(statistics=known), running, out)

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        with self.arrays.at(statistics.table):
            self.plain.update_running(running, statistics)
