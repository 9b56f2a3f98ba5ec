"""The name of a layer in its model: for error messages, and to tell layers of one group apart.

Processes that run the same program may hold a model differently: one may wrap it, or keep it in a
larger module beside a copy. So the names that tell layers apart leave out containers of a single
module (most wrappers are such), and `held_with` gives the names of all layers in a layer's models.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from syncbn_core.exchange import LayerNames

_WRAPPERS = ("module.", "_orig_mod.")  # prefixes by DistributedDataParallel and torch.compile

_names: weakref.WeakKeyDictionary[nn.Module, Names] = weakref.WeakKeyDictionary()

Parents = dict[int, list[tuple[Any, str]]]  # see `_parents`
Route = list[tuple[Any, str]]  # (parent, name of child), from an outermost module down


class Names(NamedTuple):
    """A layer's path in its model, and the same without containers of a single module."""

    path: str
    short: str


def name_of(layer: nn.Module) -> str:
    """`layer1.0.bn1 (SynchronizedBatchNorm2d)`, or only the class for a layer outside of models.

    Every process that built the same model gives the same name. The first call for a layer searches
    all live modules, which takes about 0.1 s, and names all batch norms of its model.
    """
    path, kind = _names_of(layer).path, type(layer).__name__
    return f"{path} ({kind})" if path else kind


def short_name_of(layer: nn.Module) -> str:
    """`layer1.0.bn1`, without containers of a single module; "" outside of models."""
    return _names_of(layer).short


def _names_of(layer: nn.Module) -> Names:
    names = _names.get(layer)
    if names is None:
        names = _names[layer] = _search(layer)
    return names


def _search(layer: nn.Module) -> Names:
    """The names of `layer`; notes those of all batch norms in its model."""
    modules = _live_modules()
    parents = _parents(modules)
    if id(layer) not in parents:
        return Names("", "")
    model = _root(layer, parents)
    # skip other models: they may still be under construction
    for other in modules:
        if _is_batch_norm(other) and _root(other, parents) is model:
            _names.setdefault(other, _found(other, parents))
    return _found(layer, parents)


def _found(layer: nn.Module, parents: Parents) -> Names:
    routes = _routes(layer, parents)
    paths = [_without_wrappers(".".join(name for _, name in route)) for route in routes]
    return Names(_longest(paths), _longest([_short(route) for route in routes]))


def _longest(names: list[str]) -> str:
    return min(names, key=lambda name: (-len(name), name))


def held_with(layer: nn.Module) -> list[tuple[str, bool]]:
    """The short names of all batch norms in the models that hold `layer`; which are its own."""
    modules = _live_modules()
    parents = _parents(modules)
    models = {id(route[0][0]) for route in _routes(layer, parents) if route}
    return [
        (_short(route), other is layer)
        for other in modules
        if _is_batch_norm(other)
        for route in _routes(other, parents)
        if route and id(route[0][0]) in models
    ]


LAYER_NAMES = LayerNames(short_name_of, held_with)


def _short(route: Route) -> str:
    """The dotted names of a route, without modules that are the only one in their container."""
    return ".".join(name for holder, name in route if len(_children(holder)) > 1)


def _children(module: Any) -> dict[str, Any]:
    children = module.__dict__.get("_modules") or {}
    return {name: child for name, child in children.items() if child is not None}


def _routes(module: Any, parents: Parents, seen: frozenset[int] = frozenset()) -> list[Route]:
    """All routes from an outermost module down to `module`."""
    routes = [
        [*above, (parent, name)]
        for parent, name in parents.get(id(module), [])
        if id(parent) not in seen
        for above in _routes(parent, parents, seen | {id(module)})
    ]
    return routes or [[]]


def _is_batch_norm(module: Any) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


def _live_modules() -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def _parents(modules: list[Any]) -> Parents:
    """For the id of each child module: its parents, each with the name of the child in it."""
    parents: Parents = {}
    for module in modules:
        for name, child in (module.__dict__.get("_modules") or {}).items():
            parents.setdefault(id(child), []).append((module, name))
    return parents


def _root(module: nn.Module, parents: Parents) -> nn.Module:
    """The outermost module that contains `module`, found through the first parent of each."""
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module = parents[id(module)][0][0]
    return module


def _without_wrappers(path: str) -> str:
    while path.startswith(_WRAPPERS):
        path = path.partition(".")[2]
    return path
