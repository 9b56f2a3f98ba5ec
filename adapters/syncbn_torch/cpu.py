"""CPU tensors on the kernels of `syncbn_core`, by their addresses.

Per-channel numbers are NumPy arrays: their small operations keep the interpreter lock, which each
of torch's gives away, dear among replica threads. Views of a tensor's memory live only as long as
a step, in which the tensor is held.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.backends.cpu import launch as kernels
from syncbn_core.backends.cpu.launch import Plan, plan_of
from syncbn_core.moments import EpsMode, Moments, mean_gradients
from syncbn_torch.interop import PLAIN, TYPES, as_array, empty_like, in_memory, shared
from syncbn_torch.statistics import RunningStatistics, Sums, parameter_gradients, silent

__all__ = ["CpuStatistics", "forward_alone", "moments", "wide"]

Array = np.ndarray[Any, Any]
_BLENDED = (torch.float32, torch.float64)


def _threads(parallel: bool) -> bool:
    """`torch.set_num_threads(1)` means one thread for these kernels too."""
    return parallel and torch.get_num_threads() > 1


def _dense(x: Tensor) -> tuple[Tensor, Plan]:
    """`x`, or a dense copy of it, and how the kernels take it; not for an empty one."""
    x = in_memory(x)
    plan = plan_of(x.shape, x.stride(), TYPES[x.dtype])
    if plan is None:
        x = torch.empty_like(x).copy_(x)
        plan = plan_of(x.shape, x.stride(), TYPES[x.dtype])
        assert plan is not None
    return x, plan


def _like(dy: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """`dy` in the dtype and layout of the dense `x`."""
    if type(dy) in PLAIN:
        dy = in_memory(dy)
        if dy.dtype == x.dtype:
            own = plan_of(dy.shape, dy.stride(), TYPES[dy.dtype])
            if own is plan or (own is not None and own.layout == plan.layout):
                return dy
    return torch.empty_like(x).copy_(dy)


def wide(values: Tensor | None) -> Array:
    """A float64 copy of a parameter `(C,)`; empty for None."""
    if values is None:
        return kernels.NOTHING
    if values.dtype is torch.bfloat16:  # NumPy has none
        values = in_memory(values).float()
    return as_array(values).astype(np.float64)


def moments(x: Tensor, *, parallel: bool) -> Moments:
    """Moments of this part; an empty x gives the empty part."""
    if x.numel() == 0:
        return Moments.empty(x.shape[1])
    x, plan = _dense(x)
    return kernels.moments(plan, plan.at(x.data_ptr()), parallel=_threads(parallel))


def forward_alone(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    eps_mode: EpsMode,
) -> tuple[Tensor, Moments, Array]:
    """`(y, moments, invstd)` of a batch that is x alone, and not empty."""
    x, plan = _dense(x)
    y = empty_like(x)
    views = (plan.at(x.data_ptr()), wide(weight), wide(bias))
    settings = (eps, eps_mode, plan.at(y.data_ptr()))
    total, invstd = kernels.forward_alone(plan, *views, *settings, parallel=_threads(True))
    return y, total, invstd


def update(running: RunningStatistics, total: Moments) -> None:
    """`running.update`, in a kernel where that can write the buffers: in a tenth of the time."""
    mean, var, counter = running.mean, running.var, running.counter
    if mean is None or var is None or not _can_blend(mean, var, counter, total):
        running.update(total)
        return
    factor = running.factor()
    tracked = None if counter is None else shared(counter)
    # who has kept them for backward must learn of it
    increment_version(mean)
    increment_version(var)
    if counter is not None:
        increment_version(counter)
    kernels.update_running(shared(mean), shared(var), tracked, total, factor)


def _can_blend(mean: Tensor, var: Tensor, counter: Tensor | None, total: Moments) -> bool:
    for buffer in (mean, var):
        if buffer.dtype not in _BLENDED or buffer.shape != total.mean.shape:
            return False
    if counter is not None and counter.dtype is not torch.int64:
        return False
    for own in (mean, var, counter):
        if own is not None and not (
            type(own) is Tensor
            and own.is_cpu
            and own.layout is torch.strided
            and own.is_contiguous()
            and in_memory(own) is own
            and not own.is_inference()  # those have no version
        ):
            return False
    return total.count > 1


class CpuStatistics:
    """Moments of the whole batch, and the steps that use them."""

    __slots__ = ("clamp", "eps", "invstd", "total")

    def __init__(self, total: Moments, invstd: Array, eps: float, eps_mode: str) -> None:
        self.total = total
        self.invstd = invstd
        self.eps = eps
        self.clamp = eps_mode == "clamp"

    def normalize(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStatistics | None,
        *,
        parallel: bool,
    ) -> Tensor:
        """`y = (x - mean) * invstd * weight + bias`; `running` is left to `update`."""
        if x.numel() == 0:
            y = torch.empty_like(x)
        else:
            x, plan = _dense(x)
            y = empty_like(x)
            channelwise = (self.total.mean, self.invstd, wide(weight), wide(bias))
            views = (plan.at(x.data_ptr()), *channelwise, plan.at(y.data_ptr()))
            kernels.normalize(plan, *views, parallel=_threads(parallel))
        return y

    def update(self, running: RunningStatistics) -> None:
        """Blend the batch into `running`."""
        update(running, self.total)

    def _frozen(self) -> Array | None:
        """Where "clamp" made the deviation a constant."""
        return self.total.var < self.eps if self.clamp else None

    def backward_reduce(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, *, parallel: bool
    ) -> Sums:
        """The sums of this member."""
        if x.numel() == 0:
            sums = np.zeros((2, x.shape[1]))
        else:
            x, plan = _dense(x)
            dy = _like(dy, x, plan)
            views = (plan.at(x.data_ptr()), plan.at(dy.data_ptr()), self.total.mean, self.invstd)
            sums = kernels.backward_reduce(plan, *views, parallel=_threads(parallel))
        if weight is None:
            weighted = sums
        else:
            with silent():
                weighted = sums * wide(weight)
        return Sums(weighted, *parameter_gradients(sums, x, weight))

    def backward_alone(
        self, x: Tensor, dy: Tensor, weight: Tensor | None
    ) -> tuple[Sums, Tensor] | None:
        """`backward_reduce` and `backward_input` where nobody else has a part of the batch.

        None for an empty input.
        """
        if x.numel() == 0:
            return None
        x, plan = _dense(x)
        dy = _like(dy, x, plan)
        dx = empty_like(x)
        views = (plan.at(x.data_ptr()), plan.at(dy.data_ptr()))
        channelwise = (self.total.mean, self.invstd, wide(weight), self._frozen())
        operands = (*views, *channelwise, plan.at(dx.data_ptr()))
        sums = kernels.backward_alone(plan, *operands, parallel=_threads(True))
        return Sums(sums, *parameter_gradients(sums, x, weight)), dx

    def backward_input(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, total: Array, *, parallel: bool
    ) -> Tensor:
        """dx from the sums over all members, `[2, C]`."""
        if x.numel() == 0:
            return torch.empty_like(x)
        mean_dy, mean_dy_xhat = mean_gradients(total, self.total.count, self._frozen())
        x, plan = _dense(x)
        dy = _like(dy, x, plan)
        dx = empty_like(x)
        views = (plan.at(x.data_ptr()), plan.at(dy.data_ptr()))
        channelwise = (self.total.mean, self.invstd, wide(weight), mean_dy, mean_dy_xhat)
        operands = (*views, *channelwise, plan.at(dx.data_ptr()))
        kernels.backward_input(plan, *operands, parallel=_threads(parallel))
        return dx
