"""The clock of deadlines. It stands while a kernel is compiled: who waits for that is not waiting
for a member that is lost.

Counted are compilations of this process, and those that other processes tell of (`comm.local`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT = 600.0  # seconds; a compilation that takes longer counts as a wait

listeners: list[Callable[[int], None]] = []  # get 1 when this process begins to compile, then -1
_lock = threading.Lock()
_state = 0.0, 0, 0.0  # seconds stood before; how many compilations run; since when


def stood() -> float:
    """How many seconds the clock has stood so far."""
    before, running, since = _state
    return before + (min(time.monotonic() - since, LIMIT) if running else 0.0)


def left(deadline: float, before: float) -> float:
    """Seconds until a deadline of `time.monotonic()`, set when `stood()` was `before`; 0: over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0 and (seconds := seconds + stood() - before) > 0:
        return max(seconds, 0.05)  # who waits for a compilation must not keep it from computing
    return max(seconds, 0.0)


def stood_since(before: float) -> str:
    """What the error of a wait adds, which began when `stood()` was `before`."""
    seconds = stood() - before
    return f" (besides {seconds:.3g} s in which kernels were compiled)" if seconds >= 0.1 else ""


def stand(more: int) -> None:
    """So many more compilations run; -1: one has ended."""
    global _state
    with _lock:
        before, running, since = _state
        if not running:
            since = time.monotonic()
        elif not running + more:
            before = stood()
        _state = before, running + more, since


@contextmanager
def compiling() -> Iterator[None]:
    """The block, or the function it decorates, compiles kernels."""
    try:
        for more in (stand, *listeners):
            more(1)
        yield
    finally:
        for more in (stand, *listeners):
            more(-1)
