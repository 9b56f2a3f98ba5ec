"""Take a container apart by one level, make the same kind, and find tensors in any object.

Containers are tuples, lists and mappings of any class, dataclasses, and what is registered with
torch's pytree, such as the outputs of transformers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import is_dataclass
from enum import Enum
from io import IOBase
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
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


def node(tree: Any, settings_too: bool = False) -> Node | None:
    """`tree` taken apart; None if it is no container.

    A dataclass without tensors holds settings, and is a container only with `settings_too`.
    """
    kind = type(tree)
    if kind in PLAIN:
        return None
    if kind is tuple or kind is list:
        return Node(tree, _numbers(tree), kind)
    if kind is dict:
        return Node(list(tree.values()), _names(tree), lambda v: dict(zip(tree, v, strict=True)))
    if isinstance(tree, (Tensor, PackedSequence)):
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return Node(tree, _attributes(tree._fields), lambda v: _like_named_tuple(tree, v))
    if kind is not OrderedDict and kind is not defaultdict:
        registered = registered_node(tree)
        if registered is not None:
            values, make, settings = registered
            return Node(values, _keys_of_registered(tree, len(values)), make, settings)
    if isinstance(tree, Mapping):
        return Node(list(tree.values()), _names(tree), lambda v: _like_mapping(tree, v))
    if isinstance(tree, (list, tuple)):
        return Node(tree, _numbers(tree), lambda v: _like_sequence(tree, v))
    if dataclasses.is_dataclass(kind) and (settings_too or find_tensor(tree) is not None):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        values = [getattr(tree, name) for name in names]
        return Node(values, _attributes(names), lambda v: _like_dataclass(tree, names, v))
    return None


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    container = node(tree)
    values = () if container is None else container.values
    return [tensor for value in values for tensor in tensors_in(value)]


def _numbers(values: Sequence[Any]) -> list[str]:
    return [f"[{index}]" for index in range(len(values))]


def _names(tree: Mapping[Any, Any]) -> list[str]:
    return [key_path(key) for key in tree]


def _attributes(names: Sequence[str]) -> list[str]:
    return [f".{name}" for name in names]


def _keys_of_registered(tree: Any, length: int) -> list[str]:
    if isinstance(tree, Mapping) and len(tree) == length:
        return _attributes(list(tree)) if dataclasses.is_dataclass(tree) else _names(tree)
    return [f"[{index}]" for index in range(length)]


def _like_named_tuple(tree: Any, values: list[Any]) -> Any:
    return _with_attributes(tree, type(tree)._make(values))


def _like_sequence(tree: Any, values: list[Any]) -> Any:
    if isinstance(tree, tuple):
        return _with_attributes(tree, type(tree)(values))
    made: Any = copy.copy(tree)
    made[:] = values
    return made


def _with_attributes(tree: Any, made: Any) -> Any:
    """`made` with the attributes that a subclass may have added to `tree`."""
    if getattr(tree, "__dict__", None):
        made.__dict__.update(tree.__dict__)
    return made


def _like_mapping(tree: Any, values: list[Any]) -> Any:
    new = dict(zip(tree, values, strict=True))
    if not isinstance(tree, MutableMapping):
        return type(tree)(new)
    made: Any = copy.copy(tree)  # keeps settings such as the factory of a defaultdict
    for key, value in new.items():  # `update` of a Counter adds
        made[key] = value
    attributes = getattr(tree, "__dict__", None) or {}
    if attributes is tree:  # dictionaries whose keys are also their attributes
        made.__dict__ = made
    else:
        mirrored = {k: new[k] for k in tree if attributes.get(k, new) is tree[k]}
        if mirrored:
            made.__dict__.update(mirrored)
    return made


def _like_dataclass(tree: Any, names: list[str], values: list[Any]) -> Any:
    made = copy.copy(tree)  # not its constructor, which may check or compute something
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones too
    return made


# An object may lead to everything, such as a data set, and each forward searches it: the search
# ends after so many values, and looks at so many values of each container.
_ENOUGH = 500
_ENOUGH_OF_ONE = 100

_SKIPPED = frozenset({str, bytes, int, float, complex, bool, type(None)})
# Passed on whole, as what they are: of these, replicas want the same.
_WHOLE = (str, bytes, int, float, complex, type(None), type, Enum, nn.Module, ModuleType, IOBase)


def is_iterator(thing: Any) -> bool:
    """Whether `thing` can be read only once, such as a generator; open files do not count."""
    return isinstance(thing, Iterator) and not isinstance(thing, IOBase)


def find_tensor(thing: Any, known: Collection[Any] = ()) -> str | None:
    """The path from `thing` to a tensor or iterator in it, such as `.boxes[0]`, or None.

    Looks into attributes, slots, and builtin containers, nearest first, but not into modules and
    functions. Values that are one of `known` don't count. Iterators count in containers and
    dataclasses; other objects may have one for their own use, such as a counter. Large objects
    are searched in part.
    """
    seen = {id(value): value for value in known}
    enough = len(seen) + _ENOUGH
    # a path, what is there, and whether only containers and dataclasses lead to it
    waiting: deque[tuple[str, Any, bool]] = deque([("", thing, True)])
    while waiting and len(seen) < enough:
        path, value, in_container = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # keeps it alive, so that its id stays its own
        if isinstance(value, Tensor) or (in_container and is_iterator(value)):
            return path
        fields = in_container and is_dataclass(value)
        if len(waiting) >= _ENOUGH:
            continue
        for key, held in _held(value):
            waiting.append((path + key, held, fields or (in_container and key[0] == "[")))
    return None


def key_path(key: Any) -> str:
    """How a path shows the key of a dictionary."""
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def _held(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, _WHOLE) or callable(thing):
        return
    if isinstance(thing, dict):
        for key, value in islice(thing.items(), _ENOUGH_OF_ONE):
            if type(value) not in _SKIPPED:
                yield key_path(key), value
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        for index, value in enumerate(islice(thing, _ENOUGH_OF_ONE)):
            if type(value) not in _SKIPPED:
                yield f"[{index}]", value
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict) and attributes is not thing:
        for name, value in attributes.items():
            if type(value) not in _SKIPPED:
                yield f".{name}", value
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
