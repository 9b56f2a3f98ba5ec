"""Models converted to synchronized layers and back; nothing but the class changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from syncbn_torch.batchnorm import (
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
)
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.replacement import replace_modules, unknown_kind, with_class

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

_TO_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
    nn.DataParallel: DataParallelWithCallback,
}
_TO_TORCH = {ours: theirs for theirs, ours in _TO_OURS.items() if theirs is not nn.DataParallel}


def convert_model(module: nn.Module, *, process_group: Any = None) -> nn.Module:
    """`module` with every `nn.BatchNorm1d/2d/3d` and `nn.SyncBatchNorm` synchronized.

    Containers are changed in place; returned is `module` itself, or its replacement if it is
    such a layer. An `nn.DataParallel` becomes a `DataParallelWithCallback`. Kept are parameters
    and buffers as the same objects (optimizers go on working), so dtype, device and
    `requires_grad`; training flag, eps, momentum, counters; all hooks, with their handles; a
    layer under several names stays one layer.

    `process_group`: what the layers synchronize over besides replicas, as their own argument of
    that name; with None a layer that has one keeps it.

    Other subclasses of BatchNorm (fused, lazy, parametrized) do more than we know: they stay,
    and a `UserWarning` lists them. Raises `TypeError` unless given an `nn.Module`.
    """

    def choose(layer: nn.Module) -> nn.Module | str | None:
        new = _to_ours(layer)
        made = layer if new is None else new
        if process_group is not None and isinstance(made, _SynchronizedBatchNorm):
            made.process_group = process_group
        return new

    return replace_modules(module, choose, "convert_model")


def revert_model(module: nn.Module) -> nn.Module:
    """`module` with every synchronized layer as the torch class it stands for.

    The counterpart of `convert_model`, which says what is kept: `SynchronizedBatchNorm2d`
    becomes `nn.BatchNorm2d`, `SyncBatchNorm` the class that it was converted from, else
    `nn.SyncBatchNorm`. `DataParallelWithCallback` stays. Layers with eps_mode="clamp" stay too,
    and a `UserWarning` lists them: torch has no such mode.
    """
    return replace_modules(module, _to_torch, "revert_model")


def _to_ours(module: nn.Module) -> nn.Module | str | None:
    target = _TO_OURS.get(type(module))
    return unknown_kind(module) if target is None else with_class(target, module)


def _to_torch(module: nn.Module) -> nn.Module | str | None:
    target = _TO_TORCH.get(type(module))
    if target is None:
        return (
            "a subclass that is not known" if isinstance(module, _SynchronizedBatchNorm) else None
        )
    if cast(_SynchronizedBatchNorm, module).effective_eps_mode == "clamp":
        return 'eps_mode="clamp", which torch does not have'
    origin = module.__dict__.get("_converted_from", target)
    new = with_class(origin, module)
    for name in ("_replica_sync", "_copied_from", "eps_mode", "_converted_from"):
        new.__dict__.pop(name, None)
    if origin is not nn.SyncBatchNorm:
        new.__dict__.pop("process_group", None)
    else:
        new.__dict__.setdefault("process_group", None)
    return new


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Within the block `nn.BatchNorm1d/2d/3d` are the synchronized layers.

    For code that builds its layers as `nn.BatchNorm2d(...)`. The names are restored at the
    end, also after an error; blocks may nest. Not for use in several threads at once.
    """
    names = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    places = (nn, nn.modules)
    before = [(place, name, getattr(place, name)) for place in places for name in names]
    try:
        for place, name, _ in before:
            setattr(place, name, globals()[f"Synchronized{name}"])
        yield
    finally:
        for place, name, original in before:
            setattr(place, name, original)
