"""The autograd node of a layer alone: its batch has no other parts."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from syncbn_core.backends.base import Affine, Gradients, Operations, RunningStatistics
from syncbn_core.moments import NormRule, require_more_than_one_value
from syncbn_torch.autograd.exchange import check_unchanged, needs_plain_backward
from syncbn_torch.backends import plain

__all__ = ["BatchNormFunction", "LayerCall", "batch_norm_updating_last", "gradients_alone"]


class LayerCall(NamedTuple):
    """The settings of one layer's call; `running` is updated if given."""

    operations: Operations
    rule: NormRule
    running: RunningStatistics | None


class BatchNormFunction(Function):
    """y of a layer; x (N, C, *spatial); weight, bias: (C,) or None.

    Appends the statistics to `collected`, if given. `BatchSizeError` for one value per channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall,
        collected: list[Any] | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        operations, rule, running = call
        affine = Affine(weight, bias)
        ctx.save_for_backward(x, *affine.for_backward(rule))
        require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
        y, statistics, _ = operations.forward_single(x, affine, rule, running)
        ctx.operations, ctx.rule, ctx.statistics = operations, rule, statistics
        if collected is not None:
            collected.append(statistics)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.saved_tensors  # read only once: checkpointing raises the second time
        _, _, *needs = ctx.needs_input_grad
        call = ctx.operations, ctx.rule, ctx.statistics
        gradients = gradients_alone(*call, x, dy, Affine(*kept), needs[0])
        return None, None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


def gradients_alone(
    operations: Operations,
    rule: NormRule,
    statistics: Any,
    x: Tensor,
    dy: Tensor,
    affine: Affine,
    by_x: bool,
) -> Gradients:
    """The gradients of x, if `by_x`, weight and bias."""
    check_unchanged(x, dy)
    if needs_plain_backward(None, dy):
        operations = plain.DIFFERENTIABLE
        statistics = operations.statistics(operations.moments(x), rule)
    elif by_x:
        return operations.backward_single(x, dy, statistics, affine, rule)
    sums = operations.backward_reduce(x, dy, statistics, affine, rule)
    dx = None
    if by_x:
        dx = operations.backward_input(x, dy, statistics, affine, rule, sums.exchange)
    return Gradients(dx, sums.grad_weight, sums.grad_bias)


def batch_norm_updating_last(call: LayerCall, collected: None, *operands: Tensor | None) -> Tensor:
    """`BatchNormFunction.apply`, after which the running statistics are updated.

    For saved-tensor hooks, which run after the node's forward: if one of them raises, the running
    statistics have not changed.
    """
    statistics: list[Any] = []
    y: Tensor = BatchNormFunction.apply(call._replace(running=None), statistics, *operands)
    if call.running is not None:
        call.operations.update_running(call.running, statistics[0])
    return y
