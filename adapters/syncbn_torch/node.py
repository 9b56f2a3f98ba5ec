"""The autograd node of batch normalization: all parts of a layer in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

    forward    moments of each part, merged; exchanged; y of each part
    backward   sums of each part, added; exchanged; dx of each part

One node serves a layer alone (one part), replicas (a part each), and a rank of a process group,
which exchanges one message per direction. Backward computes by plain differentiable operations if
its result must be differentiable (`create_graph=True`), or, in a layer alone, dy has a tangent or
is wrapped by a transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.errors import StateError
from syncbn_core.masks import without_filled
from syncbn_core.moments import Moments, NormRule, Statistics, require_more_than_one_value
from syncbn_core.steps import Affine, Operations, RunningStatistics, Sums
from syncbn_torch.arrays import as_tensor
from syncbn_torch.backends import plain
from syncbn_torch.checks import check_unchanged, has_tangent_or_wrapper, refuse_transforms
from syncbn_torch.derivatives import sum_over_processes, total_moments
from syncbn_torch.masks import Valid
from syncbn_torch.processes import Processes
from syncbn_torch.streams import of_node

__all__ = ["Call", "Part", "batch_norm"]


class Part(NamedTuple):
    """One part of the batch of a layer, and the settings of the layer.

    `graph`: whether gradients are enabled in the thread it comes from. The rest is for replicas.
    `inference`: whether it comes from `torch.inference_mode()`.
    `context`: the forward that they share. `kept`: the ctx of a node that has saved x, if any.
    `stream`: that of its GPU on which it computes x, and goes on with y; None on a host.
    `nodes`: how many nodes of autograd its thread has made.
    `valid`: with a mask, what `masks.filled` says of x.
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
    stream: Any = None
    nodes: int = 0
    valid: Valid | None = None

    def moments(self) -> Moments:
        """Those of x, of its valid values if there is a mask."""
        return _moments(self.operations, self.operations.take(self.x), self.valid)


class Call(NamedTuple):
    """What a forward leaves for its backward and for recomputations, besides tensors it saves.

    `operations`, `rule`, `processes`, `context`: those of all parts. `number`: of the exchange.
    `moments`: of each part. `total`: those of the whole batch; `known`: its statistics on each
    device. `kept`, `streams`, `valid`: those of the parts.
    """

    operations: Operations
    rule: NormRule
    processes: Processes | None
    context: Any
    number: int
    moments: Sequence[Moments]
    total: Moments
    known: dict[torch.device, Statistics]
    kept: Sequence[Any]
    streams: Sequence[Any]
    valid: Sequence[Valid | None]


def batch_norm(parts: Sequence[Part]) -> tuple[Sequence[Tensor], Call]:
    """`(y of each part, call)`, for the parts of one layer; updates their running statistics.

    Raises `BatchSizeError` for one value per channel in the whole batch, and the errors of the
    exchange, before it updates any.
    """
    if parts[0].operations is plain.DIFFERENTIABLE or True not in [part.graph for part in parts]:
        return _forward(parts)
    parts = [part if part.graph else part._replace(x=_constant(part.x)) for part in parts]
    affine = chain(*zip(*(part.affine for part in parts), strict=True))
    *ys, call = BatchNormOfParts.apply(parts, *(part.x for part in parts), *affine)
    return ys, call


def _constant(x: Tensor) -> Tensor:
    """x as the node can save it."""
    return x.clone() if x.is_inference() else x.detach()


class BatchNormOfParts(Function):
    """x of each part, then each weight, then each bias -> y of each part, and the `Call`.

    x: (N, C, *spatial); weight, bias: (C,) or None; y like x.
    """

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Part], *operands: Any) -> tuple[Any, ...]:
        ys, ctx.call = _forward(parts)
        own = [part.x for part in parts if part.kept is None]
        affine = [part.affine.for_backward(part.rule) for part in parts]
        ctx.save_for_backward(*own, *chain(*zip(*affine, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y, p in zip(ys, parts, strict=True) if not p.graph))
        return *ys, ctx.call

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call: Call = ctx.call
        *dys, _ = gradients
        if call.context is not None and not call.context.is_over():
            raise StateError(
                f"expected the backward of {call.context.name} after the forward of all replicas, "
                "got autograd.grad or backward() inside a replica, which can't be synchronized; "
                "compute gradients outside of DataParallelWithCallback"
            )
        count = len(dys)
        if call.processes is None and all(dy is None for dy in dys):
            return (None,) * (1 + 3 * count)
        by_x, by_weight, by_bias = (ctx.needs_input_grad[1 + n * count :][:count] for n in range(3))
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        own, weights, biases = iter(saved[: -2 * count]), saved[-2 * count : -count], saved[-count:]
        affine = [*map(Affine, weights, biases)]
        xs = [next(own) if kept is None else kept.saved_tensors[0] for kept in call.kept]
        with of_node(call.streams, xs, dys):
            dxs, sums = _backward(call, xs, dys, affine, by_x)
        of_weights = (s.grad_weight if by else None for s, by in zip(sums, by_weight, strict=True))
        of_biases = (s.grad_bias if by else None for s, by in zip(sums, by_bias, strict=True))
        return None, *dxs, *of_weights, *of_biases


def _forward(parts: Sequence[Part]) -> tuple[list[Tensor], Call]:
    first = parts[0]
    do, rule, processes = first.operations, first.rule, first.processes
    message = None if processes is None else processes.begin(first.x.shape[1])
    xs, number, members = [do.take(part.x) for part in parts], 0, 1
    moments = [_moments(do, x, part.valid) for x, part in zip(xs, parts, strict=True)]
    total = do.merge(moments, 0.0 if message is None else message.label)
    if processes is not None and message is not None:
        total, number = processes.moments(total, message)
        members = processes.communicator.size
    require_more_than_one_value(total.count, first.x.shape, members)
    # copied to all devices here, where the streams of all replicas are current
    known = {
        device: do.statistics(_on(device, total), rule) for device in {p.x.device for p in parts}
    }
    operands = [(known[part.x.device], part.affine, rule, part.running) for part in parts]
    ys = [do.forward(x, *others) for x, others in zip(xs, operands, strict=True)]
    kept, streams = [part.kept for part in parts], [part.stream for part in parts]
    of_parts = moments, total, known, kept, streams, [part.valid for part in parts]
    return ys, Call(do, rule, processes, first.context, number, *of_parts)


def _backward(
    call: Call,
    xs: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    affine: Sequence[Affine],
    by_x: Sequence[bool],
) -> tuple[list[Tensor | None], list[Sums]]:
    """dx of each part that needs one, and the sums of each part."""
    do, processes = call.operations, call.processes
    statistics = [call.known[x.device] for x in xs]
    # the loss may not use a y while others, or other processes, depend on its x
    filled = [torch.zeros_like(x) if dy is None else dy for x, dy in zip(xs, dys, strict=True)]
    for x, dy in zip(xs, filled, strict=True):
        check_unchanged(x, dy)
    if call.context is not None or processes is not None:
        refuse_transforms(lambda: _name(call), *dys)
    graph = torch.is_grad_enabled()
    if graph or has_tangent_or_wrapper(*dys):
        do, statistics = plain.DIFFERENTIABLE, _differentiable(call, xs)
    message = labels = None
    if processes is not None and not graph:
        message = processes.begin_sums(statistics[0].table, call.number)
        labels = message.labels if len(xs) == 1 else None
    operands = [
        (*do.take_pair(x, dy), known, own, call.rule)
        for x, dy, known, own in zip(xs, filled, statistics, affine, strict=True)
    ]
    sums = [do.backward_reduce(*operand, labels) for operand in operands]
    total = _added([one.exchange for one in sums])
    if processes is not None and message is None:
        total = sum_over_processes(total, processes, call.number)
    elif processes is not None and message is not None:
        total = processes.sums(total, message)
    totals = [total.to(x.device) if isinstance(total, Tensor) else total for x in xs]
    dxs = [
        do.backward_input(*operand, of_all, None, labels) if by else None
        for operand, of_all, by in zip(operands, totals, by_x, strict=True)
    ]
    return dxs, sums


def _moments(do: Operations, x: Any, valid: Valid | None) -> Moments:
    part = do.moments(x)
    if valid is None:
        return part
    count, fill = valid
    on_host = isinstance(part.rows, np.ndarray)
    return without_filled(np if on_host else torch, part, count, fill.numpy() if on_host else fill)


def _name(call: Call) -> str:
    return str(call.context.name) if call.processes is None else call.processes.name()


def _differentiable(call: Call, xs: Sequence[Tensor]) -> list[Statistics]:
    """The statistics as differentiable functions of `xs`."""
    do = plain.DIFFERENTIABLE
    total = do.merge([_moments(do, x, valid) for x, valid in zip(xs, call.valid, strict=True)])
    if call.processes is not None:
        known = as_tensor(call.known[xs[0].device].table)
        total = total_moments(total, known, call.processes, call.number)
    statistics = do.statistics(total, call.rule)
    return [statistics._replace(table=statistics.table.to(x.device)) for x in xs]


def _added(values: Sequence[Any]) -> Any:
    """The sums of all parts, in their order; tensors on the device of the first."""
    total, *others = values
    with np.errstate(invalid="ignore", over="ignore"):
        for value in others:
            total = total + (value.to(total.device) if isinstance(value, Tensor) else value)
    return total


def _on(device: torch.device, moments: Moments) -> Moments:
    """`moments` on `device`, unless NumPy holds them."""
    rows = moments.rows
    return moments._replace(rows=rows.to(device)) if isinstance(rows, Tensor) else moments
