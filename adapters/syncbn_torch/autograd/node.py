"""The autograd node of batch normalization: all parts of one or more layers in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

One node serves a layer alone (one part), replicas (a part each), a rank of a process group, and
several layers that share a message.

Each replica leaves its part with the master, which applies the node, and gets its y. Backward gets
all dy at once, so that no replica waits there. A loss may use any of the outputs. Hooks on saved
tensors belong to the thread of a replica. Where it has some, `Keep` saves x there.

In forward-mode AD differentiable operations take the place of the node.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from syncbn_core.backends.base import Affine, Operations
from syncbn_core.comm.waits import note_arrivals
from syncbn_core.errors import CheckpointError, ShapeError, StateError
from syncbn_core.moments import NormRule
from syncbn_torch._torch_private import saving_runs_hooks
from syncbn_torch.autograd.steps import Call, Part
from syncbn_torch.autograd.streams import of_node, of_replicas
from syncbn_torch.backends import plain

__all__ = ["Keep", "Recomputed", "batch_norm", "gradients_alone", "normalize_replicas"]


class Keep(Function):
    """x -> x; saves x in the thread of its replica, and puts its ctx into `kept`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class BatchNormOfParts(Function):
    """x of each part, then each weight, then each bias -> y of each part.

    x: (N, C, *spatial); weight, bias: (C,) or None; y like x. Appends the `Call` to `calls`.
    """

    @staticmethod
    def forward(
        ctx: Any, layers: Sequence[Sequence[Part]], last: bool, calls: list[Call], *operands: Any
    ) -> tuple[Tensor, ...]:
        call, parts = Call(layers), [*chain.from_iterable(layers)]
        calls.append(call)
        count = len(parts)
        xs, weights, biases = [operands[n * count : (n + 1) * count] for n in range(3)]
        affines = list(map(Affine, weights, biases))
        ctx.call, ctx.kept = call, [part.kept for part in parts]
        ctx.set_materialize_grads(False)
        own = [x for x, kept in zip(xs, ctx.kept, strict=True) if kept is None]
        kept = [a.for_backward(part.rule).weight for a, part in zip(affines, parts, strict=True)]
        ctx.save_for_backward(*own, *kept)
        ctx.versions = None if call.context is None else _versions((*own, *kept))
        ys = call.forward(parts, xs, affines, last)
        without = [y for y, part in zip(ys, parts, strict=True) if not part.graph]
        ctx.mark_non_differentiable(*without)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        call.check_over()
        count = len(dys)
        needs = [ctx.needs_input_grad[3 + n * count : 3 + (n + 1) * count] for n in range(3)]
        if call.processes is None and all(dy is None for dy in dys):
            return (None,) * (3 + 3 * count)
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        if ctx.versions is not None and _versions(saved) != ctx.versions:
            raise StateError(  # torch does not see it past the hooks `_same`
                f"expected the weight and input of {call.context.name} as they were in forward, "
                "one has been modified by an inplace operation; do that after backward"
            )
        own, weights = iter(saved[:-count]), saved[-count:]
        xs = [next(own) if kept is None else kept.saved_tensors[0] for kept in ctx.kept]
        with of_node(call.layers[0].streams, xs, dys):
            dxs, sums = call.backward(xs, dys, list(map(Affine, weights)), needs[0])
        of_weights, of_biases = (
            [one[n] if one and need else None for one, need in zip(sums, needs[n], strict=True)]
            for n in (1, 2)
        )
        return None, None, None, *dxs, *of_weights, *of_biases


class Recomputed(Function):
    """x, weight, bias -> y of an earlier call, while a checkpoint fills in what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, statistics: Any, part: Part) -> Tensor:
        ctx.name = str(part.context.name)
        do, affine = part.operations.serial, Affine(weight, bias)
        y: Tensor = do.forward(x, statistics, affine, part.rule, None).y
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise CheckpointError(
            f"{ctx.name} was recomputed by a checkpoint, and backward() was called on that "
            "recomputation, which can't be synchronized; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def batch_norm(layers: Sequence[Sequence[Part]]) -> tuple[Call, Sequence[Tensor]]:
    """`(call, y of each part)`, for one layer of any number of parts, or several of one part.

    Updates the running statistics of all, or if a step fails of none. Raises `BatchSizeError` for
    one value per channel in the whole batch, and the errors of the exchange.
    """
    parts = [*chain.from_iterable(layers)]
    first, affines = parts[0], [part.affine for part in parts]
    graph, hooks = True in [part.graph for part in parts], saving_runs_hooks()
    replicas = first.context is not None
    # Saved-tensor hooks run after the node's forward; of several layers the last one may fail.
    last = len(layers) > 1 or (hooks and not replicas)
    calls: list[Call] = []
    if graph and first.operations is not plain.DIFFERENTIABLE:
        xs = [part.x if part.graph else part.x.detach() for part in parts]
        operands = *xs, *[a.weight for a in affines], *[a.bias for a in affines]
        with ExitStack() as stack:
            if replicas:
                stack.enter_context(torch.enable_grad())
                if hooks:  # those of the master's own thread
                    stack.enter_context(saved_tensors_hooks(_same, _same))
            ys = BatchNormOfParts.apply(layers, last, calls, *operands)
    else:
        with torch.set_grad_enabled(graph):
            calls.append(Call(layers))
            ys = calls[0].forward(parts, [part.x for part in parts], affines, last)
    if last:
        calls[0].update_running(parts)
    return calls[0], ys


def normalize_replicas(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback: turns each `Part` into `(y, call of the layer, index)`.

    Settings come from the first part, the master's. Raises `BatchSizeError` for one value per
    channel in all, `ShapeError` for unequal channels.
    """
    parts: list[Part] = [part for _, part in messages]
    first = parts[0]
    if len({part.x.shape[1] for part in parts}) > 1:
        channels = {identifier: part.x.shape[1] for identifier, part in messages}
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    if first.arrived is not None:
        note_arrivals("replica", f"forward of {first.context.name}", [p.arrived for p in parts])
    if any(part.operations is not first.operations for part in parts):
        # such as a tensor of a subclass in one replica
        own: dict[str, Any] = {"operations": plain.OPERATIONS, "moments": None, "y": None}
        parts = [part._replace(**own) for part in parts]
    with of_replicas([part.stream for part in parts]) as record:
        call, ys = batch_norm([parts])
        record(ys)
    indexed = enumerate(zip(messages, ys, strict=True))
    return [(identifier, (y, call.layers[0], n)) for n, ((identifier, _), y) in indexed]


def gradients_alone(
    operations: Operations,
    rule: NormRule,
    statistics: Any,
    x: Tensor,
    dy: Tensor,
    affine: Affine,
    by_x: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x, if `by_x`, weight and bias, for a layer alone."""
    call = Call([[Part(operations, x, affine, None, rule, None, True)]])
    call.layers[0].statistics = [statistics]
    (dx,), (sums,) = call.backward([x], [dy], [affine], [by_x])
    assert sums is not None
    return dx, sums.grad_weight, sums.grad_bias


def _same(saved: Any) -> Any:
    return saved


def _versions(tensors: Sequence[Any]) -> list[int | None]:
    """How often each has been written in place."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]
