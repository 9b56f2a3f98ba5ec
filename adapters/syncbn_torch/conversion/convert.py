"""Convert the layers of a model to synchronized ones and back; only their class changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from syncbn_torch.batchnorm import (
    LazySynchronizedBatchNorm1d,
    LazySynchronizedBatchNorm2d,
    LazySynchronizedBatchNorm3d,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
    set_process_group,
)
from syncbn_torch.conversion.registry import (
    Target,
    conversions,
    load_known_libraries,
    name_of_class,
    origins,
    register_conversion,
)
from syncbn_torch.conversion.replacement import ModuleT, class_of
from syncbn_torch.conversion.report import ConversionReport
from syncbn_torch.conversion.rules import (
    Choice,
    Keep,
    apply_target,
    change_modules,
    synchronize,
)
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.process_group import checked_process_group

_PATCHED: dict[str, type[nn.Module]] = {
    "BatchNorm1d": SynchronizedBatchNorm1d,
    "BatchNorm2d": SynchronizedBatchNorm2d,
    "BatchNorm3d": SynchronizedBatchNorm3d,
    "LazyBatchNorm1d": LazySynchronizedBatchNorm1d,
    "LazyBatchNorm2d": LazySynchronizedBatchNorm2d,
    "LazyBatchNorm3d": LazySynchronizedBatchNorm3d,
}
for _name, _ours in _PATCHED.items():
    register_conversion(getattr(nn, _name), _ours)
register_conversion(nn.SyncBatchNorm, SyncBatchNorm)
register_conversion(nn.DataParallel, DataParallelWithCallback)


def convert_model(
    module: ModuleT,
    *,
    process_group: Any = None,
    extra: Mapping[type[nn.Module], Target] | None = None,
    report: ConversionReport | None = None,
) -> ModuleT:
    """Make every batch norm layer of `module` a synchronized one, in place; return `module`.

    This includes `nn.BatchNorm1d/2d/3d`, the lazy ones, `nn.SyncBatchNorm`, subclasses without a
    forward of their own, timm's `BatchNormAct2d`, and layers in plain lists and attributes. An
    `nn.DataParallel` becomes a `DataParallelWithCallback`. docs/conversion.md has the whole list.

    A layer only gets another class. It keeps its parameters, buffers, hooks, flags and settings,
    and it stays the same object, so optimizers and other references to it go on working.

    Args:
        module: the model, or a single layer.
        process_group: of all synchronized layers; None leaves theirs unchanged.
        extra: what becomes of layers of other classes, as in `register_conversion`, in this call:
            `{FusedBatchNorm: SynchronizedFusedBatchNorm}`. The class must be the very class of the
            layer. A function may return a new module; that takes the place of the layer.
        report: is filled with what was converted and what was kept, and why; print it.

    One short `UserWarning` tells which layers were kept although they look like batch norm, or
    that nothing was found. Raises `TypeError` unless given an `nn.Module`, and for an `extra` that
    is no such mapping, and `ArgumentError` for another process group; then nothing has changed.
    """
    checked_process_group(process_group)
    report = ConversionReport() if report is None else report
    name = "convert_model"
    converted = synchronize(module, extra or {}, report, _SynchronizedBatchNorm, name)
    if process_group is not None:
        set_process_group(converted, process_group)
    if not report:
        kind = type(module).__name__
        text = f"{name} found no batch norm layer in {kind}, so it changed nothing"
        warnings.warn(text, UserWarning, stacklevel=2)
    report.warn(name)
    return converted


def revert_model(module: ModuleT, *, report: ConversionReport | None = None) -> ModuleT:
    """Make every synchronized layer of `module` the torch layer again: undo `convert_model`.

    `SynchronizedBatchNorm2d` becomes `nn.BatchNorm2d`, and a layer of another class becomes what it
    was before. `SyncBatchNorm` becomes the class that it was converted from, or
    `nn.SyncBatchNorm`. `DataParallelWithCallback` stays. Layers with a setting that torch does not
    have (eps_mode="clamp", an activation) stay too, and a `UserWarning` lists them. Returns,
    reports and raises as `convert_model`, which also says what is kept.
    """
    load_known_libraries()
    report = ConversionReport() if report is None else report
    result = change_modules(module, _choose_original, _forget_ours, report, "revert_model")
    report.warn("revert_model")
    return result


def _choose_original(module: nn.Module) -> Choice:
    kind = class_of(module)
    made_by = vars(module).get("_converted_by")
    if made_by is not None:
        conversion = conversions.get(made_by)
        if conversion is None or conversion.back is None:
            return Keep(f"no way back is registered for {name_of_class(made_by)}")
        return apply_target(module, conversion.back, "register_conversion")
    origin = vars(module).get("_converted_from") or origins.get(kind)
    if isinstance(module, _SynchronizedBatchNorm):
        if origin is None:
            return Keep("unknown subclass; see register_conversion")
        setting = module._setting_torch_lacks
        if setting is not None:
            return Keep(f"{setting}, which torch does not have")
    if origin is None or issubclass(kind, nn.DataParallel):
        return None
    conversion = conversions.get(origin)
    if conversion is not None and conversion.back is not None:
        return apply_target(module, conversion.back, "register_conversion")
    return origin


def _forget_ours(module: nn.Module, before: type[nn.Module]) -> None:
    """Remove the attributes that only our layers have."""
    attributes = module.__dict__
    attributes.pop("_converted_from", None)
    if isinstance(module, _SynchronizedBatchNorm):
        return
    for name in _SynchronizedBatchNorm._own_attributes:
        attributes.pop(name, None)
    if isinstance(module, nn.SyncBatchNorm):
        attributes.setdefault("process_group", None)
    else:
        attributes.pop("process_group", None)


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """In the block, `nn.BatchNorm1d/2d/3d` and the lazy ones are the synchronized layers.

    Use it around code that builds layers with `nn.BatchNorm2d(...)`. The names in `torch.nn`,
    `torch.nn.modules` and `torch.nn.modules.batchnorm` change. A name that was bound before, as by
    `from torch.nn import BatchNorm2d` at the top of a file, still means torch's layer; use
    `convert_model` there. The original names return at the end, also after an error. Blocks may
    nest. Do not use it in several threads at once.
    """
    places = (nn, nn.modules, nn.modules.batchnorm)
    before = [(place, name, getattr(place, name)) for place in places for name in _PATCHED]
    try:
        for place, name, _ in before:
            setattr(place, name, _PATCHED[name])
        yield
    finally:
        for place, name, original in before:
            setattr(place, name, original)
