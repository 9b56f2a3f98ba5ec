"""`PlainDeviceOperations`: the steps without kernels, by operations of the array library.

Parts, statistics and sums have the same form as those of `CudaOperations`, so that single steps of
the two can be exchanged, within a member and between members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from syncbn_core.backends.cuda.memory import DeviceMemory
from syncbn_core.device_moments import DeviceMoments, DeviceStatistics, join_rows
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Affine, Forward, Operations, RunningStatistics, Sums

__all__ = ["PlainDeviceOperations"]

Array = Any


class PlainDeviceOperations(Operations):
    """The steps on CUDA devices by operations of the array library of `memory`."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def moments(self, x: Array) -> DeviceMoments:
        memory, plain = self.memory, self.memory.plain
        with memory.on_device(memory.device_of(x)):
            part = plain.moments(x)
            return DeviceMoments(plain.row(part).reshape(1, -1), part.count, memory.join)

    def merge(self, parts: Sequence[DeviceMoments]) -> DeviceMoments:
        joined = join_rows(parts)
        if len(joined.rows) == 1:
            return joined
        memory, plain = self.memory, self.memory.plain
        with memory.on_device(memory.device_of(joined.rows)):
            row = plain.row(_total(plain, joined))
            return joined.with_rows(row.reshape(1, -1), joined.known_count)

    def statistics(self, total: DeviceMoments, rule: NormRule) -> DeviceMoments:
        return total  # `forward` merges the parts and computes invstd

    def forward(
        self,
        x: Array,
        statistics: DeviceMoments,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        memory, plain = self.memory, self.memory.plain
        with memory.on_device(memory.device_of(x)):
            known = plain.statistics(_total(plain, statistics), rule)
            done = plain.forward(x, known, affine, rule, None, out)
            held = self._packed(known)
            new = None if running is None else self.update_running(running, held)
            return Forward(done.y, held, new)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        memory = self.memory
        with memory.on_device(memory.device_of(x)):
            done = memory.plain.forward_eval(x, running, affine, rule, out)
            return Forward(done.y, self._packed(done.statistics))

    def backward_reduce(
        self, x: Array, dy: Array, statistics: DeviceStatistics, affine: Affine, rule: NormRule
    ) -> Sums:
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            sums = memory.plain.backward_reduce(x, dy, statistics.as_plain(), affine, rule)
            if statistics.label is None:
                return sums
            label = memory.zeros((1,), "float64", index) + statistics.label
            return sums._replace(exchange=memory.join([sums.exchange.reshape(-1), label]))

    def backward_input(
        self,
        x: Array,
        dy: Array,
        statistics: DeviceStatistics,
        affine: Affine,
        rule: NormRule,
        total: Array | None,
        out: Array | None = None,
    ) -> Array:
        memory, known = self.memory, statistics.as_plain()
        with memory.on_device(memory.device_of(x)):
            if total is not None and statistics.label is not None:
                wrong = total[-1:] != statistics.label_of_total
                total = memory.plain.xp.where(wrong, math.nan, total[:-1]).reshape(2, -1)
            return memory.plain.backward_input(x, dy, known, affine, rule, total, out)

    def update_running(
        self, running: RunningStatistics, statistics: DeviceStatistics
    ) -> RunningStatistics:
        new = self.memory.plain.update_running(running, statistics.as_plain())
        pairs = [(own, n) for own, n in zip(running[:3], new[:3], strict=True) if own is not None]
        self.memory.assign([own for own, _ in pairs], [value for _, value in pairs])
        return running

    def _packed(self, known: Statistics) -> DeviceStatistics:
        row = self.memory.plain.row(known.moments)
        return DeviceStatistics(self.memory.join([row[:-1], known.invstd]))


def _total(plain: Any, statistics: DeviceMoments) -> Moments:
    """The moments of all parts together; the count is an array `()` if only the device knows it."""
    rows, channels = statistics.rows, statistics.num_features
    if len(rows) > 1:
        merged: Moments = plain.merge_rows(rows)
    else:
        merged = Moments(rows[0, 0], rows[0, 1 : 1 + channels], rows[0, 1 + channels : -1])
    known = statistics.known_count
    return merged if known is None else merged._replace(count=known)
