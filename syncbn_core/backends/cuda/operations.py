"""The steps of batch normalization on CUDA devices: one text for all array libraries.

A library says by a `DeviceMemory` how it allocates and where its arrays are. Two launches per
direction, on the current stream of the arrays' device; nothing here waits for the device, so a
forward and backward can be captured in a CUDA graph after one ordinary run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from syncbn_core.backends.base import Affine, Forward, Operations, RunningStatistics, Sums
from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.memory import DeviceMemory, DeviceView, Launcher
from syncbn_core.device_moments import DeviceMoments, join_rows
from syncbn_core.layout import Layout
from syncbn_core.moments import Moments, NormRule, Statistics

__all__ = ["CudaOperations", "DeviceStatistics"]

Array = Any


class DeviceStatistics(NamedTuple):
    """Statistics of the whole batch on a device: `packed` `[3 C + 1]`, count, mean, m2, invstd."""

    packed: Array

    @property
    def mean(self) -> Array:
        """`(C,)` float64."""
        return self.packed[1 : 1 + len(self.packed) // 3]

    @property
    def invstd(self) -> Array:
        """`(C,)` float64."""
        return self.packed[1 + len(self.packed) // 3 * 2 :]

    def as_plain(self) -> Statistics:
        """The same for plain operations; the count is an array ()."""
        packed, channels = self.packed, len(self.packed) // 3
        m2 = packed[1 + channels : 1 + 2 * channels]
        return Statistics(Moments(packed[0], self.mean, m2), self.invstd)


class CudaOperations(Operations):
    """The steps for the arrays of one library on CUDA devices."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.counters: dict[tuple[int, int, int], Array] = {}

    def launcher(self, index: int) -> Launcher:
        """For the device that is current."""
        return Launcher(self.memory, index, self.counters)

    def moments(self, x: Array) -> DeviceMoments:
        memory, index = self.memory, self.memory.device_of(x)
        channels = x.shape[1]
        with memory.on_device(index):
            shape = (1, 2 * channels + 1)
            if 0 in x.shape:
                return DeviceMoments(memory.zeros(shape, "float64", index), 0, memory.join)
            dense, layout = memory.dense(x)
            rows = memory.empty(shape, "float64", index)
            view = DeviceView(memory, dense, layout)
            grid.moments(self.launcher(index), view, memory.pointer(rows))
            return DeviceMoments(rows, layout.outer * layout.inner, memory.join)

    def merge(self, parts: Sequence[DeviceMoments]) -> DeviceMoments:
        return join_rows(parts)

    def one_row(self, part: DeviceMoments) -> DeviceMoments:
        """All parts in one row, as members send it."""
        rows = part.rows
        if len(rows) == 1:
            return part
        memory, index = self.memory, self.memory.device_of(rows)
        with memory.on_device(index):
            rows = memory.contiguous(rows)
            one = memory.empty((1, rows.shape[1]), "float64", index)
            run, pointers = self.launcher(index), (memory.pointer(rows), memory.pointer(one))
            grid.merge_parts(run, pointers[0], len(rows), part.num_features, pointers[1])
        return part.with_rows(one, part.known_count)

    def statistics(self, total: DeviceMoments, rule: NormRule) -> DeviceMoments:
        return total  # the kernel of `forward` merges the parts

    def forward(
        self,
        x: Array,
        statistics: DeviceMoments,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            rows = memory.contiguous(statistics.rows)
            in_kernel = None if running is None else self._in_kernel(running, index)
            update = grid.NO_RUNNING if in_kernel is None else in_kernel
            done = self._normalize(x, rows, affine, rule, update, out)
            if running is not None and in_kernel is None:
                self.update_running(running, done.statistics)
            elif running is not None and running.momentum is None:
                counter: Any = running.num_batches_tracked
                counter += 1  # the kernel has only read it, in many blocks
            return Forward(done.y, done.statistics, running)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            mean, var = running.mean, running.var
            given = RunningStatistics(mean, var, None, 0.0)
            if self._in_kernel(given, index) is None:
                cast, widest = memory.plain.namespace.cast, memory.plain.namespace.widest
                mean, var = (memory.contiguous(cast(v, widest(v))) for v in (mean, var))
            code = grid.CODES[memory.dtype_name(mean)]
            constant = grid.Running(memory.pointer(mean), memory.pointer(var), code)
            return self._normalize(x, None, affine, rule, constant, out)

    def _normalize(
        self,
        x: Array,
        rows: Array | None,
        affine: Affine,
        rule: NormRule,
        running: grid.Running,
        out: Array | None,
    ) -> Forward:
        memory, index = self.memory, self.memory.device_of(x)
        dense, layout = memory.dense(x)
        y = memory.target(dense, layout, out)
        parameters, _kept = self._parameters(affine)
        packed = memory.empty((3 * x.shape[1] + 1,), "float64", index)
        grid.normalize(
            self.launcher(index),
            DeviceView(memory, dense, layout),
            DeviceView(memory, y, layout),
            parameters,
            0 if rows is None else memory.pointer(rows),
            0 if rows is None else len(rows),
            memory.pointer(packed),
            eps=rule.eps,
            clamp=rule.clamps,
            running=running,
        )
        return Forward(memory.cast_to_output(y, out), DeviceStatistics(packed))

    def backward_reduce(
        self, x: Array, dy: Array, statistics: DeviceStatistics, affine: Affine, rule: NormRule
    ) -> Sums:
        memory, index = self.memory, self.memory.device_of(x)
        channels = x.shape[1]
        dtype = memory.dtype_name(x if affine.weight is None else affine.weight)
        with memory.on_device(index):
            make = memory.zeros if 0 in x.shape else memory.empty
            exchange = make((2, channels), "float64", index)
            grad_weight, grad_bias = make((2, channels), dtype, index)
            if 0 in x.shape:
                return Sums(exchange, grad_weight, grad_bias)
            dense, layout, grad = self._pair(x, dy)
            parameters, _kept = self._parameters(Affine(affine.weight))
            grid.backward_reduce(
                self.launcher(index),
                DeviceView(memory, dense, layout),
                DeviceView(memory, grad, layout),
                memory.pointer(statistics.packed),
                parameters,
                memory.pointer(exchange),
                memory.pointer(grad_weight),
                memory.pointer(grad_bias),
                code=grid.CODES[dtype],
            )
            return Sums(exchange, grad_weight, grad_bias)

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
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            dense, layout, grad = self._pair(x, dy)
            dx = memory.target(dense, layout, out, grad)
            parameters, _kept = self._parameters(Affine(affine.weight))
            total = None if total is None else memory.contiguous(total)
            grid.backward_input(
                self.launcher(index),
                DeviceView(memory, dense, layout),
                DeviceView(memory, grad, layout),
                DeviceView(memory, dx, layout),
                memory.pointer(statistics.packed),
                parameters,
                0 if total is None else memory.pointer(total),
                eps=rule.eps,
                clamp=rule.clamps,
            )
            return memory.cast_to_output(dx, out)

    def update_running(
        self, running: RunningStatistics, statistics: DeviceStatistics
    ) -> RunningStatistics:
        new = self.memory.plain.update_running(running, statistics.as_plain())
        pairs = [(own, n) for own, n in zip(running[:3], new[:3], strict=True) if own is not None]
        self.memory.assign([own for own, _ in pairs], [value for _, value in pairs])
        return running

    def _pair(self, x: Array, dy: Array) -> tuple[Array, Layout, Array]:
        dense, layout = self.memory.dense(x)
        return dense, layout, self.memory.like(dy, dense, layout)

    def _parameters(self, affine: Affine) -> tuple[grid.Parameters, list[Array]]:
        """Pointers to weight and bias, and the contiguous arrays behind them."""
        memory = self.memory
        arrays = [None if a is None else memory.contiguous(a) for a in affine]
        pointers = [0 if a is None else memory.pointer(a) for a in arrays]
        codes = [0 if a is None else grid.CODES[memory.dtype_name(a)] for a in arrays]
        return grid.Parameters(pointers[0], codes[0], pointers[1], codes[1]), arrays

    def _in_kernel(self, running: RunningStatistics, index: int) -> grid.Running | None:
        """What lets the kernel update running statistics; None where it can't."""
        memory = self.memory
        mean, var, counter, momentum = running
        if (mean is None) != (var is None) or (momentum is None and counter is None):
            return None
        for own in (mean, var, counter):
            if own is not None and (
                memory.device_of(own) != index or not memory.is_contiguous(own)
            ):
                return None
        if counter is not None and memory.dtype_name(counter) != "int64":
            return None
        factor = -1.0 if momentum is None else float(momentum)
        tracked = 0 if counter is None else memory.pointer(counter)
        if mean is None or var is None:
            return grid.Running(tracked=tracked, factor=factor)
        name = memory.dtype_name(mean)
        if name not in grid.CODES or memory.dtype_name(var) != name:
            return None
        pointers = (memory.pointer(mean), memory.pointer(var))
        return grid.Running(*pointers, grid.CODES[name], tracked, factor)
