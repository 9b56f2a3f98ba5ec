"""`PlainDeviceOperations`: the steps without kernels, by operations of the array library.

Parts, statistics and sums have the same form as those of `CudaOperations`, so that single steps of
the two can be exchanged, within a member and between members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from syncbn_core.backends.cuda.memory import DeviceMemory
from syncbn_core.labels import Labels
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

__all__ = ["PlainDeviceOperations"]

Array = Any


class PlainDeviceOperations(Operations):
    """The steps on CUDA devices by operations of the array library of `memory`."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def near(self, values: Array, like: Array) -> Array:
        return self.memory.plain.near(values, like)

    def moments(self, x: Array, labels: Labels | None = None) -> Moments:
        with self.memory.on_device(self.memory.device_of(x)):
            return self.memory.plain.moments(x, labels)

    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        memory = self.memory
        with memory.on_device(memory.device_of(parts[0].rows)):
            return memory.plain.merge(parts, labels)

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
            y = plain.forward(x, norm._replace(statistics=known), None, out)
            if running is not None:
                self.update_running(running, known)
            return y

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        memory = self.memory
        with memory.on_device(memory.device_of(x)):
            return memory.plain.forward_eval(x, running, affine, rule, out)

    def backward_reduce(
        self, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            sums = memory.plain.backward_reduce(x, dy, norm)
            if labels is None:
                return sums
            label = memory.zeros((1,), "float64", index) + labels.own
            return sums._replace(exchange=memory.join([sums.exchange.reshape(-1), label]))

    def backward_input(
        self,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        memory = self.memory
        with memory.on_device(memory.device_of(x)):
            if total is not None and labels is not None:
                wrong = labels.check_total(total)
                total = memory.plain.xp.where(wrong, math.nan, total[:-1]).reshape(2, -1)
            return memory.plain.backward_input(x, dy, norm, total, out)

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        with self.memory.on_device(self.memory.device_of(statistics.table)):
            self.memory.plain.update_running(running, statistics)
