"""A layer in a graph of torch.compile: plain operations and two collectives.

torch.compile traces both directions, and joins the operations with those beside the layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import StateError
from syncbn_core.masks import Valid, filled, without_filled
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
        group = _group_for(layer.process_group, x.dtype, _guarded(layer.process_group))
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
    if mask is None:
        return _in_graph(x, None, affine, running, rule, layer._graph_number, group)
    mask = checked_mask(mask, x)
    x, valid = filled(plain.TRACED.arrays, x, mask)
    y = _in_graph(x, valid, affine, running, rule, layer._graph_number, group)
    return torch.where(mask, y, 0)


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
def _group_for(process_group: Any, dtype: torch.dtype, guarded: int) -> str:
    """`compiled_exchange.group_for`, a constant in the graph."""
    # imported on first use: there are builds of torch without process groups
    name: str = import_module("syncbn_torch.compiled_exchange").group_for(process_group, dtype)
    return name


class TracedBatchNorm(Function):
    """Returns y, and the table of `Statistics`.

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
        count: Tensor | None,
        fill: Tensor | None,
        group: str,
        *rule: Any,
    ) -> tuple[Tensor, Tensor]:
        operations, affine, settings = plain.TRACED, Affine(weight, bias), NormRule(*rule)
        moments = operations.moments(x)
        if fill is not None:
            moments = without_filled(torch, moments, count, fill)
        total = moments.rows[0]
        if group:
            total = _exchange(torch.cat([total[:-1], number]), "moments", group)
        statistics = operations.statistics(Moments(total[None], None), settings)
        y: Tensor = operations.forward(x, Norm(statistics, affine, settings))
        # torch 2.11 takes gradients of an earlier operation that returned the same tensor, as `to`
        # may do: they are 0. Inductor copies nothing.
        y = y.clone()
        table = statistics.table
        ctx.save_for_backward(x, *affine.for_backward(settings), table, total[-1:], number)
        ctx.group, ctx.rule = group, rule
        ctx.mark_non_differentiable(table)
        return y, table

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        operations, group, rule = plain.TRACED, ctx.group, NormRule(*ctx.rule)
        x, weight, bias, table, call, number = ctx.saved_tensors
        norm = Norm(Statistics(table, None), Affine(weight, bias), rule)
        sums = operations.backward_reduce(x, dy, norm)
        of_all = sums.exchange
        if group:
            message = torch.cat([of_all.reshape(-1), call, number])
            of_all = _exchange(message, "sums", group)[:-2].reshape(2, -1)
        dx = operations.backward_input(x, dy, norm, of_all)
        _, by_weight, by_bias, *_ = ctx.needs_input_grad
        grad_weight = sums.grad_weight if by_weight else None
        grad_bias = sums.grad_bias if by_bias else None
        return dx, grad_weight, grad_bias, None, None, None, None, *(None for _ in rule)


def _in_graph(
    x: Tensor,
    valid: Valid | None,
    affine: Affine,
    running: RunningStatistics | None,
    rule: NormRule,
    number: Tensor,
    group: str,
) -> Tensor:
    """y; updates `running` if given. `valid`: of a mask. `number`: that of the layer."""
    place = _next_place()
    if x.is_cpu:
        number = number + place
    else:  # a CUDA graph can't read the layer's number
        number = torch.full((1,), place, dtype=number.dtype, device=x.device)
    y: Tensor
    y, table = TracedBatchNorm.apply(x, *affine, number, *(valid or (None, None)), group, *rule)
    if running is not None:
        with torch.no_grad():
            plain.TRACED.update_running(running, Statistics(table, None))
    return y


@constant_while_tracing
def _next_place() -> float:
    """A fraction, another one in each call: torch merges equal collectives of a graph into one.

    In each graph they begin anew, or Inductor would not find the graph in its cache.
    """
    # Not from 0: Inductor drops `number + 0`, and in torch 2.14 then takes the layer's number, an
    # input of the graph, for a result within a checkpoint.
    graph = traced_graph() or traced_graph  # none where torch.export traces alone
    _places[graph] = place = _places.get(graph, 0) + 1
    return place * 2**-20 % 1


_places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by graph


def _exchange(values: Tensor, direction: str, group: str) -> Tensor:
    """Send `values`, see `compiled_exchange`."""
    collectives = torch.ops._c10d_functional
    name = f"{direction} {group}"
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(values, "sum", name))
    return result
