"""The order of the steps of a node: forward and backward of a layer, in parts.

    forward    moments of each part, merged; exchanged; y of each part
    backward   sums of each part, added; exchanged; dx of each part

Over several processes there is one message per direction. Backward computes by plain differentiable
operations if its result must be differentiable (`create_graph=True`), or, in a layer alone, dy has
a tangent or is wrapped by a transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import StateError
from syncbn_core.moments import NormRule, require_more_than_one_value
from syncbn_core.steps import Affine, Operations, RunningStatistics, Sums
from syncbn_torch.arrays import as_tensor
from syncbn_torch.autograd.derivatives import sum_over_processes, total_moments
from syncbn_torch.autograd.exchange import (
    Processes,
    check_unchanged,
    has_tangent_or_wrapper,
    refuse_transforms,
)
from syncbn_torch.backends import plain

__all__ = ["Call", "Columns", "Part", "columns_of"]


class Part(NamedTuple):
    """One part of the batch of a layer, and the settings of the layer.

    `graph`: whether gradients are enabled in the thread it comes from. The rest is for replicas.
    `inference`: whether it comes from `torch.inference_mode()`.
    `context`: the forward that they share. `kept`: the ctx of its `Keep`, if it has one.
    `moments`, `y`: the moments of x, and memory for y, if the replica computes both itself.
    `stream`: that of its GPU on which it computes x, and goes on with y; None on a host.
    """

    operations: Operations
    x: Tensor
    affine: Affine
    running: RunningStatistics | None
    rule: NormRule
    processes: Processes | None
    graph: bool
    inference: bool = False
    context: Any = None
    kept: Any = None
    moments: Any = None
    y: Any = None
    stream: Any = None


Columns = Any  # a `Part` whose fields are tuples, each with one entry per part


def columns_of(parts: Sequence[Part]) -> Columns:
    """The fields of all parts."""
    columns: Columns = zip(*parts, strict=True)
    return Part(*columns)


class Call:
    """One call of a layer, in parts: what its forward knows.

    Attributes:
        operations, rule, processes, context: those of all parts.
        number: of the exchange over processes, 0 for none.
        streams: those of each part.
        alone: whether the only part is the whole batch.
        statistics: for each part, what backward needs besides x.
        parts, total, by_device: of replicas: the moments of each part and of the whole batch, and
            the statistics on each device.
    """

    __slots__ = (
        *("alone", "by_device", "context", "number", "operations", "parts", "processes", "rule"),
        *("statistics", "streams", "total"),
    )

    def __init__(self, parts: Columns) -> None:
        """Take the moments of all parts; `BatchSizeError` for one value per channel."""
        self.operations, self.rule = parts.operations[0], parts.rule[0]
        self.processes, self.context, self.number = parts.processes[0], parts.context[0], 0
        self.streams = parts.stream
        self.statistics: list[Any] = []
        self.alone = self.processes is None and self.context is None
        missing = [moments is None for moments in parts.moments]
        found = _of_some(missing, self.operations.moments, parts.x)
        own = [*map(_first, parts.moments, found)]
        total = self.operations.merge(own)
        if self.processes is not None:
            total, self.number = self.processes.moments(total)
        members = 1 if self.processes is None else self.processes.communicator.size
        require_more_than_one_value(total.known_count, parts.x[0].shape, members)
        known = self.operations.statistics(total, self.rule)
        # copied to all devices here, where the streams of all replicas are current
        devices = [x.device for x in parts.x]
        by_device = {device: _on_device(known, device) for device in {*devices}}
        self.statistics = [*map(by_device.__getitem__, devices)]
        if self.context is not None:
            self.parts, self.total, self.by_device = own, total, by_device

    def forward(self, parts: Columns, last: bool) -> list[Tensor]:
        """y of each part, after updating its running statistics.

        `last`: they are updated by `update_running` later. Where a part has memory for y, its
        replica computes it: that memory is returned as it is.
        """
        do, rule = self.operations, self.rule
        running = [None] * len(parts.x) if last else parts.running
        missing = [y is None for y in parts.y]
        columns = parts.x, self.statistics, parts.affine, repeat(rule), running
        results = _of_some(missing, do.forward, *columns)
        ys: list[Any] = [*parts.y]
        for index, result in enumerate(results):
            if result is not None:
                ys[index], self.statistics[index], _ = result
        return ys

    def update_running(self, parts: Columns) -> None:
        """Update the running statistics of all parts."""
        for running, statistics in zip(parts.running, self.statistics, strict=True):
            if running is not None:
                self.operations.update_running(running, statistics)

    def check_over(self) -> None:
        """Raise `StateError` before the forward of replicas has ended."""
        if self.context is not None and not self.context.is_over():
            raise StateError(
                f"expected the backward of {self.context.name} after the forward of all replicas, "
                "got autograd.grad or backward() inside a replica, which can't be synchronized; "
                "compute gradients outside of DataParallelWithCallback"
            )

    def backward(
        self,
        xs: Sequence[Tensor],
        dys: Sequence[Tensor | None],
        affines: Sequence[Affine],
        by_x: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Sums | None]]:
        """dx of each part that needs one, and the sums of each part that has a dy."""
        given = [dy is not None for dy in dys]
        # the loss may not use a y while others, or other processes, depend on its x
        filled = [torch.zeros_like(x) if dy is None else dy for x, dy in zip(xs, dys, strict=True)]
        if self.processes is not None:
            given = [True] * len(dys)
        for x, dy in zip(xs, filled, strict=True):
            check_unchanged(x, dy)
        do, rule, statistics = self.operations, self.rule, self.statistics
        if not self.alone:
            refuse_transforms(self._name, *dys)
        if torch.is_grad_enabled() or has_tangent_or_wrapper(*dys):
            do, statistics = plain.DIFFERENTIABLE, self._differentiable(xs)
        elif len(xs) == 1 and self.processes is not None:
            statistics = [self.processes.labelled(statistics[0], self.number)]
        operands = xs, filled, statistics, affines, repeat(rule)
        sums: list[Sums | None] = _of_some(given, do.backward_reduce, *operands)
        total = self._total(sums, statistics[0])
        here = [total.to(x.device) if isinstance(total, Tensor) else total for x in xs]
        return _of_some(by_x, do.backward_input, *operands, here), sums

    def _name(self) -> str:
        return str(self.context.name) if self.processes is None else self.processes.name()

    def _differentiable(self, xs: Sequence[Tensor]) -> list[Any]:
        """The statistics as differentiable functions of `xs`."""
        do = plain.DIFFERENTIABLE
        total = part = do.merge([do.moments(x) for x in xs])
        if self.processes is not None:
            known = plain.plain_moments(self.statistics[0].moments, xs[0].device)
            total = total_moments(part, known, self.processes, self.number)
        statistics = do.statistics(total, self.rule)
        return [plain.plain_statistics(statistics, x.device) for x in xs]

    def _total(self, sums: Sequence[Sums | None], statistics: Any) -> Any:
        """The sums (2, C) over the whole batch."""
        own = _added([one.exchange for one in sums if one is not None])
        if self.processes is None:
            return own
        if torch.is_grad_enabled():
            return sum_over_processes(as_tensor(own), self.processes, self.number)
        return self.processes.sums(own, self.number, statistics)


def _first(one: Any, other: Any) -> Any:
    """The first that is not None."""
    return other if one is None else one


def _of_some(wanted: Sequence[bool], compute: Callable[..., Any], *columns: Any) -> list[Any]:
    """`compute` of each wanted part, given its place in each column; None for the others."""
    rows = zip(wanted, *columns, strict=False)  # the rule repeats without end
    return [compute(*row) if one else None for one, *row in rows]


def _added(values: Sequence[Any]) -> Any:
    """The sums of all parts, in their order; as tensors of the first's device if some are."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, Tensor) for value in values):
        tensors = list(map(as_tensor, values))
        values = [value.to(tensors[0].device) for value in tensors]
    total = values[0]
    with np.errstate(invalid="ignore", over="ignore"):
        for value in values[1:]:
            total = total + value
    return total


def _on_device(known: Any, device: torch.device) -> Any:
    """What `statistics` returned, on `device`."""
    if isinstance(known, DeviceMoments):
        return known.with_rows(known.rows.contiguous().to(device), known.known_count)
    if isinstance(known.invstd, Tensor) and known.invstd.device != device:
        return plain.plain_statistics(known, device)
    return known
