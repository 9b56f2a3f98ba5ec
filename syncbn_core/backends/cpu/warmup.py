"""`warm_up` runs every CPU kernel that layers use once, so that all are compiled or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np

from syncbn_core.backends.base import Affine, Operations, RunningStatistics
from syncbn_core.backends.cpu.numpy import OPERATIONS
from syncbn_core.backends.cpu.plan import PARALLEL_SIZE
from syncbn_core.kernels.cpu.numerics import blend
from syncbn_core.moments import NormRule

__all__ = ["DTYPES", "cache_folder", "warm_up"]

# Their names, and NumPy's dtypes of the same bits.
DTYPES = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "float64": "f8"}


def cache_folder() -> Path:
    """The folder of compiled kernels."""
    folder: Path = blend._cache.folder
    return folder


def warm_up(dtype: str) -> None:
    """Run all steps on small arrays of `dtype`, a name in `DTYPES`, in each layout and build.

    Parallel builds run, and so are compiled, only if Numba may use several threads.
    """
    threads = numba.get_num_threads()
    # Planes and rows, with the channels from which on one kernel does a whole direction.
    for channels, width in ((4 * threads, 16), (40 * threads, 7)):
        samples = 8 + PARALLEL_SIZE // (channels * width**2)
        x = np.ones((samples, channels, width, width), DTYPES[dtype])
        _run_steps(OPERATIONS, x)
        _run_steps(OPERATIONS.serial, x[:8])


def _run_steps(operations: Operations, x: Any) -> None:
    """Every step that launches a kernel."""
    affine, rule = Affine(), NormRule(1e-5, "plus")
    statistics = operations.statistics(operations.moments(x), rule)
    operations.forward(x, statistics, affine, rule)
    for kept in (np.float32, np.float64):  # no kernel updates other running statistics
        mean, var = np.zeros((2, x.shape[1]), kept)
        running = RunningStatistics(mean, var, np.zeros((), np.int64))
        operations.update_running(running, statistics)
    sums = operations.backward_reduce(x, x, statistics, affine, rule)
    operations.backward_input(x, x, statistics, affine, rule, sums.exchange)
    operations.forward_single(x, affine, rule)
    operations.backward_single(x, x, statistics, affine, rule)
