"""Plans: how calls of one kind are computed is decided once.

A layer keeps its last plans, each with the key of the calls that it is for. A key holds all that
checks and the choice of kernels read, so a call with the key of a plan needs neither. Plans and
keys hold no tensor and no address: one that is outdated can't read memory that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn_core import order
from syncbn_core.exchange import Exchange
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Operations, RunningStatistics
from syncbn_torch._torch_private import backward_task, is_watched, like
from syncbn_torch.layer_state import LayerState
from syncbn_torch.masks import checked_mask
from syncbn_torch.processes import processes_of

__all__ = ["Plan", "call_of", "planned", "steps_by_plan"]

Key = tuple[Any, ...]
Call = tuple[Key, Sequence[Tensor], Sequence[Tensor | None]]

KEPT = 8  # plans of a layer, for shapes that come in turn
_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Plan(NamedTuple):
    """`steps` for calls of one kind, whose tensors need no checks: `key` and `are_like` tell."""

    key: Key
    are_like: Callable[..., bool]
    steps: Operations


def call_of(layer: LayerState, x: Any, mask: Tensor | None) -> Call | None:
    """What checks and the choice of steps read: `(key, tensors, weight and so on, or None)`.

    None for calls that are decided each time, since other code may see or change what they do.
    """
    own, kind = layer.__dict__, type(layer)
    if (
        not isinstance(x, Tensor)
        or own.get("_frozen") is not None
        or own.get("_replica_sync") is not None
        or layer._last_forward_tracked is not layer.track_running_stats
        or backward_task() != -1
        or is_watched()
        or not _holds_its_tensors(kind)  # type: ignore[arg-type]
        or not own.keys().isdisjoint(_NAMES)
    ):
        return None
    parameters, buffers = own["_parameters"], own["_buffers"]  # nn.Module's lookup takes 1 us each
    state = [parameters.get(name) for name in _NAMES[:2]]
    state += [buffers.get(name) for name in _NAMES[2:]]
    key = (
        kind,
        torch.is_grad_enabled(),
        mask is None,
        layer.num_features,
        layer.track_running_stats,
        *[t is None for t in state],
    )
    return key, [t for t in (x, *state) if t is not None], state


@lru_cache(maxsize=64)  # classes of parametrized layers come and go
def _holds_its_tensors(kind: type) -> bool:
    """Whether tensors of a layer of this class are what its dictionaries hold."""
    return not any(hasattr(kind, name) for name in _NAMES)


def planned(
    layer: LayerState, x: Any, mask: Tensor | None
) -> tuple[Operations, list[order.Part], NormRule, Exchange] | None:
    """What `node.batch_norm` takes, by a plan that the layer has for such calls; or None."""
    call = call_of(layer, x, mask)
    if call is None:
        return None
    key, tensors, (weight, bias, mean, var, counter) = call
    for plan in layer._plans:
        if plan.key == key and plan.are_like(*tensors):
            break
    else:
        return None
    processes = processes_of(layer, x)
    if processes is None:
        return None
    running = valid = None
    if layer.track_running_stats:
        running = RunningStatistics(mean, var, counter, layer.momentum)
    if mask is not None:  # it may change before backward
        valid = checked_mask(mask, x).as_subclass(Tensor).numpy().copy()
    part = order.Part(x, Affine(weight, bias), running, valid)
    return plan.steps, [part], layer._rule, processes


def steps_by_plan(
    layer: LayerState, x: Tensor, mask: Tensor | None, part: order.Part
) -> Operations | None:
    """Those of a new plan, which the layer keeps, for this checked call of a host; or None."""
    call = call_of(layer, x, mask)
    if call is None:
        return None
    host = import_module("syncbn_torch.backends.cpu")  # on first use: it imports Numba
    steps: Operations = host.PlannedSteps(x, part.affine, part.running, mask is not None)
    plan = Plan(call[0], like(call[1]), steps)
    layer.__dict__["_plans"] = (plan, *layer._plans[: KEPT - 1])
    return steps
