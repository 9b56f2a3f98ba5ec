"""Torch's own kernel, which writes running statistics while it normalizes.

They have to be written all or not at all, so it may write them itself only where nothing can go
wrong after it; elsewhere it writes copies.
"""

from __future__ import annotations

from functools import partial
from operator import call
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.moments import require_more_than_one_value
from syncbn_torch.interop import PLAIN
from syncbn_torch.statistics import RunningStatistics, recomputing
from syncbn_torch.transforms import transforming

__all__ = ["batch_norm", "saving_runs_hooks"]

_PLAIN = {*PLAIN, type(None)}

_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_runs_hooks() -> bool:
    """Whether code of the user's runs, and may raise, when tensors are saved for backward.

    Torch before 2.8 does not say: then it may.
    """
    return torch.is_grad_enabled() and (_top_hooks is None or _top_hooks(True) is not None)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics | None,
    eps: float,
) -> Tensor:
    """y of a batch that is x alone; `running`, if there is one, is updated by it.

    A recomputation updates nothing.
    """
    if running is None:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    mean, var, counter = running.mean, running.var, running.counter
    factor = running.factor()
    if torch.compiler.is_compiling():
        y = F.batch_norm(x, mean, var, weight, bias, True, factor, eps)
        if counter is not None:
            counter.add_(1)
        return y
    again = recomputing()
    # transforms, subclasses, modes and hooks run code that may raise after the kernel has written
    kinds = {type(x), type(weight), type(bias), type(mean), type(var), type(counter)}
    more = transforming() or not kinds <= _PLAIN or saving_runs_hooks()
    more = more or bool(torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack())
    if again or more or mean is None or var is None or counter is None:
        new_mean, new_var = (None if own is None else own.clone() for own in (mean, var))
        y = F.batch_norm(x, new_mean, new_var, weight, bias, True, factor, eps)
        if not again:
            running.write(new_mean, new_var)
        return y
    if x.numel() <= x.shape[1]:
        require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
    increment_version(mean)  # a graph of eval that has kept them must learn of it
    increment_version(var)
    # The graph of this forward keeps them too, and does not need them: by `data`, which has a
    # version of its own, it does not mind that the next forward changes them.
    settings = (mean.data, var.data, True, factor, eps, torch._C._get_cudnn_enabled())
    steps: Any = (partial(torch.batch_norm, x, weight, bias, *settings), partial(counter.add_, 1))
    result: Tensor
    result, _ = map(call, steps)  # in C: no interrupt can come between the two
    return result
