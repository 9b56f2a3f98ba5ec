"""The autograd node of a layer in a graph of torch.compile: plain operations and two collectives.

torch.compile traces both directions, and joins the operations with those beside the layer.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.moments import EpsMode, Moments, NormRule
from syncbn_core.steps import Affine, RunningStatistics
from syncbn_torch._torch_private import constant_while_tracing
from syncbn_torch.backends import plain

__all__ = ["TRACES_LAYERS", "batch_norm"]

# Whether torch.compile can trace our layers, over processes and in the mode "clamp". In torch 2.8
# a graph updated running statistics wrongly within a checkpoint.
TRACES_LAYERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


class TracedBatchNorm(Function):
    """Returns y, and the row of moments as `compiled_exchange` describes it.

    `number`: of the layer, plus a fraction of its own in each place of the graph. `group`: from
    `compiled_exchange.group_for`; "" for a layer alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        number: Tensor,
        group: str,
        eps: float,
        mode: EpsMode,
    ) -> tuple[Tensor, Tensor]:
        operations, rule = plain.TRACED, NormRule(eps, mode)
        total = operations.row(operations.moments(x))
        if group:
            total = _exchange(torch.cat([total[:-1], number]), "moments", group)
        statistics = operations.statistics(_moments(total), rule)
        y: Tensor = operations.forward(x, statistics, Affine(weight, bias), rule).y
        ctx.save_for_backward(x, weight, total, number)
        ctx.group, ctx.eps, ctx.mode = group, eps, mode
        ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        operations, group, rule = plain.TRACED, ctx.group, NormRule(ctx.eps, ctx.mode)
        x, weight, total, number = ctx.saved_tensors
        affine, statistics = Affine(weight, None), operations.statistics(_moments(total), rule)
        sums = operations.backward_reduce(x, dy, statistics, affine, rule)
        of_all = sums.exchange
        if group:
            message = torch.cat([of_all.reshape(-1), total[-1:], number])
            of_all = _exchange(message, "sums", group)[:-2].reshape(2, -1)
        dx = operations.backward_input(x, dy, statistics, affine, rule, of_all)
        _, by_weight, by_bias, *_ = ctx.needs_input_grad
        grad_weight = sums.grad_weight if by_weight else None
        return dx, grad_weight, sums.grad_bias if by_bias else None, None, None, None, None


def batch_norm(
    x: Tensor,
    affine: Affine,
    running: RunningStatistics | None,
    rule: NormRule,
    number: Tensor,
    group: str,
) -> Tensor:
    """y; updates `running` if given. `number`: that of the layer."""
    place = _next_place()
    if x.is_cpu:
        number = number + place
    else:  # a CUDA graph can't read the layer's number
        number = torch.full((1,), place, dtype=number.dtype, device=x.device)
    y: Tensor
    y, total = TracedBatchNorm.apply(x, *affine, number, group, *rule)
    if running is not None:
        with torch.no_grad():
            statistics = plain.TRACED.statistics(_moments(total), rule)
            plain.TRACED.update_running(running, statistics)
    return y


@constant_while_tracing
def _next_place() -> float:
    """A fraction, another one in each call: torch merges equal collectives of a graph into one."""
    return next(_places) * 2**-20 % 1


_places = count()


def _exchange(values: Tensor, direction: str, group: str) -> Tensor:
    """Send `values`, see `compiled_exchange`."""
    collectives = torch.ops._c10d_functional
    name = f"{direction} {group}"
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(values, "sum", name))
    return result


def _moments(total: Tensor) -> Moments:
    channels = total.shape[0] // 2 - 1
    return Moments(total[0], total[1 : 1 + channels], total[1 + channels : -1])
