"""The autograd node of batch normalization: all parts of a layer in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

One node serves a layer alone and a rank of a process group, which exchanges one message per
direction, with one part. Replicas have several where their parts could not be joined. Backward
computes by plain differentiable operations if its result must be differentiable (`create_graph`),
or dy has a tangent or is wrapped by a transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core import order
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums
from syncbn_torch._torch_private import untraced
from syncbn_torch.arrays import as_tensor
from syncbn_torch.backends import plain
from syncbn_torch.checks import check_unchanged, has_tangent_or_wrapper, refuse_transforms
from syncbn_torch.derivatives import DifferentiableSums, total_moments
from syncbn_torch.masks import filled as of_mask
from syncbn_torch.masks import zeroed
from syncbn_torch.processes import Processes
from syncbn_torch.streams import of_node

__all__ = ["Call", "Part", "batch_norm"]


class Part(NamedTuple):
    """One part of the batch of a layer, and the settings of the layer.

    `graph`: whether gradients are enabled where it comes from. `valid`: as of `order.Part`.
    `stream`: that of its GPU on which its replica computes; None on a host and without replicas.
    """

    operations: Operations
    x: Tensor
    affine: Affine
    running: RunningStatistics | None
    rule: NormRule
    processes: Processes | None
    graph: bool
    valid: Any = None
    stream: Any = None


class Call(NamedTuple):
    """What a forward leaves for its backward, besides tensors it saves.

    `known`: as `order.forward` leaves it. `streams`, `valid`: those of the parts.
    """

    known: order.Forward
    streams: Sequence[Any]
    valid: Sequence[Any]


def batch_norm(parts: Sequence[Part]) -> tuple[Sequence[Tensor], Call]:
    """`(y of each part, call)`, for the parts of one layer; updates their running statistics.

    Raises `BatchSizeError` for one value per channel in the whole batch, and the errors of the
    exchange, before it updates any.
    """
    if parts[0].operations is plain.DIFFERENTIABLE or True not in [part.graph for part in parts]:
        return _forward(parts)
    parts = [part if part.graph else part._replace(x=_constant(part.x)) for part in parts]
    affine = chain(*zip(*[part.affine for part in parts], strict=True))
    *ys, call = BatchNormOfParts.apply(parts, *[part.x for part in parts], *affine)
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
        affine = [part.affine.for_backward(part.rule) for part in parts]
        ctx.save_for_backward(*[part.x for part in parts], *chain(*zip(*affine, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[y for y, p in zip(ys, parts, strict=True) if not p.graph])
        return *ys, ctx.call

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():  # compiled autograd
            return _untraced_backward(ctx, *gradients)
        call: Call = ctx.call
        *dys, _ = gradients
        count = len(dys)
        if call.known.exchange is None and all(dy is None for dy in dys):
            return (None,) * (1 + 3 * count)
        by_x, by_weight, by_bias = [ctx.needs_input_grad[1 + n * count :][:count] for n in range(3)]
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        xs, weights, biases = saved[:count], saved[count : 2 * count], saved[2 * count :]
        affine = [*map(Affine, weights, biases)]
        with of_node(call.streams, xs, dys):
            dxs, sums = _backward(call, xs, dys, affine, by_x)
        of_weights = [s.grad_weight if by else None for s, by in zip(sums, by_weight, strict=True)]
        of_biases = [s.grad_bias if by else None for s, by in zip(sums, by_bias, strict=True)]
        return None, *dxs, *of_weights, *of_biases


_untraced_backward = untraced("syncbn's kernels and messages are not traced")(
    BatchNormOfParts.backward
)


def _forward(parts: Sequence[Part]) -> tuple[list[Tensor], Call]:
    first = parts[0]
    own = [order.Part(p.x, p.affine, p.running, p.valid, None, p.x.device) for p in parts]
    ys, known = order.forward(first.operations, own, first.rule, first.processes)
    return ys, Call(known, [part.stream for part in parts], [part.valid for part in parts])


def _backward(
    call: Call,
    xs: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    affine: Sequence[Affine],
    by_x: Sequence[bool],
) -> tuple[list[Tensor | None], list[Sums]]:
    """dx of each part that needs one, and the sums of each part."""
    # the loss may not use a y while others, or other processes, depend on its x
    filled = [torch.zeros_like(x) if dy is None else dy for x, dy in zip(xs, dys, strict=True)]
    for x, dy in zip(xs, filled, strict=True):
        check_unchanged(x, dy)
    known, exchange = call.known, call.known.exchange
    if exchange is not None:
        refuse_transforms(exchange.name, *dys)
    if not (torch.is_grad_enabled() or (exchange is None and has_tangent_or_wrapper(*dys))):
        return order.backward(known, xs, filled, by_x)
    if not known.steps.takes_masks:
        return order.backward(_differentiable(call, xs, affine), xs, filled, by_x)
    masks = [None if valid is None else torch.from_numpy(valid) for valid in call.valid]
    pairs = [
        (x, None) if m is None else of_mask(x, m, True) for x, m in zip(xs, masks, strict=True)
    ]
    xs, valid = zip(*pairs, strict=True)
    zeros = [dy if m is None else zeroed(dy, m) for dy, m in zip(filled, masks, strict=True)]
    known = _differentiable(call._replace(valid=valid), xs, affine)
    dxs, sums = order.backward(known, xs, zeros, by_x)
    masked = zip(dxs, masks, strict=True)
    return [dx if dx is None or m is None else zeroed(dx, m) for dx, m in masked], sums


def _differentiable(call: Call, xs: Sequence[Tensor], affine: Sequence[Affine]) -> order.Forward:
    """What the forward knows, as differentiable functions of `xs` and `affine`."""
    do, known = plain.DIFFERENTIABLE, call.known
    moments = [order.moments_of(do, x, valid) for x, valid in zip(xs, call.valid, strict=True)]
    total, sums = do.merge(moments), None
    if known.exchange is not None:
        table = as_tensor(known.norms[0].statistics.table)
        total = total_moments(total, table, known.exchange, known.number)
        sums = DifferentiableSums(known.exchange, known.number)
    rule = known.norms[0].rule
    statistics = do.statistics(total, rule)
    norms = [
        Norm(statistics._replace(table=do.near(statistics.table, x)), own, rule)
        for x, own in zip(xs, affine, strict=True)
    ]
    return known._replace(steps=do, norms=norms, exchange=sums)
