"""Numbers per channel, compiled: in NumPy they would take longer than the kernels of a small layer.

Rows and tables are those of `syncbn_core.moments`, float64.
"""

from __future__ import annotations

import numpy as np

from syncbn_core._kernels.cpu.builds import from_python, strict
from syncbn_core._kernels.cpu.numerics import (
    larger,
    narrow,
    power_up_to,
    rounded,
    scratch,
    smaller,
    value_or,
    widen,
)


@from_python
def fill_table(rows, table, eps, clamp):
    """Write `table`: the moments of all `rows`, and invstd; count 0 counts as 1.

    Merges the P rows `(2 C + 2,)` by the formulas of `syncbn_core.moments`, in their order.
    `table`: `(3 C + 1,)`, or a row for the moments alone, with a negative `eps`.
    """
    channels = rows.shape[1] // 2 - 1
    count = 0.0
    for part in range(rows.shape[0]):
        count += rows[part, 0]
    table[0] = count
    values = larger(count, 1.0)
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
        table[c], table[c + channels] = mean, m2
        if eps >= 0:
            var = m2 / values
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


@strict
def coefficients(x, table, weight, bias, means):
    """`(k, s)`: `(m, scale, shift, of_dz, of_x, of_one)` of `elements`, and its s.

    `k`: `(6, C)` in the dtype for x.

    `weight`, `bias`: `(0,)` for ones and zeros. `means`: `(2, C)`, the sums over all members over
    the count, times weight; None where dx is not asked for. With `rest = m - mean`:

        y  = ((x - m) + rest) * invstd * weight + bias
        dx = invstd * (weight * dz - mean_dz - ((x - m) + rest) * invstd * mean_dz_xhat)
    """
    channels = table.shape[0] // 3
    k = scratch((6, channels), x)
    s = _middle(table)
    for c in range(channels):
        mean, invstd = table[1 + c], table[1 + 2 * channels + c]
        m = rounded(mean, x)
        rest, ratio = np.float64(m) - mean, invstd / s
        w = value_or(weight, c, 1.0)
        k[0, c] = m
        k[1, c], k[2, c] = ratio * w, rest * invstd * w + value_or(bias, c, 0.0)
        if means is not None:
            k[3, c], k[4, c] = invstd * w, -invstd * means[1, c] * ratio
            k[5, c] = -invstd * (means[0, c] + rest * invstd * means[1, c])
    return k, rounded(s, x)


@strict
def _middle(table):
    """A power of two between the least and the largest invstd, that float32 holds."""
    channels = table.shape[0] // 3
    least, most = 2.0**126, 2.0**-126
    for c in range(channels):
        invstd = table[1 + 2 * channels + c]
        if invstd < least:  # not NaN
            least = invstd
        if invstd > most:
            most = invstd
    least, most = larger(least, 2.0**-126), smaller(most, 2.0**126)
    return power_up_to(np.sqrt(least) * np.sqrt(most))


@strict
def finish_products(x, table, k, s, sums):
    """`sums` `(2, C)`: from `sum(dz), sum(dz * d)` to `sum(dz), sum(dz * xhat)`."""
    channels = table.shape[0] // 3
    for c in range(channels):
        rest = np.float64(k[0, c]) - table[1 + c]
        products = sums[1, c] / np.float64(s) + rest * sums[0, c]
        sums[1, c] = products * table[1 + 2 * channels + c]
