"""The forward of a layer: choose how to compute it, once per call.

    alone, or in eval with running statistics     torch's layer
    alone, large planes on the CPU, or "clamp"    `autograd.node`, with one part
    replica                                       `autograd.node`, with the other replicas
    several processes                             `autograd.node`, one collective each way
    several processes, under torch.compile        `autograd.traced`

Where the node computes, one of these implementations does:

    plain CPU tensor of 64, 32 or 16 bits         `backends.cpu`
    plain CUDA tensor, where our kernels can run  `backends.cuda`
    any other tensor                              `backends.plain`
    "clamp" in transforms and modes               `backends.plain`, differentiated by torch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function_unary

from syncbn_core.errors import BatchSizeError, DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.steps import Affine, Operations, RunningStatistics
from syncbn_torch import arrays
from syncbn_torch._torch_private import (
    COMPARES_GROUPS_BY_TYPE,
    backward_task,
    constant_while_tracing,
    default_group,
    exporting,
    is_jit_tracing,
    modes_run_other_code,
    records_a_graph,
    transforming,
    untraced,
)
from syncbn_torch.autograd import node
from syncbn_torch.autograd import traced as traced_node
from syncbn_torch.autograd.exchange import Processes, refuse_transforms
from syncbn_torch.autograd.steps import Part
from syncbn_torch.backends import cuda, plain
from syncbn_torch.layer_state import LayerState
from syncbn_torch.module_names import LAYER_NAMES, name_of
from syncbn_torch.process_group import communicator_for, is_communicator
from syncbn_torch.validation import (
    check_for_processes,
    check_input,
    check_operands,
    checked_running,
)

__all__ = [
    "always_ours",
    "batch_norm",
    "goes_to_kernels",
    "operations_for",
    "traced_batch_norm",
]

LARGE = 50_000  # elements from which our kernels are faster than torch's,
PLANE = 256  # in planes of so many elements

_torch_forward = _BatchNorm.forward
_has_world: Any = dist.is_initialized if dist.is_available() else bool
_ours_always: ContextVar[bool] = ContextVar("ours_always", default=False)


@contextmanager
def always_ours(on: bool = True) -> Iterator[None]:
    """For tests and benchmarks: in the block, a layer alone uses our kernels for every size."""
    token = _ours_always.set(on)
    try:
        yield
    finally:
        _ours_always.reset(token)


def batch_norm(layer: LayerState, x: Tensor) -> Tensor:
    """Normalize x and update the running statistics; see `_SynchronizedBatchNorm.forward`."""
    if not layer.training and has_running_statistics(layer):
        return _eval(layer, x)
    processes = None
    if layer.training and (layer.process_group is not None or _has_world()):
        processes = processes_of(layer, x)
    if layer._replica_sync is not None or processes is not None:
        return _by_node(layer, x, processes)
    clamps = layer.effective_eps_mode == "clamp"
    if clamps or ((x.numel() >= LARGE or _ours_always.get()) and goes_to_kernels(layer, x)):
        return _by_node(layer, x, None)
    tracks = layer.track_running_stats
    unusual = layer.training and (backward_task() != -1 or layer._tracked is not tracks)
    if unusual and not _updates(layer, tracks):
        return _recomputed(layer, x)
    return _torch_forward(layer, x)


def _recomputed(layer: LayerState, x: Tensor) -> Tensor:
    """y of torch's layer, which gets copies of the running statistics."""
    mean, var = (None if t is None else t.clone() for t in (layer.running_mean, layer.running_var))
    return F.batch_norm(x, mean, var, layer.weight, layer.bias, True, 0.0, layer.eps)


def goes_to_kernels(layer: LayerState, x: Tensor) -> bool:
    """Whether a layer alone that does not clamp computes by the node.

    With large planes of float32 or float64 on the CPU our kernels are faster than torch's
    (docs/speed.md).
    """
    if _is_watched():
        return False
    tensors = x, layer.weight, layer.bias, layer.running_mean, layer.running_var
    return _ours_always.get() or (
        x.dtype in (torch.float32, torch.float64)
        and x.dim() > 2
        and not x.is_nested
        and x.numel() >= max(LARGE, PLANE * x.size(0) * x.size(1))
        and all(t is None or (arrays.supports(t) and t.dtype is x.dtype) for t in tensors)
        and x.is_contiguous()
    )


def _is_watched() -> bool:
    """Whether transforms, modes or tracing want to see operations of torch, not our kernels."""
    return transforming() or modes_run_other_code() or is_jit_tracing()


def _by_node(layer: LayerState, x: Tensor, processes: Processes | None) -> Tensor:
    """Normalize x by the statistics of the whole batch, after all checks; errors name the layer."""
    try:
        return _checked_by_node(layer, x, processes)
    except (BatchSizeError, DeviceError, DTypeError, ShapeError) as error:
        name, text = name_of(layer._original), str(error)
        if name not in text:
            error.args = (f"{name}: {text}",)
        raise


def _checked_by_node(layer: LayerState, x: Tensor, processes: Processes | None) -> Tensor:
    affine = Affine(layer.weight, layer.bias)  # read once: nn.Module's lookup is slow
    check_input(layer, x, affine.weight)
    sync = layer._replica_sync
    alone = sync is None and processes is None
    if records_a_graph():
        _refuse_to_be_recorded(layer, alone)
    if _is_named_subclass(x):
        # its class is restored after the node, so that y is no view made inside of one
        return handle_torch_function(_as_tensor, (x,), x, layer, processes)
    part = checked_part(layer, x, affine, processes)
    if alone:
        if _is_watched():
            part = part._replace(operations=plain.DIFFERENTIABLE)
        if part.running is not None:  # without telling graphs of torch's layer that have saved them
            mean, var, *rest = part.running
            data = (None if t is None else t.data for t in (mean, var))
            part = part._replace(running=RunningStatistics(*data, *rest))
    elif transforming():
        refuse_transforms(partial(name_of, layer._original), x, *affine)
    if sync is not None:
        return sync.forward(part)
    _, (y,) = node.batch_norm([part])
    return y


def _is_named_subclass(x: Tensor) -> bool:
    """Whether x is a tensor of a subclass with `__torch_function__` and data of its own."""
    return (
        type(x) not in arrays.PLAIN
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and has_torch_function_unary(x)
    )


def _as_tensor(input: Tensor, layer: LayerState, processes: Processes | None) -> Tensor:
    """What the `__torch_function__` of a subclass gets: y as a plain tensor."""
    return _by_node(layer, input.as_subclass(Tensor), processes)


def checked_part(layer: LayerState, x: Tensor, affine: Affine, processes: Processes | None) -> Part:
    """The part of a layer in training with input x; raises the errors of a layer's forward."""
    operations = operations_for(x)
    running = checked_running(layer)
    if not _updates(layer, running is not None):
        running = None
    rule, by_address = layer._rule, operations is not plain.OPERATIONS
    check_operands(x, layer.num_features, affine, running, rule, by_address)
    if processes is not None:
        check_for_processes(partial(name_of, layer), x, affine)
    return Part(operations, x, affine, running, rule, processes, torch.is_grad_enabled())


def _updates(layer: LayerState, tracks: bool) -> bool:
    """Whether this forward updates the running statistics, if the layer `tracks` some.

    A forward within a backward pass repeats one for a checkpoint. It updates nothing, unless that
    one did not track: some programs track only in the recomputation.
    """
    sync, original = layer._replica_sync, cast(LayerState, layer._original)
    if backward_task() != -1 or (sync is not None and sync.recomputes()):
        return not (tracks and original._tracked)
    if layer.training and original._tracked is not tracks:
        original.__dict__["_tracked"] = tracks
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


def operations_for(x: Tensor) -> Operations:
    """The implementation of the steps for tensors like x."""
    if arrays.supports(x):
        return _cpu()
    return cuda.OPERATIONS if cuda.supports(x) else plain.OPERATIONS


@cache
def _cpu() -> Operations:
    """Imported on first use: importing Numba doubles the import time."""
    operations: Operations = import_module("syncbn_torch.backends.cpu").OPERATIONS
    return operations


def processes_of(layer: LayerState, x: Tensor) -> Processes | None:
    """The processes to synchronize with; None in eval, where each may run any number of batches."""
    communicator = communicator_for(layer.process_group) if layer.training else None
    if communicator is None:
        return None
    original = layer._original
    dtype = str(x.dtype).removeprefix("torch.")  # as NumPy calls it
    return Processes(communicator, partial(name_of, original), dtype, original, LAYER_NAMES)


def traced_batch_norm(layer: LayerState, x: Tensor) -> Tensor:
    """`batch_norm` while torch.compile traces it."""
    if not layer.training and has_running_statistics(layer):
        return _eval(layer, x)
    if layer._replica_sync is not None or is_communicator(type(layer.process_group)):
        return _with_messages_of_python(layer, x)  # type: ignore[no-any-return]
    group, rule = "", layer._rule
    processes = layer.training and (layer.process_group is not None or default_group() is not None)
    if not traced_node.TRACES_LAYERS and (processes or rule.clamps):
        return _for_newer_torch(layer, x)  # type: ignore[no-any-return]
    if processes:
        group = _group_for(layer.process_group, x.dtype, _guarded(layer.process_group))
    if not group and not rule.clamps:
        return _torch_forward(layer, x)
    affine = Affine(layer.weight, layer.bias)
    check_input(layer, x, affine.weight)
    running = checked_running(layer)
    check_operands(x, layer.num_features, affine, running, rule, False)
    if group and exporting():
        raise StateError(
            "expected a model in eval for torch.export, got a layer in training that synchronizes "
            "over processes: the exported program would compute wrong gradients; call "
            "model.eval(), or export revert_model(copy.deepcopy(model))"
        )
    if not group and x.numel() <= x.shape[1]:
        return _of_one_value(layer, x)  # type: ignore[no-any-return]
    return traced_node.batch_norm(x, affine, running, rule, layer._number, group)


# What torch.compile can't trace, and why.
_with_messages_of_python = untraced(
    "a layer in replicas, or with a communicator as its process_group, sends messages by Python"
)(batch_norm)
_for_newer_torch = untraced(
    "a graph with a layer over processes, or in mode 'clamp', needs torch 2.10 or newer"
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


def has_running_statistics(layer: LayerState) -> bool:
    """Whether eval uses running statistics, not those of the batch."""
    return layer.running_mean is not None and layer.running_var is not None


def _eval(layer: LayerState, x: Tensor) -> Tensor:
    """y in eval, by torch's layer; "clamp" passes the clamped variance and a negligible eps."""
    if layer.effective_eps_mode != "clamp":
        return _torch_forward(layer, x)
    mean, var, eps = layer.running_mean, cast(Tensor, layer.running_var), layer.eps
    clamped = var.clamp(min=eps)
    return F.batch_norm(x, mean, clamped, layer.weight, layer.bias, False, 0.0, eps * 1e-30)
