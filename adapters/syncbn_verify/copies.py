"""Copies of the user's model and batch: without wrappers, without dropout, in one dtype."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import ArgumentError
from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.scripted import name_of_scripted
from syncbn_torch.data_parallel.pytrees import Tree
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.inplace import InPlaceABNSync

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SYNCHRONIZED = (_SynchronizedBatchNorm, InPlaceABNSync)  # our layers with a process_group

# Attributes with a probability; `p` is one only in classes of the kinds below.
_PROBABILITIES = ("drop_prob", "drop_rate", "dropout", "dropout_p", "dropout_prob", "drop_path")
_RANDOM_KINDS = ("Dropout", "DropPath", "StochasticDepth", "DropBlock")


def unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The model within wrappers, and a note about them; `ArgumentError` if it can't be checked."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"expected an nn.Module, got {type(model).__name__}")
    within = []
    while True:
        if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
            inner: Any = model.module
        elif hasattr(model, "_orig_mod"):  # of torch.compile
            inner = model._orig_mod
        else:
            break
        within.append(type(model).__name__)
        model = inner
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ArgumentError(
                f"expected a model with all its parameters, got the lazy parameter {name}; "
                "call the model once before"
            )
        if hasattr(tensor, "placements"):
            raise ArgumentError(
                f"expected a model with plain tensors, got the DTensor {name}; check the model "
                "before fully_shard"
            )
    if not model.training:
        raise ArgumentError(
            "expected a model in training mode, got one in eval mode, in which batch norm does not "
            "use the batch; call model.train()"
        )
    return model, f"Checked is the model within {' within '.join(within)}." if within else ""


def arguments_of(batch: Any) -> Arguments:
    """`args, kwargs` of the model: a tuple is arguments, a dict keywords, all else one argument."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The batch norm layers by name, also of unknown classes and in plain lists; not scripted."""
    return {name: module for module, name in modules_of(model).items() if _is_norm(module)}


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, also of modules in plain lists."""
    for module in modules_of(model):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def described(model: nn.Module) -> list[str]:
    """What the models of all ranks must have in common, since it decides which messages they send.

    Values of tensors are left out; devices count by their type.
    """
    lines = []
    for module, name in modules_of(model).items():
        text = f"{name or 'the model'}: {'training' if module.training else 'eval'} mode"
        if isinstance(module, SYNCHRONIZED):
            text += f", {module!r}, {module.effective_eps_mode}"
        lines.append(text)
        tensors = chain(module.named_parameters("", False), module.named_buffers("", False))
        lines += [f"{name}.{key}: {described_tensor(t)}".removeprefix(".") for key, t in tensors]
    return lines


def described_tensor(tensor: Tensor) -> str:
    """Shape, dtype, kind of device and whether it needs a gradient."""
    needs = ", requires_grad" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device.type}{needs}"


def dtype_name(dtype: torch.dtype) -> str:
    """As in "float32"."""
    return str(dtype).removeprefix("torch.")


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    tracks = hasattr(module, "running_mean") and hasattr(module, "running_var")
    return isinstance(module, _BatchNorm) or (tracks and not isinstance(module, _InstanceNorm))


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy; process groups can't be copied, so layers keep theirs."""
    groups = [getattr(module, "process_group", None) for module in modules_of(model)]
    copied = copy.deepcopy(model, {id(group): group for group in groups if group is not None})
    for module in modules_of(copied):
        if isinstance(module, torch.jit.ScriptModule):
            for parameter in module.parameters():
                if not parameter.is_leaf:  # torch.jit leaves it in the graph of the original
                    parameter.detach_().requires_grad_()
    return copied


def copy_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A deep copy in `dtype` without dropout and its relatives.

    A `DataParallel` within it makes no replicas: the check splits the batch itself. Raises
    `ArgumentError` for a model that can't be copied.
    """
    try:
        copied = duplicate(model)
    except Exception as error:
        raise ArgumentError(
            f"expected a model that copy.deepcopy can copy, because all work is done on copies; "
            f"it raised {type(error).__name__}: {error}"
        ) from error
    registered = set(copied.modules())
    for module in modules_of(copied):
        _silence(module)
        if isinstance(module, nn.DataParallel):
            module.device_ids = cast(Any, module.device_ids[:1])
        if isinstance(module, DataParallelWithCallback) and module.batch_sizes is not None:
            module.batch_sizes = "even"
        if dtype is not None and (module is copied or module not in registered):
            # `double` works for complex tensors too
            module.double() if dtype is torch.float64 else module.to(dtype)
    return copied


def _silence(module: nn.Module) -> None:
    """Switch off dropout and its relatives."""
    kind = name_of_scripted(module)
    is_random = isinstance(module, _DropoutNd) or any(word in kind for word in _RANDOM_KINDS)
    if not isinstance(module, torch.jit.ScriptModule):
        for name in (*_PROBABILITIES, *(("p",) if is_random else ())):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    is_leaf = not list(module.children())  # the modules in it are silenced by themselves
    if (is_random and is_leaf and not _is_norm(module)) or kind.startswith("RReLU"):
        module.training = False


def converted(
    tree: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Any:
    """Copies of the tensors in nested containers, on `device`; floating ones in `dtype`."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach().to(device=device or value.device, copy=True)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    found = Tree(tree)
    return found.made_of(map(copied, found.values))


class _Undivided(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` without communication."""

    forward = _BatchNorm.forward


def alone(model: nn.Module) -> nn.Module:
    """The same model, a copy, whose layers compute over what they get, and send nothing."""
    for layer in norm_layers(model).values():
        kind = type(layer)
        if isinstance(layer, SYNCHRONIZED):
            layer.process_group = SingleCommunicator()
        elif kind is nn.SyncBatchNorm:
            layer.__class__ = _Undivided
        elif isinstance(layer, nn.SyncBatchNorm):  # a subclass, which keeps its own forward
            layer.__class__ = type(kind.__name__, (kind, _Undivided), {})
    return model


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (models may use it)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of all global random number generators at the end."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(cuda):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
