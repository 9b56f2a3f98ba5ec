"""Calls of the original model's layers while replicas of the model run.

A bound method, a partial, a plain list or a compiled function made earlier still refers to a layer
of the original model, which has no link to other replicas. In a replica's thread `copy_of` finds
the copy to use instead. If there is none, `check_alone` raises, so that no layer silently uses the
statistics of a part of the batch.
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

# False while no replica runs and no mark exists; layers then skip this module. A plain global,
# because every forward reads it and torch.compile can guard on it.
active = False

_lock = threading.RLock()  # garbage collection may call `_forget` in the thread that holds it
_running: set[Replica] = set()
_current: ContextVar[Replica | None] = ContextVar("replica", default=None)


class Replica:
    """One of several replicas of a model. `copies`: original layer -> this replica's copy."""

    def __init__(self, index: int, size: int, copies: dict[nn.Module, nn.Module]) -> None:
        self.index = index
        self.size = size
        self.copies = copies
        self.grad = torch.is_grad_enabled()
        self.given_up = False

    def run(self, call: Callable[[], T]) -> T:
        """Run `call()` as this replica; must be called in a `contextvars` context of its own."""
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
    """A `Replica` for each of two or more copies of `model`, all lists of modules in one order."""
    if len(copies) < 2:
        return []
    places = [i for i, m in enumerate(model) if hasattr(type(m), "__data_parallel_replicate__")]
    return [
        Replica(index, len(copies), {model[i]: own[i] for i in places})
        for index, own in enumerate(copies)
    ]


def current() -> Replica | None:
    """The replica that runs in this thread, or None."""
    return _current.get()


def give_up(replicas: Sequence[Replica]) -> None:
    """Ignore these replicas from now on: their forward has failed, but some may still run."""
    for replica in replicas:
        replica.given_up = True


def copy_of(layer: nn.Module) -> nn.Module | None:
    """The copy of `layer` in the replica that runs in this thread, or None."""
    replica = _current.get()
    return None if replica is None else replica.copies.get(layer)


def check_alone(layer: nn.Module) -> None:
    """Raise if `layer`, which has no link, would use the statistics of a part of the batch."""
    replica = _current.get()
    if replica is not None:
        raise StateError(
            f"{name_of(layer)} was called in replica {replica.index} of {replica.size}, but is "
            "not a submodule of the model that DataParallelWithCallback replicates (is it in a "
            "plain list or a global, or made in forward?), so it can't be synchronized; register "
            "it, for example in an nn.ModuleList"
        )
    with _lock:
        _watch()
        theirs = any(layer in other.copies for other in _running if not other.given_up)
        recomputed = any(reached() is layer for reached in list(_marks.values()))
    if theirs:
        raise StateError(
            f"{name_of(layer)} of the original model was called by a thread that belongs to no "
            "replica while replicas of the model run, so it can't be synchronized; in your own "
            "threads call the replica's submodules (self.bn), or run the call in "
            "contextvars.copy_context() of the replica"
        )
    if recomputed and backward_task() != -1:
        raise CheckpointError(
            f"{name_of(layer)} of the original model was recomputed in backward after a replica "
            "had called it through a bound method or a plain list, so it can't be synchronized; "
            "checkpoint a function that calls the replica's submodules (self.bn)"
        )


class _Mark:
    """Exists as long as the graph of a call in which a replica reached an original layer."""


# Existing marks: id -> layer.
_marks: dict[int, weakref.ref[nn.Module]] = {}
# Marks without a graph exist as long as their layer.
_kept: weakref.WeakKeyDictionary[nn.Module, _Mark] = weakref.WeakKeyDictionary()


def note_reached(layer: nn.Module, y: Tensor) -> None:
    """Remember that a replica has called the original `layer`; a recomputation must then raise.

    The mark exists as long as the graph of y. The first forward of a reentrant checkpoint has no
    graph; its mark exists as long as the layer.
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
        # torch.compile may trace a forward twice and needs the same `active` both times. So a
        # mark that is collected during tracing does not change it; the next forward does.
        if not is_tracing():
            _watch()


def _watch() -> None:
    global active
    active = bool(_running or _marks)
