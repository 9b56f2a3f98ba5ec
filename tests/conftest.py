"""Shared by all tests: an interrupt at every step of a call."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interrupt() -> Callable[..., bool]:
    """`interrupt(action, at, *within)`: whether `action()` was cut short at its `at`-th step.

    KeyboardInterrupt comes between two instructions of the interpreter, as from Ctrl-C; counted
    are those in files whose path has one of `within` in it.
    """

    def run(action: Callable[[], Any], at: int, *within: str) -> bool:
        left = at

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if not any(part in frame.f_code.co_filename for part in within):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    return run
