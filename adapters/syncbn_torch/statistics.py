"""What passes between a layer and the steps: running statistics, and the sums of backward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncbn_core.errors import StateError
from syncbn_core.moments import Moments, averaging_factor, blend
from syncbn_torch.interop import as_array, as_tensor, check_storage
from syncbn_torch.plain import wide_dtype

__all__ = [
    "Channelwise",
    "RunningStatistics",
    "Sums",
    "parameter_gradients",
    "recomputing",
    "silent",
    "tensor_of",
]

Channelwise = Any  # numpy.ndarray or Tensor, (C,) or (2, C)
_COUNTERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def silent() -> np.errstate:
    """For NumPy as for torch, infinity and NaN are numbers, not causes for warnings."""
    return np.errstate(invalid="ignore", over="ignore")


def tensor_of(values: Channelwise) -> Tensor:
    """`values` as a tensor over the same memory."""
    return values if isinstance(values, Tensor) else as_tensor(values)


class Sums(NamedTuple):
    """What a member's backward adds up.

    `exchange` [2, C], `sum(dy), sum(dy * xhat)` times weight, goes to all members; the gradients
    by weight and bias, (C,), are the member's own.
    """

    exchange: Channelwise
    by_weight: Tensor | None
    by_bias: Tensor | None


@dataclass(slots=True)  # not frozen: that would take four times as long to make
class RunningStatistics:
    """The buffers of a layer that a batch has to update, and by how much."""

    mean: Tensor | None
    var: Tensor | None
    counter: Tensor | None
    momentum: float | None

    def check(self) -> None:
        """Raise `StateError`, before anything is written, for what can't be all written."""
        if torch.compiler.is_compiling():
            return
        for own in (self.mean, self.var, self.counter):
            if own is not None and (
                own.requires_grad or own.is_inference() or not own.is_contiguous()
            ):
                _check_writable(own)
        if (self.mean is None) != (self.var is None):
            raise StateError(
                "expected running_mean and running_var together or neither, got only "
                + ("running_var" if self.mean is None else "running_mean")
            )
        counter = self.counter
        if counter is not None and (counter.dtype not in _COUNTERS or counter.numel() != 1):
            raise StateError(
                "expected num_batches_tracked to be one integer, such as torch.tensor(0), got "
                f"dtype {counter.dtype} and shape {tuple(counter.shape)}"
            )
        check_storage(self.mean, self.var, self.counter)

    def factor(self) -> float:
        """Share of the new batch, which the counter does not count yet; none without a counter."""
        if self.momentum is None:
            return 0.0 if self.counter is None else averaging_factor(None, int(self.counter) + 1)
        return self.momentum

    def update(self, total: Moments) -> None:
        """Blend the moments of the whole batch in; of an empty batch, only count it."""
        if self.mean is None or self.var is None or total.count == 0:
            self.write(None, None)
            return
        factor = self.factor()
        new_mean = _blended(self.mean, total.mean, factor)
        self.write(new_mean, _blended(self.var, total.unbiased_var, factor))

    def write(self, mean: Tensor | None, var: Tensor | None) -> None:
        """Set what is not None, and count the batch.

        All three in one call of C: between the writes no interrupt can come.
        """
        counter = None if self.counter is None else self.counter + 1
        pairs = [(self.mean, mean), (self.var, var), (self.counter, counter)]
        written = [(own, new) for own, new in pairs if own is not None and new is not None]
        deque(starmap(Tensor.copy_, written), maxlen=0)


def recomputing() -> bool:
    """Whether this forward runs in a backward pass, as activation checkpointing does it again."""
    return torch._C._current_graph_task_id() != -1


def _check_writable(own: Tensor) -> None:
    if own.is_inference() and not torch.is_inference_mode_enabled():
        raise StateError(
            "expected running statistics that can be updated, got those of a layer built "
            "in torch.inference_mode(); build it outside, or train it in there too"
        )
    if own.requires_grad:
        raise StateError(
            "expected running statistics without gradients, got some with "
            "requires_grad=True; register them as buffers, detached"
        )
    if 0 in own.stride() and not own.is_contiguous():
        raise StateError(
            "expected running statistics with memory for each value, got some of shape "
            f"{tuple(own.shape)} and strides {own.stride()}; clone() what expand() gave"
        )


def parameter_gradients(
    sums: Channelwise, x: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients by weight and bias from `sums` (2, C), in the dtype of weight."""
    dtype = x.dtype if weight is None else weight.dtype
    if dtype is torch.float32 and not isinstance(sums, Tensor):
        with silent():  # NumPy's small operations cost less than torch's
            rounded = sums.astype(np.float32)
        return tensor_of(rounded[1]), tensor_of(rounded[0])
    by_bias, by_weight = tensor_of(sums).to(dtype).unbind()
    return by_weight, by_bias


def _blended(running: Tensor, batch: Channelwise, factor: float) -> Tensor:
    """The new value of a running statistic, in float64."""
    old = running.to(wide_dtype(running))
    if isinstance(batch, Tensor):
        return tensor_of(blend(old, batch.detach().to(old.device), factor))
    with silent():
        return tensor_of(blend(as_array(old), batch, factor))
