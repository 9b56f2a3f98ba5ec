"""Copies of the user's model to compare: without wrappers, without dropout, in one dtype."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import ArgumentError
from syncbn_torch.batchnorm import SyncBatchNorm, _SynchronizedBatchNorm
from syncbn_torch.conversion.registry import origins
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.scripted import name_of_scripted
from syncbn_torch.data_parallel.pytrees import Tree
from syncbn_verify.recording import norm_layers

__all__ = [
    "Arguments",
    "arguments_of",
    "check_model",
    "converted",
    "copy_of",
    "duplicate",
    "make_alone",
    "random_state_kept",
    "seed_everything",
    "unwrapped",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Attributes with a probability; `p` is one only in classes of the kinds below.
_PROBABILITIES = ("drop_prob", "drop_rate", "dropout", "dropout_p", "dropout_prob", "drop_path")
_RANDOM_KINDS = ("Dropout", "DropPath", "StochasticDepth", "DropBlock")


class Undivided(_BatchNorm):
    """`nn.BatchNorm*d` for inputs of any rank: what `SyncBatchNorm` computes for a whole batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class UndividedSync(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` without its communication, as a base class of subclasses of it."""

    def forward(self, input: Tensor) -> Tensor:
        return _BatchNorm.forward(self, input)

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The model within `DataParallel`, `DistributedDataParallel` or torch.compile, and a note."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"expected an nn.Module, got {type(model).__name__}")
    within = []
    while True:
        if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
            inner: Any = model.module
        elif hasattr(model, "_orig_mod"):
            inner = model._orig_mod
        else:
            break
        within.append(type(model).__name__)
        model = inner
    return model, f"Checked is the model within {' within '.join(within)}." if within else ""


def check_model(model: nn.Module) -> None:
    """Raise `ArgumentError` for a model that can't be checked."""
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


def arguments_of(batch: Any) -> Arguments:
    """`args, kwargs` of the model: a tuple is arguments, a dict keywords, all else one argument."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


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


def copy_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A deep copy in `dtype` without dropout and its relatives, nor gradients.

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
            if getattr(module, "batch_sizes", None) is not None:
                module.batch_sizes = cast(Any, "even")
        if dtype is not None and (module is copied or module not in registered):
            # `double` works for complex tensors too
            module.double() if dtype is torch.float64 else module.to(dtype)
    return copied


def _silence(module: nn.Module) -> None:
    """Switch off dropout and its relatives."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    kind = name_of_scripted(module)
    is_random = isinstance(module, _DropoutNd) or any(word in kind for word in _RANDOM_KINDS)
    for name in (*_PROBABILITIES, *(("p",) if is_random else ())):
        if isinstance(getattr(module, name, None), float) and not scripted:
            setattr(module, name, 0.0)
    is_leaf = not list(module.children())  # the modules in it are silenced by themselves
    if (is_random and is_leaf and not norm_layers(module)) or kind.startswith("RReLU"):
        module.training = False


def converted(
    tree: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Any:
    """Copies of the tensors in nested containers, on `device`; floating ones in `dtype`."""

    def copy_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach().to(device=device or value.device, copy=True)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    found = Tree(tree)
    return found.made_of(map(copy_of, found.values))


def make_alone(model: nn.Module) -> nn.Module:
    """Make the layers of a copy compute with torch's kernel over what they get, and nothing else.

    Layers that torch does not have (eps_mode="clamp", an activation, subclasses) compute in a
    group of one.
    """
    for layer in norm_layers(model).values():
        if isinstance(layer, _SynchronizedBatchNorm):
            target = origins.get(type(layer))
            if target is None or layer._extra_setting is not None:
                layer.process_group = SingleCommunicator()
            else:
                layer.__class__ = Undivided if type(layer) is SyncBatchNorm else target  # type: ignore[assignment]
        elif type(layer) is nn.SyncBatchNorm:
            layer.__class__ = Undivided  # type: ignore[assignment]
        elif isinstance(layer, nn.SyncBatchNorm):  # a subclass, which keeps its own forward
            kind = type(layer)
            layer.__class__ = type(kind.__name__, (kind, UndividedSync), {})
    return model


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (models may use it)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of all global random number generators at the end."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    on_cpu, on_cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        if cuda:
            torch.cuda.set_rng_state_all(on_cuda)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
