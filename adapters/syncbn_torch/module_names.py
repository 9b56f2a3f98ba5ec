"""The name of a layer in its model, for error messages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn

__all__ = ["name_of"]

_WRAPPERS = ("module.", "_orig_mod.")  # prefixes by DistributedDataParallel and torch.compile

_known: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def name_of(layer: nn.Module) -> str:
    """`layer1.0.bn1 (SynchronizedBatchNorm2d)`, or only the class for a layer outside of models.

    The same in every process that built the same model. The first call for a layer searches all
    live modules, which takes about 0.1 s, and names all layers of its class in the same model.
    """
    name = _known.get(layer)
    if name is None:
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        parents = _parents(modules)
        name = _known[layer] = _found_name(layer, parents)
        model = _root(layer, parents)
        # not those of other models, which may still be put together
        for other in modules:
            if type(other) is type(layer) and _root(other, parents) is model:
                _known.setdefault(other, _found_name(other, parents))
    return name


def _parents(modules: list[Any]) -> dict[int, list[tuple[Any, str]]]:
    """The modules that contain each module, by its id, and its name there."""
    parents: dict[int, list[tuple[Any, str]]] = {}
    for module in modules:
        for name, child in (module.__dict__.get("_modules") or {}).items():
            parents.setdefault(id(child), []).append((module, name))
    return parents


def _root(module: nn.Module, parents: dict[int, list[tuple[Any, str]]]) -> nn.Module:
    """The outermost module that contains `module`, by the first parent of each."""
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module = parents[id(module)][0][0]
    return module


def _found_name(layer: nn.Module, parents: dict[int, list[tuple[Any, str]]]) -> str:
    paths = _paths(layer, parents, frozenset())
    kind = type(layer).__name__
    path = min((_without_wrappers(path) for path in paths), key=lambda p: (-len(p), p))
    return f"{path} ({kind})" if path else kind


def _paths(
    module: Any, parents: dict[int, list[tuple[Any, str]]], seen: frozenset[int]
) -> list[str]:
    """The dotted paths to `module` from every root, a module that no other module contains."""
    found = []
    for parent, name in parents.get(id(module), []):
        if id(parent) not in seen:
            above = _paths(parent, parents, seen | {id(module)})
            found += [f"{path}.{name}" if path else name for path in above]
    return found or [""]


def _without_wrappers(path: str) -> str:
    while path.startswith(_WRAPPERS):
        path = path.partition(".")[2]
    return path
