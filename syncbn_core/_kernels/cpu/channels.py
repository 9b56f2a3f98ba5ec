"""Steps per channel, compiled: in NumPy they would take longer than the kernels of a small layer.

Rows and tables are those of `syncbn_core.moments`, float64.
"""

from __future__ import annotations

import numpy as np

from syncbn_core._kernels.cpu.builds import from_python
from syncbn_core._kernels.cpu.numerics import narrow, rounded, widen

__all__ = ["fill_table", "merge", "update_running"]


@from_python
def merge(rows, total):
    """Merge P parts by the formulas of `syncbn_core.moments`, in their order.

    `rows`: `(P, 2 C + 2)`. Writes count, mean and m2 of `total`, a row or a table `(3 C + 1,)`.
    """
    channels = rows.shape[1] // 2 - 1
    total[0] = rows[:, 0].sum()
    values = max(1.0, total[0])
    for c in range(1, channels + 1):
        mean, m2 = rows[0, c], rows[0, c + channels]
        if rows.shape[0] > 1:
            mean = rows[0, 0] / values * mean
            for part in range(1, rows.shape[0]):
                mean += rows[part, 0] / values * rows[part, c]
            m2 = 0.0
            for part in range(rows.shape[0]):
                deviation = rows[part, c] - mean
                m2 += rows[part, c + channels] + rows[part, 0] * deviation * deviation
        total[c], total[c + channels] = mean, m2


@from_python
def fill_table(rows, table, eps, clamp):
    """Write `table`: the moments of all `rows`, and invstd; count 0 counts as 1."""
    merge(rows, table)
    channels = table.shape[0] // 3
    for c in range(1, channels + 1):
        var = table[c + channels] / max(table[0], 1.0)
        positive = (eps if var < eps else var) if clamp else var + eps  # NaN stays NaN
        table[c + 2 * channels] = 1.0 / np.sqrt(positive)


@from_python
def update_running(mean, var, counter, table, factor):
    """Update running statistics in place, as `syncbn_core.moments` says, and count the batch.

    `mean`, `var`: 16 bits as activations have them; `(0,)` for none. `counter`: `()`.
    One call writes all three, so no interrupt can come between them.
    """
    count, channels = table[0], table.shape[0] // 3
    for c in range(mean.shape[0] if count > 0 else 0):
        new_mean = (1.0 - factor) * np.float64(widen(mean[c])) + factor * table[1 + c]
        unbiased = table[1 + channels + c] / (count - 1)
        new_var = (1.0 - factor) * np.float64(widen(var[c])) + factor * unbiased
        mean[c], var[c] = narrow(rounded(new_mean, mean), mean), narrow(rounded(new_var, var), var)
    counter[()] += 1
