"""The autograd node of batch normalization: all parts of a layer in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

One node serves a layer alone and a rank of a process group, which exchanges one message per
direction, with one part. Replicas have several where their parts could not be joined. Backward
computes by plain differentiable operations if its result must be differentiable (`create_graph`),
or dy has a tangent or is wrapped by a transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core import order
from syncbn_core.arrays import near
from syncbn_core.exchange import Exchange
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm, Operations, Sums
from syncbn_torch._torch_private import has_tangent_or_wrapper, untraced
from syncbn_torch.arrays import as_tensor
from syncbn_torch.backends import plain
from syncbn_torch.checks import check_unchanged, refuse_transforms
from syncbn_torch.derivatives import DifferentiableSums, total_moments
from syncbn_torch.streams import of_node

_x, _weight, _bias = attrgetter("x"), attrgetter("affine.weight"), attrgetter("affine.bias")


def batch_norm(
    steps: Operations, parts: Sequence[order.Part], rule: NormRule, processes: Exchange | None
) -> tuple[Sequence[Tensor], order.Forward]:
    """`order.forward` with a graph. No x is an inference tensor where gradients are enabled."""
    call = steps, parts, rule, processes
    if steps is plain.DIFFERENTIABLE or not torch.is_grad_enabled():
        return order.forward(*call)
    operands = [*map(_x, parts), *map(_weight, parts), *map(_bias, parts)]
    *ys, known = BatchNormOfParts.apply(call, *operands)
    return ys, known


class BatchNormOfParts(Function):
    """x of each part, then each weight, then each bias -> y of each part, and `order.Forward`.

    x: (N, C, *spatial); weight, bias: (C,) or None; y like x.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *operands: Any) -> tuple[Any, ...]:
        _, parts, rule, _ = call
        ys, ctx.known = order.forward(*call)
        # a bias is needed for the derivative of an activation alone
        biases = [None] * len(parts) if rule.activation is None else map(_bias, parts)
        ctx.save_for_backward(*map(_x, parts), *map(_weight, parts), *biases)
        ctx.set_materialize_grads(False)
        return *ys, ctx.known

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():  # compiled autograd
            return _untraced_backward(ctx, *gradients)
        *dys, _ = gradients
        count = len(dys)
        if ctx.known.exchange is None and dys.count(None) == count:
            return (None,) * (1 + 3 * count)
        by_x, by_weight, by_bias = [ctx.needs_input_grad[1 + n * count :][:count] for n in range(3)]
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        xs, weights, biases = saved[:count], saved[count : 2 * count], saved[2 * count :]
        affine = [*map(Affine, weights, biases)]
        with of_node(xs, dys):
            dxs, sums = _backward(ctx.known, xs, dys, affine, by_x)
        of_weights = [s.grad_weight if by else None for s, by in zip(sums, by_weight, strict=True)]
        of_biases = [s.grad_bias if by else None for s, by in zip(sums, by_bias, strict=True)]
        return None, *dxs, *of_weights, *of_biases


_untraced_backward = untraced("syncbn's kernels and messages are not traced")(
    BatchNormOfParts.backward
)


def _backward(
    known: order.Forward,
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
    if known.exchange is not None:
        refuse_transforms(known.exchange.name, *dys)
    if not (torch.is_grad_enabled() or (known.exchange is None and has_tangent_or_wrapper(*dys))):
        return order.backward(known, xs, filled, by_x)
    return order.backward(_differentiable(known, xs, affine), xs, filled, by_x)


def _differentiable(
    known: order.Forward, xs: Sequence[Tensor], affine: Sequence[Affine]
) -> order.Forward:
    """What the forward knows, as differentiable functions of `xs` and `affine`."""
    do = plain.DIFFERENTIABLE
    masks = [None if mask is None else as_tensor(mask) for mask in known.masks or [None] * len(xs)]
    parts = [order.Part(x, mask=mask) for x, mask in zip(xs, masks, strict=True)]
    filled = [order.filled_part(do, part) for part in parts]
    moments = [order.moments_of(do, part.x, part.valid) for part in filled]
    total, sums = do.merge(moments), None
    if known.exchange is not None:
        table = as_tensor(known.norms[0].statistics.table)
        total = total_moments(total, table, known.exchange, known.number)
        sums = DifferentiableSums(known.exchange, known.number)
    rule = known.norms[0].rule
    statistics = do.statistics(total, rule)
    norms = [
        Norm(statistics._replace(table=near(statistics.table, x)), own, rule)
        for x, own in zip(xs, affine, strict=True)
    ]
    return known._replace(steps=do, norms=norms, exchange=sums, masks=masks)
