"""`warm_up` runs every CPU kernel that layers use once, so that all are compiled or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from syncbn_core.kernels.cpu.launch import most_threads
from syncbn_core.kernels.cpu.numerics import share
from syncbn_core.moments import NormRule
from syncbn_core.numpy_steps import OPERATIONS, PARALLEL_SIZE
from syncbn_core.steps import Affine, Operations, RunningStatistics

__all__ = ["DTYPES", "cache_folder", "warm_up"]

# Their names, and NumPy's dtypes of the same bits.
DTYPES = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "float64": "f8"}


def cache_folder() -> Path:
    """The folder of compiled kernels."""
    folder: Path = share._cache.folder
    return folder


def warm_up(dtype: str) -> None:
    """Run all steps on small arrays of `dtype`, a name in `DTYPES`, in each layout and build.

    Parallel builds run, and so are compiled, only if Numba may use several threads.
    """
    threads = most_threads()
    for channels, width, fewest in ((4 * threads, 16, 8), (40 * threads, 7, 49)):  # planes, rows
        samples = fewest + PARALLEL_SIZE // (channels * width**2)
        x = np.ones((samples, channels, width, width), DTYPES[dtype])
        _run_steps(OPERATIONS, x)
        _run_steps(OPERATIONS.serial, x[:fewest])


def _run_steps(operations: Operations, x: Any) -> None:
    """Every step that launches a kernel."""
    affine, rule = Affine(), NormRule(1e-5, "plus")
    statistics = operations.statistics(operations.moments(x), rule)
    operations.forward(x, statistics, affine, rule)
    mean, var = np.zeros((2, x.shape[1]))
    operations.update_running(RunningStatistics(mean, var), statistics)
    sums = operations.backward_reduce(x, x, statistics, affine, rule)
    operations.backward_input(x, x, statistics, affine, rule, sums.exchange)
