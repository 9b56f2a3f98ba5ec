"""`OPERATIONS` for CPU tensors: the steps of `syncbn_core.numpy_steps` on their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.moments import Statistics
from syncbn_core.numpy_steps import NumpySteps, rounded
from syncbn_core.steps import RunningStatistics
from syncbn_torch.arrays import DTYPES, array_of, empty_like, tensor_of

__all__ = ["OPERATIONS"]


class _Running(NamedTuple):
    """`RunningStatistics` in NumPy. `written`: the tensors of which autograd counts versions."""

    mean: Any
    var: Any
    num_batches_tracked: Any
    momentum: float | None
    written: Sequence[Tensor]


class TensorSteps(NumpySteps):
    """The steps for plain CPU tensors. Statistics and sums that are exchanged are NumPy arrays."""

    array: Any = staticmethod(array_of)
    empty_like: Any = staticmethod(empty_like)
    rounded: Any = staticmethod(
        lambda values, dtype: [tensor_of(row, dtype) for row in rounded(values, DTYPES[dtype])]
    )

    def threads(self) -> int:
        # torch.set_num_threads(1) also applies to our kernels
        return super().threads() if torch.get_num_threads() > 1 else 1

    def running(self, running: RunningStatistics) -> _Running:
        mean, var, counter = [array_of(own, written=True) for own in running[:3]]
        # of inference tensors there are no versions; of others, a graph may have saved them
        written = [b for b in running[:3] if b is not None and not b.is_inference()]
        return _Running(mean, var, counter, running.momentum, written)

    def update_running(self, running: Any, statistics: Statistics) -> None:
        super().update_running(running, statistics)
        increment_version(running.written)


OPERATIONS = TensorSteps()
