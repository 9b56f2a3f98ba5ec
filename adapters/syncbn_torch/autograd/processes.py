"""The autograd node of layers over a process group, without replicas.

Backward calls the collective directly, because each process has its own autograd threads.
Several layers may share one node, and then also one message per direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from syncbn_core.backends.base import Affine, RunningStatistics, Sums
from syncbn_core.moment_exchange import labelled
from syncbn_core.moments import Moments, NormRule, Statistics, require_more_than_one_value
from syncbn_torch.autograd.alone import LayerCall
from syncbn_torch.autograd.differentiable_exchange import sum_over_processes, total_moments
from syncbn_torch.autograd.exchange import (
    Processes,
    check_unchanged,
    needs_plain_backward,
    wanted_gradients,
)
from syncbn_torch.backends import plain

__all__ = ["SyncBatchNormFunction", "batch_norm_of_processes", "batch_norm_with_tangents"]


class SyncBatchNormFunction(Function):
    """y of each layer; `operands` are x, weight, bias of the first layer, the second, and so on.

    x: (N, C, *spatial); weight, bias: (C,) or None; y like x. Appends the statistics of each
    layer to `all_statistics`. Raises `BatchSizeError` for one value per channel over the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[LayerCall],
        processes: Processes,
        all_statistics: list[Any],
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.processes, ctx.statistics = calls, processes, all_statistics
        xs, affines = operands[::3], list(map(Affine, operands[1::3], operands[2::3]))
        kept = [affine.for_backward(call.rule) for affine, call in zip(affines, calls, strict=True)]
        ctx.save_for_backward(*xs, *chain.from_iterable(kept))
        parts = [call.operations.moments(x) for call, x in zip(calls, xs, strict=True)]
        with_kernels = all(call.operations.with_kernels for call in calls)
        totals, ctx.number = processes.exchange_moments(parts, with_kernels)
        for total, x in zip(totals, xs, strict=True):
            require_more_than_one_value(total.known_count, x.shape)
        outputs = []
        for (operations, rule, running), total, x, affine in zip(
            calls, totals, xs, affines, strict=True
        ):
            statistics = operations.statistics(total, rule)
            y, statistics, _ = operations.forward(x, statistics, affine, rule, running)
            all_statistics.append(statistics)
            outputs.append(y)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        size = len(ctx.calls)
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        xs, affines = saved[:size], list(map(Affine, saved[size::2], saved[size + 1 :: 2]))
        for x, dy in zip(xs, dys, strict=True):
            check_unchanged(x, dy)
        calls, statistics = ctx.calls, ctx.statistics
        if needs_plain_backward(ctx.processes, *dys):  # create_graph=True
            calls = [call._replace(operations=plain.DIFFERENTIABLE) for call in calls]
            statistics = [
                _differentiable(ctx, *of_layer)
                for of_layer in zip(statistics, xs, calls, strict=True)
            ]
        return _backward_over_processes(ctx, calls, statistics, xs, dys, affines)


def batch_norm_of_processes(
    calls: Sequence[LayerCall],
    processes: Processes,
    all_statistics: list[Any],
    *operands: Tensor | None,
) -> tuple[Tensor, ...]:
    """y of each layer; updates the running statistics of all, or if a step fails of none.

    Saved-tensor hooks run after the node's forward, and the last of several layers may fail.
    """
    later = [call._replace(running=None) for call in calls]
    outputs: tuple[Tensor, ...] = SyncBatchNormFunction.apply(
        later, processes, all_statistics, *operands
    )
    for call, statistics in zip(calls, all_statistics, strict=True):
        if call.running is not None:
            call.operations.update_running(call.running, statistics)
    return outputs


def batch_norm_with_tangents(
    processes: Processes,
    x: Tensor,
    affine: Affine,
    rule: NormRule,
    running: RunningStatistics | None,
) -> Tensor:
    """y in forward-mode AD, by differentiable operations; updates `running` if given.

    All ranks must be in a dual level; their x, weight and bias may have tangents or not.
    """
    operations = plain.DIFFERENTIABLE
    part = operations.moments(x)
    measured = Moments(part.count, _value(part.mean), _value(part.m2))
    # True: plain operations by choice, so no warning about missing kernels
    (total,), number = processes.exchange_moments([measured], True)
    assert isinstance(total, Moments)
    require_more_than_one_value(total.known_count, x.shape)
    needs_grad = any(t is not None and t.requires_grad for t in (x, *affine))
    total = total_moments(part, total, processes, number, needs_grad and torch.is_grad_enabled())
    statistics = operations.statistics(total, rule)
    y: Tensor = operations.forward(x, statistics, affine, rule, running).y
    return y


def _value(values: Tensor) -> Tensor:
    """`values` without tangent and graph."""
    primal: Tensor = forward_ad.unpack_dual(values).primal
    return primal.detach()


def _differentiable(ctx: Any, statistics: Any, x: Tensor, call: LayerCall) -> Statistics:
    """The statistics of the whole batch as a differentiable function of x."""
    total = plain.plain_moments(statistics.moments, x.device)
    part = call.operations.moments(x)
    total = total_moments(part, total, ctx.processes, ctx.number, True)
    of_batch: Statistics = call.operations.statistics(total, call.rule)
    return of_batch


def _backward_over_processes(
    ctx: Any,
    calls: Sequence[LayerCall],
    all_statistics: list[Any],
    xs: Sequence[Tensor],
    dys: Sequence[Tensor],
    affines: Sequence[Affine],
) -> tuple[Any, ...]:
    """Gradients after one all_reduce for all layers, which every rank calls, needed or not."""
    if len(all_statistics) == 1:
        all_statistics = [labelled(ctx.processes.communicator, all_statistics[0], ctx.number)]
    layers = list(zip(calls, all_statistics, xs, dys, affines, strict=True))
    sums: list[Sums] = [
        call.operations.backward_reduce(x, dy, statistics, affine, call.rule)
        for call, statistics, x, dy, affine in layers
    ]
    joined = _joined([one.exchange for one in sums])
    if torch.is_grad_enabled():
        total = sum_over_processes(joined, ctx.processes, ctx.number)
    else:
        total = ctx.processes.all_reduce(joined, ctx.number, all_statistics[0])
    gradients: list[Any] = [None, None, None]
    start = 0
    for i, (call, statistics, x, dy, affine) in enumerate(layers):
        end = start + 2 * x.shape[1]
        total_of_layer = total if len(layers) == 1 else total[start:end].reshape(2, -1)
        start = end
        dx = call.operations.backward_input(x, dy, statistics, affine, call.rule, total_of_layer)
        gradients.append(dx)
        gradients += wanted_gradients(ctx, 4 + 3 * i, sums[i].grad_weight, sums[i].grad_bias)
    return tuple(gradients)


def _joined(sums: Sequence[Any]) -> Any:
    """The (2, C) sums of several layers, flattened into one message."""
    if len(sums) == 1:
        return sums[0]
    if isinstance(sums[0], Tensor):
        return torch.cat([one.reshape(-1) for one in sums])
    return np.concatenate([one.reshape(-1) for one in sums])
