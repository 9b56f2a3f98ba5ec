"""The usual case of a layer in as few steps as can be.

In a network a step of Python takes longer than in a loop, because its memory is no longer in the
caches: the checks of `dispatch` would take as long as the kernel of a middle-sized layer. So the
tensors of a layer are checked once, and each call looks only at what may have changed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from syncbn_core.backends.base import RunningStatistics
from syncbn_torch._torch_private import (
    backward_task,
    cudnn_enabled,
    forward_ad,
    function_transforms_active,
    modes_run_other_code,
    operations_are_seen,
    profiler,
    saving_runs_hooks,
)
from syncbn_torch.backends import torch_kernel
from syncbn_torch.backends.memory import (
    FLOATS,
    HALVES,
    PLAIN,
    PLAIN_OR_NONE,
    holds_all_values,
    kernels_forbidden,
)
from syncbn_torch.layer_state import LayerState
from syncbn_torch.which_kernel import ours_is_better

__all__ = [
    "Checked",
    "at_same_addresses",
    "checked_before",
    "remember",
    "usual_eval",
    "usual_forward",
]

_NAMES = frozenset(("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))


@lru_cache(maxsize=256)
def _looks_up_tensors_as_torch(kind: Any) -> bool:
    """Whether `layer.weight` and the like of this class come from `nn.Module.__getattr__`."""
    return (
        kind.__getattr__ is nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name in _NAMES)  # such as a property
    )


def _registered(layer: LayerState) -> tuple[Any, ...] | None:
    """Weight, bias, running mean and variance and counter; None if attributes are others."""
    kind: Any = type(layer)
    if not _looks_up_tensors_as_torch(kind) or not layer.__dict__.keys().isdisjoint(_NAMES):
        return None
    parameters: Any = layer._parameters
    buffers: Any = layer._buffers
    try:
        return (
            parameters["weight"],
            parameters["bias"],
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
        )
    except KeyError:  # deleted, or registered as the other kind
        return None


class Checked(NamedTuple):
    """Tensors of a layer that have passed all checks, and where their memory was."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    device: torch.device | None  # None: the CPU
    data: tuple[Tensor, Tensor]  # of the running mean and variance
    present: list[Tensor]
    data_ptrs: list[int]
    addresses: np.ndarray[Any, Any]  # the same for `operands.look`, with 0 for absent ones


def remember(
    layer: LayerState,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics | None,
) -> None:
    """Note that these tensors of the layer have passed all checks."""
    if running is None or any(p is not None and p.grad_fn is not None for p in (weight, bias)):
        return  # a computed weight would keep its graph alive
    mean, var, counter = running.mean, running.var, running.num_batches_tracked
    tensors = (weight, bias, mean, var, counter)
    present = [tensor for tensor in tensors if tensor is not None]
    if mean is None or var is None or counter is None or not (mean.is_cpu or mean.is_cuda):
        return
    device = mean.device
    for tensor in present:
        if (
            type(tensor) not in PLAIN
            or tensor.device != device
            or tensor.is_neg()
            or tensor.is_inference()
        ):
            return
    data_ptrs = [*map(Tensor.data_ptr, present)]
    addresses = np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    where, data = None if mean.is_cpu else device, (mean.data, var.data)
    layer.__dict__["_checked"] = Checked(
        weight, bias, mean, var, counter, where, data, present, data_ptrs, addresses
    )


def checked_before(layer: LayerState, x: Tensor) -> Checked | None:
    """The tensors of a layer in training if all checks of this call would pass, as they did before.

    None if something is unusual, or was not checked yet.
    """
    checked: Checked | None = layer._checked
    if checked is None:
        return None
    weight, bias, mean, var, counter, device, *_ = checked
    if (
        layer._replica_sync is not None
        or type(x) not in PLAIN
        or (not x.is_cpu if device is None else x.device != device)
        or x.layout is not torch.strided
        or x.is_nested
        or x.is_inference()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or function_transforms_active()
        or backward_task() != -1
        or saving_runs_hooks()
        or operations_are_seen()
    ):
        return None
    own = _registered(layer)
    if (
        own is None
        or own[0] is not weight
        or own[1] is not bias
        or own[2] is not mean
        or own[3] is not var
        or own[4] is not counter
        or not layer.track_running_stats
        or not layer._tracked
    ):
        return None
    layer._check_input_dim(x)
    dtype: Any = x.dtype
    layer_dtype: Any = (mean if weight is None else weight).dtype
    if (
        (dtype is not layer_dtype and not (layer_dtype is torch.float32 and dtype in HALVES))
        or x.size(1) != layer.num_features
        or mean.requires_grad
        or var.requires_grad
    ):
        return None
    return checked


def at_same_addresses(checked: Checked, x: Tensor) -> bool:
    """Whether x and the tensors have memory, the tensors where it was when they were checked."""
    return holds_all_values(x) and [*map(Tensor.data_ptr, checked.present)] == checked.data_ptrs


def usual_forward(layer: LayerState, x: Tensor, checked: Checked) -> Tensor | None:
    """The training forward of a layer alone by torch's kernel or those for CPU.

    None if others are to be used, or something is unusual.
    """
    momentum = layer.momentum
    if ours_is_better(x, checked.running_mean.dtype) or layer.effective_eps_mode == "clamp":
        if not x.is_cpu or kernels_forbidden():
            return None
        kernels, rule = cpu_kernels(), layer._rule
        y: Tensor | None = kernels.batch_norm(x, checked[:5], checked.addresses, momentum, rule)
        return y
    if modes_run_other_code() or x.numel() <= x.size(1) or not at_same_addresses(checked, x):
        return None
    weight, bias, mean, var, counter, _, data, *_ = checked
    running = mean, var, counter, momentum
    return torch_kernel.batch_norm_in_place(x, weight, bias, running, data, layer.eps)


def usual_eval(layer: LayerState, x: Tensor) -> Tensor | None:
    """The forward in eval by torch's kernel; None if something is unusual."""
    own = _registered(layer)
    if own is None or operations_are_seen():
        return None
    weight, bias, mean, var, _ = own
    dtype: Any = x.dtype if type(x) in PLAIN else None
    if (
        dtype not in FLOATS
        or not PLAIN_OR_NONE.issuperset(map(type, own))
        or x.is_nested
        or mean is None
        or var is None
        or mean.dtype is not dtype
        or var.dtype is not dtype
        or (weight is not None and weight.dtype is not dtype)
        or (bias is not None and bias.dtype is not dtype)
        or (mean if weight is None else weight).device != x.device
        or layer.effective_eps_mode == "clamp"
    ):
        return None
    layer._check_input_dim(x)
    if x.size(1) != layer.num_features:
        return None
    settings = mean, var, False, 0.0, layer.eps, cudnn_enabled()
    return torch.batch_norm(x, weight, bias, *settings)


@cache
def cpu_kernels() -> Any:
    """Imported on first use: importing Numba doubles the import time."""
    return import_module("syncbn_torch.autograd.on_cpu")
