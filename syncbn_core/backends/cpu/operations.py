"""`CpuOperations`: the steps of batch normalization on the CPU, for all array libraries.

Each step is two compiled calls: one looks at the arrays (`kernels.cpu.operands`), one computes
(`kernels.cpu.entries`). Where kernels can't use the arrays as they are, a `HostMemory` of the
library makes copies that they can use. Per-channel numbers are NumPy float64 arrays `(C,)` for
every library: small NumPy operations hold the GIL, while those of torch release it and acquire it
again, which is slow with replica threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from syncbn_core.backends.base import (
    Affine,
    Forward,
    Gradients,
    Operations,
    RunningStatistics,
    Sums,
)
from syncbn_core.backends.cpu.launch import launch, most_threads
from syncbn_core.kernels.cpu.calls import CALL, CHANNELS, INNER, A
from syncbn_core.kernels.cpu.entries import fill_invstd, update_running
from syncbn_core.kernels.cpu.operands import FUSED
from syncbn_core.moments import (
    Moments,
    NormRule,
    averaging_factor,
    blend,
    merge_moments,
    require_more_than_one_value,
)

__all__ = [
    "CpuOperations",
    "HostMemory",
    "HostStatistics",
    "Seen",
    "momentum_of",
    "run_backward",
    "run_forward",
]

Array = Any  # of the library
Host = np.ndarray[Any, Any]


class HostMemory(Protocol):
    """What the CPU steps need from an array library."""

    def may_use_threads(self) -> bool:
        """Whether the library's settings allow more than one thread."""

    def look(self, call: Host, threads: int, *arrays: Array | None) -> int:
        """`operands.look` at eight arrays: negative if kernels can't use them as they are."""

    def dense(self, x: Array) -> Array:
        """x or a dense copy of it that kernels can use. x must not be empty."""

    def dense_pair(self, x: Array, dy: Array) -> tuple[Array, Array]:
        """x and dy, or copies, in the same dtype and layout."""

    def target(self, dense: Array, out: Array | None, *operands: Array) -> Array:
        """The array for a result: `out` if the kernels can write it, else a new one like dense."""

    def cast_to_output(self, result: Array, x: Array, out: Array | None) -> Array:
        """`result` in the dtype of x; written to `out` and returned as `out` if that is given."""

    def wide(self, values: Array | None) -> Array | None:
        """Per-channel values in float64, as an array that kernels can use; None for None."""

    def empty_like(self, x: Array, out: Array | None) -> Array:
        """The result for an empty x: `out`, or a new array like x."""

    def gradients(self, like: Array | None, channels: int) -> tuple[Array, Array]:
        """Two new arrays `(C,)` in the dtype of `like`, in float64 for None."""

    def rounded(self, wide: Array, like: Array) -> Array:
        """`wide`, of the library, in the dtype of `like`."""

    def mark_written(self, *arrays: Array | None) -> None:
        """A kernel is about to write these: tell the library."""

    def assign(self, targets: Sequence[Array], values: Sequence[Any]) -> None:
        """Write `values` into `targets` in one C call, which Ctrl-C can't interrupt halfway."""


class HostStatistics(NamedTuple):
    """Statistics of a batch of `count` values per channel; `table`: mean, m2, invstd (3, C)."""

    count: Any  # an int
    table: Host

    @property
    def moments(self) -> Moments:
        """As members exchange them."""
        return Moments(self.count, self.table[0], self.table[1])

    @property
    def mean(self) -> Host:
        """Per channel, `(C,)`."""
        mean: Host = self.table[0]
        return mean

    @property
    def invstd(self) -> Host:
        """`(C,)`."""
        invstd: Host = self.table[2]
        return invstd


class Seen(NamedTuple):
    """What `look` found of the arrays of a step.

    Attributes:
        code: how to compute; negative if kernels can't use the arrays.
        call: addresses and sizes, valid as long as the arrays live.
        arrays: the arrays that kernels read and write, to keep them alive.
    """

    code: int
    call: Host
    arrays: tuple[Array | None, ...]

    @property
    def per_channel(self) -> int:
        """How many values x has per channel."""
        return int(self.call[A] * self.call[INNER])


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

    def _look(self, *arrays: Array | None) -> Seen:
        """Look at x, dy, out, four per-channel operands, the counter; the last may be left out."""
        call = np.empty(CALL, np.int64)
        memory = self.memory
        threads = most_threads() if self.parallel and memory.may_use_threads() else 1
        missing = (None,) * (8 - len(arrays))
        return Seen(memory.look(call, threads, *arrays, *missing), call, arrays)

    def moments(self, x: Array) -> Moments:
        if 0 in x.shape:
            return Moments.empty(x.shape[1])
        seen = self._look(x)
        if seen.code < 0:
            seen = self._look(self.memory.dense(x))
        table = np.empty((2, x.shape[1]))
        launch("moments", seen.code, seen.call, table)
        return Moments(seen.per_channel, table[0], table[1])

    def merge(self, parts: Sequence[Moments]) -> Moments:
        return merge_moments(parts)

    def statistics(self, total: Moments, rule: NormRule) -> HostStatistics:
        table = np.empty((3, total.mean.shape[0]))
        table[0], table[1] = total.mean, total.m2
        fill_invstd(table, total.count, rule.eps, rule.clamps)
        return HostStatistics(total.count, table)

    def forward(
        self,
        x: Array,
        statistics: HostStatistics,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        memory = self.memory
        if 0 in x.shape:
            if running is not None:
                self.update_running(running, statistics)
            return Forward(memory.empty_like(x, out), statistics, running)
        seen, y, later = self._for_forward(x, affine, running, out)
        count, table = statistics
        launch("normalize", seen.code, seen.call, table, count, momentum_of(running))
        if later is not None:
            self.update_running(later, statistics)
        return Forward(memory.cast_to_output(y, x, out), statistics, running)

    def _for_forward(
        self, x: Array, affine: Affine, running: RunningStatistics | None, out: Array | None
    ) -> tuple[Seen, Array, RunningStatistics | None]:
        """The arrays of a forward, y, and the running statistics that its kernel can't update."""
        memory = self.memory
        y = memory.target(x, out)
        buffers = () if running is None else running[:3]
        seen = self._look(x, None, y, *affine, *buffers)
        if seen.code >= 0:
            memory.mark_written(*buffers)
            return seen, y, None
        dense = memory.dense(x)
        y = memory.target(dense, out)
        return self._look(dense, None, y, *map(memory.wide, affine)), y, running

    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        mean, var = (np.array(self.memory.wide(values)) for values in running[:2])
        statistics = self.statistics(Moments(1, mean, var), rule)
        return self.forward(x, statistics, affine, rule, None, out)

    def forward_single(
        self,
        x: Array,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        if 0 in x.shape:
            return super().forward_single(x, affine, rule, running, out)
        seen, y, later = self._for_forward(x, affine, running, out)
        table = run_forward(seen.code, seen.call, rule, momentum_of(running))
        statistics = HostStatistics(seen.per_channel, table)
        if later is not None:
            self.update_running(later, statistics)
        return Forward(self.memory.cast_to_output(y, x, out), statistics, running)

    def backward_reduce(
        self, x: Array, dy: Array, statistics: HostStatistics, affine: Affine, rule: NormRule
    ) -> Sums:
        memory, weight = self.memory, affine.weight
        like = x if weight is None else weight
        if 0 in x.shape:
            zeros = np.zeros((2, x.shape[1]))
            both = memory.gradients(like, x.shape[1])
            memory.assign(both, [*zeros])
            return Sums(zeros, *both)
        gradients = memory.gradients(like, x.shape[1])
        seen = self._look(x, dy, None, weight, *gradients)
        if seen.code >= 0:
            return Sums(_reduce(seen.code, seen.call, statistics.table), *gradients)
        gradients = memory.gradients(None, x.shape[1])
        seen = self._look(*memory.dense_pair(x, dy), None, memory.wide(weight), *gradients)
        sums = _reduce(seen.code, seen.call, statistics.table)
        return Sums(sums, *(memory.rounded(wide, like) for wide in gradients))

    def backward_input(
        self,
        x: Array,
        dy: Array,
        statistics: HostStatistics,
        affine: Affine,
        rule: NormRule,
        total: Host | None,
        out: Array | None = None,
    ) -> Array:
        memory = self.memory
        if 0 in x.shape:
            return memory.empty_like(x, out)
        dx = memory.target(x, out, dy)
        seen = self._look(x, dy, dx, affine.weight)
        if seen.code < 0:
            dense, grad = memory.dense_pair(x, dy)
            dx = memory.target(dense, out, grad)
            seen = self._look(dense, grad, dx, memory.wide(affine.weight))
        if total is None:
            total = np.zeros((2, x.shape[1]))
        elif not total.flags.carray:  # Numba would compile the kernels again
            total = total.copy()
        _input(seen.code, seen.call, rule, statistics.table, total, statistics.count)
        return memory.cast_to_output(dx, x, out)

    def backward_single(
        self,
        x: Array,
        dy: Array,
        statistics: HostStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Gradients:
        memory, weight = self.memory, affine.weight
        if 0 in x.shape:
            return super().backward_single(x, dy, statistics, affine, rule, out)
        like = x if weight is None else weight
        dx, gradients = memory.target(x, out, dy), memory.gradients(like, x.shape[1])
        seen = self._look(x, dy, dx, weight, *gradients)
        if seen.code >= 0:
            run_backward(seen.code, seen.call, rule, statistics.table)
            return Gradients(memory.cast_to_output(dx, x, out), *gradients)
        dense, grad = memory.dense_pair(x, dy)
        dx, gradients = memory.target(dense, out, grad), memory.gradients(None, x.shape[1])
        seen = self._look(dense, grad, dx, memory.wide(weight), *gradients)
        run_backward(seen.code, seen.call, rule, statistics.table)
        rounded = (memory.rounded(wide, like) for wide in gradients)
        return Gradients(memory.cast_to_output(dx, x, out), *rounded)

    def update_running(
        self, running: RunningStatistics, statistics: HostStatistics
    ) -> RunningStatistics:
        total, memory = statistics.moments, self.memory
        mean, var, counter, momentum = running
        require_more_than_one_value(total.count)
        call = np.empty(CALL, np.int64)
        call[CHANNELS] = total.mean.shape[0]
        if memory.look(call, 1, None, None, None, None, None, mean, var, counter) >= 0:
            memory.mark_written(mean, var, counter)
            update_running(call, statistics.table, total.count, momentum_of(running))
            return running
        buffers: list[Array] = []
        values: list[Any] = []
        if mean is not None and var is not None and total.count > 0:
            factor = averaging_factor(momentum, counter)
            buffers = [mean, var]
            with np.errstate(invalid="ignore", over="ignore"):
                values = [
                    blend(np.asarray(memory.wide(mean)), total.mean, factor),
                    blend(np.asarray(memory.wide(var)), total.unbiased_var, factor),
                ]
        if counter is not None:
            buffers.append(counter)
            values.append(counter + 1)
        memory.assign(buffers, values)
        return running


# ------------------------------------------- steps of a call, given what `look` has returned


def run_forward(code: int, call: Host, rule: NormRule, momentum: float) -> Host:
    """Write y and the running statistics of a batch without other parts; returns the table."""
    table = np.empty((3, call[CHANNELS]))
    if code & FUSED:
        launch("forward", code, call, table, rule.eps, rule.clamps, momentum)
    else:
        launch("moments", code, call, table)
        count = int(call[A] * call[INNER])
        fill_invstd(table, count, rule.eps, rule.clamps)
        launch("normalize", code, call, table, count, momentum)
    return table


def run_backward(code: int, call: Host, rule: NormRule, table: Host) -> None:
    """Write dx and the gradients of a batch without other parts."""
    if code & FUSED:
        launch("backward", code, call, table, rule.eps, rule.clamps)
    else:
        sums = _reduce(code, call, table)
        _input(code, call, rule, table, sums, int(call[A] * call[INNER]))


def _reduce(code: int, call: Host, table: Host) -> Host:
    sums = np.empty((2, table.shape[1]))
    launch("backward_reduce", code, call, table, sums)
    return sums


def _input(code: int, call: Host, rule: NormRule, table: Host, total: Host, count: int) -> None:
    launch("backward_input", code, call, table, rule.eps, rule.clamps, total, max(count, 1))


def momentum_of(running: RunningStatistics | None) -> float:
    """The momentum as kernels take it: NaN stands for None."""
    if running is None:
        return 0.0
    return np.nan if running.momentum is None else float(running.momentum)
