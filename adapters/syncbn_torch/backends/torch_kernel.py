"""`batch_norm` by torch's own kernel, which updates the running statistics itself.

A forward must update all of them or, if it fails, none. So the kernel gets the buffers themselves
only if nothing can fail after it, and copies otherwise.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import starmap
from operator import call
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn_core.backends.base import RunningStatistics
from syncbn_core.moments import averaging_factor, require_more_than_one_value
from syncbn_torch._torch_private import (
    cudnn_enabled,
    increment_versions,
    is_jit_tracing,
    modes_run_other_code,
    saving_runs_hooks,
    transforming,
)
from syncbn_torch.backends.memory import PLAIN_OR_NONE

__all__ = ["batch_norm", "batch_norm_in_place"]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics | None,
    eps: float,
    updates: bool = True,
) -> Tensor:
    """Compute y for a layer alone, x (N, C, *spatial); update `running` if it is not None.

    `updates`: False for a forward that a checkpoint repeats; it saves the same tensors as the first
    one. Raises `BatchSizeError` or torch's ValueError for one value per channel.
    """
    if running is None:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    mean, var, counter, momentum = running
    factor = averaging_factor(momentum, counter)
    if torch.compiler.is_compiling() or is_jit_tracing():
        y = F.batch_norm(x, mean, var, weight, bias, True, factor, eps)
        if counter is not None:
            counter.add_(1)
        return y
    # transforms, subclasses, modes and hooks run code that may raise after the kernel
    kinds = {type(x), type(weight), type(bias), type(mean), type(var), type(counter)}
    may_raise = transforming() or not kinds <= PLAIN_OR_NONE or saving_runs_hooks()
    may_raise = may_raise or modes_run_other_code()
    if not updates or may_raise or mean is None or var is None or counter is None:
        new_mean, new_var = (None if buffer is None else buffer.clone() for buffer in (mean, var))
        y = F.batch_norm(x, new_mean, new_var, weight, bias, True, factor, eps)
        if updates:
            _write(running, new_mean, new_var)
        return y
    if x.numel() <= x.shape[1]:
        require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
    # The graph of this forward saves mean and var too but never reads them. `data` has its own
    # version counter, so autograd does not object when the next forward changes them.
    return batch_norm_in_place(x, weight, bias, running, (mean.data, var.data), eps)


def batch_norm_in_place(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Any,
    data: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """`batch_norm` where nothing can fail after the kernel.

    `running`: mean, variance, counter and momentum; `data`: `mean.data` and `var.data`.
    """
    mean, var, counter, momentum = running
    factor = averaging_factor(momentum, counter)
    increment_versions((mean, var))  # autograd must notice if an eval forward saved them
    settings = (*data, True, factor, eps, cudnn_enabled())
    steps: Any = (partial(torch.batch_norm, x, weight, bias, *settings), partial(counter.add_, 1))
    result: Tensor
    result, _ = map(call, steps)  # in C, so that KeyboardInterrupt can't come between the two
    return result


def _write(running: RunningStatistics, mean: Tensor | None, var: Tensor | None) -> None:
    """Write mean and var and count the batch in one C call, which KeyboardInterrupt can't split."""
    counter: Any = running.num_batches_tracked
    counted = None if counter is None else counter + 1
    pairs = [(running.mean, mean), (running.var, var), (counter, counted)]
    written = [(buffer, new) for buffer, new in pairs if buffer is not None and new is not None]
    deque(starmap(Tensor.copy_, written), maxlen=0)
