"""Plans: how calls of one kind are computed is decided once.

A layer keeps its last plans, each with the key of the calls that it is for. A key holds all that
checks and the choice of kernels read, so a call with the key of a plan needs neither. Plans and
keys hold no tensor and no address: one that is outdated can't read memory that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn_core import order
from syncbn_core.backends.cuda.operations import CudaOperations
from syncbn_core.exchange import Exchange
from syncbn_core.steps import Affine, Operations, RunningStatistics
from syncbn_torch._torch_private import backward_task, is_watched, like
from syncbn_torch.layer_state import LayerState
from syncbn_torch.masks import checked_mask
from syncbn_torch.processes import processes_of

Key = tuple[Any, ...]
Call = tuple[Key, Sequence[Tensor], Sequence[Tensor | None]]

KEPT = 8  # plans of a layer, for shapes that come in turn
_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Plan(NamedTuple):
    """`steps` for calls of one kind, whose tensors need no checks: `key` and `are_like` tell."""

    key: Key
    are_like: Callable[..., bool]
    steps: Operations


def call_of(layer: LayerState, x: Any, mask: Any) -> Call | None:
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
    state = [*map(parameters.get, _NAMES[:2]), *map(buffers.get, _NAMES[2:])]
    key = (
        kind,
        torch.is_grad_enabled(),
        mask is None,
        layer.training,
        layer.num_features,
        layer.track_running_stats,
        *map(is_, state, repeat(None)),
    )
    return key, [t for t in (x, *state) if t is not None], state


@lru_cache(maxsize=64)  # classes of parametrized layers come and go
def _holds_its_tensors(kind: type) -> bool:
    """Whether tensors of a layer of this class are what its dictionaries hold."""
    return not any(hasattr(kind, name) for name in _NAMES)


def planned(
    layer: LayerState, x: Any, mask: Tensor | None
) -> tuple[Operations, order.Part, Exchange | None] | None:
    """The steps, operands and processes of a call like one for which the layer has a plan."""
    call = call_of(layer, x, mask)
    if call is None:
        return None
    key, tensors, (weight, bias, mean, var, counter) = call
    for plan in layer._plans:
        if plan.key == key and plan.are_like(*tensors):
            break
    else:
        return None
    processes, running, own = processes_of(layer, x), None, None
    if layer.track_running_stats and layer.training:
        running = RunningStatistics(mean, var, counter, layer.momentum)
        if processes is None:
            running = unwatched(running)
    if mask is not None:  # of a host; it may change before backward
        own = checked_mask(mask, x).as_subclass(Tensor).numpy().copy()
    part = order.Part(x, Affine(weight, bias), running, own)
    return plan.steps, part, processes


def unwatched(running: RunningStatistics) -> RunningStatistics:
    """The same memory without version counters.

    A graph of torch's layer that has saved these buffers must not be told that they change.
    """
    mean, var = [None if t is None else t.data for t in running[:2]]
    return running._replace(mean=mean, var=var)


def host_steps(part: order.Part) -> Operations:
    """The steps for a part on a CPU that has been checked, and for what is like it."""
    host = import_module("syncbn_torch.backends.cpu")  # on first use: it imports Numba
    masked = part.mask is not None
    return host.TensorSteps(part.x, part.affine, part.running, masked)  # type: ignore[no-any-return]


def kept_steps(layer: LayerState, part: order.Part, steps: Operations | None) -> Operations:
    """The steps for calls like this one, which the layer keeps as a plan if they can be known.

    `steps`: as `forward.checked_part` gives them.
    """
    if steps is None:
        steps = host_steps(part)
    elif not isinstance(steps, CudaOperations) or part.mask is not None:
        return steps  # look at each call; masks of devices fill x
    else:
        steps = steps.for_calls_like(part.x, part.affine, part.running)
    call = call_of(layer, part.x, part.mask)
    if call is not None:
        plan = Plan(call[0], like(call[1]), steps)
        layer.__dict__["_plans"] = (plan, *layer._plans[: KEPT - 1])
    return steps
