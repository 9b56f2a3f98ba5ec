"""`OPERATIONS` for CPU tensors: the steps of `syncbn_core.numpy_steps` on their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from syncbn_core.moments import Statistics
from syncbn_core.numpy_steps import NumpySteps
from syncbn_core.steps import Affine, Labels, RunningStatistics, Sums
from syncbn_torch.arrays import array_of, check_storage, empty_like, tensor_of

__all__ = ["OPERATIONS"]


class TensorSteps(NumpySteps):
    """The steps for plain CPU tensors. Statistics and sums that are exchanged are NumPy arrays."""

    def threads(self) -> int:
        # torch.set_num_threads(1) also applies to our kernels
        return super().threads() if torch.get_num_threads() > 1 else 1

    def moments(self, x: Any) -> Any:
        return super().moments(array_of(x))

    def forward(
        self,
        x: Any,
        statistics: Statistics,
        affine: Affine,
        rule: Any,
        running: RunningStatistics | None = None,
        out: Any = None,
    ) -> Any:
        y = empty_like(x) if out is None else out
        arrays = Affine(*map(array_of, affine))
        super().forward(array_of(x), statistics, arrays, rule, None, array_of(y))
        if running is not None:
            self.update_running(running, statistics)
        return y

    def backward_reduce(
        self,
        x: Any,
        dy: Any,
        statistics: Statistics,
        affine: Affine,
        rule: Any,
        labels: Labels | None = None,
    ) -> Sums:
        dtype = x.dtype if affine.weight is None else affine.weight.dtype
        arrays = Affine(*map(array_of, affine))
        dy = _like(dy, x)
        operands = array_of(x), array_of(dy), statistics, arrays, rule
        exchange, *gradients = super().backward_reduce(*operands)
        return Sums(exchange, *(tensor_of(values, dtype) for values in gradients))

    def backward_input(
        self,
        x: Any,
        dy: Any,
        statistics: Statistics,
        affine: Affine,
        rule: Any,
        total: Any,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Any:
        dx = empty_like(x) if out is None else out
        arrays = Affine(*map(array_of, affine))
        dy = _like(dy, x)
        operands = array_of(x), array_of(dy), statistics, arrays, rule, total
        super().backward_input(*operands, array_of(dx))
        return dx

    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        mean, var, counter = [array_of(own, written=True) for own in running[:3]]
        super().update_running(RunningStatistics(mean, var, counter, running.momentum), statistics)
        # of inference tensors there are no versions; of others, a graph may have saved them
        increment_version([b for b in running[:3] if b is not None and not b.is_inference()])
        return running


def _like(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy in the dtype of x, as autograd gives it."""
    if dy.dtype is x.dtype:
        return dy
    check_storage(dy)
    return dy.to(x.dtype)


OPERATIONS = TensorSteps()
