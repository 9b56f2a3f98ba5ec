"""The values in nested containers, taken out and put back by torch's pytree."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from syncbn_core.errors import ShapeError
from syncbn_torch._torch_private import pytree

# Frequent types of values that are no containers.
SIMPLE_TYPES = frozenset({str, int, float, bool, type(None)})


class Tree:
    """How containers nest around `values`.

    Containers are what is registered with torch's pytree, such as tuples, lists, dictionaries and
    the outputs of transformers; and dataclasses, other mappings, and classes derived from lists and
    tuples. Those with nothing but numbers, strings and None are one value. A thing for which
    `stops(thing)` is true is one value too.
    """

    def __init__(self, tree: Any, stops: Callable[[Any], bool] = lambda thing: False) -> None:
        self._tree, self._stops = tree, stops
        # no method: torch keeps this function, until garbage is collected, and all that it holds
        self._is_value = partial(_is_value, stops)
        self._found, self._spec = pytree.tree_flatten(tree, is_leaf=self._is_value)
        self._opened = {
            n: Tree(_contents(thing), stops)
            for n, thing in enumerate(self._found)
            if not self._is_value(thing) and not _is_plain(_contents(thing))
        }
        self.values: list[Any] = [
            value
            for n, thing in enumerate(self._found)
            for value in (self._opened[n].values if n in self._opened else [thing])
        ]

    def paths(self, root: str) -> list[str]:
        """How to reach each value from `root`, such as `output[0]`, `output['x']` or `output.x`."""
        try:
            found = pytree.tree_flatten_with_path(self._tree, is_leaf=self._is_value)[0]
            paths = [root + pytree.keystr(keys) for keys, _ in found]
        except ValueError:  # a class that was registered without names, such as of transformers
            tree = self._tree
            inside = pytree.tree_leaves(tree, is_leaf=lambda thing: thing is not tree)
            named = isinstance(tree, Mapping) and len(tree) == len(inside)
            keys = list(tree) if named else range(len(inside))
            return [
                path
                for key, value in zip(keys, inside, strict=True)
                for path in Tree(value, self._stops).paths(f"{root}[{key!r}]")
            ]
        return [
            path
            for n, own in enumerate(paths)
            for path in (self._opened[n].paths(own) if n in self._opened else [own])
        ]

    def values_of(self, other: Any) -> list[Any]:
        """The values of `other`; raises `ValueError` if its containers are unlike these."""
        values: list[Any] = []
        for n, theirs in enumerate(self._spec.flatten_up_to(other)):
            if n not in self._opened:
                values.append(theirs)
            elif type(theirs) is type(self._found[n]):
                values += self._opened[n].values_of(_contents(theirs))
            else:
                kinds = [type(thing).__name__ for thing in (self._found[n], theirs)]
                raise ValueError(f"expected {kinds[0]}, but got {kinds[1]}")
        return values

    def made_of(self, values: Iterable[Any]) -> Any:
        """The same containers around other values; `ShapeError` if a class prevents it."""
        values = iter(values)
        made = [
            _like(thing, self._opened[n].made_of(values)) if n in self._opened else next(values)
            for n, thing in enumerate(self._found)
        ]
        return pytree.tree_unflatten(made, self._spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, in their order."""
    return [value for value in Tree(tree).values if isinstance(value, Tensor)]


def hidden_tensor(thing: Any) -> str | None:
    """The path to a tensor that an object holds, such as `.boxes`, or None.

    Looks at the first values of its attributes, of containers in these, and of the attributes of
    what such a container holds; not into modules and what else is called.
    """
    if isinstance(thing, PackedSequence):
        return ".data"
    held = {f".{name}": value for name, value in getattr(thing, "__dict__", {}).items()}
    if isinstance(thing, (set, frozenset)):
        held["{...}"] = list(thing)
    for path, value in held.items() if not callable(thing) else ():
        for each in islice(pytree.tree_iter(value), 100):
            inside = {} if each is value or callable(each) else getattr(each, "__dict__", {})
            if any(isinstance(found, Tensor) for found in (each, *inside.values())):
                return path
    return None


def _is_value(stops: Callable[[Any], bool], thing: Any) -> bool:
    if isinstance(thing, PackedSequence) or stops(thing):
        return True
    return type(thing) in (list, tuple) and _is_plain(thing)


def _is_plain(values: Any) -> bool:
    held = values.values() if isinstance(values, dict) else values
    return SIMPLE_TYPES.issuperset(map(type, held))


def _contents(thing: Any) -> dict[Any, Any] | list[Any]:
    """What a container holds that torch's pytree does not know; nothing for other things."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [field.name for field in dataclasses.fields(thing)]
        return {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    if isinstance(thing, Mapping):
        return dict(thing)
    return list(thing) if isinstance(thing, (list, tuple)) else []


def _like(thing: Any, contents: Any) -> Any:
    """A container like `thing` with other contents."""
    kind = type(thing)
    try:
        if isinstance(thing, Mapping):
            return kind(contents)
        if isinstance(thing, (list, tuple)):
            return getattr(kind, "_make", kind)(contents)
        made = copy.copy(thing)  # not its constructor, which may check or compute something
        for name, value in contents.items():
            object.__setattr__(made, name, value)  # frozen ones too
        return made
    except Exception as error:
        raise ShapeError(
            f"expected containers that can be made from what they hold, got a {kind.__name__}, "
            f"which raised {type(error).__name__}: {error}; use a dictionary or dataclass instead"
        ) from error
