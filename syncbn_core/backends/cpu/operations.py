"""`CpuOperations`: the steps of batch normalization on the CPU, for all array libraries.

Each step is two compiled calls, for one part of the batch or for several: one looks at the arrays
(`kernels.cpu.operands`), one computes (`kernels.cpu.entries`). Where kernels can't use the arrays
as they are, a `HostMemory` of the library makes copies that they can use. Per-channel numbers are
NumPy float64 arrays `(C,)` for every library: small NumPy operations hold the GIL, while those of
torch release it and acquire it again, which is slow with replica threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
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
from syncbn_core.kernels.cpu.entries import fill_invstd, merge, update_running
from syncbn_core.kernels.cpu.operands import FUSED
from syncbn_core.moments import (
    Moments,
    NormRule,
    averaging_factor,
    blend,
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
_NOTHING = (None,) * 8


class HostMemory(Protocol):
    """What the CPU steps need from an array library."""

    def may_use_threads(self) -> bool:
        """Whether the library's settings allow more than one thread."""

    def look(self, calls: Host, threads: int, arrays: Sequence[Array | None]) -> int:
        """`operands.look` at eight arrays of each part: negative if kernels can't use them."""

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
        calls: addresses and sizes of P parts, `(P, CALL)`, valid as long as the arrays live.
        arrays: the arrays that kernels read and write, to keep them alive.
    """

    code: int
    calls: Host
    arrays: Sequence[Array | None]


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

    def _look(self, *parts: tuple[Array | None, ...]) -> Seen:
        """Look at x, dy, out, four per-channel operands and the counter of each part.

        The last may be left out.
        """
        calls = np.empty((len(parts), CALL), np.int64)
        arrays = [*chain.from_iterable([(*part, *_NOTHING[len(part) :]) for part in parts])]
        threads = most_threads() if self.parallel and self.memory.may_use_threads() else 1
        return Seen(self.memory.look(calls, threads, arrays), calls, arrays)

    def moments(self, x: Array) -> Moments:
        if 0 in x.shape:
            return Moments.empty(x.shape[1])
        seen = self._look((x,))
        if seen.code < 0:
            seen = self._look((self.memory.dense(x),))
        return _moments(seen)[0]

    def moments_of_parts(self, xs: Sequence[Array]) -> list[Moments]:
        seen = self._look(*[(x,) for x in xs])
        return _moments(seen) if seen.code >= 0 else super().moments_of_parts(xs)

    def merge(self, parts: Sequence[Moments]) -> Moments:
        if len(parts) == 1:
            return parts[0]
        table = np.empty((2, parts[0].num_features))
        counts, means, m2s = map(np.array, zip(*parts, strict=True))
        merge(counts, means, m2s, table)
        return Moments(sum([part.count for part in parts]), *table)

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
        seen, y, remaining = self._for_forward(x, affine, running, out)
        count, table = statistics
        launch("normalize", seen.code, seen.calls, table, count, momentum_of(running))
        if remaining is not None:
            self.update_running(remaining, statistics)
        return Forward(memory.cast_to_output(y, x, out), statistics, running)

    def forward_of_parts(
        self,
        xs: Sequence[Array],
        statistics: Sequence[HostStatistics],
        affines: Sequence[Affine],
        running: Sequence[RunningStatistics | None],
        rule: NormRule,
    ) -> list[Forward]:
        momenta = {*map(momentum_of, running)}
        if len(momenta) == 1:
            seen, ys = self._look_forward(xs, affines, running, None)
            if seen.code >= 0:
                count, table = statistics[0]
                launch("normalize", seen.code, seen.calls, table, count, momenta.pop())
                return [*map(Forward, ys, statistics, running)]
        return super().forward_of_parts(xs, statistics, affines, running, rule)

    def _look_forward(
        self,
        xs: Sequence[Array],
        affines: Sequence[Affine],
        running: Sequence[RunningStatistics | None],
        out: Array | None,
    ) -> tuple[Seen, list[Array]]:
        """What `look` found of each part, and its y; the kernel is to run next."""
        memory = self.memory
        ys = [memory.target(x, out) for x in xs]
        buffers = [() if of_part is None else of_part[:3] for of_part in running]
        parts = zip(xs, ys, affines, buffers, strict=True)
        seen = self._look(*[(x, None, y, *affine, *written) for x, y, affine, written in parts])
        if seen.code >= 0:
            memory.mark_written(*chain.from_iterable(buffers))
        return seen, ys

    def _for_forward(
        self, x: Array, affine: Affine, running: RunningStatistics | None, out: Array | None
    ) -> tuple[Seen, Array, RunningStatistics | None]:
        """The arrays of a forward, y, and the running statistics that its kernel can't update."""
        seen, (y,) = self._look_forward([x], [affine], [running], out)
        if seen.code >= 0:
            return seen, y, None
        memory = self.memory
        dense = memory.dense(x)
        y = memory.target(dense, out)
        return self._look((dense, None, y, *map(memory.wide, affine))), y, running

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
        seen, y, remaining = self._for_forward(x, affine, running, out)
        table = run_forward(seen.code, seen.calls, rule, momentum_of(running))
        statistics = HostStatistics(_counts(seen.calls)[0], table)
        if remaining is not None:
            self.update_running(remaining, statistics)
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
        seen = self._look((x, dy, None, weight, *gradients))
        if seen.code >= 0:
            return Sums(_reduce(seen.code, seen.calls, statistics.table)[0], *gradients)
        gradients = memory.gradients(None, x.shape[1])
        seen = self._look((*memory.dense_pair(x, dy), None, memory.wide(weight), *gradients))
        (sums,) = _reduce(seen.code, seen.calls, statistics.table)
        return Sums(sums, *(memory.rounded(wide, like) for wide in gradients))

    def backward_reduce_of_parts(
        self,
        xs: Sequence[Array],
        dys: Sequence[Array],
        statistics: Sequence[HostStatistics],
        affines: Sequence[Affine],
        rule: NormRule,
    ) -> list[Sums]:
        weights = [affine.weight for affine in affines]
        gradients = [
            self.memory.gradients(x if weight is None else weight, x.shape[1])
            for x, weight in zip(xs, weights, strict=True)
        ]
        parts = zip(xs, dys, weights, gradients, strict=True)
        seen = self._look(*[(x, dy, None, weight, *both) for x, dy, weight, both in parts])
        if seen.code < 0:
            return super().backward_reduce_of_parts(xs, dys, statistics, affines, rule)
        sums = _reduce(seen.code, seen.calls, statistics[0].table)
        return [Sums(one, *both) for one, both in zip(sums, gradients, strict=True)]

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
        seen = self._look((x, dy, dx, affine.weight))
        if seen.code < 0:
            dense, grad = memory.dense_pair(x, dy)
            dx = memory.target(dense, out, grad)
            seen = self._look((dense, grad, dx, memory.wide(affine.weight)))
        if total is None:
            total = np.zeros((2, x.shape[1]))
        _input(seen.code, seen.calls, rule, statistics, total)
        return memory.cast_to_output(dx, x, out)

    def backward_input_of_parts(
        self,
        xs: Sequence[Array],
        dys: Sequence[Array],
        statistics: Sequence[HostStatistics],
        affines: Sequence[Affine],
        total: Sequence[Host],
        rule: NormRule,
    ) -> list[Array]:
        dxs = [self.memory.target(x, None, dy) for x, dy in zip(xs, dys, strict=True)]
        weights = [affine.weight for affine in affines]
        seen = self._look(*zip(xs, dys, dxs, weights, strict=True))
        if seen.code < 0:
            return super().backward_input_of_parts(xs, dys, statistics, affines, total, rule)
        _input(seen.code, seen.calls, rule, statistics[0], total[0])
        return dxs

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
        seen = self._look((x, dy, dx, weight, *gradients))
        if seen.code >= 0:
            run_backward(seen.code, seen.calls, rule, statistics.table)
            return Gradients(memory.cast_to_output(dx, x, out), *gradients)
        dense, grad = memory.dense_pair(x, dy)
        dx, gradients = memory.target(dense, out, grad), memory.gradients(None, x.shape[1])
        seen = self._look((dense, grad, dx, memory.wide(weight), *gradients))
        run_backward(seen.code, seen.calls, rule, statistics.table)
        rounded = (memory.rounded(wide, like) for wide in gradients)
        return Gradients(memory.cast_to_output(dx, x, out), *rounded)

    def update_running(
        self, running: RunningStatistics, statistics: HostStatistics
    ) -> RunningStatistics:
        total, memory = statistics.moments, self.memory
        mean, var, counter, momentum = running
        require_more_than_one_value(total.count)
        calls = np.empty((1, CALL), np.int64)
        calls[0, CHANNELS] = total.mean.shape[0]
        if memory.look(calls, 1, (*_NOTHING[3:], mean, var, counter)) >= 0:
            memory.mark_written(mean, var, counter)
            update_running(calls[0], statistics.table, total.count, momentum_of(running))
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


def _moments(seen: Seen) -> list[Moments]:
    """Those of each part."""
    tables = np.empty((len(seen.calls), 2, seen.calls[0, CHANNELS]))
    launch("moments", seen.code, seen.calls, tables)
    parts = zip(_counts(seen.calls), tables, strict=True)
    return [Moments(count, mean, m2) for count, (mean, m2) in parts]


def run_forward(code: int, calls: Host, rule: NormRule, momentum: float) -> Host:
    """Write y and the running statistics of a batch without other parts; returns the table."""
    table = np.empty((3, calls[0, CHANNELS]))
    if code & FUSED:
        launch("forward", code, calls, table, rule.eps, rule.clamps, momentum)
    else:
        launch("moments", code, calls, table[None])
        (count,) = _counts(calls)
        fill_invstd(table, count, rule.eps, rule.clamps)
        launch("normalize", code, calls, table, count, momentum)
    return table


def run_backward(code: int, calls: Host, rule: NormRule, table: Host) -> None:
    """Write dx and the gradients of a batch without other parts."""
    if code & FUSED:
        launch("backward", code, calls, table, rule.eps, rule.clamps)
    else:
        (sums,) = _reduce(code, calls, table)
        _input(code, calls, rule, HostStatistics(_counts(calls)[0], table), sums)


def _reduce(code: int, calls: Host, table: Host) -> Host:
    """The sums of each part, `(P, 2, C)`."""
    sums = np.empty((len(calls), 2, table.shape[1]))
    launch("backward_reduce", code, calls, table, sums)
    return sums


def _input(code: int, calls: Host, rule: NormRule, statistics: HostStatistics, total: Host) -> None:
    count, table = statistics
    if not total.flags.carray:  # Numba would compile the kernels again
        total = total.copy()
    launch("backward_input", code, calls, table, rule.eps, rule.clamps, total, max(count, 1))


def _counts(calls: Host) -> list[int]:
    """How many values per channel each part has."""
    counts: list[int] = (calls[:, A] * calls[:, INNER]).tolist()
    return counts


def momentum_of(running: RunningStatistics | None) -> float:
    """The momentum as kernels take it: NaN stands for None."""
    if running is None:
        return 0.0
    return np.nan if running.momentum is None else float(running.momentum)
