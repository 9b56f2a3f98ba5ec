"""The autograd node of a layer alone or over a process group, without replicas.

Backward calls the collective directly, because each process has its own autograd threads.
Several layers may share one node, and then also one message per direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.backends.base import Affine, Operations, RunningStatistics, Sums
from syncbn_core.moment_exchange import exchange_moments
from syncbn_core.moments import NormRule, require_more_than_one_value
from syncbn_torch.autograd.exchange import Processes, needs_plain_backward
from syncbn_torch.backends import plain

__all__ = ["BatchNormFunction", "LayerCall", "batch_norm_with_hooks"]


class LayerCall(NamedTuple):
    """The settings of one layer's call; `running` is updated if given."""

    operations: Operations
    rule: NormRule
    running: RunningStatistics | None


class BatchNormFunction(Function):
    """y of each layer; `operands` are x, weight, bias of the first layer, the second, and so on.

    x: (N, C, *spatial); weight, bias: (C,) or None; y like x. Appends the statistics of each
    layer to `known`. Raises `BatchSizeError` for one value per channel over the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[LayerCall],
        processes: Processes | None,
        known: list[Any],
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.processes, ctx.statistics = calls, processes, known
        xs, weights, biases = operands[::3], operands[1::3], operands[2::3]
        ctx.save_for_backward(*xs, *weights)
        outputs = []
        if processes is None:
            for (operations, rule, running), x, weight, bias in zip(
                calls, xs, weights, biases, strict=True
            ):
                require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
                affine = Affine(weight, bias)
                y, statistics, _ = operations.forward_single(x, affine, rule, running)
                known.append(statistics)
                outputs.append(y)
            return tuple(outputs)
        parts = [call.operations.moments(x) for call, x in zip(calls, xs, strict=True)]
        totals, ctx.number = exchange_moments(processes.communicator, parts, processes.site)
        for total, x in zip(totals, xs, strict=True):
            require_more_than_one_value(total.known_count, x.shape)
        for (operations, rule, running), total, x, weight, bias in zip(
            calls, totals, xs, weights, biases, strict=True
        ):
            statistics = operations.statistics(total, rule)
            affine = Affine(weight, bias)
            y, statistics, _ = operations.forward(x, statistics, affine, rule, running)
            known.append(statistics)
            outputs.append(y)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        size = len(ctx.calls)
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        xs, weights = saved[:size], saved[size:]
        if ctx.processes is None:
            gradients: list[Any] = [None, None, None]
            for i, (call, statistics, x, dy, weight) in enumerate(
                zip(ctx.calls, ctx.statistics, xs, dys, weights, strict=True)
            ):
                gradients += _backward_alone(ctx, 3 + 3 * i, call, statistics, x, dy, weight)
            return tuple(gradients)
        needs_plain_backward(ctx.processes, *dys)
        return _backward_over_processes(ctx, xs, dys, weights)


def batch_norm_with_hooks(
    calls: Sequence[LayerCall],
    processes: Processes | None,
    known: list[Any],
    *operands: Tensor | None,
) -> tuple[Tensor, ...]:
    """`BatchNormFunction.apply` for use under saved-tensor hooks.

    The hooks run after the node's forward and may raise, so this updates running statistics last.
    """
    later = [call._replace(running=None) for call in calls]
    outputs: tuple[Tensor, ...] = BatchNormFunction.apply(later, processes, known, *operands)
    for call, statistics in zip(calls, known, strict=True):
        if call.running is not None:
            call.operations.update_running(call.running, statistics)
    return outputs


def _backward_alone(
    ctx: Any, first: int, call: LayerCall, statistics: Any, x: Tensor, dy: Tensor, weight: Any
) -> list[Tensor | None]:
    """Gradients of x, weight and bias (inputs `first`, + 1, + 2) for a layer alone."""
    operations, rule, _ = call
    affine = Affine(weight)
    if needs_plain_backward(None, dy):
        operations = plain.OPERATIONS
        statistics = operations.statistics(operations.moments(x), rule)
    elif ctx.needs_input_grad[first]:
        done = operations.backward_single(x, dy, statistics, affine, rule)
        return [done.x, *needed(ctx, first + 1, done.weight, done.bias)]
    sums = operations.backward_reduce(x, dy, statistics, affine, rule)
    dx = None
    if ctx.needs_input_grad[first]:
        dx = operations.backward_input(x, dy, statistics, affine, rule, sums.exchange)
    return [dx, *needed(ctx, first + 1, sums.grad_weight, sums.grad_bias)]


def _backward_over_processes(
    ctx: Any, xs: Sequence[Tensor], dys: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """Gradients after one all_reduce for all layers, which every rank calls, needed or not."""
    layers = list(zip(ctx.calls, ctx.statistics, xs, dys, weights, strict=True))
    sums: list[Sums] = [
        call.operations.backward_reduce(x, dy, statistics, Affine(weight), call.rule)
        for call, statistics, x, dy, weight in layers
    ]
    exchanges = [one.exchange for one in sums]
    total = ctx.processes.all_reduce(_joined(exchanges), ctx.number)
    gradients: list[Any] = [None, None, None]
    start = 0
    for i, (call, statistics, x, dy, weight) in enumerate(layers):
        end = start + 2 * x.shape[1]
        own = total if len(layers) == 1 else total[start:end].reshape(2, -1)
        affine, start = Affine(weight), end
        dx = call.operations.backward_input(x, dy, statistics, affine, call.rule, own)
        gradients.append(dx)
        gradients += needed(ctx, 4 + 3 * i, sums[i].grad_weight, sums[i].grad_bias)
    return tuple(gradients)


def _joined(sums: Sequence[Any]) -> Any:
    """The (2, C) sums of several layers, flattened into one message."""
    if len(sums) == 1:
        return sums[0]
    if isinstance(sums[0], Tensor):
        return torch.cat([one.reshape(-1) for one in sums])
    return np.concatenate([one.reshape(-1) for one in sums])


def needed(ctx: Any, first: int, grad_weight: Tensor, grad_bias: Tensor) -> list[Tensor | None]:
    """The gradients that autograd needs of weight and bias, inputs `first` and `first + 1`."""
    by_weight, by_bias = ctx.needs_input_grad[first : first + 2]
    return [grad_weight if by_weight else None, grad_bias if by_bias else None]
