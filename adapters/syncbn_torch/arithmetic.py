"""The four steps of `syncbn_core.functional` on tensors.

CPU tensors in float32 and float64 go to the kernels by DLPack, everything else to plain
operations. Results carry no graph and lie in memory as x does. Per-channel values are wide
(float64) tensors `(C,)`, except weight and bias, which come in their own dtype.

`parallel`: False keeps a step in the calling thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncbn_core import functional as core
from syncbn_torch import plain
from syncbn_torch.interop import as_array, as_tensor, has_kernels

__all__ = ["backward_input", "backward_reduce", "moments", "normalize"]


def _maybe(tensor: Tensor | None) -> object:
    return None if tensor is None else as_array(tensor)


def _threads(parallel: bool) -> bool:
    """`torch.set_num_threads(1)` means one thread for these kernels too."""
    return parallel and torch.get_num_threads() > 1


@torch.no_grad()
def moments(x: Tensor, *, parallel: bool) -> Tensor:
    """`[mean, m2]`, `(2, C)`; zeros for an empty x."""
    if not has_kernels(x):
        return plain.moments(x)
    part = core.local_moments(as_array(x), parallel=_threads(parallel))
    return torch.stack([as_tensor(part.mean), as_tensor(part.m2)])


@torch.no_grad()
def normalize(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    parallel: bool,
) -> Tensor:
    """`y = (x - mean) * invstd * weight + bias`."""
    if not has_kernels(x):
        return plain.normalize(x, mean, invstd, weight, bias)
    y = torch.empty_like(x)
    per_channel = (as_array(mean), as_array(invstd), _maybe(weight), _maybe(bias))
    core.normalize(as_array(x), *per_channel, out=as_array(y), parallel=_threads(parallel))
    return y


@torch.no_grad()
def backward_reduce(
    x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor, *, parallel: bool
) -> tuple[Tensor, Tensor]:
    """`(sum(dy), sum(dy * xhat))`, each `(C,)`."""
    if not has_kernels(x):
        return plain.backward_reduce(x, dy, mean, invstd)
    sums = core.backward_sums(
        as_array(x),
        as_array(dy),
        as_array(mean),
        as_array(invstd),
        parallel=_threads(parallel),
    )
    return as_tensor(sums[0]), as_tensor(sums[1])


@torch.no_grad()
def backward_input(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    mean_dy: Tensor,
    mean_dy_xhat: Tensor,
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
        as_array(mean),
        as_array(invstd),
        _maybe(weight),
        as_array(mean_dy),
        as_array(mean_dy_xhat),
        out=as_array(dx),
        parallel=_threads(parallel),
    )
    return dx
