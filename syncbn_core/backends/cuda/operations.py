"""`CudaOperations`: the steps of batch normalization on CUDA devices, for all array libraries.

The `DeviceArrays` of a library allocates them and gives their addresses. Forward and backward are
two kernel launches each, on the current stream of the arrays' device. Nothing here waits for the
device, except for the check of kernels, so a CUDA graph can capture forward and backward,
after one run without capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from syncbn_core.arrays import DeviceArrays
from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.launcher import Launcher
from syncbn_core.backends.cuda.usable import usable
from syncbn_core.backends.cuda.view import DeviceView
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.labels import Labels
from syncbn_core.layout import Layout
from syncbn_core.moments import Moments, NormRule, Statistics, total_count
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

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


def _launching(step: Callable[..., Any]) -> Any:
    """A step, which gets a `Launcher` first, whose device is current.

    It must write nothing that its caller sees before its last kernel has been launched.
    """

    @wraps(step)
    def launched(self: CudaOperations, first: Any, *arguments: Any, **settings: Any) -> Any:
        arrays, own = self.arrays, first[0].rows if type(first) is list else first
        index = arrays.device_of(own)
        if arrays.is_current(index):
            return step(self, self.launcher(index), first, *arguments, **settings)
        with arrays.on_device(index):
            return step(self, self.launcher(index), first, *arguments, **settings)

    return launched


class CudaOperations(Operations):
    """The steps on CUDA devices for one array library, by kernels."""

    def __init__(self, arrays: DeviceArrays) -> None:
        self.arrays, self.plain = arrays, PlainOperations(arrays)
        self.counters: dict[tuple[int, int], Array] = {}
        self.partials: dict[tuple[int, int], Array] = {}

    def on(self, array: Array) -> Operations:
        return self if usable(self, self.arrays.device_of(array)) else self.plain

    def contiguous(self, array: Array) -> Array:
        """The array, or a row-major copy of it."""
        return array if self.arrays.is_contiguous(array) else self.arrays.copy(array)

    def launcher(self, index: int) -> Launcher:
        """A launcher for device number `index`, which must be the current device."""
        return Launcher(self.arrays, index, self)

    @_launching
    def moments(self, run: Launcher, x: Array, labels: Labels | None = None) -> Moments:
        arrays = self.arrays
        channels = x.shape[1]
        rows, label = self._row(labels, channels, run.index)
        if 0 in x.shape:
            rows[:, :-1] = 0
            rows[:, -1:] = label
            return Moments(rows, 0)
        dense, layout = self._dense(x)
        grid.moments(run, DeviceView(arrays, dense, layout), arrays.pointer(rows), label)
        return Moments(rows, layout.outer * layout.inner)

    def _row(self, labels: Labels | None, channels: int, index: int) -> tuple[Array, float]:
        """Memory for the moments of one part, and the label to write there."""
        if labels is not None:
            return labels.row, labels.own
        return self.arrays.empty((1, 2 * channels + 2), "float64", index), 0.0

    @_launching
    def merge(
        self, run: Launcher, parts: Sequence[Moments], labels: Labels | None = None
    ) -> Moments:
        arrays = self.arrays
        if len(parts) == 1:
            return parts[0]
        first = parts[0].rows
        rows = arrays.xp.concatenate([arrays.near(part.rows, first) for part in parts])
        channels = parts[0].num_features
        one, label = self._row(labels, channels, run.index)
        places = arrays.pointer(rows), len(parts), channels, arrays.pointer(one)
        grid.merge_parts(run, *places, grid.Check(label))
        return Moments(one, total_count(parts))

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        rows = self.contiguous(total.rows)
        index = self.arrays.device_of(rows)
        table = self.arrays.empty((3 * total.num_features + 1,), "float64", index)
        return Statistics(table, total.count, rows, total.labels)  # `forward` fills the table

    @_launching
    def forward(
        self,
        run: Launcher,
        x: Array,
        norm: Norm,
        running: RunningStatistics | None = None,
        out: Any = None,
    ) -> Array:
        statistics, affine, rule = norm
        arrays = self.arrays
        rows: Any = statistics.rows
        dense, layout = self._dense(x)
        view = DeviceView(arrays, dense, layout)
        in_kernel = None if running is None else self._in_kernel(running, run.index)
        y = self._target(dense, layout, out)
        parameters, _kept = self._parameters(affine)
        grid.normalize(
            run,
            view,
            view.beside(arrays, y),
            parameters,
            arrays.pointer(rows),
            rows.shape[0],
            arrays.pointer(statistics.table),
            rule=rule,
            running=in_kernel or grid.NO_RUNNING,
            check=_check(statistics.labels),
        )
        if running is not None and in_kernel is None:
            self.update_running(running, statistics)
        elif running is not None:
            arrays.mark_written([own for own in running[:3] if own is not None])
            if running.momentum is None:
                counter: Any = running.num_batches_tracked
                counter += 1  # not in the kernel, where many blocks read it
        return _in_place_of(y, out)

    @_launching
    def forward_eval(
        self,
        run: Launcher,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        arrays = self.arrays
        mean, var = running.mean, running.var
        given = RunningStatistics(mean, var, None, 0.0)
        if self._in_kernel(given, run.index) is None:
            wide = (arrays.cast(own, arrays.widest(own)) for own in (mean, var))
            mean, var = (self.contiguous(own) for own in wide)
        code = grid.CODES[arrays.dtype_name(mean)]
        constant = grid.Running(arrays.pointer(mean), arrays.pointer(var), code)
        dense, layout = self._dense(x)
        view, y = DeviceView(arrays, dense, layout), self._target(dense, layout, out)
        table = arrays.empty((3 * x.shape[1] + 1,), "float64", run.index)
        parameters, _kept = self._parameters(affine)
        grid.normalize(
            run,
            view,
            view.beside(arrays, y),
            parameters,
            0,
            0,
            arrays.pointer(table),
            rule=rule,
            running=constant,
        )
        return _in_place_of(y, out), Statistics(table, None)

    @_launching
    def backward_reduce(
        self, run: Launcher, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        statistics, affine, rule = norm
        arrays = self.arrays
        if 0 in x.shape:
            dtype = arrays.dtype_name(x if affine.weight is None else affine.weight)
            exchange = arrays.zeros((2, x.shape[1]), "float64", run.index)
            if labels is not None:
                exchange = arrays.zeros((2 * x.shape[1] + 1,), "float64", run.index)
                exchange[-1:] = labels.own
            return Sums(exchange, *arrays.zeros((2, x.shape[1]), dtype, run.index))
        pair = self._pair(x, dy)
        parameters, _kept = self._parameters(affine if rule.activation else affine[:1])
        shape = (2, pair.x.channels)
        dtype = pair.x.dtype if affine.weight is None else arrays.dtype_name(affine.weight)
        size = shape if labels is None else (2 * pair.x.channels + 1,)
        exchange = arrays.empty(size, "float64", run.index)
        gradients = arrays.empty(shape, dtype, run.index)
        grad_weight, grad_bias = gradients[0], gradients[1]
        grid.backward_reduce(
            run,
            pair.x,
            pair.dy,
            arrays.pointer(statistics.table),
            parameters,
            arrays.pointer(exchange),
            arrays.pointer(grad_weight),
            arrays.pointer(grad_bias),
            rule=rule,
            code=grid.CODES[dtype],
            label=grid.NO_LABEL if labels is None else labels.own,
        )
        return Sums(exchange, grad_weight, grad_bias)

    @_launching
    def backward_input(
        self,
        run: Launcher,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        statistics, affine, rule = norm
        arrays = self.arrays
        pair = self._pair(x, dy)
        parameters, _kept = self._parameters(affine if rule.activation else affine[:1])
        total = None if total is None else self.contiguous(total)
        if total is None or len(total.shape) == 2:
            labels = None  # compared before
        if 0 in x.shape and labels is not None:
            labels.check_total(total)  # no kernel runs
        dx = self._target(pair.dense, pair.layout, out, pair.grad)
        grid.backward_input(
            run,
            pair.x,
            pair.dy,
            pair.x.beside(arrays, dx),
            arrays.pointer(statistics.table),
            parameters,
            0 if total is None else arrays.pointer(total),
            rule=rule,
            check=_check(labels),
        )
        return _in_place_of(dx, out)

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        with self.arrays.at(statistics.table):
            self.plain.update_running(running, statistics)

    def _pair(self, x: Array, dy: Array) -> _Pair:
        arrays, (dense, layout) = self.arrays, self._dense(x)
        grad = dy
        if dy.dtype != dense.dtype or arrays.layout(dy) != layout:
            grad = arrays.empty_like(dense, layout)
            grad[...] = dy
        view = DeviceView(arrays, dense, layout)
        return _Pair(dense, layout, grad, view, view.beside(arrays, grad))

    def _dense(self, x: Array) -> tuple[Array, Layout]:
        """x, or a copy of it that kernels can read, and its layout."""
        layout = self.arrays.layout(x)
        if layout is None:
            x = self.arrays.copy(x)
            layout = self.arrays.layout(x)
            assert layout is not None
        return x, layout

    def _target(self, dense: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
        """The array to write to: `out` if possible, else a new array like `dense`.

        `out` must have the dtype and layout of `dense`, and overlap no operand unless it is the
        same arrays.
        """
        arrays, pointer, size = self.arrays, self.arrays.pointer, dense.nbytes
        if (
            out is None
            or out.dtype != dense.dtype
            or arrays.layout(out) != layout
            or any(0 < abs(pointer(out) - pointer(own)) < size for own in (dense, *operands))
        ):
            return arrays.empty_like(dense, layout)
        return out

    def _parameters(self, affine: Sequence[Array | None]) -> tuple[grid.Parameters, list[Array]]:
        """Pointers to weight and bias, and the contiguous arrays that must stay alive for them."""
        arrays, kept, arguments = self.arrays, [], []
        for own in affine:
            if own is None:
                arguments += [0, 0]
            else:
                array = self.contiguous(own)
                kept.append(array)
                arguments += [arrays.pointer(array), grid.CODES[arrays.dtype_name(array)]]
        return grid.Parameters(*arguments), kept

    def _in_kernel(self, running: RunningStatistics, index: int) -> grid.Running | None:
        """The arguments with which the kernel updates running statistics; None if it can't."""
        arrays = self.arrays
        mean, var, counter, momentum = running
        if (mean is None) != (var is None) or (momentum is None and counter is None):
            return None
        for own in (mean, var, counter):
            if own is not None and (
                arrays.device_of(own) != index or not arrays.is_contiguous(own)
            ):
                return None
        if counter is not None and arrays.dtype_name(counter) != "int64":
            return None
        factor = -1.0 if momentum is None else float(momentum)
        tracked = 0 if counter is None else arrays.pointer(counter)
        if mean is None or var is None:
            return grid.Running(tracked=tracked, factor=factor)
        name = arrays.dtype_name(mean)
        if name not in grid.CODES or arrays.dtype_name(var) != name:
            return None
        pointers = (arrays.pointer(mean), arrays.pointer(var))
        return grid.Running(*pointers, grid.CODES[name], tracked, factor)


def _in_place_of(result: Array, out: Array | None) -> Array:
    """`result`, or `out` after writing the result into it."""
    if out is None or out is result:
        return result
    out[...] = result
    return out
