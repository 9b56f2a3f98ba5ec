"""`CudaOperations`: the steps of batch normalization on CUDA devices, for all array libraries.

A `DeviceMemory` per library allocates arrays and gives their addresses. Forward and backward are
two kernel launches each, on the current stream of the arrays' device. Nothing here waits for the
device, except for the check of kernels, so a CUDA graph can capture forward and backward,
after one run without capture. Where kernels can't be used, steps run by plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.kernels import KernelFailure
from syncbn_core.backends.cuda.launcher import Launcher
from syncbn_core.backends.cuda.memory import DeviceMemory, DeviceView
from syncbn_core.backends.cuda.plain import PlainDeviceOperations, first_array
from syncbn_core.backends.cuda.usable import give_up, usable
from syncbn_core.labels import Labels
from syncbn_core.layout import Layout
from syncbn_core.moments import Moments, NormRule, Statistics, total_count
from syncbn_core.steps import Affine, Norm, RunningStatistics, Sums

__all__ = ["CudaOperations"]

Array = Any


class _Pair(NamedTuple):
    """A dense x, its layout, dy in that layout, and the views of both."""

    dense: Array
    layout: Layout
    grad: Array
    x: DeviceView
    dy: DeviceView


def _check(labels: Labels | None) -> grid.Check:
    if labels is None:
        return grid.NO_CHECK
    return grid.Check(labels.expected, labels.alarm.pointer, labels.place)


_Step = TypeVar("_Step", bound=Callable[..., Any])


def _or_plain(step: _Step) -> _Step:
    """The step by kernels, or by plain operations if kernels can't be used.

    A step must write nothing that its caller sees before its last kernel has been launched.
    """

    @wraps(step)
    def chosen(self: CudaOperations, first: Any, *arguments: Any, **settings: Any) -> Any:
        memory, own = self.memory, first_array(first)
        index = memory.device_of(own)
        dtype = memory.dtype_name(own) if own is first else None  # None: to merge moments
        if usable(self, index, dtype):
            try:
                return step(self, first, *arguments, **settings)
            except KernelFailure as failure:
                give_up(index, failure)
            # outside of this block the arrays of the step that failed are free again
        return getattr(super(CudaOperations, self), step.__name__)(first, *arguments, **settings)

    return cast("_Step", chosen)


class CudaOperations(PlainDeviceOperations):
    """The steps on CUDA devices for the array library of `memory`, by kernels where they work."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self.counters: dict[tuple[int, int], Array] = {}

    def launcher(self, index: int) -> Launcher:
        """A launcher for device number `index`, which must be the current device."""
        return Launcher(self.memory, index, self.counters)

    @_or_plain
    def moments(self, x: Array, labels: Labels | None = None) -> Moments:
        memory, index = self.memory, self.memory.device_of(x)
        channels = x.shape[1]
        with memory.on_device(index):
            rows, label = self._row(labels, channels, index)
            if 0 in x.shape:
                rows[:, :-1] = 0
                rows[:, -1:] = label
                return Moments(rows, 0)
            dense, layout = memory.dense(x)
            view = DeviceView(memory, dense, layout)
            grid.moments(self.launcher(index), view, memory.pointer(rows), label)
            return Moments(rows, layout.outer * layout.inner)

    def _row(self, labels: Labels | None, channels: int, index: int) -> tuple[Array, float]:
        """Memory for the moments of one part, and the label to write there."""
        if labels is not None:
            return labels.row, labels.own
        return self.memory.empty((1, 2 * channels + 2), "float64", index), 0.0

    @_or_plain
    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        memory, index = self.memory, self.memory.device_of(parts[0].rows)
        with memory.on_device(index):
            if len(parts) == 1:
                return parts[0]
            rows = memory.contiguous(memory.join([part.rows for part in parts]))
            channels = parts[0].num_features
            one, label = self._row(labels, channels, index)
            run, pointers = self.launcher(index), (memory.pointer(rows), memory.pointer(one))
            grid.merge_parts(run, pointers[0], len(rows), channels, pointers[1], grid.Check(label))
            return Moments(one, total_count(parts))

    @_or_plain
    def forward(
        self, x: Array, norm: Norm, running: RunningStatistics | None = None, out: Any = None
    ) -> Array:
        statistics, affine, rule = norm
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            rows: Any = statistics.rows
            dense, layout = memory.dense(x)
            view, run = DeviceView(memory, dense, layout), self.launcher(index)
            in_kernel = None if running is None else self._in_kernel(running, index)
            y = memory.target(dense, layout, out)
            parameters, _kept = self._parameters(affine)
            grid.normalize(
                run,
                view,
                view.beside(memory, y),
                parameters,
                memory.pointer(rows),
                len(rows),
                memory.pointer(statistics.table),
                rule=rule,
                running=in_kernel or grid.NO_RUNNING,
                check=_check(statistics.labels),
            )
            if running is not None and in_kernel is None:
                self.update_running(running, statistics)
            elif running is not None:
                memory.mark_written(*(own for own in running[:3] if own is not None))
                if running.momentum is None:
                    counter: Any = running.num_batches_tracked
                    counter += 1  # not in the kernel, where many blocks read it
            return memory.cast_to_output(y, out)

    @_or_plain
    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            mean, var = running.mean, running.var
            given = RunningStatistics(mean, var, None, 0.0)
            if self._in_kernel(given, index) is None:
                space = memory.plain.namespace
                wide = (space.cast(own, space.widest(own)) for own in (mean, var))
                mean, var = (memory.contiguous(own) for own in wide)
            code = grid.CODES[memory.dtype_name(mean)]
            constant = grid.Running(memory.pointer(mean), memory.pointer(var), code)
            dense, layout = memory.dense(x)
            view, y = DeviceView(memory, dense, layout), memory.target(dense, layout, out)
            table = memory.empty((3 * x.shape[1] + 1,), "float64", index)
            parameters, _kept = self._parameters(affine)
            grid.normalize(
                self.launcher(index),
                view,
                view.beside(memory, y),
                parameters,
                0,
                0,
                memory.pointer(table),
                rule=rule,
                running=constant,
            )
            return memory.cast_to_output(y, out), Statistics(table, None)

    @_or_plain
    def backward_reduce(
        self, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        statistics, affine, rule = norm
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            if 0 in x.shape:
                dtype = memory.dtype_name(x if affine.weight is None else affine.weight)
                exchange = memory.zeros((2, x.shape[1]), "float64", index)
                if labels is not None:
                    exchange = memory.zeros((2 * x.shape[1] + 1,), "float64", index)
                    exchange[-1:] = labels.own
                return Sums(exchange, *memory.zeros((2, x.shape[1]), dtype, index))
            pair = self._pair(x, dy)
            parameters, _kept = self._parameters(affine)
            shape = (2, pair.x.channels)
            dtype = pair.x.dtype if affine.weight is None else memory.dtype_name(affine.weight)
            size = shape if labels is None else (2 * pair.x.channels + 1,)
            exchange = memory.empty(size, "float64", index)
            grad_weight, grad_bias = memory.empty(shape, dtype, index)
            grid.backward_reduce(
                self.launcher(index),
                pair.x,
                pair.dy,
                memory.pointer(statistics.table),
                parameters,
                memory.pointer(exchange),
                memory.pointer(grad_weight),
                memory.pointer(grad_bias),
                rule=rule,
                code=grid.CODES[dtype],
                label=grid.NO_LABEL if labels is None else labels.own,
            )
            return Sums(exchange, grad_weight, grad_bias)

    @_or_plain
    def backward_input(
        self,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        statistics, affine, rule = norm
        memory, index = self.memory, self.memory.device_of(x)
        with memory.on_device(index):
            pair = self._pair(x, dy)
            parameters, _kept = self._parameters(affine)
            total = None if total is None else memory.contiguous(total)
            if total is None or len(total.shape) == 2:
                labels = None  # compared before
            if 0 in x.shape and labels is not None:
                labels.check_total(total)  # no kernel runs
            dx = memory.target(pair.dense, pair.layout, out, pair.grad)
            grid.backward_input(
                self.launcher(index),
                pair.x,
                pair.dy,
                pair.x.beside(memory, dx),
                memory.pointer(statistics.table),
                parameters,
                0 if total is None else memory.pointer(total),
                rule=rule,
                check=_check(labels),
            )
            return memory.cast_to_output(dx, out)

    def _pair(self, x: Array, dy: Array) -> _Pair:
        dense, layout = self.memory.dense(x)
        grad = self.memory.like(dy, dense, layout)
        view = DeviceView(self.memory, dense, layout)
        return _Pair(dense, layout, grad, view, view.beside(self.memory, grad))

    def _parameters(self, affine: Affine) -> tuple[grid.Parameters, list[Array]]:
        """Pointers to weight and bias, and the contiguous arrays that must stay alive for them."""
        memory, arrays, arguments = self.memory, [], []
        for own in affine:
            if own is None:
                arguments += [0, 0]
            else:
                array = memory.contiguous(own)
                arrays.append(array)
                arguments += [memory.pointer(array), grid.CODES[memory.dtype_name(array)]]
        return grid.Parameters(*arguments), arrays

    def _in_kernel(self, running: RunningStatistics, index: int) -> grid.Running | None:
        """The arguments with which the kernel updates running statistics; None if it can't."""
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
