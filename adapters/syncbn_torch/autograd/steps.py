"""The order of the steps of a node: forward and backward of one or more layers, each in parts.

    forward    moments of each part, merged; exchanged; y of each part
    backward   sums of each part, added; exchanged; dx of each part

Over several processes there is one message per direction for all layers. Backward computes by plain
differentiable operations if its result must be differentiable (`create_graph=True`), or a tensor
has a tangent or is wrapped (`transforms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from syncbn_core.backends.base import Affine, Operations, RunningStatistics, Sums
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import StateError
from syncbn_core.moment_exchange import labelled
from syncbn_core.moments import Moments, NormRule, require_more_than_one_value
from syncbn_torch.autograd.differentiable_exchange import sum_over_processes, total_moments
from syncbn_torch.autograd.exchange import Processes, check_unchanged, needs_plain_backward
from syncbn_torch.backends import plain
from syncbn_torch.backends.memory import as_tensor

__all__ = ["Call", "Columns", "LayerCall", "Part", "columns_of"]


class Part(NamedTuple):
    """One part of the batch of a layer, and the settings of the layer.

    `graph`: whether gradients are enabled in the thread it comes from. The rest is for replicas.
    `inference`: whether it comes from `torch.inference_mode()`.
    `context`: the forward that they share. `kept`: the ctx of its `Keep`, if it has one.
    `moments`, `y`: the moments of x, and memory for y, if the replica computes both itself.
    `stream`: that of its GPU on which it computes x, and goes on with y; None on a host. `arrived`
    is for `waits`.
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
    arrived: float | None = None


Columns = Any  # a `Part` whose fields are tuples, each with one entry per part


def columns_of(parts: Sequence[Part]) -> Columns:
    """The fields of all parts."""
    columns: Columns = zip(*parts, strict=True)
    return Part(*columns)


class LayerCall:
    """One call of one layer.

    Attributes:
        operations, rule: those of all parts.
        alone: whether the only part is the whole batch.
        statistics: for each part, what backward needs besides x.
        parts, total, by_device: of replicas: the moments of each part and of the whole batch, and
            the statistics on each device.
    """

    __slots__ = ("alone", "by_device", "operations", "parts", "rule", "statistics", "total")

    def __init__(self, operations: Operations, rule: NormRule) -> None:
        self.operations, self.rule = operations, rule
        self.alone = True
        self.statistics: list[Any] = []

    def merged_moments(self, xs: Sequence[Tensor], known: Sequence[Any]) -> Any:
        """The moments of all parts together; `known`: of each part, or None."""
        missing = [moments is None for moments in known]
        found = _of_some(missing, self.operations.moments_of_parts, xs)
        self.parts = [*map(_first, known, found)]
        return self.operations.merge(self.parts)

    def set_total(self, total: Any, xs: Sequence[Tensor], replicas: bool) -> None:
        """Set the moments of the whole batch; `BatchSizeError` for one value per channel."""
        require_more_than_one_value(total.known_count, xs[0].shape)
        known = self.operations.statistics(total, self.rule)
        # copied to all devices here, where the streams of all replicas are current
        devices = [x.device for x in xs]
        by_device = {device: _on_device(known, device) for device in {*devices}}
        self.statistics = [*map(by_device.__getitem__, devices)]
        self.alone = False
        if replicas:
            self.total, self.by_device = total, by_device
        else:
            del self.parts  # rows of all ranks can be large

    def forward(
        self,
        xs: Sequence[Tensor],
        affines: Sequence[Affine],
        running: Sequence[RunningStatistics | None],
        room: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """y of each part, after updating its running statistics.

        Where `room` has memory for a y, its replica computes it: that memory is returned as it is.
        """
        do, rule = self.operations, self.rule
        if self.alone:
            (x,), (affine,) = xs, affines
            require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
            done = do.forward_single(x, affine, rule, running[0])
            self.statistics = [done.statistics]
            return [done.y]
        missing = [y is None for y in room]
        compute = partial(do.forward_of_parts, rule=rule)
        results = _of_some(missing, compute, xs, self.statistics, affines, running)
        ys: list[Any] = [*room]
        for index, result in enumerate(results):
            if result is not None:
                ys[index], self.statistics[index], _ = result
        return ys

    def differentiable(self, call: Call, xs: Sequence[Tensor]) -> LayerCall:
        """This call, computed by differentiable operations; statistics are functions of `xs`."""
        do = plain.DIFFERENTIABLE
        total = part = do.merge([do.moments(x) for x in xs])
        if call.processes is not None:
            known = plain.plain_moments(self.statistics[0].moments, xs[0].device)
            total = total_moments(part, known, call.processes, call.number, True)
        statistics = do.statistics(total, self.rule)
        other = LayerCall(do, self.rule)
        other.statistics = [plain.plain_statistics(statistics, x.device) for x in xs]
        return other


class Call:
    """One call of the layers of a node.

    Attributes:
        layers: one of any number of parts, or several of one part.
        processes, context: those of all parts.
        number: of the exchange over processes, 0 for none.
        streams: those of each part.
    """

    __slots__ = ("context", "layers", "number", "processes", "streams")

    def __init__(self, layers: Sequence[Sequence[Part]], parts: Columns) -> None:
        """`parts`: those of all layers."""
        first = layers[0][0]
        self.processes, self.context, self.number = first.processes, first.context, 0
        self.streams = parts.stream
        self.layers = [LayerCall(of_one[0].operations, of_one[0].rule) for of_one in layers]
        if self.processes is None and self.context is None:
            return
        columns = self._by_layer(parts.x, parts.moments)
        totals = [layer.merged_moments(*of_layer) for layer, *of_layer in columns]
        if self.processes is not None:
            totals = self._of_all_processes(totals, first)
        for (layer, xs, _), total in zip(columns, totals, strict=True):
            layer.set_total(total, xs, self.context is not None)

    def _of_all_processes(self, own: list[Any], first: Part) -> list[Any]:
        """`own`, the moments of each layer in this process, merged with those of the others."""
        processes: Any = self.processes
        do = first.operations
        if do is plain.DIFFERENTIABLE:  # by choice, so no warning about missing kernels
            (part,) = own
            values = Moments(part.count, _value(part.mean), _value(part.m2))
            (total,), self.number = processes.exchange_moments([values], True)
            needs_grad = any(t is not None and t.requires_grad for t in (first.x, *first.affine))
            return [total_moments(part, total, processes, self.number, needs_grad and first.graph)]
        sent = [layer.operations.one_row(one) for layer, one in zip(self.layers, own, strict=True)]
        with_kernels = all(layer.operations.with_kernels for layer in self.layers)
        totals: list[Any]
        totals, self.number = processes.exchange_moments(sent, with_kernels)
        return totals

    def _by_layer(self, *columns: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Each layer with its part of the columns, in which the parts of all layers stand."""
        if len(self.layers) == 1:
            return [(self.layers[0], *columns)]
        return [
            (layer, *[column[n : n + 1] for column in columns])
            for n, layer in enumerate(self.layers)
        ]

    def forward(self, parts: Columns, last: bool) -> list[Tensor]:
        """y of each part. `last`: the running statistics are updated by `update_running` later."""
        running = [None] * len(parts.x) if last else parts.running
        columns = self._by_layer(parts.x, parts.affine, running, parts.y)
        return [y for layer, *of_layer in columns for y in layer.forward(*of_layer)]

    def update_running(self, parts: Columns) -> None:
        """Update the running statistics of all parts."""
        for layer, of_layer in self._by_layer(parts.running):
            for running, statistics in zip(of_layer, layer.statistics, strict=True):
                if running is not None:
                    layer.operations.update_running(running, statistics)

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
        layers = self.layers
        if needs_plain_backward(self.processes, *dys):
            layers = [one.differentiable(self, of_layer) for one, of_layer in self._by_layer(xs)]
        elif layers[0].alone and by_x[0]:
            settings = layers[0].statistics[0], affines[0], layers[0].rule
            dx, *rest = layers[0].operations.backward_single(xs[0], filled[0], *settings)
            return [dx], [Sums(None, *rest)]
        elif len(xs) == 1 and self.processes is not None:
            communicator, (statistics,) = self.processes.communicator, layers[0].statistics
            layers[0].statistics = [labelled(communicator, statistics, self.number)]
        columns = [of_layer for _, *of_layer in self._by_layer(xs, filled, affines, given, by_x)]
        sums: list[Sums | None] = []
        for layer, (x, dy, affine, is_given, _) in zip(layers, columns, strict=True):
            reduce = partial(layer.operations.backward_reduce_of_parts, rule=layer.rule)
            sums += _of_some(is_given, reduce, x, dy, layer.statistics, affine)
        totals = self._totals(sums, layers[0].statistics[0])
        dxs: list[Tensor | None] = []
        for layer, total, (x, dy, affine, _, needed) in zip(layers, totals, columns, strict=True):
            here = [total.to(one.device) if isinstance(total, Tensor) else total for one in x]
            compute = partial(layer.operations.backward_input_of_parts, rule=layer.rule)
            dxs += _of_some(needed, compute, x, dy, layer.statistics, affine, here)
        return dxs, sums

    def _totals(self, sums: Sequence[Sums | None], statistics: Any) -> Sequence[Any]:
        """For each layer the sums over the whole batch."""
        own = [
            _added([one.exchange for one in of_layer if one is not None])
            for _, of_layer in self._by_layer(sums)
        ]
        if self.processes is None:
            return own
        joined = _joined(own)
        if torch.is_grad_enabled():
            total = sum_over_processes(as_tensor(joined), self.processes, self.number)
        else:
            total = self.processes.all_reduce(joined, self.number, statistics)
        if len(own) == 1:
            return [total]
        ends = [0, *accumulate(one.shape[0] * one.shape[1] for one in own)]
        return [total[begin:end].reshape(2, -1) for begin, end in pairwise(ends)]


def _first(one: Any, other: Any) -> Any:
    """The first that is not None."""
    return other if one is None else one


def _value(values: Tensor) -> Tensor:
    """`values` without tangent and graph."""
    primal: Tensor = forward_ad.unpack_dual(values).primal
    return primal.detach()


def _of_some(wanted: Sequence[bool], compute: Callable[..., Any], *columns: Any) -> list[Any]:
    """`compute(*columns)` for the wanted parts, each result in its place; None for the others."""
    if all(wanted):
        return compute(*columns)  # type: ignore[no-any-return]
    if not any(wanted):
        return [None] * len(wanted)
    results = iter(compute(*[[*compress(column, wanted)] for column in columns]))
    return [next(results) if one else None for one in wanted]


def _joined(sums: Sequence[Any]) -> Any:
    """The (2, C) sums of several layers, flattened into one message."""
    if len(sums) == 1:
        return sums[0]
    if isinstance(sums[0], Tensor):
        return torch.cat([one.reshape(-1) for one in sums])
    return np.concatenate([one.reshape(-1) for one in sums])


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
