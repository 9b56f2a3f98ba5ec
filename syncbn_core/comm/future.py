"""`FutureResult` passes one value from one thread to another; `Gate` lets one thread wait.

Only plain locks are used, because Ctrl-C may raise KeyboardInterrupt between any two Python-level
calls of the main thread. A `threading.Condition` is written in Python, so Ctrl-C could leave it
locked forever. A plain lock is acquired, released and waited for in C.
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
    """Type of `NOTHING`, which means "no value", so that None can be a value."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING: Any = _Nothing()


class Gate:
    """An event for one waiting thread. Any thread may open it; it never closes again."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Release the thread that waits now or later. Opening twice is allowed."""
        try:  # noqa: SIM105  (`suppress` is Python code: Ctrl-C may interrupt it)
            self._lock.release()
        except RuntimeError:  # already open
            pass

    def wait(self, seconds: float) -> bool:
        """Whether the gate was opened within `seconds`."""
        return self._lock.acquire(True, seconds)


class FutureResult(Generic[T]):
    """Holds one value that one thread puts in and another takes out.

    `timeout`: the most seconds that `get` waits; None for the default at the time of `get`. A copy
    or an unpickled object is empty.
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
        """Store `result`, which may be any object.

        Raises `ProtocolError` if the previous result was not taken.
        """
        with self._lock:
            if self._has_come():
                raise ProtocolError(
                    "expected an empty FutureResult, got one whose last result was not taken with "
                    "get(); use one FutureResult per exchange"
                )
            self._value = result
            self._open()

    def fail(self, error: BaseException) -> None:
        """Make the present or next `get` raise `error`; drops a value that was not taken."""
        with self._lock:
            self._value = NOTHING
            self._error = error
            self._open()

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value, remove it and return it.

        `timeout`: seconds; None for the object's own timeout, else the default. Raises
        `CommTimeout` when they have passed, or the error that `fail` was given.
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
                raise CommTimeout(f"expected a result within {seconds:g} s, got none")
            gate.wait(left)

    def drop(self) -> None:
        """Remove the value or error, if there is one."""
        with self._lock:
            self._value = NOTHING
            self._error = None

    # The caller of the methods below holds the lock.

    def _has_come(self) -> bool:
        return self._value is not NOTHING or self._error is not None

    def _taken(self) -> T:
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # breaks the cycle between the error and its traceback's frame
        value, self._value = self._value, NOTHING
        return value

    def _open(self) -> None:
        for gate in self._gates:
            gate.open()
        self._gates.clear()
