"""`OPERATIONS` for CPU tensors: the steps of `syncbn_core.numpy_steps` on their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from syncbn_core.moments import Statistics
from syncbn_core.numpy_steps import NumpySteps, rounded
from syncbn_core.steps import RunningStatistics
from syncbn_torch.arrays import DTYPES, array_of, empty_like, tensor_of

__all__ = ["OPERATIONS"]


class TensorSteps(NumpySteps):
    """The steps for plain CPU tensors. Statistics and sums that are exchanged are NumPy arrays."""

    array: Any = staticmethod(array_of)
    empty_like: Any = staticmethod(empty_like)
    rounded: Any = staticmethod(
        lambda values, like: tensor_of(rounded(values, DTYPES[like.dtype]), like.dtype)
    )

    def threads(self) -> int:
        # torch.set_num_threads(1) also applies to our kernels
        return super().threads() if torch.get_num_threads() > 1 else 1

    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        mean, var, counter = [array_of(own, written=True) for own in running[:3]]
        super().update_running(RunningStatistics(mean, var, counter, running.momentum), statistics)
        # of inference tensors there are no versions; of others, a graph may have saved them
        increment_version([b for b in running[:3] if b is not None and not b.is_inference()])
        return running


OPERATIONS = TensorSteps()
