"""Take a container apart by one level, and make the same kind again.

Containers are tuples, lists and mappings, dataclasses, and what is registered with torch's pytree,
such as the outputs of transformers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import IOBase
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from syncbn_torch._torch_private import registered_node

__all__ = ["PLAIN", "Node", "find_tensor", "is_iterator", "key_path", "node", "tensors_in"]


class Node(NamedTuple):
    """A container, taken apart."""

    values: Sequence[Any]
    # how to reach each value, such as `[0]`, `["boxes"]` or `.logits`
    keys: Sequence[str]
    # makes the same kind of container from other values
    make: Callable[[list[Any]], Any]
    # what else containers that are joined must have in common
    settings: Any = None


# Frequent types that are not containers.
PLAIN = frozenset({str, int, float, bool, type(None)})


def node(tree: Any) -> Node | None:
    """`tree` taken apart; None if it is no container."""
    kind = type(tree)
    if kind in PLAIN or isinstance(tree, (Tensor, PackedSequence)):
        return None
    settings: Any = None
    make: Callable[[list[Any]], Any]
    values: Sequence[Any]
    if kind is tuple or kind is list:  # the next lines would take long for thousands of numbers
        values, make = tree, kind
    elif kind is not dict and (found := registered_node(tree)) is not None:
        values, make, settings = found
    elif isinstance(tree, Mapping):
        values = list(tree.values())
        make = lambda new: kind(dict(zip(tree, new, strict=True)))  # noqa: E731
    elif isinstance(tree, (list, tuple)):
        values, make = tree, getattr(kind, "_make", kind)
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        values = [getattr(tree, name) for name in names]
        make = lambda new: _like_dataclass(tree, names, new)  # noqa: E731
    else:
        return None
    return Node(values, _keys(tree, len(values)), make, settings)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    container = node(tree)
    values = () if container is None else container.values
    return [tensor for value in values for tensor in tensors_in(value)]


def _keys(tree: Any, length: int) -> list[str]:
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        names = list(tree) if isinstance(tree, Mapping) else names
    else:
        names = list(getattr(tree, "_fields", ()))
    if len(names) == length:
        return [f".{name}" for name in names]
    if isinstance(tree, Mapping) and len(tree) == length:
        return [key_path(key) for key in tree]
    return [f"[{index}]" for index in range(length)]


def _like_dataclass(tree: Any, names: list[str], values: list[Any]) -> Any:
    made = copy.copy(tree)  # not its constructor, which may check or compute something
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones too
    return made


def is_iterator(thing: Any) -> bool:
    """Whether `thing` can be read only once, such as a generator; open files do not count."""
    return isinstance(thing, Iterator) and not isinstance(thing, IOBase)


def find_tensor(thing: Any) -> str | None:
    """The path to a tensor that an object holds, such as `.boxes`, or None.

    Looks into its attributes and, of builtin containers among these, at the first values. Objects
    within are not searched, nor is what can be called, such as modules.
    """
    if callable(thing):
        return None
    held = {f".{name}": value for name, value in getattr(thing, "__dict__", {}).items()}
    if isinstance(thing, (set, frozenset)):
        held["{...}"] = list(islice(thing, 100))
    for path, value in held.items():
        inside = value.values() if isinstance(value, dict) else value
        values = inside if isinstance(value, (dict, list, tuple)) else (value,)
        if any(isinstance(each, Tensor) for each in islice(values, 100)):
            return path
    return None


def key_path(key: Any) -> str:
    """How a path shows the key of a dictionary."""
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"
