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
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from syncbn_core.comm.timeouts import get_default_timeout
from syncbn_core.errors import CommAborted

T = TypeVar("T")

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
    if len(members) == 1:
        try:
            result = members[0]()
            leave(0)
        except BaseException as error:
            abort(error)
            _add_note(error, f"raised in {describe} 0 of 1")
            raise
        return [result]
    ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
    given_up: list[BaseException] = []
    running: dict[int, threading.Thread] = {}

    def run(index: int) -> None:
        try:
            result = None if given_up else members[index]()
            leave(index)
        except BaseException as error:
            try:
                abort(error)
            finally:
                ended.put((index, None, error))
        else:
            ended.put((index, result, None))

    def give_up() -> None:
        try:
            abort(given_up[0])
        finally:
            ended.put((-1, None, None))

    try:
        for index in range(len(members)):
            name = f"{describe} {index}"
            running[index] = _Thread(target=run, args=(index,), name=name, daemon=True)
            running[index].start()
        results, errors = _wait(ended, running, describe)
    except BaseException as error:  # Ctrl-C, or a thread could not be started
        given_up.append(error)
        _thread.start_new_thread(give_up, ())  # a second Ctrl-C can't interrupt it
        _abandoned.update(running.values())
        deadline = time.monotonic() + GRACE
        left = {-1, *(index for index, thread in running.items() if thread.is_alive())}
        with suppress(Empty):
            while left:
                left.discard(ended.get(timeout=max(0.0, deadline - time.monotonic()))[0])
        raise
    if not errors:
        return [results[index] for index in range(len(members))]
    causes = [item for item in errors if not isinstance(item[1], CommAborted)]
    index, first = (causes or errors)[0]
    _add_note(first, f"raised in {describe} {index} of {len(members)}")
    if running:
        _add_note(first, f"still running: {describe} {', '.join(map(str, sorted(running)))}")
        _abandoned.update(running.values())
    try:
        raise first
    finally:  # breaks the cycle of traceback and frame, which would keep activations
        errors.clear()
        causes.clear()
        del first


def _wait(
    ended: SimpleQueue[tuple[int, Any, BaseException | None]],
    running: dict[int, threading.Thread],
    describe: str,
) -> tuple[dict[int, Any], list[tuple[int, BaseException]]]:
    """The results and errors of members, which are taken out of `running` as they end."""
    size, seconds = len(running), get_default_timeout()
    results: dict[int, Any] = {}
    errors: list[tuple[int, BaseException]] = []
    deadline = float("inf")  # as long as all compute, none is late
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            if errors:
                break
            _warn(running, size, seconds, describe)
            deadline = float("inf")
        try:
            index, results[index], error = ended.get(timeout=min(max(left, 0), SLICE))
        except Empty:
            continue
        del running[index]
        if len(running) == size - 1 or (error is not None and not errors):
            deadline = time.monotonic() + seconds
        if error is not None:
            errors.append((index, error))
    return results, errors


def _warn(running: dict[int, threading.Thread], size: int, seconds: float, describe: str) -> None:
    frames = sys._current_frames()
    for index, thread in running.items():
        frame = frames.get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown\n"
        with suppress(RuntimeWarning):  # warnings may be errors; keep waiting all the same
            warnings.warn(
                f"{describe} {index} of {size} is still running {seconds:g} s after the first "
                f"{describe} ended; the wait goes on until it ends. Its stack:\n{stack}",
                RuntimeWarning,
                stacklevel=4,
            )


def _add_note(error: BaseException, text: str) -> None:
    with suppress(Exception):  # a class of exceptions may reject notes
        error.add_note(text)


class _Thread(threading.Thread):
    """A thread whose `start` does not wait until the thread runs.

    That wait is Python code; Ctrl-C in it raises "release unlocked lock".
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._started = _Started()


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


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
