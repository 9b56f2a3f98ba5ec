"""Run the members of a group in threads of this process, so that none is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from syncbn_core.comm.deadline import get_default_timeout
from syncbn_core.errors import CommAborted

__all__ = ["run_in_threads"]

T = TypeVar("T")

GRACE = 1.0  # seconds that Ctrl-C leaves the members to end


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
    original object, with a note that names the member. A member that has not ended by the
    process's deadline (`get_default_timeout`) after an error is left to itself, and named.
    """
    results: list[Any] = [None] * len(members)
    errors: list[tuple[int, BaseException]] = []
    running: set[int] = set()
    changed = threading.Condition(threading.Lock())

    def run(index: int) -> None:
        try:
            results[index] = members[index]()
        except BaseException as error:
            with changed:
                errors.append((index, error))
            abort(error)
        else:
            leave(index)
        finally:
            with changed:
                running.discard(index)
                changed.notify_all()

    def wait() -> None:
        """Until all members have ended, or an error is older than the deadline."""
        with changed:
            changed.wait_for(lambda: not running or errors)
            if running:
                changed.wait_for(lambda: not running, get_default_timeout())

    try:
        for index in range(1, len(members)):
            running.add(index)
            name = f"{describe} {index}"
            try:
                threading.Thread(target=run, args=(index,), name=name, daemon=True).start()
            except BaseException:
                running.discard(index)
                raise
        if members:
            run(0)
        wait()
    except BaseException as error:  # no thread could be started, or Ctrl-C while waiting
        abort(error)
        with changed:
            changed.wait_for(lambda: not running, GRACE)
        raise
    if errors:
        causes = [item for item in errors if not isinstance(item[1], CommAborted)]
        index, first = (causes or errors)[0]
        first.add_note(f"raised in {describe} {index} of {len(members)}")
        if running:
            first.add_note(f"still running: {describe} {', '.join(map(str, sorted(running)))}")
        try:
            raise first
        finally:  # no cycle from the traceback to this frame and back: it would keep activations
            errors.clear()
            del first, causes
    return results
