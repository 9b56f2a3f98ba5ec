"""Find tensors and iterators in objects whose class says nothing about how to split them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from io import IOBase
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["find_tensor", "is_iterator", "named"]

# An object may lead to everything, such as a data set: after so many values the search ends.
_ENOUGH = 10_000

# Passed on whole, as what they are: of these, replicas want the same.
_WHOLE = (str, bytes, int, float, complex, type(None), type, Enum, nn.Module, ModuleType, IOBase)


def is_iterator(thing: Any) -> bool:
    """Whether `thing` is used up by the first who reads it; open files are not meant."""
    return isinstance(thing, Iterator) and not isinstance(thing, IOBase)


def find_tensor(thing: Any, known: Collection[Any] = ()) -> str | None:
    """The path from `thing` to a tensor or iterator in it, such as `.boxes[0]`, or None.

    Looks into attributes, slots, and builtin containers, nearest first, but not into modules and
    functions. Values that are one of `known` don't count.
    """
    seen = {id(value): value for value in known}
    waiting: deque[tuple[str, Any]] = deque([("", thing)])
    while waiting and len(seen) < _ENOUGH:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # keeps it alive, so that its id stays its own
        if isinstance(value, Tensor) or is_iterator(value):
            return path
        waiting.extend((path + key, held) for key, held in _held(value))
    return None


def named(key: Any) -> str:
    """How a path shows the key of a dictionary."""
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def _held(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, _WHOLE) or callable(thing):
        return
    if isinstance(thing, dict):
        yield from ((named(key), value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict) and attributes is not thing:
        yield from ((f".{name}", value) for name, value in attributes.items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
