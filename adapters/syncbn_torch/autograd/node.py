"""The autograd node of batch normalization: all parts of a layer in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

One node serves a layer alone (one part), replicas (a part each), and a rank of a process group.

Each replica leaves its part with the master, which applies the node, and gets its y. Backward gets
all dy at once, so that no replica waits there. A loss may use any of the outputs. Hooks on saved
tensors belong to the thread of a replica. Where it has some, `Keep` saves x there.

In transforms of a layer alone differentiable operations take the place of the node.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, compress
from operator import not_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from syncbn_core.errors import CheckpointError, ShapeError, StateError
from syncbn_core.steps import Affine
from syncbn_torch._torch_private import backward_task, saving_runs_hooks
from syncbn_torch.autograd.steps import Call, Columns, Part, columns_of
from syncbn_torch.autograd.streams import of_node, of_replicas
from syncbn_torch.backends import plain

__all__ = ["Keep", "Recomputed", "batch_norm", "normalize_replicas"]


_SETTINGS = 3  # arguments of `BatchNormOfParts` before its operands


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
        ctx: Any, parts: Columns, last: bool, calls: list[Call], *operands: Any
    ) -> tuple[Tensor, ...]:
        call = Call(parts)
        calls.append(call)
        ctx.call, ctx.kept = call, parts.kept
        ctx.set_materialize_grads(False)
        xs = operands[: len(parts.x)]
        own = [x for x, kept in zip(xs, parts.kept, strict=True) if kept is None]
        weights = [
            affine.for_backward(rule).weight
            for affine, rule in zip(parts.affine, parts.rule, strict=True)
        ]
        ctx.save_for_backward(*own, *weights)
        ctx.versions = None if call.context is None else _versions((*own, *weights))
        ys = call.forward(parts, last)
        ctx.mark_non_differentiable(*compress(ys, map(not_, parts.graph)))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        call.check_over()
        count = len(dys)
        needs = [ctx.needs_input_grad[_SETTINGS + n * count :][:count] for n in range(3)]
        if call.processes is None and all(dy is None for dy in dys):
            return (None,) * (_SETTINGS + 3 * count)
        saved = ctx.saved_tensors  # read only once: checkpointing raises the second time
        if ctx.versions is not None and _versions(saved) != ctx.versions:
            raise StateError(  # torch does not see it past the hooks `_same`
                f"expected the weight and input of {call.context.name} as they were in forward, "
                "one has been modified by an inplace operation; do that after backward"
            )
        own, weights = iter(saved[:-count]), saved[-count:]
        xs = [next(own) if kept is None else kept.saved_tensors[0] for kept in ctx.kept]
        with of_node(call.streams, xs, dys):
            dxs, sums = call.backward(xs, dys, list(map(Affine, weights)), needs[0])
        of_weights, of_biases = (
            [one[n] if one and need else None for one, need in zip(sums, needs[n], strict=True)]
            for n in (1, 2)
        )
        return *(None,) * _SETTINGS, *dxs, *of_weights, *of_biases


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


def batch_norm(parts: Sequence[Part]) -> tuple[Call, Sequence[Tensor]]:
    """`(call, y of each part)`, for the parts of one layer.

    Updates the running statistics of all, or if a step fails of none. Raises `BatchSizeError` for
    one value per channel in the whole batch, and the errors of the exchange.
    """
    if parts[0].context is None:
        return _batch_norm(parts)
    # not in the modes of any one replica; `_same` in place of the hooks of the master's own thread
    inference, graph = all(part.inference for part in parts), any(part.graph for part in parts)
    with torch.inference_mode(inference), torch.set_grad_enabled(graph):
        if not saving_runs_hooks():
            return _batch_norm(parts)
        with saved_tensors_hooks(_same, _same):
            return _batch_norm(parts)


def _batch_norm(parts: Sequence[Part]) -> tuple[Call, Sequence[Tensor]]:
    columns = columns_of(parts)
    # Saved-tensor hooks run after the node's forward. In a recomputation they end the forward as
    # soon as all is saved.
    last = parts[0].context is None and saving_runs_hooks() and backward_task() == -1
    calls: list[Call] = []
    if True in columns.graph and parts[0].operations is not plain.DIFFERENTIABLE:
        xs = [*map(_of_graph, columns.x, columns.graph)]
        operands = chain(xs, *zip(*columns.affine, strict=True))
        ys: Sequence[Tensor] = BatchNormOfParts.apply(columns, last, calls, *operands)
    else:
        calls.append(Call(columns))
        ys = calls[0].forward(columns, last)
    if last:
        calls[0].update_running(columns)
    return calls[0], ys


def _of_graph(x: Tensor, graph: bool) -> Tensor:
    """x of a part as the node saves it; `graph`: whether its y is part of the graph."""
    if graph:
        return x
    return x.clone() if x.is_inference() else x.detach()


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
    if any(part.operations is not first.operations for part in parts):
        # such as a tensor of a subclass in one replica
        own: dict[str, Any] = {"operations": plain.OPERATIONS, "moments": None, "y": None}
        parts = [part._replace(**own) for part in parts]
    with of_replicas([part.stream for part in parts]) as record:
        call, ys = batch_norm(parts)
        record(ys)
    indexed = enumerate(zip(messages, ys, strict=True))
    return [(identifier, (y, call, n)) for n, ((identifier, _), y) in indexed]


def _same(saved: Any) -> Any:
    return saved


def _versions(tensors: Sequence[Any]) -> list[int | None]:
    """How often each has been written in place."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]
