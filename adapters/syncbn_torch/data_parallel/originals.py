"""Layers that a replica calls though they are none of its own: they would use a part of the batch.

A bound method, a partial, a plain list or a compiled function made earlier still refers to a layer
of the original model, and a global or a layer made in forward to one of no model. None of these has
a link to the other replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from syncbn_core.errors import StateError
from syncbn_torch.data_parallel.contexts import ReplicatedForward
from syncbn_torch.module_names import name_of

T = TypeVar("T")

# Whether replicas run. A plain global, because every forward reads it and torch.compile can guard
# on it.
active: bool = False

_lock = threading.Lock()
_running: set[Replica] = set()
_current: ContextVar[Replica | None] = ContextVar("replica", default=None)


class Replica:
    """One of several replicas of a model."""

    def __init__(self, index: int, forward: ReplicatedForward) -> None:
        self.index: int = index
        self.forward: ReplicatedForward = forward

    def run(self, call: Callable[[], T]) -> T:
        """Run `call()` as this replica; must be called in a `contextvars` context of its own."""
        global active
        _current.set(self)
        with _lock:
            _running.add(self)
            active = True
        try:
            return call()
        finally:
            with _lock:
                _running.discard(self)
                active = bool(_running)


def current() -> Replica | None:
    """The replica that runs in this thread, or None."""
    return _current.get()


def check_alone(layer: Any) -> None:
    """Raise `StateError` if `layer`, which has no link, is called by a replica or beside some."""
    replica = _current.get()
    if replica is not None:
        raise StateError(
            f"{name_of(layer)} was called in replica {replica.index} of {replica.forward.size}, "
            "but is not a submodule of it, so it can't be synchronized: it was reached by a bound "
            "method, a compiled function, a plain list or a global, or made in forward; call the "
            "replica's submodules (self.bn), or register it, for example in an nn.ModuleList"
        )
    with _lock:
        forwards = {other.forward for other in _running}
    if any(layer in forward.modules for forward in forwards if not forward.given_up):
        raise StateError(
            f"{name_of(layer)} of the original model was called by a thread that belongs to no "
            "replica while replicas of the model run, so it can't be synchronized; in your own "
            "threads call the replica's submodules (self.bn)"
        )
