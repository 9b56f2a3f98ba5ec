"""`launch` runs a CPU kernel on threads, if it may.

The parallel build runs for a single caller with enough work. The serial build runs for small
arrays, for members that are threads (together they use all cores), while another thread is in a
parallel kernel, and after a fork. In the last two cases Numba's parallel code could abort the
process: its `workqueue` threading layer does so if two threads enter it, its OpenMP layer in a
forked child.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import numba

from syncbn_core._kernels.cpu.builds import SerialParallelKernel

_one_caller = threading.Lock()
_forked = False


@cache
def most_threads() -> int:
    """How many threads Numba has; they start now.

    Kernels themselves see how many of them `numba.set_num_threads` allows: to ask Numba takes as
    long as a small kernel.
    """
    numba.get_num_threads()
    config: Any = numba.config
    return int(config.NUMBA_NUM_THREADS)


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


def launch(kernel: SerialParallelKernel, *arguments: Any) -> None:
    """Run the parallel build of `kernel` if that is safe, else its serial one."""
    if (
        not _forked
        and not (_layer() == "workqueue" and threading.active_count() > 1)
        and _one_caller.acquire(blocking=False)
    ):
        try:
            kernel.parallel(*arguments)
        finally:
            _one_caller.release()
    else:
        kernel.serial(*arguments)
