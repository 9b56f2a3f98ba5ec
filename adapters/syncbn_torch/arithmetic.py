"""The steps of batch normalization on tensors, each where its kernels are.

Tensors on the CPU (`cpu.py`) and on CUDA devices (`cuda.py`) go to their kernels, everything else
to plain tensor operations. Per-channel values `(C,)` are wide (float64) and of the kind that goes
with x: NumPy arrays beside the CPU kernels, tensors on the device of x elsewhere.

`parallel`: False keeps a step in the calling thread. Call these without a graph, as inside an
autograd Function; results lie in memory as x does.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from syncbn_core.device_moments import DeviceMoments
from syncbn_core.moments import Moments
from syncbn_torch import plain
from syncbn_torch.cuda import CudaStatistics, has_cuda_kernels
from syncbn_torch.cuda import moments as cuda_moments
from syncbn_torch.interop import has_kernels
from syncbn_torch.statistics import (
    Channelwise,
    RunningStatistics,
    Sums,
    parameter_gradients,
    tensor_of,
)

if TYPE_CHECKING:
    from syncbn_torch.cpu import CpuStatistics

__all__ = [
    "PlainStatistics",
    "Statistics",
    "forward_alone",
    "invstd",
    "moments",
    "same_bits",
    "statistics_of",
]


@cache
def _cpu() -> Any:
    """`cpu.py`, once it is needed: Numba takes as long to import as all else."""
    return import_module("syncbn_torch.cpu")


def same_bits(a: Moments, b: Moments) -> bool:
    """Whether two moments are the same, NaN like any other number."""
    if a.count != b.count or type(a.mean) is not type(b.mean) or len(a.mean) != len(b.mean):
        return False
    pairs = [(a.mean, b.mean), (a.m2, b.m2)]
    if isinstance(a.mean, Tensor):
        return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in pairs)
    return all(p.tobytes() == q.tobytes() for p, q in pairs)


def invstd(total: Moments, eps: float, eps_mode: Any) -> Channelwise:
    """`1 / sqrt(var + eps)`, or for "clamp" `1 / sqrt(max(var, eps))`."""
    if isinstance(total.mean, Tensor):
        return plain.invstd_from_var(total.var, eps, eps_mode)
    return total.invstd(eps, eps_mode)


def moments(x: Tensor, *, parallel: bool) -> Moments:
    """Moments of this part; an empty x gives the empty part."""
    if has_kernels(x):
        return _cpu().moments(x, parallel=parallel)  # type: ignore[no-any-return]
    if has_cuda_kernels(x):
        return cuda_moments(x)
    return plain.moments(x)


def forward_alone(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    eps_mode: str,
) -> tuple[Tensor, Moments, Channelwise] | None:
    """`(y, moments, invstd)` of a batch that is x alone.

    None, and nothing done, where that is no gain.
    """
    if not has_kernels(x) or x.numel() == 0:
        return None
    done: tuple[Tensor, Moments, Channelwise]
    done = _cpu().forward_alone(x, weight, bias, eps, eps_mode)
    return done


def statistics_of(
    x: Tensor, total: Moments, invstd: Channelwise, eps: float, eps_mode: str
) -> Statistics:
    """What normalizes x, from moments on the host or, as tensors, on any device."""
    if isinstance(total.mean, Tensor):
        mean, scale = total.mean.to(x.device), invstd.to(x.device)
        return PlainStatistics(total, mean, scale, eps, eps_mode)
    return _cpu().CpuStatistics(total, invstd, eps, eps_mode)  # type: ignore[no-any-return]


class PlainStatistics:
    """Moments of the whole batch for tensors on devices without kernels."""

    __slots__ = ("eps", "eps_mode", "invstd", "mean", "total")

    def __init__(
        self, total: Moments, mean: Tensor, invstd: Tensor, eps: float, eps_mode: str
    ) -> None:
        self.total = total
        self.mean = mean
        self.invstd = invstd
        self.eps = eps
        self.eps_mode = eps_mode

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
        return plain.normalize(x, self.mean, self.invstd, weight, bias)

    def update(self, running: RunningStatistics) -> None:
        """Blend the batch into `running`."""
        running.update(self.total)

    def backward_reduce(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, *, parallel: bool
    ) -> Sums:
        """The sums of this member."""
        sums = torch.stack(plain.backward_reduce(x, dy, self.mean, self.invstd))
        weighted = sums if weight is None else sums * weight
        return Sums(weighted, *parameter_gradients(sums, x, weight))

    def backward_alone(self, x: Tensor, dy: Tensor, weight: Tensor | None) -> None:
        """The two steps of backward are what there is."""

    def backward_input(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, total: Tensor, *, parallel: bool
    ) -> Tensor:
        """dx from the sums over all members, `[2, C]`."""
        mean_dy, mean_dy_xhat = total.to(x.device) / max(self.total.count, 1)
        if self.eps_mode == "clamp":
            clamped = tensor_of(self.total.var < self.eps).to(x.device)
            mean_dy_xhat = mean_dy_xhat.masked_fill(clamped, 0.0)
        means = (mean_dy, mean_dy_xhat)
        return plain.backward_input(x, dy, self.mean, self.invstd, weight, *means)


Statistics = Union["CpuStatistics", CudaStatistics, PlainStatistics]


def home_of(part: Moments) -> torch.device | None:
    """The device of moments that are tensors."""
    values = part.parts if isinstance(part, DeviceMoments) else part.mean
    return values.device if isinstance(values, Tensor) else None


def moved(part: Moments, device: torch.device | None) -> Moments:
    """`part` on a device; arrays stay where they are."""
    if device is None:
        return part
    if isinstance(part, DeviceMoments):
        return DeviceMoments(part.parts.to(device), part.known_count, part.join)
    return Moments(part.count, part.mean.to(device), part.m2.to(device))
