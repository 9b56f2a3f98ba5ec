"""`PlainDeviceOperations`: the steps without kernels, by operations of the array library.

Parts, statistics and sums have the same form as those of `CudaOperations`, so that single steps of
the two can be exchanged, within a member and between members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncbn_core.backends.cuda.memory import DeviceMemory
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Norm, Operations, RunningStatistics

__all__ = ["PlainDeviceOperations", "first_array"]

Array = Any


def first_array(first: Any) -> Array:
    """Of the first argument of a step: x, or the rows of the first of several moments."""
    return first[0].rows if isinstance(first, Sequence) else first


def _plainly(name: str) -> Any:
    """The step of `memory.plain`, while the device of its arrays is current."""

    def step(self: PlainDeviceOperations, first: Any, *rest: Any, **settings: Any) -> Any:
        with self.memory.on_device(self.memory.device_of(first_array(first))):
            return getattr(self.memory.plain, name)(first, *rest, **settings)

    return step


class PlainDeviceOperations(Operations):
    """The steps on CUDA devices by operations of the array library of `memory`."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    moments: Any = _plainly("moments")
    merge: Any = _plainly("merge")
    forward_eval: Any = _plainly("forward_eval")
    backward_reduce: Any = _plainly("backward_reduce")
    backward_input: Any = _plainly("backward_input")

    def near(self, values: Array, like: Array) -> Array:
        return self.memory.plain.near(values, like)

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        memory, index = self.memory, self.memory.device_of(total.rows)
        with memory.on_device(index):
            table = memory.empty((3 * total.num_features + 1,), "float64", index)
            return Statistics(table, total.count, memory.contiguous(total.rows), total.labels)

    def forward(
        self, x: Array, norm: Norm, running: RunningStatistics | None = None, out: Any = None
    ) -> Array:
        memory, plain = self.memory, self.memory.plain
        with memory.on_device(memory.device_of(x)):
            statistics = norm.statistics
            total = Moments(statistics.rows, statistics.count, statistics.labels)
            known = plain.statistics(total, norm.rule)
            statistics.table[...] = known.table
            return plain.forward(x, norm._replace(statistics=known), running, out)

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        with self.memory.on_device(self.memory.device_of(statistics.table)):
            self.memory.plain.update_running(running, statistics)
