"""Steps per channel, compiled: in NumPy they would take longer than the kernels of a small layer.

Numbers per channel are float64 `(C,)`; `table` (3, C) holds the rows mean, m2 and invstd.
"""

from __future__ import annotations

import numpy as np

from syncbn_core._kernels.cpu.builds import from_python
from syncbn_core._kernels.cpu.numerics import narrow, rounded, widen

__all__ = ["fill_invstd", "merge", "update_running"]


@from_python
def merge(counts, means, m2s, table):
    """Write mean and m2 of P parts, by the formulas of `syncbn_core.moments` and in their order.

    `counts`: `(P,)`; `means`, `m2s`: `(P, C)`; `table`: `(2, C)`.
    """
    total = max(1, counts.sum())
    for c in range(table.shape[1]):
        mean = counts[0] / total * means[0, c]
        for part in range(1, counts.shape[0]):
            mean += counts[part] / total * means[part, c]
        m2 = 0.0
        for part in range(counts.shape[0]):
            deviation = means[part, c] - mean
            m2 += m2s[part, c] + counts[part] * deviation * deviation
        table[0, c], table[1, c] = mean, m2


@from_python
def fill_invstd(table, count, eps, clamp):
    """Write the last row of `table`, given the moments in the others; count 0 counts as 1."""
    for c in range(table.shape[1]):
        var = table[1, c] / max(count, 1)
        positive = (eps if var < eps else var) if clamp else var + eps  # NaN stays NaN
        table[2, c] = 1.0 / np.sqrt(positive)


@from_python
def update_running(mean, var, counter, table, count, factor):
    """Update running statistics in place, as `syncbn_core.moments` says, and count the batch.

    `mean`, `var`: 16 bits as activations have them; `(0,)` for none. `counter`: `()`.
    One call writes all three, so no interrupt can come between them.
    """
    for c in range(mean.shape[0] if count > 0 else 0):
        new_mean = (1.0 - factor) * np.float64(widen(mean[c])) + factor * table[0, c]
        unbiased = table[1, c] / (count - 1)
        new_var = (1.0 - factor) * np.float64(widen(var[c])) + factor * unbiased
        mean[c], var[c] = narrow(rounded(new_mean, mean), mean), narrow(rounded(new_var, var), var)
    counter[()] += 1
