"""What the copies of one submodule share during one forward.

Callbacks get a context, on which they may set any attribute. What the library needs is apart from
them, in a `SharedForward`.
"""

from __future__ import annotations

import traceback
from typing import Any

from syncbn_core.comm import SyncMaster
from syncbn_core.errors import ArgumentError, StateError
from syncbn_torch._torch_private import backward_task

__all__ = ["CallbackContext", "SharedForward", "forward_of", "open_forward_of"]

_KEY = "forward of syncbn"  # in the dictionary of a context; no name that a callback could set


class SharedForward:
    """One forward of all copies of a submodule; callbacks can't change it.

    Attributes:
        name: the submodule's name in the model, for error messages.
        size: the number of copies; 0 if unknown.
        ends: whether somebody reports the end of the forward by `close`.
        closed: True after the forward, when the other copies can't be reached any more.
        recomputes: True if the forward began within a backward pass, for activation checkpointing:
            then running statistics have been updated before.
        disowned: the error with which the caller gave up the forward, as text, or "". Some
            copies may still run then; their results are dropped.
    """

    def __init__(self, name: Any, size: int = 0, ends: bool = False) -> None:
        self.name = name
        self.size = size
        self.ends = ends
        self.closed: bool = False
        self.recomputes: bool = False
        self.disowned: str = ""
        self._masters: dict[str, SyncMaster] = {}

    def begin(self, attribute: str, master: SyncMaster) -> None:
        """Start a new round of `master`, in place of the one with this `attribute`, if any."""
        self.recomputes = backward_task() != -1
        # forget the copies of the last forward: there may be fewer this time
        master.clear_slaves()
        self._masters[attribute] = master

    def master(self, attribute: str) -> SyncMaster:
        """The master that copy 0 has given to `begin`; `StateError` if it has not."""
        if attribute not in self._masters:
            raise StateError(
                f"expected one context for all copies of {self.name}, given to copy 0 first, got "
                "one that copy 0 has not had"
            )
        return self._masters[attribute]

    def leave(self, copy_id: int) -> None:
        """End a copy's forward and release the copies that wait for it."""
        for master in self._masters.values():
            master.leave(copy_id)

    def abort(self, error: BaseException) -> None:
        """Release all waiting copies, because a replica failed with `error`."""
        for master in self._masters.values():
            master.abort(error)

    def close(self) -> None:
        """End the forward for all copies; drop its errors, whose tracebacks hold its frames."""
        self.closed = True
        for master in self._masters.values():
            master.clear_slaves()

    def disown(self, error: BaseException) -> None:
        """Give up the forward because of `error`: copies that still run must stop."""
        # as text, because its traceback would hold the frames of the forward
        self.disowned = traceback.format_exception_only(error)[0].strip()

    def is_over(self) -> bool:
        """Whether the forward has ended, so that a call now is a recomputation.

        If nobody reports the end: whether a backward pass runs, in which a forward must be one.
        """
        return self.closed if self.ends else backward_task() != -1


class CallbackContext:
    """What the copies of one submodule share during one forward; you may set any attribute.

    A `SyncMaster` that you set, usually as `sync_master`, starts a new round, so one object may
    serve many forwards. It is aborted when a replica fails.

    Attributes:
        name: the submodule's name in the model.
        size: the number of copies.
    """

    def __init__(self, name: str = "", size: int = 0, *, ends: bool = False) -> None:
        self.__dict__[_KEY] = SharedForward(name, size, ends)
        self.name = name
        self.size = size

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SyncMaster):
            forward_of(self).begin(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__.get("name")
        raise AttributeError(f"copy 0 has not set {name} on the context of {where!r}")

    def abort(self, error: BaseException) -> None:
        """Release all waiting copies, because one of them failed with `error`."""
        forward_of(self).abort(error)


def forward_of(context: CallbackContext) -> SharedForward:
    """The forward that a context of ours belongs to."""
    found: SharedForward = context.__dict__[_KEY]
    return found


def open_forward_of(context: Any, name: Any) -> SharedForward:
    """The forward that a context belongs to; one of another project's has no known end.

    `name`: of the submodule, if it is unknown. Raises `ArgumentError` for an object without a
    dictionary of attributes.
    """
    try:
        attributes = vars(context)
        found: SharedForward = attributes.setdefault(_KEY, SharedForward(name))
    except (TypeError, AttributeError):  # no dictionary, or that of a class
        raise ArgumentError(
            "expected a context on which attributes can be set, the same for all copies of a "
            f"submodule, got {type(context).__name__}; pass an object of a class without "
            "__slots__, such as types.SimpleNamespace()"
        ) from None
    return found
