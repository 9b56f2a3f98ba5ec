"""Shared by all tests: an interrupt at every point of a call."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interrupt() -> Callable[..., bool]:
    """`interrupt(action, at, *within)`: whether `action()` was cut short at its `at`-th point.

    CPython raises KeyboardInterrupt in the main thread when a call has ended, or a function
    begins. Counted are those of calls made by, and of functions in, files whose path has one of
    `within` in it. What the profiling function of `sys` raises comes out just there.
    """

    def run(action: Callable[[], Any], at: int, *within: str) -> bool:
        seen = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            if event == "c_call" or "weakref" in frame.f_code.co_filename:
                return  # errors in callbacks of weak references go nowhere
            where = frame.f_back if event == "return" else frame  # who gets the exception
            if where is not None and any(part in where.f_code.co_filename for part in within):
                seen += 1
                if seen > at:
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before)
        return False

    return run
