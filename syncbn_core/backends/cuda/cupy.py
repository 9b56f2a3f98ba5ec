"""CuPy arrays on Numba's CUDA kernels: on the current stream of the array's device.

float16, bfloat16, float32 and float64 in any dense layout; others are copied first. Memory is
CuPy's pool. Nothing waits for the device, so a forward and backward can be captured in a CUDA
graph, after one ordinary run that compiles and loads the kernels and fills the pool.

Besides the four functions of a backend there are fused ones, of two launches per direction, for
`syncbn_core.functional`: `finish_forward`, `finish_eval`, `local_sums`, `finish_backward`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import cupy

from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.driver import kernel_for, require
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.layout import Layout, layout_of
from syncbn_core.moments import EpsMode, Moments

__all__ = [
    "DeviceStatistics",
    "backward_input",
    "backward_reduce",
    "finish_backward",
    "finish_eval",
    "finish_forward",
    "local_sums",
    "moments",
    "normalize",
]

Array = Any  # cupy.ndarray

_TICKETS = 4096  # at first; as many as a reduction has channels or tiles
_LEGACY_STREAMS = (0, 1)  # never captured
_PER_THREAD_STREAM = 2  # one handle, another stream in every thread
_tickets: dict[tuple[int, int, int], Array] = {}

require()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStatistics:
    """What the kernels of backward need: count, mean, m2, invstd in one array, and the rule."""

    packed: Array  # [3 C + 1] float64
    eps: float
    clamp: bool

    @property
    def mean(self) -> Array:
        """`(C,)`."""
        return self.packed[1 : 1 + len(self.packed) // 3]

    @property
    def invstd(self) -> Array:
        """`(C,)`."""
        return self.packed[1 + len(self.packed) // 3 * 2 :]


def _pointer(array: Array) -> Any:
    return array.data.ptr


class _View:
    """A dense array as the kernels see it."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, array: Array, layout: Layout) -> None:
        self.pointer = _pointer(array)
        self.offset = array.data.ptr % 16
        self.dtype = array.dtype.name
        self.outer, self.channels, self.inner = layout.outer, layout.channels, layout.inner


class _Runner:
    """Launches on the current stream of the current device."""

    __slots__ = ("device", "stream")

    threads = cuda.THREADS

    def __init__(self) -> None:
        self.device: int = cupy.cuda.runtime.getDevice()
        self.stream: int = cupy.cuda.get_current_stream().ptr

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        kernel_for(source, self.device).launch(grid, self.stream, *arguments)

    def scratch(self, size: int) -> tuple[Any, Array]:
        array = cupy.empty(size, cupy.float64)
        return _pointer(array), array

    def tickets(self, size: int) -> tuple[Any, Array]:
        """Zeros of this stream; a captured graph has its own, it may run beside its stream."""
        stream = self.stream
        if stream not in _LEGACY_STREAMS and cupy.cuda.runtime.streamIsCapturing(stream):
            array = cupy.zeros(size, cupy.int32)
        else:
            thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
            key = (self.device, stream, thread)
            array = _tickets.get(key)
            if array is None or array.size < size:
                array = _tickets[key] = cupy.zeros(max(size, _TICKETS), cupy.int32)
        return _pointer(array), array


def _dense(x: Array) -> tuple[Array, Layout]:
    """`x`, or a dense copy of it, and its layout."""
    layout = layout_of(x)
    if layout is None:
        x = cupy.ascontiguousarray(x)
        layout = layout_of(x)
        assert layout is not None
    return x, layout


def _empty(x: Array, layout: Layout) -> Array:
    """A new array with the shape, dtype and layout of `x`."""
    lying = cupy.empty([x.shape[axis] for axis in layout.axes], x.dtype)
    return lying.transpose([layout.axes.index(axis) for axis in range(x.ndim)])


def _like(other: Array, x: Array, layout: Layout) -> Array:
    """`other` with the dtype and layout of `x`."""
    if other.dtype == x.dtype and layout_of(other) == layout:
        return other
    copy = _empty(x, layout)
    copy[...] = other
    return copy


def _target(x: Array, layout: Layout, out: Array | None, *operands: Array) -> Array:
    """Where to write: `out` itself if it lies like `x` and across no operand, else a new array."""
    if out is None or out.dtype != x.dtype or layout_of(out) != layout:
        return _empty(x, layout)
    for operand in (x, *operands):
        if out.data.ptr != operand.data.ptr and cupy.may_share_memory(out, operand):
            return _empty(x, layout)
    return out


def _give(result: Array, out: Array | None) -> Array:
    if out is None or out is result:
        return result
    out[...] = result
    return out


def _code(array: Array) -> int:
    return cuda.CODES[array.dtype.name]


def _parameters(weight: Array | None, bias: Array | None) -> tuple[cuda.Parameters, list[Array]]:
    """Pointers to weight and bias, and the contiguous arrays behind them."""
    arrays = [None if a is None else cupy.ascontiguousarray(a) for a in (weight, bias)]
    pointers = [0 if a is None else _pointer(a) for a in arrays]
    codes = [0 if a is None else _code(a) for a in arrays]
    return cuda.Parameters(pointers[0], codes[0], pointers[1], codes[1]), arrays


def moments(x: Array, *, parallel: bool = True) -> Moments:
    """Moments of `x` (N, C, *spatial), packed on its device."""
    with x.device:
        channels = x.shape[1]
        if x.size == 0:
            return DeviceMoments(cupy.zeros((1, 2 * channels + 1)), 0, cupy.concatenate)
        dense, layout = _dense(x)
        parts = cupy.empty((1, 2 * channels + 1))
        cuda.moments(_Runner(), _View(dense, layout), _pointer(parts))
        return DeviceMoments(parts, x.size // channels, cupy.concatenate)


def finish_forward(
    x: Array,
    total: Moments,
    weight: Array | None,
    bias: Array | None,
    *,
    running_mean: Array | None,
    running_var: Array | None,
    num_batches_tracked: Array | None,
    momentum: float | None,
    eps: float,
    eps_mode: EpsMode,
    out: Array | None,
) -> tuple[Array, DeviceStatistics]:
    """y and the statistics of the whole batch; running statistics are updated."""
    with x.device:
        run = _Runner()
        parts = _packed(total)
        counter = num_batches_tracked
        factor = -1.0 if momentum is None else float(momentum)
        counts = counter
        if counter is not None and counter.dtype != cupy.int64:
            counts = counter.astype(cupy.int64) if momentum is None else None
        tracked = 0 if counts is None else _pointer(counts)
        means = _writable(running_mean, running_var)
        if means is None:
            running = cuda.Running(tracked=tracked, factor=factor)
        else:
            running = cuda.Running(
                _pointer(means[0]), _pointer(means[1]), _code(means[0]), tracked, factor
            )
        y, statistics = _normalize(run, x, weight, bias, parts, eps, eps_mode, running, out)
        if means is not None and means[0] is not running_mean:
            running_mean[...], running_var[...] = means  # type: ignore[index]
        if counter is not None and (factor < 0 or counts is not counter):
            counter += 1  # the kernel did not
        return y, statistics


def _writable(mean: Array | None, var: Array | None) -> tuple[Array, Array] | None:
    """Running statistics as the kernels take them: contiguous and of one dtype."""
    if mean is None or var is None:
        return None
    if mean.dtype == var.dtype and all(a.flags.c_contiguous for a in (mean, var)):
        return mean, var
    return mean.astype(cupy.float64), var.astype(cupy.float64)


def finish_eval(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    eps_mode: EpsMode,
    out: Array | None,
) -> tuple[Array, DeviceStatistics]:
    """y by running statistics, and those as they are now."""
    with x.device:
        means = _writable(running_mean, running_var)
        assert means is not None
        running = cuda.Running(_pointer(means[0]), _pointer(means[1]), _code(means[0]))
        return _normalize(_Runner(), x, weight, bias, None, eps, eps_mode, running, out)


def _normalize(
    run: _Runner,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    parts: Array | None,
    eps: float,
    eps_mode: EpsMode,
    running: cuda.Running,
    out: Array | None,
) -> tuple[Array, DeviceStatistics]:
    dense, layout = _dense(x)
    y = _target(dense, layout, out)
    parameters, arrays = _parameters(weight, bias)
    statistics = DeviceStatistics(cupy.empty(3 * x.shape[1] + 1), eps, eps_mode == "clamp")
    cuda.normalize(
        run,
        _View(dense, layout),
        _View(y, layout),
        parameters,
        0 if parts is None else _pointer(parts),
        0 if parts is None else len(parts),
        _pointer(statistics.packed),
        eps=eps,
        clamp=statistics.clamp,
        running=running,
    )
    del arrays
    return _give(y, out), statistics


def _packed(total: Moments) -> Array:
    """`[P, 2 C + 1]` on the current device."""
    if isinstance(total, DeviceMoments):
        return cupy.ascontiguousarray(total.parts)
    count = cupy.full(1, total.count, cupy.float64)
    return cupy.concatenate([count, cupy.asarray(total.mean), cupy.asarray(total.m2)])[None]


def local_sums(
    x: Array, dy: Array, statistics: DeviceStatistics, weight: Array | None
) -> tuple[Array, Array, Array]:
    """`(sums [2, C] times weight, gradient of weight, gradient of bias)` of this member."""
    with x.device:
        channels = x.shape[1]
        dtype = (x if weight is None else weight).dtype
        sums = cupy.empty((2, channels))
        gradients = cupy.empty(channels, dtype), cupy.empty(channels, dtype)
        if x.size == 0:
            for array in (sums, *gradients):
                array[...] = 0
            return sums, *gradients
        dense, layout = _dense(x)
        grad = _like(dy, dense, layout)
        parameters, arrays = _parameters(weight, None)
        cuda.backward_reduce(
            _Runner(),
            _View(dense, layout),
            _View(grad, layout),
            _pointer(statistics.packed),
            parameters,
            _pointer(sums),
            *map(_pointer, gradients),
            code=_code(gradients[0]),
        )
        del arrays
        return sums, *gradients


def finish_backward(
    x: Array,
    dy: Array,
    statistics: DeviceStatistics,
    weight: Array | None,
    sums: Array | None,
    *,
    out: Array | None,
) -> Array:
    """dx, from the sums over all members; None for constant statistics."""
    with x.device:
        dense, layout = _dense(x)
        grad = _like(dy, dense, layout)
        dx = _target(dense, layout, out, grad)
        parameters, arrays = _parameters(weight, None)
        if sums is not None:
            sums = cupy.ascontiguousarray(sums)
        cuda.backward_input(
            _Runner(),
            _View(dense, layout),
            _View(grad, layout),
            _View(dx, layout),
            _pointer(statistics.packed),
            parameters,
            0 if sums is None else _pointer(sums),
            eps=statistics.eps,
            clamp=statistics.clamp,
        )
        del arrays
        return _give(dx, out)


# The four steps, by mean and invstd: the kernels' statistics are made of those.


def _statistics_of(mean: Array, invstd: Array) -> DeviceStatistics:
    wide = [cupy.asarray(values, cupy.float64) for values in (mean, invstd)]
    return DeviceStatistics(
        cupy.concatenate([cupy.ones(1), wide[0], wide[1] ** -2.0, wide[1]]), 0.0, False
    )


def normalize(
    x: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`y = (x - mean) * invstd * weight + bias`; `out` may be `x` itself."""
    with x.device:
        parts = _statistics_of(mean, invstd).packed[: 2 * x.shape[1] + 1][None]
        run = _Runner()
        return _normalize(run, x, weight, bias, parts, 0.0, "plus", cuda.NO_RUNNING, out)[0]


def backward_reduce(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`sum_dy = sum(dy)`, `sum_dy_xhat = sum(dy * xhat)`."""
    with x.device:
        sums, _, _ = local_sums(x, dy, _statistics_of(mean, invstd), None)
        return sums[0], sums[1]


def backward_input(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    mean_dy: Array,
    mean_dy_xhat: Array,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; `out` may be `dy` itself."""
    with x.device:
        sums = cupy.stack([cupy.asarray(v, cupy.float64) for v in (mean_dy, mean_dy_xhat)])
        statistics = _statistics_of(mean, invstd)
        return finish_backward(x, dy, statistics, weight, sums, out=out)
