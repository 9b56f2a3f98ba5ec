"""The nodes by which autograd differentiates the exchange twice and more.

With `create_graph=True` the backward of a layer is plain differentiable operations and these two
nodes: the sum over all processes, and the moments of the whole batch as functions of the own part.
The forward of `TotalMoments` sends nothing. That of `SumOverProcesses` is one exchange, and so is
the backward of each.

All ranks must send the same messages. So all make the same nodes in the same order, and one thread
of autograd runs them in the reverse order. A rank without samples, or whose x needs no gradient,
still gives the nodes inputs that need one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.exchange import OF_MOMENTS, OF_SUMS, WITH_GRAPH
from syncbn_core.moments import Moments
from syncbn_torch.processes import Processes

__all__ = ["sum_over_processes", "total_moments"]


def sum_over_processes(
    sums: Tensor, processes: Processes, call: int, kind: int = WITH_GRAPH
) -> Tensor:
    """`sums` (2, C) of the backward of `call`, added up over all processes; differentiable."""
    total: Tensor = SumOverProcesses.apply(sums, processes, call, kind)
    return total


def total_moments(part: Moments, total: Moments, processes: Processes, call: int) -> Moments:
    """`total` as a differentiable function of `part`, the moments of this process in `call`."""
    own = part.mean
    if not own.requires_grad:
        own = own.detach().requires_grad_()
    mean, m2 = TotalMoments.apply(own, part.m2, part.count, total, processes, call)
    return Moments(total.count, mean, m2)


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
        ctx.share, ctx.count = count / total.count if count else 0.0, count
        ctx.processes, ctx.call = processes, call
        return total_mean, total_m2

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor, by_m2: Tensor) -> tuple[Any, ...]:
        gradients = torch.stack([by_mean, by_m2])
        by_mean, by_m2 = sum_over_processes(gradients, ctx.processes, ctx.call, OF_MOMENTS)
        mean, total_mean = ctx.saved_tensors
        by_mean = ctx.share * by_mean + 2 * ctx.count * (mean - total_mean) * by_m2
        return by_mean, by_m2, None, None, None, None
