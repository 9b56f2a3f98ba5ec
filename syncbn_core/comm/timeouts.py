"""How long a wait may last: the object's own timeout, the process's, the environment's, 300 s."""

from __future__ import annotations

import math
import os
import threading

from syncbn_core.errors import ArgumentError

__all__ = ["check_timeout", "get_default_timeout", "seconds_of", "set_default_timeout"]

DEFAULT_TIMEOUT = 300.0
TIMEOUT_VARIABLE = "SYNCBN_TIMEOUT"

_process_timeout: float | None = None


def set_default_timeout(seconds: float | None) -> None:
    """Deadline in seconds of every wait that has none of its own; None: as if never set."""
    global _process_timeout
    _process_timeout = None if seconds is None else check_timeout(seconds)


def get_default_timeout() -> float:
    """What `set_default_timeout` set, else `SYNCBN_TIMEOUT`, else 300 seconds."""
    if _process_timeout is not None:
        return _process_timeout
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT
    try:
        return check_timeout(float(text))
    except ValueError:
        raise ArgumentError(
            f"expected the environment variable {TIMEOUT_VARIABLE} to be a number of seconds "
            f"> 0, got {text!r}"
        ) from None


def check_timeout(seconds: float) -> float:
    """`seconds` as a float, or `ArgumentError` unless it is a finite number > 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ArgumentError(f"expected a timeout in seconds (a number > 0), got {seconds!r}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ArgumentError(
            f"expected a timeout in seconds (finite and > 0), got {seconds!r}; "
            "for a very long wait give a very large number"
        )
    return min(float(seconds), threading.TIMEOUT_MAX)


def seconds_of(timeout: float | None) -> float:
    """`timeout`, or the default in force now when it is None."""
    return get_default_timeout() if timeout is None else check_timeout(timeout)
