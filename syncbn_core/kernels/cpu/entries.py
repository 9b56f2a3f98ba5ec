"""The compiled calls of the CPU steps: each gets calls (`calls`) and runs a kernel on every part.

What surrounds a kernel is compiled with it: per-channel operands of any floating dtype become
float64 and back, and running statistics are updated. In Python that takes as long as the kernel of
a small layer, and in a network, where Python's own memory is no longer in the caches, longer.

Arguments of several steps: `like`, an array of the dtype of the activations; `calls`, one for each
of P parts; `table`, the rows mean, m2 and invstd of the whole batch, float64 `(3, C)`; `factor`,
the share of the batch in the running statistics, NaN for the average over all batches by the
counter. "forward" and "backward" do a whole direction for a batch of one part.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.kernels.cpu import planes, rows
from syncbn_core.kernels.cpu.builds import SerialParallelKernel, from_python, strict
from syncbn_core.kernels.cpu.calls import (
    BIAS,
    CHANNELS,
    DY,
    GRAD_BIAS,
    GRAD_WEIGHT,
    INNER,
    MEAN,
    OUT,
    VAR,
    WEIGHT,
    A,
    X,
    count_batch,
    plane_sizes,
    plane_view,
    read_vector,
    row_sizes,
    row_view,
    write_vector,
)
from syncbn_core.kernels.cpu.numerics import blend, invstd_of, mean_gradients

__all__ = ["STEPS", "Builds", "fill_invstd", "merge", "update_running"]

_DTYPES = ("f4", "f8", "u2", "i2")  # by the code of a dtype; 16 bits as `numerics` passes them
_LIKE = [np.empty(0, dtype) for dtype in _DTYPES]

# What the functions below call, of planes or of rows; set per build.
kernel: Any = None
view: Any = None
sizes: Any = None


class Builds(NamedTuple):
    """A step for one dtype and kind of layout: its two builds, and their first argument."""

    serial: Any
    parallel: Any
    like: np.ndarray[Any, Any]


@from_python
def update_running(call, table, count, factor):
    """Count the batch and update the running statistics of the call, if it has any.

    One call writes all three, so no interrupt can come between them.
    """
    batches = count_batch(call)
    if factor != factor:
        factor = 1.0 / (batches + 1) if batches >= 0 else 0.0
    running_mean, running_var = read_vector(call, MEAN), read_vector(call, VAR)
    if count > 0 and running_mean.shape[0]:
        blend(running_mean, running_var, table[0], table[1], count, factor)
        write_vector(call, MEAN, running_mean)
        write_vector(call, VAR, running_var)


@strict
def _write_gradients(call, sums):
    """Write the gradients of weight and bias."""
    write_vector(call, GRAD_WEIGHT, sums[1])
    write_vector(call, GRAD_BIAS, sums[0])


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
        table[2, c] = invstd_of(table[1, c] / max(count, 1), eps, clamp)


def _moments(like, calls, tables):
    """Write mean and m2 of each part, `tables` (P, 2, C)."""
    for part in range(calls.shape[0]):
        call, table = calls[part], tables[part]
        kernel(view(call, X, like), *sizes(call), table[0], table[1])


def _normalize(like, calls, table, count, factor):
    for part in range(calls.shape[0]):
        call = calls[part]
        weight, bias = read_vector(call, WEIGHT), read_vector(call, BIAS)
        x, y = view(call, X, like), view(call, OUT, like)
        kernel(x, *sizes(call), table[0], table[2], weight, bias, y)
    for part in range(calls.shape[0]):
        update_running(calls[part], table, count, factor)


def _forward(like, calls, table, eps, clamp, factor):
    call = calls[0]
    weight, bias = read_vector(call, WEIGHT), read_vector(call, BIAS)
    x, y = view(call, X, like), view(call, OUT, like)
    kernel(x, *sizes(call), weight, bias, eps, clamp, table[0], table[1], table[2], y)
    update_running(call, table, call[A] * call[INNER], factor)


def _backward_reduce(like, calls, table, sums):
    """Write the gradients, and `sums` (P, 2, C) times weight."""
    for part in range(calls.shape[0]):
        call, of_part = calls[part], sums[part]
        x, dy = view(call, X, like), view(call, DY, like)
        kernel(x, dy, *sizes(call), table[0], table[2], of_part[0], of_part[1])
        _write_gradients(call, of_part)
        weight = read_vector(call, WEIGHT)
        for c in range(weight.shape[0]):
            of_part[0, c] *= weight[c]
            of_part[1, c] *= weight[c]


def _backward_input(like, calls, table, eps, clamp, total, count):
    """`total` (2, C): the sums times weight over all parts; `count`: values per channel."""
    channels = table.shape[1]
    means = np.empty((2, channels))
    for c in range(channels):
        clamped = clamp and table[1, c] / count < eps
        means[0, c], means[1, c] = mean_gradients(total[0, c], total[1, c], 1.0, count, clamped)
    for part in range(calls.shape[0]):
        call = calls[part]
        weight = read_vector(call, WEIGHT)
        x, dy, dx = view(call, X, like), view(call, DY, like), view(call, OUT, like)
        kernel(x, dy, *sizes(call), table[0], table[2], weight, means[0], means[1], dx)


def _backward(like, calls, table, eps, clamp):
    call = calls[0]
    weight = read_vector(call, WEIGHT)
    sums = np.empty((2, call[CHANNELS]))
    clamped = np.empty(call[CHANNELS] if clamp else 0, np.bool_)
    for c in range(clamped.shape[0]):
        clamped[c] = table[1, c] / (call[A] * call[INNER]) < eps
    x, dy, dx = view(call, X, like), view(call, DY, like), view(call, OUT, like)
    kernel(x, dy, *sizes(call), table[0], table[2], weight, clamped, sums[0], sums[1], dx)
    _write_gradients(call, sums)


def _build(step: Callable[..., Any], name: str, kind: str, parallel: bool) -> Any:
    """`step` compiled for one build of one kernel."""
    module = planes if kind == "planes" else rows
    both: SerialParallelKernel = getattr(module, f"{kind}_{name}")
    bound = {
        "kernel": both.parallel if parallel else both.serial,
        "view": plane_view if kind == "planes" else row_view,
        "sizes": plane_sizes if kind == "planes" else row_sizes,
    }
    title = f"{kind}_{name}" + "_parallel" * parallel
    function = FunctionType(step.__code__, {**globals(), **bound}, title)
    function.__qualname__, function.__module__ = title, __name__
    return from_python(function)


def _builds(step: Callable[..., Any], name: str) -> list[Builds]:
    """The builds of a step by the dtype and `ROWS` of what `look` returns."""
    pairs = [
        (_build(step, name, kind, False), _build(step, name, kind, True))
        for kind in ("planes", "rows")
    ]
    return [Builds(*pair, like) for pair in pairs for like in _LIKE]


STEPS: dict[str, list[Builds]] = {
    "moments": _builds(_moments, "moments"),
    "normalize": _builds(_normalize, "normalize"),
    "forward": _builds(_forward, "forward"),
    "backward_reduce": _builds(_backward_reduce, "backward_reduce"),
    "backward_input": _builds(_backward_input, "backward_input"),
    "backward": _builds(_backward, "backward"),
}
