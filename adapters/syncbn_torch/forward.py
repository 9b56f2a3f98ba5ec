"""The forward of a layer: choose how to compute it, once per call.

    alone, or in eval with running statistics       torch's layer
    alone, "clamp", or large with an activation     `node`, with one part
    several processes                               `node`, one collective each way
    replicas                                        as one of these, the parts joined
    several processes, under torch.compile          `traced`

Where the node computes, one of these implementations does:

    plain CPU tensor of 64, 32 or 16 bits         `backends.cpu`
    plain CUDA tensor, where our kernels can run  `backends.cuda`
    any other tensor                              `backends.plain`
    "clamp" in transforms and modes               `backends.plain`, differentiated by torch
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function_unary

from syncbn_core import order
from syncbn_core.errors import BatchSizeError, DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.exchange import Exchange
from syncbn_core.moments import averaging_factor
from syncbn_core.steps import Affine, Operations, RunningStatistics
from syncbn_torch import arrays, node
from syncbn_torch._torch_private import (
    backward_task,
    is_jit_tracing,
    is_watched,
    records_a_graph,
    transforming,
    without_dispatch_modes,
)
from syncbn_torch.activations import activated
from syncbn_torch.backends import cuda, plain
from syncbn_torch.checks import check_operands, checked_running, refuse_transforms
from syncbn_torch.layer_state import LayerState
from syncbn_torch.masks import checked_mask
from syncbn_torch.module_names import name_of
from syncbn_torch.plan import kept_steps, planned, unwatched
from syncbn_torch.process_group import group_of, is_communicator
from syncbn_torch.processes import processes_of

# From so many elements a layer with an activation is faster by our kernels, in networks on a CPU.
LARGE = 500_000
CHANNELS_LAST = 3_000_000  # the same for x in channels_last
FAR = 16  # deviations between a mean and 0: torch's y is off by some 1e-7 times as many

_torch_forward: Any = _BatchNorm.forward
_has_world: Any = dist.is_initialized if dist.is_available() else bool
_ours_always: ContextVar[bool] = ContextVar("ours_always", default=False)


@contextmanager
def always_ours(on: bool = True) -> Iterator[None]:
    """For tests and benchmarks: in the block, a layer alone always uses our kernels."""
    token = _ours_always.set(on)
    try:
        yield
    finally:
        _ours_always.reset(token)


def batch_norm(layer: LayerState, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Normalize x and update the running statistics; see `_SynchronizedBatchNorm.forward`."""
    try:
        call = planned(layer, x, mask) if layer._plans else None
        if call is not None:
            known, part, processes = call
            if processes is not None or mask is not None or takes_node(layer, x):
                return node.batch_norm(known, [part], layer._rule, processes)[0][0]
        if uses_running_statistics(layer):
            return eval_batch_norm(layer, x, mask)
        sync = layer._replica_sync
        processes = None if sync is not None else members_of(layer, x)
        if sync is None and processes is None and mask is None and not takes_node(layer, x):
            tracks = layer.track_running_stats
            changed = layer._last_forward_tracked is not tracks
            if (
                layer.training
                and (changed or backward_task() != -1)
                and not _updates(layer, tracks)
            ):
                return activated(_recomputed(layer, x), layer._activation)
            return activated(by_torch(layer, x), layer._activation)
        if records_a_graph():
            _refuse_to_be_recorded(layer, sync is None and processes is None)
        if type(x) is not Tensor and _is_named_subclass(x):
            # its class is restored after the node, so that y is no view made inside of one
            return handle_torch_function(_as_tensor, (x,), x, layer, mask)
        if sync is not None:
            return sync.forward(layer, x, mask)  # type: ignore[no-any-return]
        part, steps = checked_part(layer, x, processes, mask)
        steps = kept_steps(layer, part, steps)
        (y,), _ = node.batch_norm(steps, [part], layer._rule, processes)
        return y
    except ERRORS_OF_INPUT as error:
        add_name(layer, error)
        raise


def members_of(layer: LayerState, x: Tensor) -> Exchange | None:
    """The processes with which a layer in training synchronizes; None in others.

    Raises `DTypeError` for what these can't exchange.
    """
    if not layer.training:
        return None
    if layer.process_group is None and not _has_world():
        _warn_of_no_world()
        return None
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        refuse_kind(layer, x)
    processes = processes_of(layer, x)
    if processes is not None and type(x) is not Tensor and _is_whole_batch(layer, x):
        return None
    return processes


def by_torch(layer: LayerState, x: Tensor) -> Tensor:
    """y of torch's layer, whose gradients are right for any x."""
    # for torch.jit.trace sizes are tensors, and nested tensors have none
    if is_jit_tracing() or x.is_nested or 1 not in x.shape or not _is_misread(x):
        return _torch_forward(layer, x)  # type: ignore[no-any-return]
    layer._check_input_dim(x)
    mean, var, momentum = layer.running_mean, layer.running_var, layer.momentum or 0.0
    if layer.training and not layer.track_running_stats:
        mean = var = None
    elif layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    own = layer.weight, layer.bias, layer.training or mean is None, momentum, layer.eps
    return _batch_norm_of_torch(x, mean, var, *own)


def _batch_norm_of_torch(x: Tensor, *arguments: Any) -> Tensor:
    """`F.batch_norm` of x, with right gradients."""
    form, restored = _form_for_torch(x)
    return restored(F.batch_norm(form, *arguments))


def _form_for_torch(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """x without axes of 1, if torch would take their strides wrongly, and how to bring y back."""
    if is_jit_tracing() or 1 not in x.shape or not _is_misread(x):
        return x, lambda y: y
    if x.stride(1) == 1:  # channels are innermost, and so they stay
        rows = x.movedim(1, -1)
        return rows.flatten(0, -2), lambda y: y.reshape(rows.shape).movedim(-1, 1)
    return x.flatten(2), lambda y: y.reshape(x.shape)


def by_kernel_of_torch(part: order.Part, eps: float) -> Tensor | None:
    """y as torch's layer has it, or None, with nothing changed, where the node has to compute.

    That is on GPUs, for one value per channel or none, for parameters of several dtypes, and where
    torch would lose digits: a mean is more than `FAR` deviations from 0.
    """
    x, (weight, bias), running = part.x, part.affine, part.running
    mean, var, counter, momentum = running or RunningStatistics(None, None, None)
    dtypes = {t.dtype for t in (weight, bias, mean, var) if t is not None}
    if not x.is_cpu or type(x) is not Tensor or len(dtypes) > 1 or x.numel() <= x.shape[1]:
        return None
    form, restored = _form_for_torch(x)
    new = [None if tensor is None else tensor.clone() for tensor in (mean, var)]
    settings = True, float(averaging_factor(momentum, counter)), eps
    y, means, invstd = torch.native_batch_norm(form, weight, bias, new[0], new[1], *settings)
    if not (means * invstd).abs().max() < FAR:  # also for NaN
        return None
    if counter is not None:
        new.append(counter + 1)
    updated = [tensor for tensor in (mean, var, counter) if tensor is not None]
    plain.OPERATIONS.arrays.assign(updated, [tensor for tensor in new if tensor is not None])
    return restored(y)


def _is_misread(x: Tensor) -> bool:
    """Whether torch's dx would be wrong for some strides of dy (2.10 to 2.14, on CPUs).

    With an axis of 1 they can be those of two layouts; torch takes x for the one and dy for the
    other, and pairs other elements. The formats of torch have four axes or five.
    """
    samples, channels, *spatial = x.shape
    ones = 1 in (samples, *spatial) and any(size != 1 for size in spatial)
    return len(spatial) > 1 and channels > 1 and ones and x.is_cpu and torch.is_grad_enabled()


def refuse_kind(layer: LayerState, x: Any) -> None:
    """Raise `DTypeError` for what is no dense tensor; a nested one is refused later."""
    if not isinstance(x, Tensor):
        kind, remedy = type(x).__name__, "torch.as_tensor(input)"
    elif not x.is_nested:
        kind, remedy = f"one of layout {x.layout}", "input.to_dense()"
    else:
        return
    raise DTypeError(f"{name_of(layer)}: expected a dense tensor, got {kind}; pass {remedy}")


def _is_whole_batch(layer: LayerState, x: Tensor) -> bool:
    """Whether x is a DTensor over all ranks of the layer, like its state: torch sees it whole.

    Raises `DTypeError` if channels are on several ranks: torch would give other running statistics.
    """
    mesh: Any = getattr(x, "device_mesh", None)
    state = layer.weight, layer.running_mean
    if mesh is None or any(t is not None and not hasattr(t, "device_mesh") for t in state):
        return False
    if is_communicator(type(layer.process_group)):
        return False
    ranks = dist.get_process_group_ranks(group_of(layer.process_group))
    if not set(ranks) <= set(mesh.mesh.flatten().tolist()):
        return False
    placements: Any = getattr(x, "placements", ())
    if any(placement.is_shard(1) for placement in placements):
        raise DTypeError(
            f"{name_of(layer)}: expected all channels of a DTensor on each rank, got {placements}; "
            "pass x.redistribute(placements=[Shard(0)])"
        )
    return True


@cache
def _warn_of_no_world() -> None:
    """Say once, on rank 0, that processes of torchrun are not connected."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and os.environ.get("RANK", "0") == "0":
        text = f"WORLD_SIZE is {size}, but batch norm does not synchronize without a process group"
        warnings.warn(f"{text}; call torch.distributed.init_process_group() before", stacklevel=2)


def _recomputed(layer: LayerState, x: Tensor) -> Tensor:
    """y of torch's layer, which gets copies of the running statistics."""
    with without_dispatch_modes():
        mean, var = (
            None if t is None else t.clone() for t in (layer.running_mean, layer.running_var)
        )
    own = layer.weight, layer.bias, True, 0.0, layer.eps
    return _batch_norm_of_torch(x, mean, var, *own)


def takes_node(layer: LayerState, x: Tensor) -> bool:
    """Whether a layer that sends nothing computes by the node: if it clamps, or saves passes."""
    if layer.effective_eps_mode == "clamp":
        return True
    always, large = _ours_always.get(), x.numel() >= LARGE and layer._activation[0] is not None
    if not (always or large) or is_watched():
        return False
    tensors = x, layer.weight, layer.bias, layer.running_mean, layer.running_var
    return always or (
        x.dtype in (torch.float32, torch.float64)
        and x.dim() > 2
        and not x.is_nested
        and (x.is_contiguous() or _is_large_in_channels_last(x))
        and all(t is None or (arrays.supports(t) and t.dtype is x.dtype) for t in tensors)
    )


def _is_large_in_channels_last(x: Tensor) -> bool:
    dense = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return dense and x.numel() >= CHANNELS_LAST


ERRORS_OF_INPUT = (BatchSizeError, DeviceError, DTypeError, ShapeError)


def add_name(layer: LayerState, error: Exception) -> None:
    """Let the text of an error begin with the name of the layer, unless it has it."""
    name, text = name_of(layer._original), str(error)
    if name not in text:
        error.args = (f"{name}: {text}",)


def _is_named_subclass(x: Tensor) -> bool:
    """Whether x is a tensor of a subclass with `__torch_function__` and data of its own."""
    return (
        type(x) not in arrays.PLAIN_CLASSES
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and has_torch_function_unary(x)
    )


def _as_tensor(input: Tensor, layer: LayerState, mask: Tensor | None) -> Tensor:
    """What the `__torch_function__` of a subclass gets: y as a plain tensor."""
    return batch_norm(layer, input.as_subclass(Tensor), mask)


def checked_part(
    layer: LayerState,
    x: Tensor,
    processes: Exchange | None,
    mask: Tensor | None = None,
    operations: Operations | None = None,
) -> tuple[order.Part, Operations | None]:
    """The part of a layer with input x, and the steps.

    `operations`: None for those that suit x. The steps are None on a CPU, where `plan` makes them.
    Raises the errors of a layer's forward.
    """
    affine = Affine(layer.weight, layer.bias)  # read once: nn.Module's lookup is slow
    operations, running = operations or operations_for(x), checked_running(layer)
    by_address, sends = operations is not plain.OPERATIONS, processes is not None
    check_operands(layer, x, affine, running, by_address, sends)
    if not _updates(layer, running is not None):
        running = None
    if sends or layer._replica_sync is not None:
        if transforming():
            refuse_transforms(partial(name_of, layer._original), x, *affine)
    else:
        if is_watched():
            operations = plain.DIFFERENTIABLE
        if running is not None:
            running = unwatched(running)
    own: Any = None
    if mask is not None:  # a copy: it may change before backward
        own = checked_mask(mask, x).clone()
        own = own.as_subclass(Tensor).numpy() if operations is None else own
    return order.Part(x, affine, running, own, None, x.device), operations


def _updates(layer: LayerState, tracks: bool) -> bool:
    """Whether this forward updates the running statistics, if the layer `tracks` some.

    A forward within a backward pass repeats one for a checkpoint. It updates nothing, unless that
    one did not track: some programs track only in the recomputation.
    """
    sync, original = layer._replica_sync, layer._original
    if backward_task() != -1 or (sync is not None and sync.recomputes()):
        return not (tracks and original._last_forward_tracked)
    if layer.training and original._last_forward_tracked is not tracks:
        original.__dict__["_last_forward_tracked"] = tracks
    return True


def _refuse_to_be_recorded(layer: LayerState, alone: bool) -> None:
    """Raise `StateError` where torch.jit.trace or make_fx would record something else."""
    if alone and not is_jit_tracing():  # differentiable operations
        return
    why = "a 'clamp' layer in training" if alone else "the exchange with other members"
    raise StateError(
        f"expected no torch.jit.trace or make_fx around {name_of(layer)}, which can't record "
        f"{why}; call model.eval(), or trace revert_model(copy.deepcopy(model))"
    )


def operations_for(x: Tensor) -> Operations | None:
    """The implementation of the steps for tensors like x; None on a CPU, see `plan`."""
    if arrays.supports(x):
        return None
    return cuda.OPERATIONS if cuda.supports(x) else plain.OPERATIONS


def uses_running_statistics(layer: LayerState) -> bool:
    """Whether y comes from running statistics, not from those of the batch."""
    if layer.training and layer._frozen is None:
        return False
    return layer.running_mean is not None and layer.running_var is not None


def eval_batch_norm(layer: LayerState, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """y in eval, by torch's layer."""
    if mask is not None:
        mask = checked_mask(mask, x)
        return torch.where(mask, eval_batch_norm(layer, torch.where(mask, x, 0)), 0)
    if layer.effective_eps_mode != "clamp" and not layer.training:
        return activated(by_torch(layer, x), layer._activation)
    layer._check_input_dim(x)
    return activated(by_running_statistics(layer, x, layer.weight), layer._activation)


def by_running_statistics(layer: LayerState, x: Tensor, weight: Tensor | None) -> Tensor:
    """y, by torch's function; "clamp" passes the clamped variance and a negligible eps."""
    mean, var, eps = layer.running_mean, cast(Tensor, layer.running_var), layer.eps
    if layer.effective_eps_mode == "clamp":
        var, eps = var.clamp(min=eps), eps * 1e-30
    return _batch_norm_of_torch(x, mean, var, weight, layer.bias, False, 0.0, eps)
