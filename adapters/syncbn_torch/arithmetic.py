"""The four steps of `syncbn_core.functional` on tensors.

CPU tensors in float32 and float64 go to the kernels by DLPack, everything else to plain tensor
operations. Per-channel values `(C,)` are wide (float64) and of the kind that goes with x: NumPy
arrays beside the kernels, tensors on the device of x elsewhere. NumPy's small operations keep the
interpreter lock; each of torch's gives it away, which is dear among replica threads.

`parallel`: False keeps a step in the calling thread. Call these without a graph, as inside an
autograd Function; results lie in memory as x does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncbn_core import functional as core
from syncbn_core.moments import Moments, invstd_from_var
from syncbn_torch import plain
from syncbn_torch.interop import as_array, as_tensor, has_kernels

__all__ = [
    "Channelwise",
    "backward_input",
    "backward_reduce",
    "invstd",
    "moments",
    "normalize",
    "place_like",
    "same_bits",
    "silent",
    "tensor_of",
]

Channelwise = Any  # numpy.ndarray or Tensor, (C,) or (2, C)


def _maybe(tensor: Tensor | None) -> Channelwise | None:
    return None if tensor is None else as_array(tensor)


def _threads(parallel: bool) -> bool:
    """`torch.set_num_threads(1)` means one thread for these kernels too."""
    return parallel and torch.get_num_threads() > 1


def silent() -> np.errstate:
    """For NumPy as for torch, infinity and NaN are numbers, not causes for warnings."""
    return np.errstate(invalid="ignore", over="ignore")


def tensor_of(values: Channelwise) -> Tensor:
    """`values` as a tensor over the same memory."""
    return values if isinstance(values, Tensor) else as_tensor(values)


def place_like(values: Channelwise, x: Tensor) -> Channelwise:
    """`values` on the device of x; arrays are where the kernels are."""
    return values.to(x.device) if isinstance(values, Tensor) else values


def same_bits(a: Moments, b: Moments) -> bool:
    """Whether two moments are the same, NaN like any other number."""
    if a.count != b.count or type(a.mean) is not type(b.mean) or len(a.mean) != len(b.mean):
        return False
    pairs = [(a.mean, b.mean), (a.m2, b.m2)]
    if isinstance(a.mean, Tensor):
        return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in pairs)
    return all(p.tobytes() == q.tobytes() for p, q in pairs)


def invstd(var: Channelwise, eps: float, eps_mode: Any) -> Channelwise:
    """`1 / sqrt(var + eps)`, or for "clamp" `1 / sqrt(max(var, eps))`."""
    if isinstance(var, Tensor):
        return plain.invstd_from_var(var, eps, eps_mode)
    return invstd_from_var(var, eps, eps_mode)


def moments(x: Tensor, *, parallel: bool) -> Moments:
    """Moments of this part; an empty x gives the empty part."""
    if has_kernels(x):
        return core.local_moments(as_array(x), parallel=_threads(parallel))
    return plain.moments(x)


def normalize(
    x: Tensor,
    mean: Channelwise,
    invstd: Channelwise,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    parallel: bool,
) -> Tensor:
    """`y = (x - mean) * invstd * weight + bias`."""
    if not has_kernels(x):
        return plain.normalize(x, mean, invstd, weight, bias)
    y = torch.empty_like(x)
    per_channel = (mean, invstd, _maybe(weight), _maybe(bias))
    core.normalize(as_array(x), *per_channel, out=as_array(y), parallel=_threads(parallel))
    return y


def backward_reduce(
    x: Tensor, dy: Tensor, mean: Channelwise, invstd: Channelwise, *, parallel: bool
) -> Channelwise:
    """`[sum(dy), sum(dy * xhat)]`, `(2, C)`."""
    if not has_kernels(x):
        return torch.stack(plain.backward_reduce(x, dy, mean, invstd))
    arrays = (as_array(x), as_array(dy), mean, invstd)
    return np.stack(core.backward_sums(*arrays, parallel=_threads(parallel)))


def backward_input(
    x: Tensor,
    dy: Tensor,
    mean: Channelwise,
    invstd: Channelwise,
    weight: Tensor | None,
    mean_dy: Channelwise,
    mean_dy_xhat: Channelwise,
    *,
    parallel: bool,
) -> Tensor:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`."""
    if not has_kernels(x):
        return plain.backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat)
    dx = torch.empty_like(x)
    core.backward_input(
        as_array(x),
        as_array(dy),
        mean,
        invstd,
        _maybe(weight),
        mean_dy,
        mean_dy_xhat,
        out=as_array(dx),
        parallel=_threads(parallel),
    )
    return dx
