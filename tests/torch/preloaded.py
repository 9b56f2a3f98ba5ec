"""Imported once by the server from which ranks are forked: they need not load these kernels each.

Only serial builds run here, since a process with threads must not be forked.
"""

import numpy as np

from syncbn_core.moments import NormRule
from syncbn_core.numpy_steps import OPERATIONS
from syncbn_core.steps import Affine, RunningStatistics

for dtype in (np.float64, np.float32):
    steps, affine, rule = OPERATIONS.serial, Affine(), NormRule(1e-5, "plus")
    x = steps.take(np.ones((2, 3, 4, 4), dtype))
    running = RunningStatistics(np.zeros(3, dtype), np.zeros(3, dtype), np.zeros((), np.int64))
    statistics = steps.statistics(steps.moments(x), rule)
    steps.forward(x, statistics, affine, rule, running)
    sums = steps.backward_reduce(x, x, statistics, affine, rule)
    steps.backward_input(x, x, statistics, affine, rule, sums.exchange)
