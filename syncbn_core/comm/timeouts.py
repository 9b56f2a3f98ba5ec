"""Timeouts: how long a member waits for the others.

The first that is set applies: the object's own `timeout`, `set_default_timeout`, the environment
variable `SYNCBN_TIMEOUT`, 60 seconds between threads and 300 between processes.
"""

from __future__ import annotations

import math
import os
import threading

from syncbn_core.errors import ArgumentError

THREADS, PROCESSES = 60.0, 300.0
TIMEOUT_VARIABLE = "SYNCBN_TIMEOUT"

_process_timeout: float | None = None


def set_default_timeout(seconds: float | None) -> None:
    """Set the timeout in seconds of every wait without its own; None removes this setting.

    Raises `ArgumentError` unless `seconds` is None or a finite number > 0.
    """
    global _process_timeout
    _process_timeout = None if seconds is None else check_timeout(seconds)


def get_default_timeout(unless_set: float = THREADS) -> float:
    """Seconds: the value of `set_default_timeout`, else of `SYNCBN_TIMEOUT`, else `unless_set`.

    Raises `ArgumentError` if `SYNCBN_TIMEOUT` is not a finite number > 0.
    """
    if _process_timeout is not None:
        return _process_timeout
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return unless_set
    try:
        return check_timeout(float(text))
    except ValueError:
        raise ArgumentError(
            f"expected the environment variable {TIMEOUT_VARIABLE} to be a number of seconds "
            f"> 0, got {text!r}; unset it or set a number such as 300"
        ) from None


def remedy_for(timeout: float | None) -> str:
    """How to wait longer than by `seconds_of(timeout)`, for the error of a wait."""
    if timeout is not None:
        return "give it a longer timeout"
    by = TIMEOUT_VARIABLE if _process_timeout is None else set_default_timeout.__name__
    return f"raise {by}, now {get_default_timeout():g}"


def check_timeout(seconds: float) -> float:
    """`seconds` as a float; raises `ArgumentError` unless it is a finite number > 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ArgumentError(f"expected a timeout in seconds (a number > 0), got {seconds!r}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ArgumentError(
            f"expected a timeout in seconds (finite and > 0), got {seconds!r}; "
            "to wait almost forever, use a very large number"
        )
    return min(float(seconds), threading.TIMEOUT_MAX)


def seconds_of(timeout: float | None, unless_set: float = THREADS) -> float:
    """`timeout` in seconds, or the present default if it is None."""
    return get_default_timeout(unless_set) if timeout is None else check_timeout(timeout)
