"""Find the modules of a model, and change their class or put others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)  # of a model; conversion keeps its class, or a parent

# What every module has in its dictionary: registries, hooks, flags.
_ORDINARY = frozenset(vars(nn.Module()))


def modules_of(root: nn.Module) -> dict[nn.Module, str]:
    """All modules of `root` with their names, the registered ones first.

    Modules in plain attributes, lists, tuples, sets and dictionaries follow, also those that lie
    within such modules. Their names look like `head.layers[0].bn`. A module that contains `root` is
    left out: it is a reference back, not a part.
    """
    names = {module: name for name, module in root.named_modules()}
    todo = list(names)
    containers: set[int] = set()
    for module in todo:  # grows
        for key, value in _plain_attributes(module):
            place = f"{names[module]}.{key}" if names[module] else key
            for name, found in _held(value, place, containers):
                if root in found.modules() and found is not root:
                    continue
                for inner, submodule in found.named_modules():
                    if submodule not in names:
                        names[submodule] = f"{name}.{inner}" if inner else name
                        todo.append(submodule)
    return names


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`; of a parametrized module the one that it had before."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):  # keeps its submodules elsewhere
        return kind
    # not by torch.nn.utils.parametrize, which asks for an attribute: that may run the user's code
    if isinstance(vars(module)["_modules"].get("parametrizations"), nn.ModuleDict):
        return kind.__bases__[0]
    return kind


def change_class(module: nn.Module, target: type[nn.Module]) -> None:
    """Make `module` a `target`, in place: it keeps its state, its hooks and its identity."""
    kind = type(module)
    if class_of(module) is not kind:
        # torch gives each parametrized module a class of its own, which holds the properties
        own = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        target = type(f"Parametrized{target.__name__}", (target,), own)
    if not forward_replaced(module):
        vars(module).pop("forward", None)  # the forward of the old class
    module.__class__ = target


def forward_replaced(module: nn.Module) -> bool:
    """Whether the object has a forward that is not the one of its class.

    Removing a hook of accelerate leaves the forward of the class on the object; that is none.
    """
    own = vars(module).get("forward")
    return own is not None and own != MethodType(type(module).forward, module)


def swap_modules(holders: Mapping[nn.Module, str], new: Mapping[nn.Module, nn.Module]) -> None:
    """In all `holders`, put `new[module]` in the place of `module`, also in plain lists."""
    known: dict[int, Any] = {}
    for holder in holders:
        for key, child in list(holder._modules.items()):
            if child is not None and child in new:
                holder._modules[key] = new[child]
        for key, value in _plain_attributes(holder):
            changed = _swapped(value, new, known)
            if changed is not value:
                holder.__dict__[key] = changed


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):  # a traced one holds itself once more
        return []
    return [(key, value) for key, value in vars(module).items() if key not in _ORDINARY]


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    return issubclass(type(value), kinds)  # isinstance would ask a proxy for its __class__


def _may_hold_modules(value: Any) -> bool:
    """Whether `value` is a container with modules or containers in it."""
    if not _is(value, (list, tuple, set, frozenset, dict)):
        return False
    # quick also for millions of numbers
    kinds = set(map(type, value.values() if _is(value, dict) else value))
    return any(issubclass(k, (nn.Module, list, tuple, set, frozenset, dict)) for k in kinds)


def _held(value: Any, place: str, containers: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a plain attribute. `containers`: the ids of those already searched."""
    if _is(value, nn.Module):
        yield place, value
    elif _may_hold_modules(value) and id(value) not in containers:
        containers.add(id(value))
        items = value.items() if _is(value, dict) else enumerate(value)
        for key, item in items:
            if _is(item, (nn.Module, list, tuple, set, frozenset, dict)):
                yield from _held(item, f"{place}[{key!r}]", containers)


def _swapped(value: Any, new: Mapping[nn.Module, nn.Module], known: dict[int, Any]) -> Any:
    """`value` with all modules replaced: changed in place, or a new tuple or frozenset.

    `known`: for the ids of containers seen before, the old and the new one.
    """
    if _is(value, nn.Module):
        return new.get(value, value)
    if not _may_hold_modules(value):
        return value
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, value  # it may contain itself
    if _is(value, dict):
        for key, item in list(value.items()):
            swapped = _swapped(item, new, known)
            if swapped is not item:
                value[key] = swapped
        return value
    items = [_swapped(item, new, known) for item in value]
    if all(a is b for a, b in zip(items, value, strict=True)):
        return value
    if _is(value, list):
        value[:] = items
    elif _is(value, set):
        value.clear()
        value.update(items)
    else:
        make = getattr(value, "_make", type(value))  # a named tuple has `_make`
        known[id(value)] = value, make(items)
    return known[id(value)][1]
