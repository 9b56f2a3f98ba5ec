"""Imported once by the server from which ranks are forked: they need not load these kernels each.

Only serial builds run here, since a process with threads must not be forked.
"""

import numpy as np

from syncbn_core.moments import NormRule
from syncbn_core.numpy_steps import OPERATIONS
from syncbn_core.steps import Affine, Norm, RunningStatistics

for dtype in (np.float64, np.float32):
    steps, rule = OPERATIONS.serial, NormRule(1e-5, "plus")
    given = RunningStatistics(np.zeros(3, dtype), np.zeros(3, dtype), np.zeros((), np.int64))
    x, affine, running = steps.take(np.ones((2, 3, 4, 4), dtype), Affine(), given)
    norm = Norm(steps.statistics(steps.moments(x), rule), affine, rule)
    steps.forward(x, norm, running)
    sums = steps.backward_reduce(x, x, norm)
    steps.backward_input(x, x, norm, sums.exchange)
