"""Layers of the model itself, reached while replicas of it run.

A replica calls its own copies of the layers, unless something leads around them: a bound method
or a partial made before, a plain list, a compiled function. What is reached then is a layer of the
original model, which has no link to the other replicas. In a replica's thread `copy_of` finds the
copy that belongs there. Where there is none, `check_alone` raises: statistics of a part of the
batch are never computed without a word.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from syncbn_core.errors import CheckpointError, StateError
from syncbn_torch._torch_private import backward_task, is_tracing
from syncbn_torch.module_names import name_of

__all__ = ["Replica", "check_alone", "copy_of", "current", "give_up", "note_reached", "replicas_of"]

T = TypeVar("T")

# False while no replica runs and no mark lives: layers then skip this module. A plain global,
# because every forward reads it and torch.compile can guard on it.
watching = False

_lock = threading.RLock()  # garbage collection may run `_forget` in the thread that holds it
_running: set[Replica] = set()
_current: ContextVar[Replica | None] = ContextVar("replica", default=None)


class Replica:
    """One of several replicas of a model: the copy that it has of each layer."""

    def __init__(self, index: int, size: int, copies: dict[nn.Module, nn.Module]) -> None:
        self.index = index
        self.size = size
        self.copies = copies
        self.grad = torch.is_grad_enabled()
        self.given_up = False

    def run(self, call: Callable[[], T]) -> T:
        """`call()`, to whose thread this replica belongs; in a context of its own."""
        _current.set(self)
        try:
            with _lock:
                _running.add(self)
                _watch()
            return call()
        finally:
            with _lock:
                _running.discard(self)
                _watch()


def replicas_of(model: Sequence[nn.Module], copies: Sequence[Sequence[nn.Module]]) -> list[Replica]:
    """What copies of a model need to find their layers; nothing for a single one.

    All are given as lists of their modules, in the same order.
    """
    if len(copies) < 2:
        return []
    places = [i for i, m in enumerate(model) if hasattr(type(m), "__data_parallel_replicate__")]
    return [
        Replica(index, len(copies), {model[i]: own[i] for i in places})
        for index, own in enumerate(copies)
    ]


def current() -> Replica | None:
    """The replica in whose thread this is called."""
    return _current.get()


def give_up(replicas: Sequence[Replica]) -> None:
    """The caller goes on without them, though some may still run: others needn't mind them."""
    for replica in replicas:
        replica.given_up = True


def copy_of(layer: nn.Module) -> nn.Module | None:
    """The copy of `layer` that belongs to the replica in whose thread this is called."""
    replica = _current.get()
    return None if replica is None else replica.copies.get(layer)


def check_alone(layer: nn.Module) -> None:
    """Raise if `layer`, which has no link, would take the statistics of a part of a batch only."""
    replica = _current.get()
    if replica is not None:
        raise StateError(
            f"{name_of(layer)} was reached in replica {replica.index} of {replica.size}, but is "
            "not a submodule of the model that DataParallelWithCallback replicates (kept in a "
            "plain list, a global, or made in forward?), so it can't be synchronized; register "
            "it, e.g. in nn.ModuleList"
        )
    with _lock:
        _watch()
        theirs = any(layer in other.copies for other in _running if not other.given_up)
        recomputed = any(reached() is layer for reached in list(_marks.values()))
    if theirs:
        raise StateError(
            f"{name_of(layer)} of the original model was reached by a thread that belongs to no "
            "replica while replicas of it run, so it can't be synchronized; in threads of your "
            "own call the replica's submodules (self.bn), or run the call in "
            "contextvars.copy_context() of the replica"
        )
    if recomputed and backward_task() != -1:
        raise CheckpointError(
            f"{name_of(layer)} of the original model was recomputed in backward after a replica "
            "had reached it through a bound method or a plain list, so it can't be synchronized; "
            "checkpoint a function that calls the replica's submodules (self.bn)"
        )


class _Mark:
    """A replica has reached a layer of the original model, and the graph of that call lives."""


# The layer of each mark that lives.
_marks: dict[int, weakref.ref[nn.Module]] = {}
_kept: weakref.WeakKeyDictionary[nn.Module, _Mark] = weakref.WeakKeyDictionary()


def note_reached(layer: nn.Module, y: Tensor) -> None:
    """Remember, for a recomputation in backward, that a replica has reached the original `layer`.

    The mark lives as long as the graph of y. A reentrant checkpoint makes none at first: then it
    lives as long as the layer.
    """
    replica = _current.get()
    node: Any = y.grad_fn
    if replica is None or (node is None and not replica.grad):
        return
    mark = _Mark()
    with _lock:
        if node is None:
            if layer in _kept:
                return
            _kept[layer] = mark
        else:
            node.metadata["syncbn_reached"] = mark
        _marks[id(mark)] = weakref.ref(layer)
        _watch()
    weakref.finalize(mark, _forget, id(mark)).atexit = False


def _forget(mark: int) -> None:
    with _lock:
        del _marks[mark]
        # torch.compile may trace a forward twice and needs the same `watching` both times. A mark
        # that is collected meanwhile leaves it as it is; the next forward corrects it.
        if not is_tracing():
            _watch()


def _watch() -> None:
    global watching
    watching = bool(_running or _marks)
