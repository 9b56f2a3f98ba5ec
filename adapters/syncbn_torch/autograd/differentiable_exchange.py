"""The nodes by which autograd differentiates the exchange: twice and more, and in forward mode.

With `create_graph=True`, and in forward-mode AD, a layer is plain differentiable operations and
these two nodes: the sum over all processes, and the moments of the whole batch as functions of the
own part. The forward of `TotalMoments` sends nothing; that of `SumOverProcesses` is one all_reduce.
The backward and the jvp of each are one all_reduce.

All ranks must send the same messages. So all make the same nodes in the same order, and one thread
of autograd runs them in the reverse order. A rank without samples, or whose x needs no gradient,
still gives the nodes inputs that need one (in forward mode: a zero tangent).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from syncbn_core.exchange import OF_MOMENTS, OF_SUMS, OF_TANGENTS, WITH_GRAPH
from syncbn_core.moments import Moments
from syncbn_torch._torch_private import forward_ad_active
from syncbn_torch.autograd.exchange import Processes

__all__ = ["sum_over_processes", "total_moments"]


def sum_over_processes(
    sums: Tensor, processes: Processes, call: int, kind: int = WITH_GRAPH
) -> Tensor:
    """`sums` (2, C) of the backward of `call`, added up over all processes; differentiable."""
    total: Tensor = SumOverProcesses.apply(_input(sums, False), processes, call, kind)
    return total


def total_moments(
    part: Moments, total: Moments, processes: Processes, call: int, needs_grad: bool
) -> Moments:
    """`total` as a differentiable function of `part`, the moments of this process in `call`.

    `needs_grad`: whether the node must be part of the graph; must be the same on all ranks.
    """
    own = _input(part.mean, needs_grad), _input(part.m2, False)
    mean, m2 = TotalMoments.apply(*own, part.count, total, processes, call)
    return Moments(total.count, mean, m2)


def _input(values: Tensor, needs_grad: bool) -> Tensor:
    """`values` with a tangent, if forward-mode AD is active, and a gradient if one is needed."""
    tangent = None
    if forward_ad_active():
        values, tangent = forward_ad.unpack_dual(values)
        tangent = torch.zeros_like(values) if tangent is None else tangent
    if needs_grad and not values.requires_grad:
        values = values.detach().requires_grad_()
    return values if tangent is None else forward_ad.make_dual(values, tangent)


class SumOverProcesses(Function):
    """`values` (2, C), added up over all processes; the gradient is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: Processes, call: int, kind: int) -> Tensor:
        total: Tensor = processes.sums(values, call, None, kind)
        ctx.processes, ctx.number = processes, processes.member.exchanges
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return sum_over_processes(gradient, ctx.processes, ctx.number, OF_SUMS), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        total: Tensor = SumOverProcesses.apply(tangent, ctx.processes, ctx.number, OF_TANGENTS)
        return total


class TotalMoments(Function):
    """Mean and m2 `(C,)` of the whole batch, as known from the forward, as functions of `part`.

    `part`: mean and m2 of this process, of `count` values. For n values in all,

        d mean / d mean_i = count / n
        d m2 / d mean_i = 2 count (mean_i - mean)        d m2 / d m2_i = 1
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        m2: Tensor,
        count: int,
        total: Moments,
        processes: Processes,
        call: int,
    ) -> tuple[Tensor, Tensor]:
        total_mean, total_m2 = total.mean.clone(), total.m2.clone()
        ctx.save_for_backward(mean, total_mean)
        ctx.save_for_forward(mean, total_mean)
        ctx.share, ctx.count = count / total.count if count else 0.0, count
        ctx.processes, ctx.call = processes, call
        return total_mean, total_m2

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor, by_m2: Tensor) -> tuple[Any, ...]:
        gradients = torch.stack([by_mean, by_m2])
        by_mean, by_m2 = sum_over_processes(gradients, ctx.processes, ctx.call, OF_MOMENTS)
        by_mean = ctx.share * by_mean + _slope(ctx) * by_m2
        return by_mean, by_m2, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, mean: Tensor, m2: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        tangents = torch.stack([ctx.share * mean, m2 + _slope(ctx) * mean])
        total = SumOverProcesses.apply(tangents, ctx.processes, ctx.call, OF_TANGENTS)
        return total[0], total[1]


def _slope(ctx: Any) -> Any:
    """d m2 / d mean_i."""
    mean, total_mean = ctx.saved_tensors
    return 2 * ctx.count * (mean - total_mean)
