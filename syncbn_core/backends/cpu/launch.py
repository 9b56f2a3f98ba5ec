"""Which build of a CPU kernel runs, so that no call of Numba's threads can end the process.

The parallel build is for a single caller with enough work. The serial one is for members that are
threads and fill the cores by themselves, for small arrays, while another thread is in a parallel
kernel, and after a fork: Numba's `workqueue` layer aborts the process when two threads enter it,
and its OpenMP layer when a forked child does.
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
    """Numba's threading layer, or None while it has not been started."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _after_fork() -> None:
    global _one_caller, _forked
    _one_caller = threading.Lock()  # its holder is not in this process
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
    """Run the kernel of a step on views that `plan` has made."""
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
