"""Run the members of a group in threads of this process, so that none is left waiting."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from syncbn_core.comm.future import Gate
from syncbn_core.comm.timeouts import get_default_timeout
from syncbn_core.errors import CommAborted

__all__ = ["run_in_threads"]

T = TypeVar("T")

GRACE = 0.5  # seconds that Ctrl-C, or the interpreter's exit, leaves the members to end


def run_in_threads(
    members: Sequence[Callable[[], T]],
    *,
    abort: Callable[[BaseException], Any] = lambda error: None,
    leave: Callable[[int], Any] = lambda member: None,
    describe: str = "member",
) -> list[T]:
    """Call every member at the same time; results in their order.

    Member 0 runs in the calling thread. When a member raises, `abort(error)` is called, which
    should release whoever waits for it; when one returns, `leave(index)` is. After all have
    ended, the first error that is not a mere consequence (`CommAborted`) is raised again: the
    original object, with a note that names the member.

    A member that computes is waited for: a `RuntimeWarning` says once which one, and where it is,
    when the caller has waited for the process's deadline (`get_default_timeout`). A member that
    has not ended by that deadline after an error is left to itself, and named. On Ctrl-C the
    others are released, and half a second later those that have not ended are left to themselves.
    """
    crew = _Crew(members, abort, leave, describe)
    try:
        crew.start()
        crew.run_first()
        crew.wait()
    except BaseException as error:  # Ctrl-C, or no thread could be started
        try:
            _thread.start_new_thread(crew.give_up, (error,))  # which no second Ctrl-C cuts off
        except RuntimeError:
            crew.give_up(error)
        crew.given_up.wait(GRACE)  # a late abort could hit the caller's next call
        crew.all_ended_within(GRACE)
        _left_to_themselves.update(crew.running.copy().values())
        raise
    first = crew.first_error()
    if first is not None:
        try:
            raise first
        finally:  # no cycle from the traceback to this frame and back: it would keep activations
            crew.errors.clear()
            del first
    return crew.results


class _Thread(threading.Thread):
    """A thread whose `start` does not wait until it runs.

    That wait is Python code, and Ctrl-C in it comes out as "release unlocked lock".
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._started = _Started()


class _Started:
    """What `threading.Thread` asks of the event that it has run."""

    def __init__(self) -> None:
        self._has_run = False

    def set(self) -> None:
        self._has_run = True

    def is_set(self) -> bool:
        return self._has_run

    def wait(self, timeout: float | None = None) -> bool:
        return True


class _Crew(Generic[T]):
    """The members of one call, and what has become of them."""

    def __init__(
        self,
        members: Sequence[Callable[[], T]],
        abort: Callable[[BaseException], Any],
        leave: Callable[[int], Any],
        describe: str,
    ) -> None:
        self.size = len(members)
        self.abort = abort
        self.leave = leave
        self.describe = describe
        self.jobs = dict(enumerate(members))  # that have not begun
        self.results: list[Any] = [None] * len(members)
        self.errors: list[tuple[int, BaseException]] = []
        self.running: dict[int, threading.Thread] = {}
        self.lock = threading.Lock()
        self.gate = Gate()  # where the caller waits for the next member that ends
        self.given_up = Gate()

    def start(self) -> None:
        """Members 1, 2, ... in threads, which the interpreter's exit doesn't wait for."""
        for index in range(1, self.size):
            name = f"{self.describe} {index}"
            thread = _Thread(target=self.run, args=(index,), name=name, daemon=True)
            self.running[index] = thread
            try:
                thread.start()
            except RuntimeError:
                del self.running[index]
                raise

    def run(self, index: int) -> None:
        """What the thread of a member does."""
        job = self.jobs.pop(index, None)
        try:
            if job is not None:
                self.results[index] = job()
            self.leave(index)
        except BaseException as error:
            self.errors.append((index, error))
            self.abort(error)
        finally:
            with self.lock:
                del self.running[index]
                self.gate.open()

    def run_first(self) -> None:
        """Member 0, in the calling thread: Ctrl-C is no error of its own."""
        job = self.jobs.pop(0, None)
        if job is None:
            return
        try:
            self.results[0] = job()
            self.leave(0)
        except Exception as error:
            self.errors.append((0, error))
            self.abort(error)

    def give_up(self, error: BaseException) -> None:
        """Begin no more members, release those that wait, and keep nothing of theirs."""
        self.jobs.clear()
        self.results = [None] * self.size
        try:
            self.abort(error)
        finally:
            self.given_up.open()

    def wait(self) -> None:
        """Until all members have ended, or an error is older than the deadline."""
        seconds = get_default_timeout()
        patience = time.monotonic() + seconds
        while True:
            failed = bool(self.errors)
            if self.all_ended_within(patience - time.monotonic(), stop_at_error=not failed):
                return
            if failed:
                return
            if self.errors:
                patience = time.monotonic() + seconds
            else:
                self._warn(seconds)
                patience = time.monotonic() + threading.TIMEOUT_MAX

    def all_ended_within(self, seconds: float, stop_at_error: bool = False) -> bool:
        """Whether all members have ended; after so many seconds at most, or at an error."""
        deadline = time.monotonic() + seconds
        while True:
            with self.lock:
                if not self.running:
                    return True
                gate = self.gate = Gate()
            left = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if left <= 0 or (stop_at_error and self.errors):
                return False
            gate.wait(left)

    def _warn(self, seconds: float) -> None:
        frames = sys._current_frames()
        with self.lock:
            running = {index: thread.ident for index, thread in self.running.items()}
        for index, ident in running.items():
            frame = frames.get(ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown\n"
            with suppress(
                RuntimeWarning
            ):  # where warnings are errors: it is waited for all the same
                warnings.warn(
                    f"{self.describe} {index} of {self.size} is still computing {seconds:g} s "
                    f"after {self.describe} 0 has ended; it is waited for, as long as it takes. "
                    f"It is at:\n{stack}",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def first_error(self) -> BaseException | None:
        """The first error that is no mere consequence, with notes where it takes any."""
        if not self.errors:
            return None
        errors = list(self.errors)
        causes = [item for item in errors if not isinstance(item[1], CommAborted)]
        index, first = (causes or errors)[0]
        with self.lock:
            running = ", ".join(map(str, sorted(self.running)))
            _left_to_themselves.update(self.running.values())
        try:
            first.add_note(f"raised in {self.describe} {index} of {self.size}")
            if running:
                first.add_note(f"still running: {self.describe} {running}")
        except Exception:  # a class of exceptions may refuse attributes
            pass
        return first


_left_to_themselves: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_those_left() -> None:
    """Raise SystemExit in members that still run Python code, and wait for them a moment.

    One that comes back from C++ while the interpreter ends would abort the process: CPython ends
    the thread right there, and C++ takes that for an error.
    """
    running = [thread for thread in _left_to_themselves if thread.is_alive()]
    for thread in running:
        identifier = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(SystemExit))
    deadline = time.monotonic() + GRACE
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
