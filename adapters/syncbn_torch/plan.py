"""Plans: what a kind of call of a layer was decided by is decided once.

A layer keeps its last plans, each with the key of the calls that it is for. A key holds all that
checks and the choice of kernels read, so a call with the key of a plan needs neither. Plans and
keys hold no tensor, no address and no group: one that is outdated can't read memory that is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn_core import order
from syncbn_core.exchange import Exchange, Known
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Operations, RunningStatistics
from syncbn_torch import layer_state
from syncbn_torch._torch_private import backward_task, is_watched, like
from syncbn_torch.layer_state import LayerState
from syncbn_torch.masks import checked_mask
from syncbn_torch.process_group import communicator_for
from syncbn_torch.processes import exchange_of

__all__ = ["Plan", "call_of", "planned", "steps_by_plan"]

Key = tuple[Any, ...]
Call = tuple[Key, Sequence[Tensor], Sequence[Tensor | None], Any]

KEPT = 8  # plans of a layer, for shapes that come in turn
_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Plan(NamedTuple):
    """The decisions for one kind of call: `key` and `are_like` tell which, the rest is taken."""

    key: Key
    are_like: Callable[..., bool]
    steps: Operations
    rule: NormRule
    dtype: str
    agreed: NormRule
    known: Known


def call_of(layer: LayerState, x: Any, mask: Tensor | None) -> Call | None:
    """What decides how a call is computed: `(key, tensors, weight and so on or None, group)`.

    None for calls that are decided each time, since other code may see or change what they do.
    """
    own, kind = layer.__dict__, type(layer)
    if (
        not isinstance(x, Tensor)
        or not own["training"]
        or own.get("_frozen") is not None
        or own.get("_replica_sync") is not None
        or layer._last_forward_tracked is not layer.track_running_stats
        or backward_task() != -1
        or is_watched()
        or not _holds_its_tensors(kind)  # type: ignore[arg-type]
        or not own.keys().isdisjoint(_NAMES)
    ):
        return None
    communicator = communicator_for(layer.process_group)
    if communicator is None:
        return None
    parameters, buffers = own["_parameters"], own["_buffers"]  # nn.Module's lookup takes 1 us each
    state = [parameters.get(name) for name in _NAMES[:2]]
    state += [buffers.get(name) for name in _NAMES[2:]]
    try:
        group = weakref.ref(communicator)
    except TypeError:  # a class of the user's
        return None
    key = (
        group,
        kind,
        torch.is_grad_enabled(),
        mask is None,
        layer.num_features,
        layer.track_running_stats,
        layer._activation,
        kind._agreed is not LayerState._agreed and layer._agreed,
        float(layer.eps),
        layer.eps_mode or layer_state._default_eps_mode,
        *[t is None for t in state],
    )
    return key, [t for t in (x, *state) if t is not None], state, communicator


@cache
def _holds_its_tensors(kind: type) -> bool:
    """Whether tensors of a layer of this class are what its dictionaries hold."""
    return not any(hasattr(kind, name) for name in _NAMES)


def planned(
    layer: LayerState, x: Any, mask: Tensor | None
) -> tuple[Operations, list[order.Part], NormRule, Exchange] | None:
    """What `node.batch_norm` takes, by the plan that the layer has for such calls; or None."""
    call = call_of(layer, x, mask)
    if call is None:
        return None
    key, tensors, (weight, bias, mean, var, counter), communicator = call
    for plan in layer._plans:
        if plan.key == key and plan.are_like(*tensors):
            break
    else:
        return None
    running = valid = None
    if layer.track_running_stats:
        running = RunningStatistics(mean, var, counter, layer.momentum)
    if mask is not None:  # it may change before backward
        valid = checked_mask(mask, x).as_subclass(Tensor).numpy().copy()
    exchange = exchange_of(layer, communicator, plan.dtype, plan.agreed, plan.known)
    return plan.steps, [order.Part(x, Affine(weight, bias), running, valid)], plan.rule, exchange


def steps_by_plan(
    layer: LayerState, x: Tensor, mask: Tensor | None, part: order.Part, exchange: Exchange
) -> Operations | None:
    """Those of a new plan, which the layer keeps, for this checked call of a host; or None."""
    call = call_of(layer, x, mask)
    if call is None:
        return None
    host = import_module("syncbn_torch.backends.cpu")  # on first use: it imports Numba
    steps: Operations = host.PlannedSteps(x, part.affine, part.running, mask is not None)
    known = exchange.known_of(x.shape[1], x)
    if known is not None:  # else the layer has no number yet
        own = steps, layer._rule, exchange.dtype, layer._agreed, known
        plan = Plan(call[0], like(call[1]), *own)
        layer.__dict__["_plans"] = (plan, *layer._plans[: KEPT - 1])
    return steps
