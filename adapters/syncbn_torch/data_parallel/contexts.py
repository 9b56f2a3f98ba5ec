"""What the replicas of a model share during one forward.

Callbacks get a context for each submodule, on which they may set any attribute. What the library
needs is apart from them, in one `ReplicatedForward`, of which a context knows its `Place`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from syncbn_core.comm import SyncMaster
from syncbn_core.errors import ArgumentError, StateError
from syncbn_torch._torch_private import backward_task
from syncbn_torch.module_names import name_of

_KEY = "forward of syncbn"  # in the dictionary of a context; no name that a callback could set


class ReplicatedForward:
    """One forward of a model in replicas; callbacks can't change it.

    Attributes:
        size: the number of replicas; 0 if unknown.
        ends: whether somebody reports the end of the forward by `close`.
        modules: of the original model.
        closed: True after the forward, when the other replicas can't be reached any more.
        recomputes: True if the forward began within a backward pass, for activation checkpointing:
            then running statistics have been updated before.
        given_up: the error with which the caller gave up the forward, as text, or "". Some
            replicas may still run then; their results are dropped.
    """

    def __init__(
        self, size: int = 0, ends: bool = False, modules: Sequence[nn.Module] = ()
    ) -> None:
        self.size = size
        self.ends = ends
        self.modules: frozenset[nn.Module] = frozenset(modules)
        self.closed: bool = False
        self.recomputes: bool = False
        self.given_up: str = ""
        self.masters: dict[tuple[int, str], SyncMaster] = {}  # by place, and attribute of a context

    def leave(self, copy_id: int) -> None:
        """End a replica's forward and release the replicas that wait for it."""
        for master in list(self.masters.values()):
            master.leave(copy_id)

    def abort(self, error: BaseException) -> None:
        """Release all waiting replicas, because one failed with `error`."""
        for master in list(self.masters.values()):
            master.abort(error)

    def close(self) -> None:
        """End the forward for all replicas; drop its errors, whose tracebacks hold its frames."""
        self.closed = True
        self.modules = frozenset()  # a graph holds this object: it must not hold the model
        for master in list(self.masters.values()):
            master.clear_slaves()

    def give_up(self, error: BaseException) -> None:
        """Drop the results of replicas that still run, because of `error`: they must stop."""
        # as text, because its traceback would hold the frames of the forward
        self.given_up = traceback.format_exception_only(error)[0].strip()

    def is_over(self) -> bool:
        """Whether the forward has ended, so that a call now is a recomputation.

        If nobody reports the end: whether a backward pass runs, in which a forward must be one.
        """
        return self.closed if self.ends else backward_task() != -1


class Place(NamedTuple):
    """A submodule in a forward: its number, and its name in the model for error messages."""

    forward: ReplicatedForward
    number: int
    name: Any

    def begin(self, attribute: str, master: SyncMaster) -> None:
        """Start a new round of `master`, in place of the one with this `attribute`, if any."""
        self.forward.recomputes = backward_task() != -1
        # forget the copies of the last forward: there may be fewer this time
        master.clear_slaves()
        self.forward.masters[self.number, attribute] = master

    def master(self, attribute: str) -> SyncMaster:
        """The master that copy 0 has given to `begin`; `StateError` if it has not."""
        master = self.forward.masters.get((self.number, attribute))
        if master is None:
            raise StateError(
                f"expected one context for all copies of {self.name}, given to copy 0 first, got "
                "one that copy 0 has not had"
            )
        return master


class CallbackContext:
    """What the copies of one submodule share during one forward; you may set any attribute.

    A `SyncMaster` that you set, usually as `sync_master`, starts a new round, so one object may
    serve many forwards. It is aborted when a replica fails.

    Attributes:
        name: the submodule's name in the model.
        size: the number of copies.
    """

    def __init__(self, name: str = "", size: int = 0, *, place: Place | None = None) -> None:
        attributes = self.__dict__
        attributes[_KEY] = place or Place(ReplicatedForward(size), 0, name)
        attributes["name"], attributes["size"] = name, size

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SyncMaster):
            place: Place = self.__dict__[_KEY]
            place.begin(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__.get("name")
        raise AttributeError(f"copy 0 has not set {name} on the context of {where!r}")

    def abort(self, error: BaseException) -> None:
        """Release all replicas that wait in this forward, because one failed with `error`."""
        place: Place = self.__dict__[_KEY]
        place.forward.abort(error)


class _LazyName:
    """The name of a layer, searched only when it is printed, because the search is slow."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __str__(self) -> str:
        return name_of(self.layer)


def place_of(context: Any, layer: nn.Module) -> Place:
    """The place of the copies of `layer` in their forward.

    A context of another project's is alone in a forward with no known end. Raises `ArgumentError`
    for an object without a dictionary of attributes.
    """
    try:
        attributes = vars(context)
        if _KEY not in attributes:
            attributes.setdefault(_KEY, Place(ReplicatedForward(), 0, _LazyName(layer)))
        place: Place = attributes[_KEY]
    except (TypeError, AttributeError):  # no dictionary, or that of a class
        raise ArgumentError(
            "expected a context on which attributes can be set, the same for all copies of a "
            f"submodule, got {type(context).__name__}; pass an object of a class without "
            "__slots__, such as types.SimpleNamespace()"
        ) from None
    return place
