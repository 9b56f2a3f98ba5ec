"""Run the members of a group in threads of this process, so that none is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from syncbn_core.errors import CommAborted

__all__ = ["run_in_threads"]

T = TypeVar("T")


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
    """
    results: list[Any] = [None] * len(members)
    errors: list[tuple[int, BaseException]] = []

    def run(index: int) -> None:
        try:
            results[index] = members[index]()
        except BaseException as error:
            errors.append((index, error))
            abort(error)
        else:
            leave(index)

    threads = [
        threading.Thread(target=run, args=(index,), name=f"{describe} {index}", daemon=True)
        for index in range(1, len(members))
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        if members:
            run(0)
        for thread in started:
            thread.join()
    except BaseException as error:  # no thread could be started, or Ctrl-C while waiting
        abort(error)
        for thread in started:
            thread.join()
        raise
    if errors:
        causes = [item for item in errors if not isinstance(item[1], CommAborted)]
        index, first = (causes or errors)[0]
        first.add_note(f"raised in {describe} {index} of {len(members)}")
        try:
            raise first
        finally:  # no cycle from the traceback to this frame and back: it would keep activations
            errors.clear()
            del first, causes
    return results
