"""`launch` runs a CPU kernel, in its parallel or its serial build.

The parallel build runs for a single caller with enough work. The serial build runs for small
arrays, for members that are threads (together they use all cores), while another thread is in a
parallel kernel, and after a fork. In the last two cases Numba's parallel code could abort the
process: its `workqueue` threading layer does so if two threads enter it, its OpenMP layer in a
forked child.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numba
import numpy as np

from syncbn_core.backends.cpu.plan import Plan

__all__ = ["launch"]

Array = np.ndarray[Any, Any]

_one_caller = threading.Lock()
_forked = False


def _layer() -> str | None:
    """The name of Numba's threading layer, or None if it has not started."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _after_fork() -> None:
    global _one_caller, _forked
    _one_caller = threading.Lock()  # the thread that holds the old one is not in this process
    _forked = _forked or _layer() is not None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def launch(
    plan: Plan,
    step: str,
    parallel: bool,
    read: tuple[Array, ...],
    per_channel: tuple[Any, ...],
    *written: Array,
) -> None:
    """Run the kernel of `step` with the arguments `read`, `per_channel` and `written`.

    `read` and `written` are arrays as `Plan.view` returns them. `parallel`: False for the serial
    build in any case.
    """
    kernel = plan.kernels[step]
    if (
        plan.worth_threads(parallel)
        and not _forked
        and (threads := numba.get_num_threads()) > 1
        and not (_layer() == "workqueue" and threading.active_count() > 1)
        and _one_caller.acquire(blocking=False)
    ):
        try:
            kernel.parallel(*read, *plan.leading(threads), *per_channel, *written)
        finally:
            _one_caller.release()
    else:
        kernel.serial(*read, *plan.leading(1), *per_channel, *written)
