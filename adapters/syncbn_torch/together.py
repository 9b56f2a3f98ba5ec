"""Several layers whose inputs are ready together share one message between processes.

Branches of a block, levels of a pyramid: what a small message costs is its latency, so five layers
in one cost as much as one layer (docs/scaling.md has the measurement).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules import module as modules

from syncbn_core.comm import ProcessCommunicator, Site
from syncbn_core.errors import ShapeError
from syncbn_torch import arithmetic, originals
from syncbn_torch.arithmetic import Statistics
from syncbn_torch.batchnorm import _SynchronizedBatchNorm, dtype_name
from syncbn_torch.functional import Call, needed_gradients, on_the_way
from syncbn_torch.interop import as_array, widened
from syncbn_torch.names import name_of
from syncbn_torch.statistics import Channelwise, RunningStatistics, tensor_of
from syncbn_torch.transforms import beyond_memory, needs_plain_forward, refuse_over_processes

__all__ = ["forward_together"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def forward_together(
    layers: Sequence[_SynchronizedBatchNorm], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """`[layer(x) for layer, x in zip(layers, inputs)]`, with one exchange between processes.

    In training over one process group that is one all_gather for all layers forward and one
    all_reduce backward, which runs when the gradients of all outputs are there. Everywhere else
    (eval, one process, replicas, unlike groups or devices, hooks, subclasses) the layers
    run one after the other; every process has to come to the same of the two. `ShapeError` unless
    there are as many inputs as layers, each of them once; else the errors of the layers.
    """
    if len(layers) != len(inputs) or len(set(layers)) != len(layers):
        raise ShapeError(
            f"expected one input for each of several layers, got {len(inputs)} inputs for "
            f"{len(set(layers))} layers; a layer that is used twice runs twice"
        )
    communicator = _common_communicator(layers)
    if communicator is None or len({(type(x), x.device) for x in inputs}) > 1:
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    for layer, x in zip(layers, inputs, strict=True):
        layer._check(x)
    for layer, x in zip(layers, inputs, strict=True):
        operands = (x, layer.weight, layer.bias)
        needs_plain_forward(partial(name_of, layer), False, True, *operands)
    own = [layer._operands(x) for layer, x in zip(layers, inputs, strict=True)]
    dtypes = tuple(map(dtype_name, inputs))
    communicator = communicator.at(Site(lambda: ", ".join(map(name_of, layers)), dtypes, layers[0]))
    calls = [Call(layer.eps, layer.effective_eps_mode, communicator) for layer in layers]
    running = [one for *_, one in own]
    every = [operand for (weight, bias, _), x in zip(own, inputs, strict=True)
                for operand in widened(x, weight, bias)]  # fmt: skip
    known: list[Statistics] = []
    outputs = Together.apply(calls, known, [on_the_way(one) for one in running], *every)
    for statistics, one in zip(known, running, strict=True):
        if one is not None:
            statistics.update(one)
    return [y.to(x.dtype) for y, x in zip(outputs, inputs, strict=True)]


def _common_communicator(
    layers: Sequence[_SynchronizedBatchNorm],
) -> ProcessCommunicator | None:
    """That of all layers, if they can share a message."""
    if any(layer._link or _runs_other_code(layer) for layer in layers):
        return None
    if originals.current() is not None:  # in a replica: its own layers synchronize
        return None
    found = [layer._communicator() for layer in layers]
    same = len(layers) > 1 and all(one is found[0] for one in found)
    return found[0] if same else None


def _runs_other_code(layer: _SynchronizedBatchNorm) -> bool:
    """Whether calling the layer runs more than its own forward: hooks, or that of a subclass."""
    return (
        type(layer).forward is not _SynchronizedBatchNorm.forward
        or "forward" in layer.__dict__
        or any(getattr(layer, hooks) for hooks in _HOOKS)
        or any(getattr(modules, f"_global{hooks}") for hooks in _HOOKS)
    )


class Together(Function):
    """x, weight, bias of each layer -> y of each; `known` gets the statistics of each."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: list[Call],
        known: list[Statistics],
        running: list[RunningStatistics | None],
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        triples = list(zip(operands[::3], operands[1::3], operands[2::3], strict=True))
        parts = [arithmetic.moments(x, parallel=True) for x, _, _ in triples]
        communicator: Any = calls[0].communicator
        totals = communicator.merge_several(parts)
        for call, total, part, (x, _, _) in zip(calls, totals, parts, triples, strict=True):
            call.settle(total, [part], x.shape)
        ctx.calls = calls
        known += [call.statistics(x) for call, (x, _, _) in zip(calls, triples, strict=True)]
        ctx.statistics = known
        ctx.save_for_backward(*operands[::3], *operands[1::3])
        return tuple(
            statistics.normalize(x, weight, bias, own, parallel=True)
            for statistics, own, (x, weight, bias) in zip(
                ctx.statistics, running, triples, strict=True
            )
        )

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        count = len(ctx.calls)
        xs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        calls: list[Call] = ctx.calls
        if beyond_memory(*dys):
            refuse_over_processes("the backward of forward_together")
        every = list(zip(ctx.statistics, xs, dys, weights, strict=True))
        sums = [s.backward_reduce(x, dy, weight, parallel=True) for s, x, dy, weight in every]
        exchange = torch.cat([tensor_of(one.exchange).reshape(-1) for one in sums])
        total = calls[0].reduce(exchange)
        results: list[Any] = [None, None, None]
        start = 0
        for index, (statistics, x, dy, weight) in enumerate(every):
            size = 2 * x.shape[1]
            mine: Channelwise = total[start : start + size].reshape(2, -1)
            start += size
            if not isinstance(sums[index].exchange, Tensor):
                mine = as_array(mine)
            dx = statistics.backward_input(x, dy, weight, mine, parallel=True)
            results += [dx, *needed_gradients(ctx, 4 + 3 * index, sums[index])]
        return tuple(results)
