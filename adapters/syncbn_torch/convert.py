"""Convert the layers of a model to synchronized ones and back; only their class changes."""

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
    """Replace every `nn.BatchNorm1d/2d/3d` and `nn.SyncBatchNorm` in `module` by ours.

    Changes containers in place. Returns `module`, or its replacement if it is such a layer
    itself. An `nn.DataParallel` becomes a `DataParallelWithCallback`.

    The new layers have the same parameter and buffer objects, so optimizers keep working. They
    also keep the training flag, all settings and all hooks. A layer that the model has under
    several names stays a single layer.

    `process_group`: the `process_group` of all synchronized layers; None leaves theirs unchanged.

    Other subclasses of BatchNorm (fused, lazy, parametrized) are not replaced, because they may
    compute something else; a `UserWarning` lists them. Raises `TypeError` unless given an
    `nn.Module`.
    """

    def choose(layer: nn.Module) -> nn.Module | str | None:
        new = _to_ours(layer)
        made = layer if new is None else new
        if process_group is not None and isinstance(made, _SynchronizedBatchNorm):
            made.process_group = process_group
        return new

    return replace_modules(module, choose, "convert_model")


def revert_model(module: nn.Module) -> nn.Module:
    """Replace every synchronized layer in `module` by the torch layer: undo `convert_model`.

    `SynchronizedBatchNorm2d` becomes `nn.BatchNorm2d`. `SyncBatchNorm` becomes the class that it
    was converted from, or `nn.SyncBatchNorm`. `DataParallelWithCallback` stays. Layers with a
    setting that torch does not have (eps_mode="clamp") stay too, and a `UserWarning` lists them.
    Returns and raises as `convert_model`, which also says what is kept.
    """
    return replace_modules(module, _to_torch, "revert_model")


def _to_ours(module: nn.Module) -> nn.Module | str | None:
    target = _TO_OURS.get(type(module))
    return unknown_kind(module) if target is None else with_class(target, module)


def _to_torch(module: nn.Module) -> nn.Module | str | None:
    target = _TO_TORCH.get(type(module))
    if target is None:
        return "an unknown subclass" if isinstance(module, _SynchronizedBatchNorm) else None
    unusual = cast(_SynchronizedBatchNorm, module)._rule.unusual
    if unusual is not None:
        return f"{unusual}, which torch does not have"
    origin = module.__dict__.get("_converted_from", target)
    new = with_class(origin, module)
    for name in (*_SynchronizedBatchNorm._own_attributes, "_converted_from"):
        new.__dict__.pop(name, None)
    if origin is not nn.SyncBatchNorm:
        new.__dict__.pop("process_group", None)
    else:
        new.__dict__.setdefault("process_group", None)
    return new


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """In the block, `nn.BatchNorm1d/2d/3d` are the synchronized layers.

    Use it around code that builds layers with `nn.BatchNorm2d(...)`. The original names return
    at the end, also after an error. Blocks may nest. Do not use it in several threads at once.
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
