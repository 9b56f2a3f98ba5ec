"""`CpuOperations`: the steps of batch normalization on the CPU, for all array libraries.

A `HostMemory` per library gives access to the memory of its arrays. Per-channel numbers are NumPy
float64 arrays `(C,)` for every library: small NumPy operations hold the GIL, while those of torch
release it and acquire it again, which is slow with replica threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from syncbn_core.backends.base import (
    Affine,
    Forward,
    Gradients,
    Operations,
    RunningStatistics,
    Sums,
)
from syncbn_core.backends.cpu.launch import launch
from syncbn_core.backends.cpu.plan import Plan
from syncbn_core.kernels.cpu.numerics import blend as blend_kernel
from syncbn_core.moments import (
    Moments,
    NormRule,
    Statistics,
    averaging_factor,
    blend,
    mean_gradients,
    merge_moments,
)

__all__ = ["NO_VALUES", "CpuOperations", "HostMemory"]

Array = Any  # of the library
Host = np.ndarray[Any, Any]

NO_VALUES = np.empty(0)  # no weight or no bias
_NO_MASK = np.empty(0, np.bool_)
_NO_COUNTER = np.empty(0, np.int64)


class HostMemory(Protocol):
    """What the CPU steps need from an array library.

    A *view* is a NumPy array, shaped by a `Plan`, over the memory of a library array. The methods
    return that array as well, because it keeps the memory alive.
    """

    def may_use_threads(self) -> bool:
        """Whether the library's settings allow more than one thread."""

    def dense(self, x: Array) -> tuple[Array, Host, Plan]:
        """x or a dense copy of it, its view, and its plan. x must not be empty."""

    def dense_pair(
        self, x: Array, dy: Array
    ) -> tuple[tuple[Array, Host], tuple[Array, Host], Plan]:
        """x and dy in the same dtype and layout, each with its view; and their plan."""

    def target(
        self, dense: Array, plan: Plan, out: Array | None, *operands: Array
    ) -> tuple[Array, Host]:
        """The array for a result, `out` if the kernels can write it, else a new one; its view."""

    def cast_to_output(self, result: Array, x: Array, out: Array | None) -> Array:
        """`result` in the dtype of x; written to `out` and returned as `out` if that is given."""

    def empty_like(self, x: Array, out: Array | None) -> Array:
        """The result for an empty x: `out`, or a new array like x."""

    def as_float64(self, values: Array | None) -> Host:
        """Per-channel values as a contiguous float64 array `(C,)`; `NO_VALUES` for None."""

    def parameter_gradients(
        self, sums: Host, x: Array, weight: Array | None
    ) -> tuple[Array, Array]:
        """Gradients of weight and bias, `(C,)`, in the dtype of weight, else of x.

        `sums`: `(2, C)` float64, `sum(dy)` and `sum(dy * xhat)`.
        """

    def shared_buffers(
        self, running: RunningStatistics, total: Moments
    ) -> tuple[Host, Host, Host | None] | None:
        """Running mean, var and counter as arrays that a kernel can update; None if it can't."""

    def assign(self, targets: Sequence[Array], values: Sequence[Any]) -> None:
        """Write `values` into `targets` in one C call, which Ctrl-C can't interrupt halfway."""


class CpuOperations(Operations):
    """The steps on the CPU for the array library of `memory`.

    `parallel`: False computes every step in the calling thread.
    """

    def __init__(self, memory: HostMemory, parallel: bool = True) -> None:
        self.memory = memory
        self.parallel = parallel
        self._serial = CpuOperations(memory, parallel=False) if parallel else self

    @property
    def serial(self) -> CpuOperations:
        return self._serial

    def _threads(self) -> bool:
        return self.parallel and self.memory.may_use_threads()

    def moments(self, x: Array) -> Moments:
        if 0 in x.shape:
            return Moments.empty(x.shape[1])
        _kept, view, plan = self.memory.dense(x)
        return _moments(plan, view, self._threads())

    def merge(self, parts: Sequence[Moments]) -> Moments:
        return merge_moments(parts)

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        # A communicator may return views of other strides: Numba would compile the kernels again.
        if not (total.mean.flags.carray and total.m2.flags.carray):
            total = Moments(total.count, total.mean.copy(), total.m2.copy())
        return Statistics(total, rule.invstd(total.var))

    def forward(
        self,
        x: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        y = self._normalize(x, statistics.moments.mean, statistics.invstd, affine, out)
        if running is not None:
            self.update_running(running, statistics)
        return Forward(y, statistics, running)

    def _normalize(
        self, x: Array, mean: Host, invstd: Host, affine: Affine, out: Array | None
    ) -> Array:
        memory = self.memory
        if 0 in x.shape:
            return memory.empty_like(x, out)
        dense, view, plan = memory.dense(x)
        y, target = memory.target(dense, plan, out)
        weight, bias = memory.as_float64(affine.weight), memory.as_float64(affine.bias)
        launch(plan, "normalize", self._threads(), (view,), (mean, invstd, weight, bias), target)
        return memory.cast_to_output(y, x, out)

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        mean, var = (self.memory.as_float64(values).copy() for values in running[:2])
        statistics = Statistics(Moments(1, mean, var), rule.invstd(var))
        return self.forward(x, statistics, affine, rule, None, out)

    def forward_single(
        self,
        x: Array,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        memory = self.memory
        if 0 in x.shape:
            return super().forward_single(x, affine, rule, running, out)
        dense, view, plan = memory.dense(x)
        y, target = memory.target(dense, plan, out)
        weight, bias = memory.as_float64(affine.weight), memory.as_float64(affine.bias)
        threads = self._threads()
        if plan.fits_cache(1, threads):
            mean, m2, invstd = np.empty((3, plan.channels))
            settings = (weight, bias, rule.eps, rule.clamps, mean, m2, invstd)
            launch(plan, "forward", threads, (view,), settings, target)
            statistics = Statistics(Moments(plan.count, mean, m2), invstd)
        else:
            statistics = self.statistics(_moments(plan, view, threads), rule)
            per_channel = (statistics.moments.mean, statistics.invstd, weight, bias)
            launch(plan, "normalize", threads, (view,), per_channel, target)
        y = memory.cast_to_output(y, x, out)
        if running is not None:
            self.update_running(running, statistics)
        return Forward(y, statistics, running)

    def backward_reduce(
        self, x: Array, dy: Array, statistics: Statistics, affine: Affine, rule: NormRule
    ) -> Sums:
        memory = self.memory
        if 0 in x.shape:
            sums = np.zeros((2, x.shape[1]))
        else:
            (_x, view), (_dy, grad), plan = memory.dense_pair(x, dy)
            sums = self._reduce(plan, view, grad, statistics)
        return Sums(
            _weighted(sums, memory.as_float64(affine.weight)),
            *memory.parameter_gradients(sums, x, affine.weight),
        )

    def _reduce(self, plan: Plan, x: Host, dy: Host, statistics: Statistics) -> Host:
        sums = np.empty((2, plan.channels))
        per_channel = (statistics.moments.mean, statistics.invstd, *sums)
        launch(plan, "backward_reduce", self._threads(), (x, dy), per_channel)
        return sums

    def backward_input(
        self,
        x: Array,
        dy: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        total: Host | None,
        out: Array | None = None,
    ) -> Array:
        memory = self.memory
        if 0 in x.shape:
            return memory.empty_like(x, out)
        (dense, view), (grad, dy_view), plan = memory.dense_pair(x, dy)
        dx, target = memory.target(dense, plan, out, grad)
        means = _means(statistics, rule, total, plan.channels)
        weight = memory.as_float64(affine.weight)
        per_channel = (statistics.moments.mean, statistics.invstd, weight, *means)
        launch(plan, "backward_input", self._threads(), (view, dy_view), per_channel, target)
        return memory.cast_to_output(dx, x, out)

    def backward_single(
        self,
        x: Array,
        dy: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Gradients:
        memory = self.memory
        if 0 in x.shape:
            return super().backward_single(x, dy, statistics, affine, rule, out)
        (dense, view), (grad, dy_view), plan = memory.dense_pair(x, dy)
        dx, target = memory.target(dense, plan, out, grad)
        weight = memory.as_float64(affine.weight)
        moments, invstd = statistics
        threads = self._threads()
        if plan.fits_cache(2, threads):
            sums = np.empty((2, plan.channels))
            clamped = rule.clamped(moments.var) if rule.clamps else _NO_MASK
            per_channel = (moments.mean, invstd, weight, clamped, *sums)
            launch(plan, "backward", threads, (view, dy_view), per_channel, target)
        else:
            sums = self._reduce(plan, view, dy_view, statistics)
            means = _means(statistics, rule, _weighted(sums, weight), plan.channels)
            per_channel = (moments.mean, invstd, weight, *means)
            launch(plan, "backward_input", threads, (view, dy_view), per_channel, target)
        gradients = memory.parameter_gradients(sums, x, affine.weight)
        return Gradients(memory.cast_to_output(dx, x, out), *gradients)

    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        total, memory = statistics.moments, self.memory
        mean, var, counter, momentum = running
        buffers: list[Array] = []
        values: list[Any] = []
        if mean is not None and var is not None and total.count > 0:
            factor = averaging_factor(momentum, counter)
            shared = memory.shared_buffers(running, total)
            if shared is not None:
                own_mean, own_var, tracked = shared
                tracked = _NO_COUNTER if tracked is None else tracked.reshape(1)
                new = (total.mean, total.m2, total.count, float(factor))
                blend_kernel(own_mean, own_var, tracked, *new)
                return running
            buffers = [mean, var]
            with np.errstate(invalid="ignore", over="ignore"):
                values = [
                    blend(memory.as_float64(mean), total.mean, factor),
                    blend(memory.as_float64(var), total.unbiased_var, factor),
                ]
        if counter is not None:
            buffers.append(counter)
            values.append(counter + 1)
        memory.assign(buffers, values)
        return running


def _moments(plan: Plan, view: Host, parallel: bool) -> Moments:
    mean, m2 = np.empty((2, plan.channels))
    launch(plan, "moments", parallel, (view,), (mean, m2))
    return Moments(plan.count, mean, m2)


def _weighted(sums: Host, weight: Host) -> Host:
    if not weight.size:
        return sums
    with np.errstate(invalid="ignore", over="ignore"):
        product: Host = sums * weight
        return product


def _means(
    statistics: Statistics, rule: NormRule, total: Host | None, channels: int
) -> tuple[Host, Host]:
    """`mean_gradients` of the sums `total`; zeros if it is None (constant statistics)."""
    if total is None:
        zeros = np.zeros(channels)
        return zeros, zeros
    moments = statistics.moments
    return mean_gradients(total, moments.count, rule.clamped(moments.var))
