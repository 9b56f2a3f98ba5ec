"""`run_in_threads` runs the members of a group in threads; if one fails, it releases the others."""

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

__all__ = ["callers_that_wait", "run_in_threads"]

T = TypeVar("T")

callers_that_wait: set[int] = set()  # threads within `run_in_threads`, which call nothing else
GRACE = 0.5  # seconds that members have to end after Ctrl-C or at the interpreter's exit
SLICE = 1.0  # seconds; a Ctrl-C just before a wait begins is only noticed after that wait


def run_in_threads(
    members: Sequence[Callable[[], T]],
    *,
    abort: Callable[[BaseException], Any] = lambda error: None,
    leave: Callable[[int], Any] = lambda member: None,
    describe: str = "member",
) -> list[T]:
    """Call all `members` at the same time and return their results in the same order.

    Args:
        members: functions without arguments. Each runs in its own new thread; a single one runs
            in the calling thread.
        abort: called with the error when a member raises; it should release members that wait.
        leave: called with the member's index when a member returns.
        describe: the word for a member in warnings and error notes.

    If members raise, the first error that is not just a consequence (`CommAborted`) is raised
    after the others have ended: the original exception, with a note that names the member.

    The function waits for members that are still computing. After the default timeout
    (`get_default_timeout`) it issues one `RuntimeWarning` with the stack of each. After an error
    it waits only that long for the others; a note then names the members that are still running.
    On Ctrl-C it releases the members and waits half a second for them to end.
    """
    group = _Members(members, abort, leave, describe)
    try:
        if group.size == 1:
            group.run_alone()
        else:
            group.start()
            group.wait()
    except BaseException as error:  # Ctrl-C, or a thread could not be started
        try:
            _thread.start_new_thread(group.give_up, (error,))  # a second Ctrl-C can't interrupt it
        except RuntimeError:
            group.give_up(error)
        group.given_up.wait(GRACE)  # a late abort could affect the caller's next call
        group.all_ended_within(GRACE)
        _abandoned.update(group.running.copy().values())
        raise
    first = group.first_error()
    if first is not None:
        try:
            raise first
        finally:  # breaks the cycle of traceback and frame, which would keep activations
            group.errors.clear()
            del first
    return group.results


class _Thread(threading.Thread):
    """A thread whose `start` does not wait until the thread runs.

    That wait is Python code; Ctrl-C in it raises "release unlocked lock".
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._started = _Started()


class _Started:
    """The part of `threading.Event` that `threading.Thread` uses to signal its start."""

    def __init__(self) -> None:
        self._has_run = False

    def set(self) -> None:
        self._has_run = True

    def is_set(self) -> bool:
        return self._has_run

    def wait(self, timeout: float | None = None) -> bool:
        return True


class _Members(Generic[T]):
    """The members of one `run_in_threads`: their threads, results and errors."""

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
        self.jobs = dict(enumerate(members))  # members that have not started
        self.results: list[Any] = [None] * len(members)
        self.errors: list[tuple[int, BaseException]] = []
        self.running: dict[int, threading.Thread] = {}
        self.lock = threading.Lock()
        self.gate = Gate()  # the caller waits here for the next member to end
        self.given_up = Gate()

    def start(self) -> None:
        """Start all members in daemon threads, so that the interpreter can exit."""
        for index in range(self.size):
            name = f"{self.describe} {index}"
            thread = _Thread(target=self.run, args=(index,), name=name, daemon=True)
            self.running[index] = thread
            try:
                thread.start()
            except RuntimeError:
                del self.running[index]
                raise

    def run(self, index: int) -> None:
        """Run member `index`, in its own thread."""
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

    def run_alone(self) -> None:
        """Run the only member in the calling thread. Ctrl-C is not stored as its error."""
        try:
            self.results[0] = self.jobs.pop(0)()
            self.leave(0)
        except Exception as error:
            self.errors.append((0, error))
            self.abort(error)

    def give_up(self, error: BaseException) -> None:
        """Start no more members, release those that wait, and drop all results."""
        self.jobs.clear()
        self.results = [None] * self.size
        try:
            self.abort(error)
        finally:
            self.given_up.open()

    def wait(self) -> None:
        """Wait until all members have ended, or the timeout has passed since an error."""
        caller = threading.get_ident()
        callers_that_wait.add(caller)
        try:
            self._wait(get_default_timeout())
        finally:
            callers_that_wait.discard(caller)

    def _wait(self, seconds: float) -> None:
        self.wait_for_the_first()
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

    def wait_for_the_first(self) -> None:
        """Wait until a member has ended: as long as all compute, none is late."""
        while True:
            with self.lock:
                if len(self.running) < self.size or self.size == 0:
                    return
                gate = self.gate = Gate()
            gate.wait(SLICE)

    def all_ended_within(self, seconds: float, stop_at_error: bool = False) -> bool:
        """Wait up to `seconds`, or until an error; return whether all members have ended."""
        deadline = time.monotonic() + seconds
        while True:
            with self.lock:
                if not self.running:
                    return True
                gate = self.gate = Gate()
            left = min(deadline - time.monotonic(), SLICE)
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
            with suppress(RuntimeWarning):  # warnings may be errors; keep waiting all the same
                warnings.warn(
                    f"{self.describe} {index} of {self.size} is still running {seconds:g} s after "
                    f"the first {self.describe} ended; the wait goes on until it ends. Its stack:\n"
                    f"{stack}",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def first_error(self) -> BaseException | None:
        """The first error that is not just a consequence, with notes if it accepts them."""
        if not self.errors:
            return None
        errors = list(self.errors)
        causes = [item for item in errors if not isinstance(item[1], CommAborted)]
        index, first = (causes or errors)[0]
        with self.lock:
            running = ", ".join(map(str, sorted(self.running)))
            _abandoned.update(self.running.values())
        try:
            first.add_note(f"raised in {self.describe} {index} of {self.size}")
            if running:
                first.add_note(f"still running: {self.describe} {running}")
        except Exception:  # a class of exceptions may reject notes
            pass
        return first


_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _stop_abandoned() -> None:
    """At exit, raise SystemExit in members that still run, and wait up to `GRACE` seconds.

    A thread that returns from C++ while the interpreter shuts down aborts the process: CPython
    ends the thread inside the C++ code, which treats that as an error.
    """
    running = [thread for thread in _abandoned if thread.is_alive()]
    for thread in running:
        identifier = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(SystemExit))
    deadline = time.monotonic() + GRACE
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
