"""The steps of batch normalization on tensors, each where its kernels are.

CPU tensors go to the kernels as arrays, CUDA tensors by pointers (`cuda.py`), everything else to
plain tensor operations. Per-channel values `(C,)` are wide
(float64) and of the kind that goes with x: NumPy arrays beside the CPU kernels, whose small
operations keep the interpreter lock (each of torch's gives it away, which is dear among replica
threads), tensors on the device of x elsewhere.

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
from syncbn_core.packed import PackedMoments
from syncbn_torch import plain
from syncbn_torch.cuda import CudaStatistics, has_cuda_kernels
from syncbn_torch.cuda import moments as cuda_moments
from syncbn_torch.interop import as_array, empty_like, has_kernels, values_of
from syncbn_torch.statistics import Channelwise, RunningStatistics, Sums, silent, tensor_of

__all__ = [
    "HostStatistics",
    "Statistics",
    "forward_alone",
    "invstd",
    "moments",
    "parameter_gradients",
    "place_like",
    "same_bits",
    "weighted",
]


def _maybe(tensor: Tensor | None) -> Channelwise | None:
    return None if tensor is None else values_of(tensor)


def _threads(parallel: bool) -> bool:
    """`torch.set_num_threads(1)` means one thread for these kernels too."""
    return parallel and torch.get_num_threads() > 1


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


def weighted(sums: Channelwise, weight: Tensor | None) -> Channelwise:
    """`sums` (2, C) times weight (C,)."""
    if weight is None:
        return sums
    if isinstance(sums, Tensor):
        return sums * weight
    with silent():
        return sums * values_of(weight)


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


def moments(x: Tensor, *, parallel: bool) -> Moments:
    """Moments of this part; an empty x gives the empty part."""
    if has_kernels(x):
        return core.local_moments(as_array(x), parallel=_threads(parallel))
    if has_cuda_kernels(x):
        return cuda_moments(x)
    return plain.moments(x)


def forward_alone(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, eps_mode: Any
) -> tuple[Tensor, Moments, Channelwise] | None:
    """`(y, moments, invstd)` of a batch that is x alone, in one; None where that is no gain."""
    if not has_kernels(x) or x.numel() == 0:
        return None
    y = empty_like(x)
    per_channel = (_maybe(weight), _maybe(bias))
    settings: dict[str, Any] = {"eps": eps, "eps_mode": eps_mode, "parallel": _threads(True)}
    done = core.forward_alone(as_array(x), *per_channel, out=as_array(y), **settings)
    return None if done is None else (y, *done[1:])


class HostStatistics:
    """Moments of the whole batch for tensors on CPU and on devices without kernels."""

    __slots__ = ("eps", "eps_mode", "invstd", "mean", "total")

    def __init__(
        self, total: Moments, mean: Channelwise, invstd: Channelwise, eps: float, eps_mode: str
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
        """`y = (x - mean) * invstd * weight + bias`; running statistics are updated."""
        if has_kernels(x):
            y = empty_like(x)
            per_channel = (self.mean, self.invstd, _maybe(weight), _maybe(bias))
            threads = _threads(parallel)
            core.normalize(as_array(x), *per_channel, out=as_array(y), parallel=threads)
        else:
            y = plain.normalize(x, self.mean, self.invstd, weight, bias)
        if running is not None:
            running.update(self.total)
        return y

    def backward_reduce(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, *, parallel: bool
    ) -> Sums:
        """The sums of this member."""
        sums: Channelwise
        if has_kernels(x):
            arrays = (as_array(x), as_array(dy), self.mean, self.invstd)
            sums = np.stack(core.backward_sums(*arrays, parallel=_threads(parallel)))
        else:
            sums = torch.stack(plain.backward_reduce(x, dy, self.mean, self.invstd))
        return Sums(weighted(sums, weight), *parameter_gradients(sums, x, weight))

    def backward_alone(
        self, x: Tensor, dy: Tensor, weight: Tensor | None
    ) -> tuple[Sums, Tensor] | None:
        """`backward_reduce` and `backward_input` in one where nobody else has a part of the batch.

        None where that is no gain.
        """
        if not has_kernels(x) or x.numel() == 0:
            return None
        dx = empty_like(x)
        frozen = self.total.var < self.eps if self.eps_mode == "clamp" else None
        operands = (as_array(x), as_array(dy), self.mean, self.invstd, _maybe(weight), frozen)
        done = core.backward_alone(*operands, out=as_array(dx), parallel=_threads(True))
        if done is None:
            return None
        sums = np.stack(done[:2])
        return Sums(sums, *parameter_gradients(sums, x, weight)), dx

    def means(self, sums: Channelwise, x: Tensor) -> tuple[Channelwise, Channelwise]:
        """`sums` (2, C) over the count; zero where "clamp" made the deviation a constant."""
        mean_dy, mean_dy_xhat = place_like(sums, x) / max(self.total.count, 1)
        if self.eps_mode == "clamp":
            clamped = self.total.var < self.eps
            if isinstance(sums, Tensor):
                clamped = tensor_of(clamped).to(x.device)
                mean_dy_xhat = mean_dy_xhat.masked_fill(clamped, 0.0)
            else:
                mean_dy_xhat = np.where(clamped, 0.0, mean_dy_xhat)
        return mean_dy, mean_dy_xhat

    def backward_input(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, total: Channelwise, *, parallel: bool
    ) -> Tensor:
        """dx from the sums over all members, `[2, C]`."""
        means = self.means(total, x)
        if not has_kernels(x):
            return plain.backward_input(x, dy, self.mean, self.invstd, weight, *means)
        dx = empty_like(x)
        arrays = (as_array(x), as_array(dy), self.mean, self.invstd, _maybe(weight))
        threads = _threads(parallel)
        core.backward_input(*arrays, *means, out=as_array(dx), parallel=threads)
        return dx


Statistics = HostStatistics | CudaStatistics


def home_of(part: Moments) -> torch.device | None:
    """The device of moments that are tensors."""
    values = part.parts if isinstance(part, PackedMoments) else part.mean
    return values.device if isinstance(values, Tensor) else None


def moved(part: Moments, device: torch.device | None) -> Moments:
    """`part` on a device; arrays stay where they are."""
    if device is None:
        return part
    if isinstance(part, PackedMoments):
        return PackedMoments(part.parts.to(device), part.known_count, part.join)
    return Moments(part.count, part.mean.to(device), part.m2.to(device))
