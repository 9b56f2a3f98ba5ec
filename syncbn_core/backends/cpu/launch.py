"""Dense memory on the Numba CPU kernels: the same for NumPy arrays and for tensors of a framework.

Activations come as views of the shape that a `Plan` says, per-channel numbers as float64 `(C,)`
(an empty `weight` or `bias` stands for ones or zeros); who calls allocates the activations.

Which build of a kernel runs: the parallel one for a single caller with enough work, the serial
one for threads that fill the cores by themselves (`parallel=False`), for small arrays, while
another thread is in a parallel kernel, and after a fork. Numba's `workqueue` layer aborts the
process when two threads enter it, and its OpenMP layer when a forked child does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import lru_cache
from math import prod
from typing import Any

import numba
import numpy as np

from syncbn_core.kernels.cpu import planes as cpu_planes
from syncbn_core.kernels.cpu import rows as cpu_rows
from syncbn_core.kernels.cpu.numerics import SerialParallelKernel, blend, has_half
from syncbn_core.layout import Layout, layout_of_strides
from syncbn_core.moments import EpsMode, Moments, mean_gradients

__all__ = [
    "NOTHING",
    "Plan",
    "backward_alone",
    "backward_input",
    "backward_reduce",
    "carrier",
    "forward_alone",
    "moments",
    "normalize",
    "plan_of",
    "update_running",
]

Array = np.ndarray[Any, Any]

PARALLEL_SIZE = 32768  # elements; below, starting the threads costs more than they save
NEAR = 1 << 20  # bytes of a channel that a core's own cache still has when it is read again
SHORT = 64  # elements; shorter planes are computed side by side, as rows
NOTHING = np.empty(0)
_NOWHERE = np.empty(0, np.bool_)
_UNCOUNTED = np.empty(0, np.int64)
_STEPS = ("moments", "normalize", "backward_reduce", "backward_input", "forward", "backward")
_PLANES: dict[str, SerialParallelKernel] = {
    step: getattr(cpu_planes, f"planes_{step}") for step in _STEPS
}
_ROWS: dict[str, SerialParallelKernel] = {
    step: getattr(cpu_rows, f"rows_{step}") for step in _STEPS
}

_one_caller = threading.Lock()
_forked = False


def _layer() -> str | None:
    """Numba's threading layer, or None while it has not been started."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _after_fork() -> None:
    global _one_caller, _forked
    _one_caller = threading.Lock()  # its holder is not in this process
    _forked = _forked or _layer() is not None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _run(kernel: SerialParallelKernel, parallel: bool, x: Array, *arguments: Any) -> None:
    if (
        parallel
        and x.size >= PARALLEL_SIZE
        and not _forked
        and numba.get_num_threads() > 1
        and not (_layer() == "workqueue" and threading.active_count() > 1)
        and _one_caller.acquire(blocking=False)
    ):
        try:
            kernel.parallel(x, *arguments)
        finally:
            _one_caller.release()
    else:
        kernel.serial(x, *arguments)


@lru_cache(maxsize=64)
def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which the kernels take numbers of `dtype`: of the same size, or float32.

    Their own for 16 bits are integers (`kernels.cpu.numerics`).
    """
    if dtype.itemsize > 2:
        return dtype.newbyteorder("=")
    if dtype.name in ("bfloat16", "uint16"):
        return np.dtype(np.uint16)
    return np.dtype(np.int16 if dtype.name in ("float16", "int16") and has_half() else np.float32)


class Plan:
    """How the kernels take dense memory of one shape, strides and dtype.

    Attributes:
        layout: how it lies there.
        dtype: in what dtype they take it; `shape`: of what shape, `[A, C, B]` or rows.
        channels: C; `count`: values per channel.
    """

    __slots__ = (
        "_kernels",
        "_memory",
        "channels",
        "count",
        "dtype",
        "layout",
        "shape",
    )

    def __init__(self, layout: Layout, dtype: np.dtype[Any]) -> None:
        self.layout = layout
        self.dtype = dtype
        self.channels = layout.channels
        self.count = layout.outer * layout.inner
        self.shape: tuple[int, ...] = (layout.outer, layout.channels, layout.inner)
        self._kernels = _PLANES
        if self.is_rows:
            columns = layout.channels * layout.inner
            repeats = cpu_rows.joined(layout.outer, columns)
            self.shape = (layout.outer // repeats, columns * repeats)
            self._kernels = _ROWS
        self._memory = ctypes.c_char * (prod(self.shape) * dtype.itemsize)

    @property
    def is_rows(self) -> bool:
        layout = self.layout
        return layout.inner == 1 or (layout.inner <= SHORT and layout.outer >= 8)

    def view(self, array: Array) -> Array:
        """What the kernels see of an array of this layout."""
        seen: Array = self.layout.view(array).reshape(self.shape)
        return seen

    def at(self, address: int) -> Array:
        """What they see of memory at an address; only while somebody else keeps it alive."""
        memory: Any = self._memory.from_address(address)
        return np.ndarray(self.shape, self.dtype, memory)

    def call(
        self,
        step: str,
        parallel: bool,
        read: tuple[Array, ...],
        channelwise: tuple[Any, ...],
        *written: Array,
    ) -> None:
        """Run a kernel on views."""
        leading: tuple[int, ...] = ()
        if self.is_rows:
            many = parallel and self.count * self.channels >= PARALLEL_SIZE
            leading = (self.layout.inner, numba.get_num_threads() if many else 1)
        _run(self._kernels[step], parallel, *read, *leading, *channelwise, *written)

    def stays_near(self, arrays: int, parallel: bool) -> bool:
        """Whether a channel of so many arrays stays in cache, and all cores have channels.

        Of rows, a block of channels.
        """
        together = 1
        if self.is_rows:
            inner = self.layout.inner
            width = cpu_rows.WIDE if inner == 1 else cpu_rows.WIDTH
            together = max(1, min(self.channels, width // inner))
        if self.count * together * self.dtype.itemsize * arrays > NEAR:
            return False
        many = parallel and self.count * self.channels >= PARALLEL_SIZE
        return not many or self.channels // together >= 4 * numba.get_num_threads()


@lru_cache(maxsize=1024)
def plan_of(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], unit: int = 1
) -> Plan | None:
    """The plan for `(N, C, *spatial)` memory; strides in units of so many per element.

    None where the kernels can't take it as it lies there: it has gaps or is empty, or its dtype
    has to be converted.
    """
    taken = carrier(dtype)
    if 0 in shape or not dtype.isnative or taken.itemsize != dtype.itemsize:
        return None
    layout = layout_of_strides(shape, strides, unit)
    return None if layout is None else Plan(layout, taken)


def moments(plan: Plan, x: Array, *, parallel: bool) -> Moments:
    """Moments of x."""
    mean, m2 = np.empty((2, plan.channels))
    plan.call("moments", parallel, (x,), (mean, m2))
    return Moments(plan.count, mean, m2)


def normalize(
    plan: Plan,
    x: Array,
    mean: Array,
    invstd: Array,
    weight: Array,
    bias: Array,
    y: Array,
    *,
    parallel: bool,
) -> None:
    """`y = (x - mean) * invstd * weight + bias`; `y` may be `x`."""
    plan.call("normalize", parallel, (x,), (mean, invstd, weight, bias), y)


def forward_alone(
    plan: Plan,
    x: Array,
    weight: Array,
    bias: Array,
    eps: float,
    eps_mode: EpsMode,
    y: Array,
    *,
    parallel: bool,
) -> tuple[Moments, Array]:
    """`(moments, invstd)` of x alone, and y by them; in one go where a channel stays near."""
    if plan.stays_near(1, parallel):
        mean, m2, invstd = np.empty((3, plan.channels))
        settings = (weight, bias, float(eps), eps_mode == "clamp")
        plan.call("forward", parallel, (x,), (*settings, mean, m2, invstd), y)
        return Moments(plan.count, mean, m2), invstd
    total = moments(plan, x, parallel=parallel)
    invstd = total.invstd(eps, eps_mode)
    normalize(plan, x, total.mean, invstd, weight, bias, y, parallel=parallel)
    return total, invstd


def backward_reduce(
    plan: Plan, x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool
) -> Array:
    """`sum(dy), sum(dy * xhat)`, (2, C)."""
    sums = np.empty((2, plan.channels))
    plan.call("backward_reduce", parallel, (x, dy), (mean, invstd, *sums))
    return sums


def backward_input(
    plan: Plan,
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array,
    mean_dy: Array,
    mean_dy_xhat: Array,
    dx: Array,
    *,
    parallel: bool,
) -> None:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`; `dx` may be `dy`."""
    channelwise = (mean, invstd, weight, mean_dy, mean_dy_xhat)
    plan.call("backward_input", parallel, (x, dy), channelwise, dx)


def backward_alone(
    plan: Plan,
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array,
    frozen: Array | None,
    dx: Array,
    *,
    parallel: bool,
) -> Array:
    """`sum(dy), sum(dy * xhat)`, (2, C), of x alone, and dx by them.

    `frozen` (C,) bool: where `invstd` is a constant.
    """
    if plan.stays_near(2, parallel):
        sums = np.empty((2, plan.channels))
        constant = _NOWHERE if frozen is None else frozen
        plan.call("backward", parallel, (x, dy), (mean, invstd, weight, constant, *sums), dx)
        return sums
    sums = backward_reduce(plan, x, dy, mean, invstd, parallel=parallel)
    with np.errstate(invalid="ignore", over="ignore"):
        total = sums * weight if weight.size else sums
    mean_dy, mean_dy_xhat = mean_gradients(total, plan.count, frozen)
    channelwise = (mean, invstd, weight, mean_dy, mean_dy_xhat)
    backward_input(plan, x, dy, *channelwise, dx, parallel=parallel)
    return sums


def update_running(
    running_mean: Array, running_var: Array, tracked: Array | None, total: Moments, factor: float
) -> None:
    """Blend `total`, of two values per channel or more, into float32 or float64 `(C,)` in place.

    `tracked`, one int64 or None, counts the batch.
    """
    counter = _UNCOUNTED if tracked is None else tracked.reshape(1)
    values = (total.mean, total.m2, total.count, float(factor))
    blend(running_mean, running_var, counter, *values)
