"""`OPERATIONS` for CPU tensors: passes their memory to the steps of `syncbn_core.backends.cpu`.

The views of a tensor's memory live only during a step, which also holds the tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.backends.base import RunningStatistics
from syncbn_core.backends.cpu.operations import NO_VALUES, CpuOperations
from syncbn_core.backends.cpu.plan import Plan, plan_of
from syncbn_core.moments import Moments
from syncbn_torch.backends.memory import (
    NUMPY_DTYPES,
    PLAIN,
    as_array,
    as_tensor,
    empty_like,
    in_memory,
    shared_array,
)

__all__ = ["OPERATIONS", "TensorMemory"]

Array = np.ndarray[Any, Any]
_BLENDED = (torch.float32, torch.float64)


class TensorMemory:
    """`HostMemory` of CPU tensors."""

    def may_use_threads(self) -> bool:
        return torch.get_num_threads() > 1  # torch.set_num_threads(1) also applies to our kernels

    def dense(self, x: Tensor) -> tuple[Tensor, Array, Plan]:
        x, plan = _dense(x)
        return x, plan.at(x.data_ptr()), plan

    def dense_pair(
        self, x: Tensor, dy: Tensor
    ) -> tuple[tuple[Tensor, Array], tuple[Tensor, Array], Plan]:
        x, plan = _dense(x)
        dy = _like(dy, x, plan)
        return (x, plan.at(x.data_ptr())), (dy, plan.at(dy.data_ptr())), plan

    def target(
        self, dense: Tensor, plan: Plan, out: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, Array]:
        y = empty_like(dense)
        return y, plan.at(y.data_ptr())

    def cast_to_output(self, result: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        return result

    def empty_like(self, x: Tensor, out: Tensor | None) -> Tensor:
        return torch.empty_like(x)

    def as_float64(self, values: Tensor | None) -> Array:
        if values is None:
            return NO_VALUES
        if values.dtype is torch.bfloat16:  # NumPy has no bfloat16
            values = in_memory(values).float()
        return as_array(values).astype(np.float64)

    def parameter_gradients(
        self, sums: Array, x: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        dtype = x.dtype if weight is None else weight.dtype
        if dtype is torch.float32:
            with np.errstate(invalid="ignore", over="ignore"):
                rounded = sums.astype(np.float32)
            return as_tensor(rounded[1]), as_tensor(rounded[0])
        by_bias, by_weight = as_tensor(sums).to(dtype).unbind()
        return by_weight, by_bias

    def shared_buffers(
        self, running: RunningStatistics, total: Moments
    ) -> tuple[Array, Array, Array | None] | None:
        mean, var, counter, _ = running
        assert mean is not None
        assert var is not None
        if not _can_blend(mean, var, counter, total):
            return None
        # the kernel writes them unseen by autograd, which must notice if a graph has saved them
        increment_version(mean)
        increment_version(var)
        if counter is None:
            return shared_array(mean), shared_array(var), None
        increment_version(counter)
        return shared_array(mean), shared_array(var), shared_array(counter)

    def assign(self, targets: Sequence[Tensor], values: Sequence[Any]) -> None:
        new = [v if isinstance(v, Tensor) else as_tensor(v) for v in values]
        deque(map(Tensor.copy_, targets, new), maxlen=0)


OPERATIONS = CpuOperations(TensorMemory())


def _dense(x: Tensor) -> tuple[Tensor, Plan]:
    """x or a dense copy of it, and the plan by which kernels read it; x must not be empty."""
    x = in_memory(x)
    plan = plan_of(x.shape, x.stride(), NUMPY_DTYPES[x.dtype])
    if plan is None:
        x = torch.empty_like(x).copy_(x)
        plan = plan_of(x.shape, x.stride(), NUMPY_DTYPES[x.dtype])
        assert plan is not None
    return x, plan


def _like(dy: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """dy in the dtype and layout of the dense x."""
    if type(dy) in PLAIN:
        dy = in_memory(dy)
        if dy.dtype == x.dtype:
            own = plan_of(dy.shape, dy.stride(), NUMPY_DTYPES[dy.dtype])
            if own is plan or (own is not None and own.layout == plan.layout):
                return dy
    return torch.empty_like(x).copy_(dy)


def _can_blend(mean: Tensor, var: Tensor, counter: Tensor | None, total: Moments) -> bool:
    """Whether a kernel can write these buffers."""
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
            and not own.is_inference()  # inference tensors have no version to increment
        ):
            return False
    return bool(total.count > 1)
