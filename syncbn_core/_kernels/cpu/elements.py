"""What the CPU kernels compute of one element, and loops over a run of them.

    d = (x - m) * s        z = d * scale + shift        dz = dy * slope(z)

    forward     y  = activation(z)                      sums of x - m and of (x - m)**2
    backward    dx = dz * of_dz + (d * of_x + of_one)   sums of dz and of dz * d

A kernel is in forward where dy is None, which the compiler knows. m is the mean, rounded to the
computing dtype of x, so x - m is exact near it; s is about invstd, so d is about 1 in size.
`channels.coefficients` computes all of them, with what rounding left, in float64.

Coefficients are numbers (a run has one channel) or arrays (of each element of a row).
"""

from __future__ import annotations

import numpy as np

from syncbn_core._kernels.cpu.activations import activated, incoming, value_of
from syncbn_core._kernels.cpu.builds import may_contract, may_reorder, strict
from syncbn_core._kernels.cpu.numerics import at, kept, narrow, rounded, where, widen


@may_contract
def _terms(x, dy, act, m, s, scale, shift):
    """What an element adds to the two sums; without m the first alone."""
    if m is None:
        return widen(x), rounded(0, x)
    if dy is None:
        d = widen(x) - m
        return d, d * d
    d = (widen(value_of(act, x)) - m) * s
    dz = incoming(act, x, dy, d * scale + shift)
    return dz, dz * d


@may_contract
def _result(x, dy, act, m, s, scale, shift, of_dz, of_x, of_one):
    d = (widen(value_of(act, x)) - m) * s
    if dy is None:
        return activated(act, d * scale + shift)
    return incoming(act, x, dy, d * scale + shift) * of_dz + (d * of_x + of_one)


@may_contract
def write_run(x, dy, valid, act, m, s, scale, shift, of_dz, of_x, of_one, target):
    """Write y, or dx, of a run; 0 where it is not valid."""
    for i in range(x.shape[0]):
        result = _result(
            x[i], at(dy, i), act, at(m, i), at(s, i), at(scale, i), at(shift, i),
            at(of_dz, i), at(of_x, i), at(of_one, i),
        )  # fmt: skip
        target[i] = narrow(where(kept(valid, i), result, rounded(0, x)), target)


@may_reorder
def sums_of_run(x, dy, valid, act, m, s, scale, shift):
    """Both sums of a run of one channel."""
    zero = rounded(0, x)
    first = second = zero
    for i in range(x.shape[0]):
        p, q = _terms(x[i], at(dy, i), act, m, s, scale, shift)
        first += where(kept(valid, i), p, zero)
        second += where(kept(valid, i), q, zero)
    return first, second


@strict
def float64_sums(x, valid, mean):
    """`(sum(d), sum(d**2))` of a run, `d = x - mean`, one by one, in float64."""
    first = second = 0.0
    for i in range(x.shape[0]):
        if kept(valid, i):
            d = np.float64(widen(x[i])) - mean
            first += d
            second += d * d
    return first, second


@may_contract
def add_rows(x, dy, valid, left, right, begin, end, act, m, s, scale, shift, first, second):
    """Add the terms of rows `begin` to `end` to the sums of each column; `second` may be None."""
    # Sliced row by row: Numba does not know that a block `x[:, left:right]` has unit stride.
    # With dy four rows at a time would be eight streams from memory, which is slower.
    single = begin if valid is not None or dy is not None else end - (end - begin) % 4
    for r in range(begin, single - 3, 4):
        a, b = x[r, left:right], x[r + 1, left:right]
        c, d = x[r + 2, left:right], x[r + 3, left:right]
        for i in range(first.shape[0]):
            p, q = _terms(a[i], None, act, at(m, i), s, scale, shift)
            t, u = _terms(b[i], None, act, at(m, i), s, scale, shift)
            v, w = _terms(c[i], None, act, at(m, i), s, scale, shift)
            y, z = _terms(d[i], None, act, at(m, i), s, scale, shift)
            first[i] += (p + t) + (v + y)
            if second is not None:
                second[i] += (q + u) + (w + z)
    for r in range(single, end):
        if kept(valid, r):
            a, g = x[r, left:right], at(dy, (r, slice(left, right)))
            for i in range(first.shape[0]):
                p, q = _terms(a[i], at(g, i), act, at(m, i), at(s, i), at(scale, i), at(shift, i))
                first[i] += p
                if second is not None:
                    second[i] += q
