"""A place for one value that passes from one thread to another, and the gate that waits for it.

Ctrl-C raises KeyboardInterrupt between any two Python-level calls of the main thread. A
`threading.Condition` is Python code and can then be left locked for ever, so here everything is
guarded by plain locks: `with lock:` enters and leaves them in C, and so does every wait.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Generic, TypeVar

from syncbn_core.comm.timeouts import check_timeout, seconds_of
from syncbn_core.errors import CommTimeout, ProtocolError

__all__ = ["NOTHING", "FutureResult", "Gate"]

T = TypeVar("T")


class _Nothing:
    """Marks an empty place, so that None can be a value."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING: Any = _Nothing()


class Gate:
    """Closed at first; one thread waits for it, any thread opens it, once and for all."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let the waiting thread through, or the one that comes; again is no error."""
        try:  # noqa: SIM105  (`suppress` is Python code, which Ctrl-C may cut off)
            self._lock.release()
        except RuntimeError:  # it was open
            pass

    def wait(self, seconds: float) -> bool:
        """Whether the gate was opened within `seconds`."""
        return self._lock.acquire(True, seconds)


class FutureResult(Generic[T]):
    """A place for one value, filled by one thread and emptied by another.

    `timeout`: seconds that `get` waits at most; None takes the default in force at that time.
    A copy or a pickle of it is a new, empty one.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = None if timeout is None else check_timeout(timeout)
        self._lock = threading.Lock()
        self._gates: list[Gate] = []
        self._value: T = NOTHING
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FutureResult, (self._timeout,)

    def put(self, result: T) -> None:
        """Fill the place; any value will do. `ProtocolError` if the last one was not taken."""
        with self._lock:
            if self._has_come():
                raise ProtocolError(
                    "expected an empty FutureResult, got one whose last result nobody has "
                    "taken with get(); use one FutureResult per exchange"
                )
            self._value = result
            self._open()

    def fail(self, error: BaseException) -> None:
        """Make the waiting, or the next, `get` raise `error`; a value not taken is dropped."""
        with self._lock:
            self._value = NOTHING
            self._error = error
            self._open()

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value and take it out.

        Raises `CommTimeout` after `timeout` seconds (None: the object's own, else the default),
        or what `fail` was given.
        """
        seconds = seconds_of(timeout if timeout is not None else self._timeout)
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._has_come():
                    return self._taken()
                gate = Gate()
                self._gates.append(gate)
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommTimeout(f"expected a result within {seconds:g} s, none came")
            gate.wait(left)

    def drop(self) -> None:
        """Empty the place, if anything is in it."""
        with self._lock:
            self._value = NOTHING
            self._error = None

    # The methods below are called with the lock held.

    def _has_come(self) -> bool:
        return self._value is not NOTHING or self._error is not None

    def _taken(self) -> T:
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else the traceback's frame and the error keep each other alive
        value, self._value = self._value, NOTHING
        return value

    def _open(self) -> None:
        for gate in self._gates:
            gate.open()
        self._gates.clear()
