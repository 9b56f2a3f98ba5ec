"""The forward of a layer: choose how to compute it, once per call.

    eval with running statistics                     torch's kernel
    replica                                          `autograd.node`, with the other replicas
    several processes                                `autograd.node`, one collective each way
    several processes, under torch.compile           `autograd.traced`
    alone, under torch.compile or a transform        torch's kernel
    alone, where torch's kernel is as fast (below)   torch's kernel
    alone, where one call of the CPU kernels fits    `autograd.on_cpu`
    alone, otherwise                                 `autograd.node`

Where torch's kernel does not compute it, one of these implementations does:

    plain CPU tensor of 64, 32 or 16 bits            `backends.cpu`
    plain CUDA tensor, where our kernels can run     `backends.cuda`
    any other tensor                                 `backends.plain`
    tangents or function transforms                  `backends.plain`, differentiated by torch

`which_kernel` says where torch's kernel is as fast.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from syncbn_core.backends.base import Affine, Operations, RunningStatistics
from syncbn_core.errors import StateError
from syncbn_core.moment_exchange import CallSite
from syncbn_torch import ranges
from syncbn_torch._torch_private import (
    COMPARES_GROUPS_BY_TYPE,
    backward_task,
    constant_while_tracing,
    default_group,
    exporting,
    is_jit_tracing,
    operations_are_seen,
    profiler,
    records_a_graph,
    transforming,
    untraced,
)
from syncbn_torch.autograd import traced as traced_node
from syncbn_torch.autograd.exchange import Processes
from syncbn_torch.autograd.node import batch_norm
from syncbn_torch.autograd.steps import Part
from syncbn_torch.autograd.transforms import needs_plain_forward
from syncbn_torch.backends import cuda, memory, plain, torch_kernel
from syncbn_torch.layer_state import LayerState
from syncbn_torch.module_names import LAYER_NAMES, name_of
from syncbn_torch.process_group import communicator_for, is_communicator
from syncbn_torch.usual import (
    at_same_addresses,
    checked_before,
    remember,
    usual_eval,
    usual_forward,
)
from syncbn_torch.validation import (
    check_floating,
    check_for_processes,
    check_for_torch,
    check_input,
    check_operands,
    checked_running,
)
from syncbn_torch.which_kernel import torch_is_better

__all__ = ["checked_part", "forward", "operations_for", "processes_of"]


def forward(layer: LayerState, x: Tensor) -> Tensor:
    """Normalize x and update the running statistics; see `_SynchronizedBatchNorm.forward`."""
    return _traced(layer, x) if torch.compiler.is_compiling() else _eager(layer, x)


def _eager(layer: LayerState, x: Tensor) -> Tensor:
    """`forward` where nobody traces. It does not ask `is_compiling`, one flag for all threads."""
    y = _usual(layer, x)
    if y is not None:
        return y
    affine = Affine(layer.weight, layer.bias)  # read once: nn.Module's lookup is slow
    check_input(layer, x, affine.weight)
    if _has_fixed_statistics(layer):
        return _eval(layer, x, affine)
    if not profiler._is_profiler_enabled:
        return _train(layer, x, affine)
    name = partial(name_of, layer._original)
    with ranges.span("forward", name):
        y = _train(layer, x, affine)
    if layer._replica_sync is None:  # which names its nodes
        ranges.name_backward(y, name)
    return y


def _train(layer: LayerState, x: Tensor, affine: Affine) -> Tensor:
    """Normalize x by the statistics of the batch, after all checks."""
    sync, processes, rule = layer._replica_sync, processes_of(layer, x), layer._rule
    first = layer.running_mean if affine.weight is None else affine.weight
    dtype = None if first is None else first.dtype
    if sync is None and processes is None and torch_is_better(x, dtype, rule):
        running, updates = _running(layer)
        check_for_torch(x, *affine, running)
        y = torch_kernel.batch_norm(x, *affine, running, layer.eps, updates)
        remember(layer, *affine, running)
        return y
    if records_a_graph():
        _refuse_to_be_recorded(layer, sync is None and processes is None)
    if _is_named_subclass(x):
        # its class is restored after the node, so that y is no view made inside of one
        return handle_torch_function(_train_as_tensor, (x,), x, layer)
    part = checked_part(layer, x, affine, processes)
    if (
        transforming()
        and needs_plain_forward(
            partial(name_of, layer), sync is not None, processes is not None, x, *affine
        )
    ) or (sync is None and processes is None and operations_are_seen()):
        part = part._replace(operations=plain.DIFFERENTIABLE)
    if sync is not None:
        return sync.forward(part)
    if part.operations.with_kernels:
        remember(layer, *affine, part.running)
    _, (y,) = batch_norm([[part]])
    return y


def _is_named_subclass(x: Tensor) -> bool:
    """Whether x is a tensor of a subclass with `__torch_function__` and data of its own."""
    return (
        type(x) not in memory.PLAIN
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and has_torch_function_unary(x)
    )


def _train_as_tensor(input: Tensor, layer: LayerState) -> Tensor:
    """What the `__torch_function__` of a subclass gets: y as a plain tensor."""
    x = input.as_subclass(Tensor)
    return _train(layer, x, Affine(layer.weight, layer.bias))


def checked_part(layer: LayerState, x: Tensor, affine: Affine, processes: Processes | None) -> Part:
    """The part of a layer in training with input x; raises the errors of a layer's forward."""
    operations = operations_for(x)
    running, updates = _running(layer)
    running = running if updates else None
    rule, by_address = layer._rule, operations is not plain.OPERATIONS
    check_operands(x, layer.num_features, affine, running, rule, by_address)
    if processes is not None:
        check_for_processes(partial(name_of, layer), x, affine)
    return Part(operations, x, affine, running, rule, processes, torch.is_grad_enabled())


def _running(layer: LayerState) -> tuple[RunningStatistics | None, bool]:
    """The running statistics, if the layer tracks them, and whether this forward updates them.

    A forward within a backward pass repeats one for a checkpoint. It updates nothing, unless that
    one did not track: some programs track only in the recomputation.
    """
    running, sync, original = checked_running(layer), layer._replica_sync, layer._original
    if backward_task() != -1 or (sync is not None and sync.recomputes()):
        return running, not cast(LayerState, original)._tracked
    original.__dict__["_tracked"] = running is not None
    return running, True


def _usual(layer: LayerState, x: Tensor) -> Tensor | None:
    """`forward` without its checks if all passed before; None if something is unusual."""
    if not layer.training:
        return usual_eval(layer, x)
    checked = checked_before(layer, x)
    if checked is None:
        return None
    processes = None
    if layer.process_group is not None or default_group() is not None:
        processes = processes_of(layer, x)
    y: Any = None
    if processes is None:
        y = usual_forward(layer, x, checked)
        if y is not None or x.is_cpu:
            return y  # type: ignore[no-any-return]
    operations = operations_for(x)
    if not (operations.with_kernels and at_same_addresses(checked, x)):
        return None
    affine, running = Affine(*checked[:2]), RunningStatistics(*checked[2:5], layer.momentum)
    graph = torch.is_grad_enabled()
    _, (y,) = batch_norm([[Part(operations, x, affine, running, layer._rule, processes, graph)]])
    return y  # type: ignore[no-any-return]


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
    if memory.supports(x):
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
    name = partial(name_of, original)
    return Processes(communicator, CallSite(name, (dtype,), (original,), LAYER_NAMES))


def _traced(layer: LayerState, x: Tensor) -> Tensor:
    """`forward` while torch.compile traces it."""
    affine = Affine(layer.weight, layer.bias)
    check_input(layer, x, affine.weight)
    if _has_fixed_statistics(layer):
        return _eval(layer, x, affine)
    if layer._replica_sync is not None or is_communicator(type(layer.process_group)):
        return _with_messages_of_python(layer, x)  # type: ignore[no-any-return]
    group, rule = "", layer._rule
    processes = layer.training and (layer.process_group is not None or default_group() is not None)
    if not traced_node.TRACES_LAYERS and (processes or rule.extra_setting is not None):
        return _for_newer_torch(layer, x)  # type: ignore[no-any-return]
    if processes:
        group = _group_for(layer.process_group, x.dtype, _guarded(layer.process_group))
    if not group and rule.extra_setting is None:
        return _by_torch(layer, x, affine)
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


# What torch.compile can't trace: `_eager`, and why.
_with_messages_of_python = untraced(
    "a layer in replicas, or with a communicator as its process_group, sends messages by Python"
)(_eager)
_for_newer_torch = untraced(
    "a graph with a layer over processes, or in mode 'clamp', needs torch 2.10 or newer"
)(_eager)
_of_one_value = untraced("the layer raises an error: expected more than 1 value per channel")(
    _eager
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


def _has_fixed_statistics(layer: LayerState) -> bool:
    return not (layer.training or layer.running_mean is None or layer.running_var is None)


def _eval(layer: LayerState, x: Tensor, affine: Affine) -> Tensor:
    """y in eval, by torch's kernel; "clamp" passes it the clamped variance and a negligible eps."""
    weight, bias, eps = *affine, layer.eps
    mean, var = cast(Tensor, layer.running_mean), cast(Tensor, layer.running_var)
    check_floating(weight, bias, mean, var)
    if layer._rule.clamps:
        var, eps = var.clamp(min=eps), eps * 1e-30
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _by_torch(layer: LayerState, x: Tensor, affine: Affine) -> Tensor:
    running = checked_running(layer)
    check_for_torch(x, *affine, running)
    return torch_kernel.batch_norm(x, *affine, running, layer.eps)
