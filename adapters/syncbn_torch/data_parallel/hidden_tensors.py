"""Find tensors and iterators in objects whose class says nothing about how to split them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from io import IOBase
from itertools import islice
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["find_tensor", "is_iterator", "named"]

# An object may lead to everything, such as a data set, and each forward searches it: the search
# ends after so many values, and looks at so many values of each container.
_ENOUGH = 500
_ENOUGH_OF_ONE = 100

_SKIPPED = frozenset({str, bytes, int, float, complex, bool, type(None)})
# Passed on whole, as what they are: of these, replicas want the same.
_WHOLE = (str, bytes, int, float, complex, type(None), type, Enum, nn.Module, ModuleType, IOBase)


def is_iterator(thing: Any) -> bool:
    """Whether `thing` is used up by the first who reads it; open files are not meant."""
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


def named(key: Any) -> str:
    """How a path shows the key of a dictionary."""
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def _held(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, _WHOLE) or callable(thing):
        return
    if isinstance(thing, dict):
        for key, value in islice(thing.items(), _ENOUGH_OF_ONE):
            if type(value) not in _SKIPPED:
                yield named(key), value
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
