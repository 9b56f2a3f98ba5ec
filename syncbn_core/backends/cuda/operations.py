"""`CudaOperations`: the steps of batch normalization on CUDA devices, for all array libraries.

The `DeviceArrays` of a library allocates them and gives their addresses. Forward and backward are
two kernel launches each, on the current stream of the arrays' device. Nothing here waits for the
device, except for the check of kernels, so a CUDA graph can capture forward and backward,
after one run without capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple

from syncbn_core._kernels.cuda.constants import VECTOR
from syncbn_core.arrays import DeviceArrays
from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.launcher import Held, Launcher
from syncbn_core.backends.cuda.usable import usable
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.errors import StateError
from syncbn_core.labels import Labels
from syncbn_core.moments import Moments, NormRule, Statistics, total_count
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

__all__ = ["CudaOperations"]

Array = Any
_NO_VECTORS = RunningStatistics(None, None)


class Kind:
    """What is decided once for all calls whose arrays are like these. It keeps none of them.

    Attributes:
        index: of the device.
        form: what `DeviceArrays.form` gives of x.
        layout: that of x, or of the copy that kernels read; `is_dense`: whether they read x itself.
        sizes: how kernels see x.
        copies: whether weight or bias is copied for kernels.
        in_kernel: whether a kernel can write to the running statistics; `code`: their dtype.
    """

    def __init__(
        self, arrays: DeviceArrays, x: Array, affine: Affine, running: RunningStatistics | None
    ) -> None:
        self.index: int = arrays.device_of(x)
        self.form = arrays.form(x)
        layout: Any
        layout, dtype = arrays.layout(x), arrays.dtype_name(x.dtype)
        self.is_dense = layout is not None
        layout = layout or arrays.layout(arrays.empty(x.shape, dtype, self.index))
        self.layout = layout
        self.sizes = grid.Sizes(dtype, layout.outer, layout.channels, layout.inner)
        self.copies = not all(own is None or arrays.is_contiguous(own) for own in affine)
        mean, var, counter, _ = running or _NO_VECTORS
        vectors = [own for own in (mean, var, counter) if own is not None]
        names = {arrays.dtype_name(own.dtype) for own in (mean, var) if own is not None}
        self.in_kernel = (
            (mean is None) == (var is None)
            and all(arrays.device_of(o) == self.index and arrays.is_contiguous(o) for o in vectors)
            and (counter is None or arrays.dtype_name(counter.dtype) == "int64")
            and (not names or (len(names) == 1 and names <= grid.CODES.keys()))
        )
        self.code = grid.CODES[names.pop()] if self.in_kernel and names else 0


class Taken:
    """x or an array like it, as kernels see it in one call: a `grid.View`."""

    __slots__ = ("array", "here", "kind", "offset", "pointer", "run", "sizes")

    def __init__(self, kind: Kind, run: Launcher, array: Array, here: bool = True) -> None:
        self.kind, self.run, self.array = kind, run, array
        self.here: bool = here  # whether its device is current
        self.sizes: grid.Sizes = kind.sizes
        self.pointer: Any = run.arrays.pointer(array) or _none(0 in self.sizes)
        self.offset: int = self.pointer % VECTOR


class Vectors(NamedTuple):
    """Weight and bias, as kernels read them, of a call of this kind."""

    weight: Array | None
    bias: Array | None
    kind: Kind


def _none(is_empty: bool) -> int:
    """The address of an empty array; of any other it may not be 0, which stands for no array."""
    if not is_empty:
        raise StateError(
            "expected arrays with their values, got one whose memory was freed; if a wrapper such "
            "as FSDP freed it, call the wrapped model"
        )
    return 0


def _check(labels: Labels | None) -> grid.Check:
    if labels is None:
        return grid.NO_CHECK
    return grid.Check(labels.expected, labels.alarm.pointer, labels.place)


def _launching(step: Callable[..., Any]) -> Any:
    """A step that launches kernels: on the device of its first argument, which is made current.

    It must write nothing that its caller sees before its last kernel has been launched.
    """

    @wraps(step)
    def launched(self: CudaOperations, x: Taken, *arguments: Any, **settings: Any) -> Any:
        if x.here:
            return step(self, x, *arguments, **settings)
        with self.arrays.on_device(x.kind.index):
            return step(self, x, *arguments, **settings)

    return launched


class CudaOperations(Operations):
    """The steps on CUDA devices for one array library, by kernels.

    `kind`: of all calls, see `for_calls_like`; None: each call is looked at.
    """

    kind: Kind | None = None

    def __init__(self, arrays: DeviceArrays) -> None:
        self.arrays, self.plain = arrays, PlainOperations(arrays)
        self.code_of = cache(lambda dtype: grid.CODES[arrays.dtype_name(dtype)])
        held: Held = {}
        self.scratch = held
        self.launcher: Callable[[int, int], Launcher]  # for a device and a stream
        self.launcher = lru_cache(64)(lambda index, stream: Launcher(arrays, index, stream, held))

    def on(self, array: Array) -> Operations:
        return self if usable(self, self.arrays.device_of(array)) else self.plain

    def for_calls_like(
        self, x: Array, affine: Affine, running: RunningStatistics | None
    ) -> CudaOperations:
        """These steps, for arrays of the same kind, at which they do not look again."""
        steps = copy(self)
        steps.kind = Kind(self.arrays, x, affine, running)
        return steps

    def take(
        self, x: Array, affine: Affine, running: RunningStatistics | None, mask: Any = None
    ) -> tuple[Taken, Vectors, RunningStatistics | None]:
        kind = self.kind or Kind(self.arrays, x, affine, running)
        # detached from parameters, whose memory may be replaced before backward
        weight, bias = [None if own is None else self.arrays.constant(own) for own in affine]
        if kind.copies:
            weight, bias = self.contiguous(weight), self.contiguous(bias)
        return self._taken(kind, x), Vectors(weight, bias, kind), running

    def take_pair(self, x: Array, dy: Array, affine: Any = None) -> tuple[Taken, Taken]:
        arrays, kind = self.arrays, affine.kind
        if arrays.form(x) != kind.form:  # not what forward has saved
            kind = Kind(arrays, x, Affine(), None)
        own = self._taken(kind, x)
        if arrays.form(dy) != kind.form or not kind.is_dense:
            layout, given = kind.layout, dy
            if dy.dtype != x.dtype or arrays.layout(dy) != layout:
                dy = arrays.empty_like(own.array, layout)
                dy[...] = given
        return own, Taken(kind, own.run, dy)

    def _taken(self, kind: Kind, x: Array) -> Taken:
        arrays, index = self.arrays, kind.index
        run, here = self.launcher(index, arrays.stream(index)), arrays.is_current(index)
        return Taken(kind, run, x if kind.is_dense else arrays.copy(x), here)

    def contiguous(self, array: Array | None) -> Any:
        """The array, or a row-major copy of it."""
        if array is None or self.arrays.is_contiguous(array):
            return array
        return self.arrays.copy(array)

    @_launching
    def moments(self, x: Taken, labels: Labels | None = None) -> Moments:
        (_, outer, channels, inner), arrays = x.sizes, self.arrays
        rows, label = self._row(labels, channels, x.kind.index)
        if 0 in x.sizes:
            rows[:, :-1] = 0
            rows[:, -1:] = label
        else:
            grid.moments(x.run, x, arrays.pointer(rows), label)
        return Moments(rows, outer * inner)

    def _row(self, labels: Labels | None, channels: int, index: int) -> tuple[Array, float]:
        """Memory for the moments of one part, and the label to write there."""
        if labels is not None:
            return labels.row, labels.own
        return self.arrays.empty((1, 2 * channels + 2), "float64", index), 0.0

    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        arrays, first = self.arrays, parts[0].rows
        if len(parts) == 1:
            return parts[0]
        channels, index = parts[0].num_features, arrays.device_of(first)
        with arrays.on_device(index):
            rows = arrays.xp.concatenate([arrays.near(part.rows, first) for part in parts])
            one, label = self._row(labels, channels, index)
            places = arrays.pointer(rows), len(parts), channels, arrays.pointer(one)
            run = self.launcher(index, arrays.stream(index))
            grid.merge_parts(run, *places, grid.Check(label))
        return Moments(one, total_count(parts))

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        index = self.arrays.device_of(total.rows)
        table = self.arrays.empty((3 * total.num_features + 1,), "float64", index)
        return Statistics(table, total.count)  # `forward` fills the table

    @_launching
    def forward(
        self,
        x: Taken,
        norm: Norm,
        running: RunningStatistics | None = None,
        out: Any = None,
        total: Any = None,
    ) -> Array:
        in_kernel, numbers = x.kind.in_kernel, grid.NO_RUNNING
        if running is not None and in_kernel:
            numbers = self._running(running, x.kind)
        y = self._normalized(x, norm, out, numbers, total)
        if running is None:
            return y
        if not in_kernel:
            self.update_running(running, norm.statistics)
            return y
        self.arrays.mark_written([own for own in running[:3] if own is not None])
        counter: Any = running.num_batches_tracked
        if running.momentum is None and counter is not None:
            counter += 1  # not in the kernel, where many blocks read it
        return y

    @_launching
    def forward_eval(
        self,
        x: Taken,
        running: RunningStatistics,
        affine: Any,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        arrays, kind = self.arrays, x.kind
        mean, var = running.mean, running.var
        code = kind.code
        if not kind.in_kernel:
            wide = (arrays.cast(own, arrays.widest(own)) for own in (mean, var))
            mean, var = (self.contiguous(own) for own in wide)
            code = self.code_of(mean.dtype)
        constant = grid.Running(arrays.pointer(mean), arrays.pointer(var), code)
        table = arrays.empty((3 * x.sizes.channels + 1,), "float64", kind.index)
        norm = Norm(Statistics(table, None), affine, rule)
        return self._normalized(x, norm, out, constant), norm.statistics

    def _normalized(
        self,
        x: Taken,
        norm: Norm,
        out: Array | None,
        running: grid.Running,
        total: Moments | None = None,
    ) -> Array:
        """y; fills the table from the moments `total`, or from constant running statistics."""
        arrays, y, (statistics, affine, rule) = self.arrays, self._target(x, out), norm
        parts, check = (0, 0), grid.NO_CHECK
        if total is not None:
            rows, check = total.rows, _check(total.labels)
            rows = rows if total.labels is not None else self.contiguous(rows)
            parts = arrays.pointer(rows), rows.shape[0]
        places = self._parameters(affine), *parts, arrays.pointer(statistics.table)
        grid.normalize(x.run, x, y, *places, rule=rule, running=running, check=check)
        return _in_place_of(y.array, out)

    @_launching
    def backward_reduce(
        self, x: Taken, dy: Taken, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        statistics, affine, rule = norm
        arrays, (dtype, _, channels, _), index = self.arrays, x.sizes, x.kind.index
        if affine.weight is not None:
            dtype = arrays.dtype_name(affine.weight.dtype)
        size = (2, channels) if labels is None else (2 * channels + 1,)
        if 0 in x.sizes:
            exchange = arrays.zeros(size, "float64", index)
            if labels is not None:
                exchange[-1:] = labels.own
            return Sums(exchange, *arrays.zeros((2, channels), dtype, index))
        exchange = arrays.empty(size, "float64", index)
        gradients = arrays.empty((2, channels), dtype, index)
        grad_weight, grad_bias = gradients[0], gradients[1]
        table, own = arrays.pointer(statistics.table), self._parameters(affine)
        results = [arrays.pointer(array) for array in (exchange, grad_weight, grad_bias)]
        code, label = grid.CODES[dtype], grid.NO_LABEL if labels is None else labels.own
        grid.backward_reduce(x.run, x, dy, table, own, *results, rule=rule, code=code, label=label)
        return Sums(exchange, grad_weight, grad_bias)

    @_launching
    def backward_input(
        self,
        x: Taken,
        dy: Taken,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        statistics, affine, rule = norm
        arrays = self.arrays
        if total is None or len(total.shape) == 2:
            labels, total = None, self.contiguous(total)  # compared before
        if 0 in x.sizes and labels is not None:
            labels.check_total(total)  # no kernel runs
        dx = self._target(x, out, dy)
        table, own = arrays.pointer(statistics.table), self._parameters(affine)
        sums = 0 if total is None else arrays.pointer(total)
        grid.backward_input(x.run, x, dy, dx, table, own, sums, rule=rule, check=_check(labels))
        return _in_place_of(dx.array, out)

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        with self.arrays.at(statistics.table):
            self.plain.update_running(running, statistics)

    def _target(self, x: Taken, out: Array | None, *operands: Taken) -> Taken:
        """Where to write: `out` if possible, else a new array like x.

        `out` must have the dtype and layout of x, and overlap no operand unless it is the same.
        """
        arrays, layout, size = self.arrays, x.kind.layout, x.array.nbytes
        if out is not None and out.dtype == x.array.dtype and arrays.layout(out) == layout:
            given = Taken(x.kind, x.run, out)
            if not any(0 < abs(given.pointer - o.pointer) < size for o in (x, *operands)):
                return given
        return Taken(x.kind, x.run, arrays.empty_like(x.array, layout))

    def _parameters(self, affine: Vectors) -> grid.Parameters:
        weight, bias, kind = affine
        pointer, is_empty = self.arrays.pointer, not kind.sizes.channels
        first = second = (0, 0)
        if weight is not None:
            first = pointer(weight) or _none(is_empty), self.code_of(weight.dtype)
        if bias is not None:
            second = pointer(bias) or _none(is_empty), self.code_of(bias.dtype)
        return grid.Parameters(*first, *second)

    def _running(self, running: RunningStatistics, kind: Kind) -> grid.Running:
        """The arguments with which a kernel updates running statistics."""
        mean, var, counter, momentum = running
        pointer, is_empty = self.arrays.pointer, not kind.sizes.channels
        places = [
            0 if own is None else pointer(own) or _none(is_empty) for own in (mean, var, counter)
        ]
        average = 0.0 if counter is None else -1.0
        factor = average if momentum is None else float(momentum)
        return grid.Running(places[0], places[1], kind.code, places[2], factor)


def _in_place_of(result: Array, out: Array | None) -> Array:
    """`result`, or `out` after writing the result into it."""
    if out is None or out is result:
        return result
    out[...] = result
    return out
