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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.exchange import Exchange, Message
from syncbn_core.labels import OF_MOMENTS, OF_SUMS, WITH_GRAPH
from syncbn_core.moments import Moments, columns


def sum_over_processes(
    sums: Tensor, processes: Exchange, call: int, kind: int = WITH_GRAPH
) -> Tensor:
    """`sums` (2, C) of the backward of `call`, added up over all processes; differentiable."""
    total: Tensor = SumOverProcesses.apply(sums, processes, call, kind)
    return total


class DifferentiableSums(NamedTuple):
    """An `Exchange` of the sums of the backward of `call`, in a graph that autograd derives."""

    processes: Exchange
    call: int

    def begin_sums(self, like: Any, forward: int) -> Message:
        """A message that is never sent, because `sums` sends one of its own."""
        return self.processes.begin_sums(like, forward, WITH_GRAPH)

    def sums(self, sums: Tensor, message: Message) -> Tensor:
        return sum_over_processes(sums, self.processes, self.call)


def total_moments(part: Moments, table: Tensor, processes: Exchange, call: int) -> Moments:
    """Those of the whole batch, with the given `table`, as a differentiable function of `part`.

    `part`: of this process in `call`, of one row.
    """
    own = part.rows
    if not own.requires_grad:
        own = own.detach().requires_grad_()
    total = table[: own.shape[1] - 1]
    return Moments(TotalMoments.apply(own, total, processes, call), None)


class SumOverProcesses(Function):
    """`values` (2, C), added up over all processes; the gradient is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: Exchange, call: int, kind: int) -> Tensor:
        total: Tensor = processes.sums(values, processes.begin_sums(values, call, kind))
        ctx.processes, ctx.number = processes, processes.member.exchanges
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return sum_over_processes(gradient, ctx.processes, ctx.number, OF_SUMS), None, None, None


class TotalMoments(Function):
    """The row of the whole batch, as known from the forward, as a function of `own` `(1, 2 C + 2)`.

    For n values in all, and the n_i, mean_i and m2_i of `own`,

        d mean / d mean_i = n_i / n
        d m2 / d mean_i = 2 n_i (mean_i - mean)        d m2 / d m2_i = 1
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: Tensor, processes: Exchange, call: int) -> Tensor:
        row = torch.cat([total, total[:1] * 0])[None]
        ctx.save_for_backward(own, row)
        ctx.processes, ctx.call = processes, call
        return row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        own, row = ctx.saved_tensors
        gradients = gradient[0, 1:-1].reshape(2, -1)
        by_mean, by_m2 = sum_over_processes(gradients, ctx.processes, ctx.call, OF_MOMENTS)
        (count, mean, _), (total, total_mean, _) = columns(own), columns(row)
        share = torch.where(count > 0, count / total, 0)[0]
        by_mean = share * by_mean + 2 * count[0] * (mean - total_mean)[0] * by_m2
        zero = by_mean[:1] * 0
        return torch.cat([zero, by_mean, by_m2, zero])[None], None, None, None
