"""A layer in a graph of torch.compile: passes over x, and a collective in each direction.

torch.compile traces both directions, and joins the passes with the operations beside the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import getfile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function

import syncbn_core
from syncbn_core.backends.plain import column
from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import StateError
from syncbn_core.masks import filled, without_filled
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Affine, Norm, RunningStatistics
from syncbn_torch._torch_private import (
    COMPARES_GROUPS_BY_TYPE,
    constant_while_tracing,
    default_group,
    exporting,
    traced_graph,
    untraced,
)
from syncbn_torch.activations import activated
from syncbn_torch.backends import plain
from syncbn_torch.checks import check_operands, checked_running
from syncbn_torch.forward import batch_norm, by_torch, eval_batch_norm, uses_running_statistics
from syncbn_torch.layer_state import LayerState
from syncbn_torch.masks import checked_mask
from syncbn_torch.process_group import is_communicator


def traced_batch_norm(layer: LayerState, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`batch_norm` while torch.compile traces it."""
    if uses_running_statistics(layer):
        return eval_batch_norm(layer, x, mask)
    alone = type(layer.process_group) is SingleCommunicator
    if layer._replica_sync is not None or (
        not alone and is_communicator(type(layer.process_group))
    ):
        return _with_messages_of_python(layer, x, mask)
    group, rule = "", layer._rule
    has_group = layer.process_group is not None or default_group() is not None
    if layer.training and has_group and not alone:
        settings = x.dtype, (rule.eps, rule.mode), layer.momentum
        own = layer.process_group
        group = _group_for(own, x.is_cpu, settings, _guarded(own))
    if not group and rule.mode != "clamp" and mask is None:
        return activated(by_torch(layer, x), layer._activation)
    affine, running = Affine(layer.weight, layer.bias), checked_running(layer)
    check_operands(layer, x, affine, running)
    if group and exporting():
        raise StateError(
            "expected a model in eval for torch.export, got a layer in training that synchronizes "
            "over processes: the exported program would compute wrong gradients; call "
            "model.eval(), or export revert_model(copy.deepcopy(model))"
        )
    if not group and x.numel() <= x.shape[1]:
        return _of_one_value(layer, x, mask)
    known, state = (None, None), tuple(running or RunningStatistics(None, None))
    if mask is not None:
        mask = checked_mask(mask, x)
        x, known = filled(plain.TRACED.arrays, x, mask)
    given = x, *affine, layer._graph_number, *known, group
    y = _node(*given, state, tuple(rule), _allow_in_graph())
    return y if mask is None else torch.where(mask, y, 0)


# What torch.compile can't trace, and why.
_with_messages_of_python = untraced(
    "a layer in replicas, or with a communicator as its process_group, sends messages by Python"
)(batch_norm)
_of_one_value = untraced("the layer raises an error: expected more than 1 value per channel")(
    batch_norm
)


def _guarded(process_group: Any) -> int:
    """A number by which torch.compile tells groups apart; before torch 2.12 it does by itself."""
    group = default_group() if process_group is None else process_group
    return id(group) if COMPARES_GROUPS_BY_TYPE else 0


@constant_while_tracing
def _group_for(process_group: Any, on_cpu: bool, settings: tuple[Any, ...], _: int) -> str:
    """`compiled_exchange.group_for`, a constant in the graph.

    Its place is another one in each call, since torch merges equal collectives of a graph into
    one. Places begin anew in each graph, or Inductor would not find the graph in its cache.
    """
    graph = traced_graph() or traced_graph  # none where torch.export traces alone
    _places[graph] = place = _places.get(graph, 0) + 1
    # imported on first use: there are builds of torch without process groups
    group_for = import_module("syncbn_torch.compiled_exchange").group_for
    return group_for(process_group, on_cpu, place, *settings)  # type: ignore[no-any-return]


# So begin the names of groups whose exchange computes what is per channel, on the host.
ON_HOST = "host "
_places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by graph


@constant_while_tracing
def _allow_in_graph() -> str:
    """Let torch.compile call `_node`; returns a digest of what it runs.

    Within a checkpoint, torch finds a graph in its cache by the name of `_node` and what it is
    given, so another version must be given another digest.
    """
    torch.compiler.allow_in_graph(_node)  # it imports torch._dynamo, which takes a second
    return _digest()


@cache
def _digest() -> str:
    folders = [Path(getfile(each)).parent for each in (syncbn_core, TracedBatchNorm)]
    sources = [path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return sha256(b"".join(sources)).hexdigest()


def _node(*given: Any) -> Tensor:
    """y of a layer; updates the running statistics.

    Dynamo takes it into the graph as one call, since tracing Python takes longer than tracing its
    operations, which AOTAutograd does.
    """
    *call, running, rule, _ = given
    held = RunningStatistics(*running)
    y: Tensor
    y, *new = TracedBatchNorm.apply(*call, held, NormRule(*rule))
    with torch.no_grad():
        plain.TRACED.arrays.assign(held.held, new)
    return y


class TracedBatchNorm(Function):
    """Returns y and the new running statistics, as many as there are.

    `number`: of the layer. `valid`, `fill`: what is known of an x that a mask has filled. `group`:
    from `compiled_exchange.group_for`; "" for a layer alone.
    """

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        x, weight, bias, number, valid, fill, group, running, rule = call
        do, shape = plain.TRACED, x.shape
        count = math.prod((shape[0], *shape[2:]))
        shift = do.shift(x) if count else x.new_zeros(shape[1], dtype=do.arrays.working(x))
        deviations = do.arrays.difference(x, column(shift, x))
        affine = _or_constant(weight, 1, shift), _or_constant(bias, 0, shift)
        rows = [shift, *do.two_sums(x, deviations, shift), *affine]
        if group.startswith(ON_HOST):
            counts = shift.new_full((2,), count, dtype=torch.float64)
            if fill is not None:
                rows, counts = [*rows, fill], torch.stack([counts[0], valid])
            layer = number if x.is_cpu else torch.zeros(1, device=x.device)
            sent = _joined(*rows, counts, layer), shift.new_empty((3, shape[1])), *running.held
            message, numbers, *new = _exchanged(f"forward {group}", sent)
        else:
            own = do.moments_of_sums(count, *rows[:3])
            if fill is not None:
                own = without_filled(torch, own, valid, fill)
            total, last = _moments_of_all(own, group)
            statistics = do.statistics(total, rule)
            new, message = do.updated(running, statistics), _joined(statistics.table, last)
            numbers = do.of_forward(Norm(statistics, Affine(*affine), rule), shift.dtype)
        ctx.save_for_backward(x, weight, numbers, message)
        ctx.group, ctx.rule = group, rule
        ctx.mark_non_differentiable(*new)
        return do.normalized(x, numbers, rule), *new

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        do, group, rule = plain.TRACED, ctx.group, ctx.rule
        x, weight, numbers, message = ctx.saved_tensors
        if rule.activation is not None:
            dy = do.through_activation(x, dy, numbers, rule)
        mean = numbers[0]
        two, scale = do.two_sums(x, dy, mean), _or_constant(weight, 1, mean)
        table, call = message[: 3 * len(mean) + 1], message[-1:]
        if group.startswith(ON_HOST):
            sent = _joined(*two, scale, table, call), numbers.new_empty((4, len(mean)))
            gradients, numbers = _exchanged(f"backward {group}", sent)
            gradients = gradients[: 2 * len(mean)].reshape(2, -1)
        else:
            norm = Norm(Statistics(table, None), Affine(scale), rule)
            gradients = do.of_sums(norm, *two, mean.dtype)
            total = _sums_of_all(gradients * scale, call, group)
            numbers = do.of_backward(norm, total, mean.dtype)
        by_bias, by_weight = gradients.to((x if weight is None else weight).dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_affine = by_weight if needs_weight else None, by_bias if needs_bias else None
        return do.gradient(x, dy, numbers), *of_affine, *(None,) * 6


def _or_constant(values: Tensor | None, constant: float, like: Tensor) -> Tensor:
    """`values`, or as many of a constant."""
    return torch.full_like(like, constant) if values is None else values


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat([part.to(torch.float64) for part in parts])


def _exchanged(name: str, values: Sequence[Tensor]) -> list[Tensor]:
    """What `compiled_exchange` puts in place of `values`."""
    collectives = torch.ops._c10d_functional
    own = collectives.all_reduce_coalesced([*values], "sum", name)
    return [*map(collectives.wait_tensor, own)]


def _moments_of_all(own: Moments, group: str) -> tuple[Moments, Tensor]:
    row = own.rows[0]
    if group:
        (row,) = _exchanged(f"moments {group}", [row])
        own = Moments(row[None], None)
    return own, row[-1:]


def _sums_of_all(sums: Tensor, call: Tensor, group: str) -> Tensor:
    if not group:
        return sums
    (total,) = _exchanged(f"sums {group}", [_joined(sums.reshape(-1), call)])
    return total[:-1].reshape(sums.shape)
