"""Which layers a conversion changes, and why it keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from syncbn_torch.conversion.registry import (
    Target,
    check_target,
    conversions,
    load_known_libraries,
    name_of_class,
    origins,
    synchronized_subclass,
)
from syncbn_torch.conversion.replacement import (
    ModuleT,
    change_class,
    class_of,
    forward_replaced,
    modules_of,
    swap_modules,
)
from syncbn_torch.conversion.report import ConversionReport, ReportedLayer
from syncbn_torch.conversion.scripted import name_of_scripted, scripted_batch_norm
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.layer_state import LayerState, give_number
from syncbn_torch.reference import BatchNorm2dReimpl


class Keep(NamedTuple):
    """Leave a layer as it is. `expected`: no warning is needed."""

    reason: str
    expected: bool = False


# A class: the layer becomes an object of it. A module: it takes the layer's place. None: this
# module has nothing to do with batch norm.
Choice = type[nn.Module] | nn.Module | Keep | None


def change_modules(
    root: ModuleT,
    choose: Callable[[nn.Module], Choice],
    finish: Callable[[nn.Module, type[nn.Module]], None],
    report: ConversionReport,
    caller: str,
) -> ModuleT:
    """Change each module of `root` as `choose` says; return `root` or what takes its place.

    `finish` gets each module that became one of another class, and the class that it had. If
    `choose` raises, or a module can't take its new class, nothing has changed.
    """
    if not isinstance(root, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(root).__name__}")
    names, registered = modules_of(root), set(root.modules())
    choices = {module: _possible(choose(module), module, caller) for module in names}
    before = {module: class_of(module) for module in names}
    _change_classes({m: c for m, c in choices.items() if isinstance(c, type)}, names)
    report.clear()
    new: dict[nn.Module, nn.Module] = {}
    for module, choice in choices.items():
        if choice is None:
            continue
        after, kept = None, choice if isinstance(choice, Keep) else Keep("")
        if isinstance(choice, nn.Module):
            new[module] = choice
            after = name_of_class(type(choice))
        elif isinstance(choice, type):
            finish(module, before[module])
            after = name_of_class(choice)
        scripted = isinstance(module, torch.jit.ScriptModule)
        was = name_of_scripted(module) if scripted else name_of_class(before[module])
        name = names[module] or "the model itself"
        report.append(ReportedLayer(name, was, after, *kept, module in registered))
    if new:
        swap_modules(names, new)
    return cast(ModuleT, new.get(root, root))


def _change_classes(
    targets: Mapping[nn.Module, type[nn.Module]], names: dict[nn.Module, str]
) -> None:
    """Give each module its target class, or none of them if one can't take it (`TypeError`)."""
    changed: dict[nn.Module, type[nn.Module]] = {}
    for module, target in targets.items():
        kind = type(module)
        try:
            change_class(module, target)
        except TypeError as error:
            for earlier, before in changed.items():
                earlier.__class__ = before
            raise TypeError(
                f"expected a class that {names[module] or 'the model'} ({name_of_class(kind)}) can "
                f"become in place, got {name_of_class(target)} ({error}); use a function instead"
            ) from error
        changed[module] = kind


def synchronize(
    root: ModuleT,
    extra: Mapping[type[nn.Module], Target],
    report: ConversionReport,
    ours: type[nn.Module],
    caller: str,
) -> ModuleT:
    """Make the layers of `root` synchronized ones. `ours`: the base class of these."""
    if not isinstance(extra, Mapping):
        raise TypeError(f"expected extra={{Class: what it becomes}}, got {type(extra).__name__}")
    for cls, target in extra.items():
        check_target(cls, target)
    load_known_libraries()

    def remember_origin(module: nn.Module, before: type[nn.Module]) -> None:
        if origins.get(class_of(module)) is not before:
            module.__dict__["_converted_from"] = before
        if isinstance(module, LayerState):
            give_number(module)

    def choose(module: nn.Module) -> Choice:
        return _choose(module, extra, ours)

    return change_modules(root, choose, remember_origin, report, caller)


def convertible(model: nn.Module) -> dict[nn.Module, str]:
    """The layers, with their names, that `convert_model` would give another class."""
    load_known_libraries()
    return {
        module: name
        for module, name in modules_of(model).items()
        if isinstance(module, _BatchNorm)
        and isinstance(_possible(_choose(module, {}, LayerState), module, ""), type)
    }


def _choose(
    module: nn.Module, extra: Mapping[type[nn.Module], Target], ours: type[nn.Module]
) -> Choice:
    if isinstance(module, torch.jit.ScriptModule):
        return _kept_of_jit(module)
    kind = class_of(module)
    if kind in extra:
        return apply_target(module, extra[kind], "extra=")
    if issubclass(kind, ours):
        return Keep("it synchronizes already", True)
    if kind in conversions:
        new = apply_target(module, conversions[kind].to, "register_conversion")
        if isinstance(new, nn.Module):
            new.__dict__["_converted_by"] = kind  # `revert_model` looks for the way back there
        return new
    if issubclass(kind, BatchNorm2dReimpl):
        return Keep("the reference layer does not synchronize", True)
    if hasattr(module, "__data_parallel_replicate__"):
        return Keep("it synchronizes by itself", True) if issubclass(kind, _BatchNorm) else None
    if issubclass(kind, nn.DataParallel) and kind is not DataParallelWithCallback:
        return Keep("a subclass of DataParallel; call patch_replication_callback on it")
    return _kept_of_torch(module, kind) or _unknown(module, kind)


def _possible(choice: Choice, module: nn.Module, caller: str) -> Choice:
    """`choice`; or `Keep` for another class of a module that does not use the forward of its class.

    The old forward of a DataParallel calls methods of the new class, so it does its work.
    """
    by_class = isinstance(choice, type) and not isinstance(module, nn.DataParallel)
    if by_class and forward_replaced(module):
        return Keep(
            "its forward was replaced on the object (hooks of accelerate?); remove that, "
            f"call {caller}, and add it again"
        )
    return choice


def apply_target(module: nn.Module, target: Target, source: str) -> Choice:
    """What a user's conversion makes of `module`. `source`: where the conversion was given."""
    if target is None:
        return Keep(f"{source} says that it stays", True)
    if isinstance(target, type):
        return target
    new = target(module)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"expected an nn.Module from the function for {name_of_class(class_of(module))} in "
            f"{source}, got {type(new).__name__}"
        )
    return new


def _unknown(module: nn.Module, kind: type[nn.Module]) -> Choice:
    if issubclass(kind, _BatchNorm):
        made = synchronized_subclass(kind)
        return Keep(f"{made}; see extra=") if isinstance(made, str) else made
    buffers: dict[str, Any] = module._buffers
    if "running_var" in buffers and "weight" not in buffers and not issubclass(kind, _InstanceNorm):
        name = name_of_class(kind)
        if kind.__module__.partition(".")[0] == "inplace_abn":
            return Keep("use InPlaceABNSync of syncbn_torch.inplace, which loads its checkpoints")
        return Keep(f"it has a running_var, but {name} is no subclass of BatchNorm; see extra=")
    return None


def _kept_of_jit(module: torch.jit.ScriptModule) -> Keep | None:
    """A module that was scripted or traced: torch can't change it, and its code can't wait."""
    statistics = scripted_batch_norm(module)
    if statistics == "never":
        return Keep("compiled by torch.jit; it uses its running statistics only", True)
    if statistics is None:
        return None
    return Keep(
        "compiled by torch.jit, so it can't synchronize; convert the model as it was before "
        "torch.jit.script or trace, and train that"
    )


def _kept_of_torch(module: nn.Module, kind: type[nn.Module]) -> Keep | None:
    """Layers of torch.ao that can't be converted, or not yet."""
    where = kind.__module__
    if not where.startswith("torch.ao.nn."):
        return None
    if issubclass(kind, _BatchNorm):
        return Keep("quantized; it uses its running statistics only", True)
    if where == "torch.ao.nn.intrinsic.modules.fused" and "Bn" in kind.__name__:
        return Keep("prepare_qat makes a new plain layer of it; call convert_model after that")
    if getattr(module, "_enable_slow_path_for_better_numerical_stability", False):
        return Keep(
            "its slow path takes statistics of its own part; set "
            "_enable_slow_path_for_better_numerical_stability to False"
        )
    return None
