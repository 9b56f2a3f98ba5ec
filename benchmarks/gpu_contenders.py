"""The layers that `gpu.py` compares: ours, torch's, apex's, and plain tensor operations.

All get the same `Parameters`, and none communicates; `gpu_processes.py` times layers that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from syncbn_torch import SyncBatchNorm

EPS, MOMENTUM = 1e-5, 0.1
MOST_BUFFERS = 512
DENSE = {4: torch.channels_last, 5: torch.channels_last_3d}


class Parameters:
    """Parameters and running statistics, the same for every contender."""

    def __init__(self, x: Tensor) -> None:
        channels = x.shape[1]
        generator = torch.Generator().manual_seed(channels)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        values = torch.randn(2, channels, generator=generator).to(x.device, wide)
        self.weight, self.bias = nn.Parameter(1 + 0.1 * values[0]), nn.Parameter(values[1])
        self.mean, self.var = torch.zeros_like(values[0]), torch.ones_like(values[0])


Net = Callable[[Tensor], Tensor]


def ours(p: Parameters) -> Net:
    layer = SyncBatchNorm(len(p.weight), EPS, MOMENTUM, device=p.weight.device)
    layer.weight, layer.bias = p.weight, p.bias
    return layer


def by_torch(p: Parameters, cudnn: bool) -> Net:
    settings = (p.weight, p.bias, p.mean, p.var, True, MOMENTUM, EPS, cudnn)

    def forward(x: Tensor) -> Tensor:
        # torch does not look at the last argument of batch_norm, but at this setting
        with torch.backends.cudnn.flags(enabled=cudnn):
            return torch.batch_norm(x, *settings)  # what F.batch_norm calls

    return forward


def by_operations(p: Parameters) -> Net:
    def forward(x: Tensor) -> Tensor:
        axes, count = [axis for axis in range(x.dim()) if axis != 1], x.numel() // x.shape[1]
        wide = x.float()
        mean = wide.mean(axes)
        shape = (1, -1, *[1] * (x.dim() - 2))
        deviations = wide - mean.view(shape)
        m2 = deviations.square().sum(axes)
        with torch.no_grad():
            p.mean.lerp_(mean, MOMENTUM)
            p.var.lerp_(m2 / (count - 1), MOMENTUM)
        scale = (m2 / count + EPS).rsqrt() * p.weight
        return (deviations * scale.view(shape) + p.bias.view(shape)).to(x.dtype)

    return forward


class OneMemberSync(Function):
    """The kernels of `nn.SyncBatchNorm` in their order; its collectives have nobody to talk to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, p: Parameters, mask: bool
    ) -> Tensor:
        x = _as_torch_wants(x)
        channels, size = x.shape[1], x.numel() // x.shape[1]
        mean, invstd = torch.batch_norm_stats(x, EPS)
        packed = torch.cat([mean, invstd, mean.new_full((1,), size)])
        means, invstds, counts = packed.view(1, -1).split(channels, dim=1)
        if mask and not torch.cuda.is_current_stream_capturing():  # drops empty members; waits
            present = counts.squeeze(-1) >= 1
            means, invstds, counts = means[present], invstds[present], counts[present]
        settings = (p.mean, p.var, MOMENTUM, EPS, counts.view(-1))
        mean, invstd = torch.batch_norm_gather_stats_with_counts(x, means, invstds, *settings)
        ctx.save_for_backward(x, weight, mean, invstd, counts.to(torch.int32))
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        dy = _as_torch_wants(dy)
        sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
        sum_dy, sum_dy_xmu = torch.cat(sums[:2]).split(len(mean))
        settings = (mean, invstd, weight, sum_dy, sum_dy_xmu, counts)
        dx = torch.batch_norm_backward_elemt(dy, x, *settings)
        return dx, sums[2], sums[3], None, None


def _as_torch_wants(x: Tensor) -> Tensor:
    dense = x.dim() in DENSE and x.is_contiguous(memory_format=DENSE[x.dim()])
    return x if dense else x.contiguous()


def by_torch_sync(p: Parameters, mask: bool) -> Net:
    return lambda x: OneMemberSync.apply(x, p.weight, p.bias, p, mask)


class ApexFormula(Function):
    """What `apex.parallel.SyncBatchNorm` computes, in its order, in tensor operations.

        forward    mean, biased variance; merged over the members; inv_std; y, rounded once
        backward   sums of dy and dy (x - mean); the same over all members; dx from their means

    The numbers are those of apex's formula. The speed is not apex's, whose kernels do each line in
    one or two passes over memory; `OneMemberSync` comes closer to that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, p: Parameters) -> Tensor:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        column = (1, -1, *[1] * (x.dim() - 2))
        wide, count = x.to(weight.dtype), x.numel() // x.shape[1]
        var, mean = torch.var_mean(wide, axes, correction=0)
        means, m2s, counts = mean[None], var[None] * count, mean.new_full((1, 1), count)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        m2 = (m2s + counts * (means - mean).square()).sum(0)
        inv_std = (m2 / total + EPS).rsqrt()
        p.mean.lerp_(mean, MOMENTUM)
        p.var.lerp_(m2 / (total - 1), MOMENTUM)
        ctx.save_for_backward(x, weight, mean, inv_std, total)
        ctx.axes, ctx.column = axes, column
        scale = (inv_std * weight).view(column)
        return ((wide - mean.view(column)) * scale + bias.view(column)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inv_std, total = ctx.saved_tensors
        axes, column = ctx.axes, ctx.column
        wide, deviations = dy.to(weight.dtype), x.to(weight.dtype) - mean.view(column)
        sum_dy, sum_dy_xmu = wide.sum(axes), (wide * deviations).sum(axes)
        mean_dy, mean_dy_xmu = (sum_dy / total).view(column), sum_dy_xmu / total
        slope = (inv_std.square() * mean_dy_xmu).view(column)
        scale = (inv_std * weight).view(column)
        dx = ((wide - mean_dy - deviations * slope) * scale).to(x.dtype)
        return dx, sum_dy_xmu * inv_std, sum_dy, None


def by_apex_formula(p: Parameters) -> Net:
    return lambda x: ApexFormula.apply(x, p.weight, p.bias, p)


def by_apex(p: Parameters) -> Net:
    """apex's own layer and kernels; it takes channels_last as the last axis of a contiguous x."""
    from apex.parallel import SyncBatchNorm as Layer  # type: ignore[import-not-found]

    layers = {}
    for last in (False, True):
        layer = Layer(len(p.weight), EPS, MOMENTUM, channel_last=last).to(p.weight.device)
        layer.weight, layer.bias = p.weight, p.bias
        layers[last] = layer

    def forward(x: Tensor) -> Tensor:
        if x.dim() in DENSE and not x.is_contiguous():
            return layers[True](x.movedim(1, -1)).movedim(-1, 1)
        return layers[False](x)

    return forward


def has_apex() -> bool:
    """Whether apex is installed with its kernels, which are a module `syncbn` of their own."""
    return find_spec("apex") is not None and find_spec("syncbn") is not None


# -------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Contender:
    """`build(parameters)` is a layer in training."""

    name: str
    build: Callable[[Parameters], Net]
    needs_cuda: bool = False
    most: int = MOST_BUFFERS  # one that fills the cache by itself needs fewer
    batch: int | None = None  # its device time is measured for batches of this size; None: all

    def times(self, shape: Sequence[int]) -> bool:
        """Whether its device time is measured at this shape."""
        return self.batch in (None, shape[0])


CONTENDERS = [
    Contender("ours", ours),
    Contender("torch cudnn", lambda p: by_torch(p, True), needs_cuda=True),
    Contender("torch native", lambda p: by_torch(p, False)),
    Contender("torch sync", lambda p: by_torch_sync(p, True), needs_cuda=True),
    Contender("plain operations", by_operations, most=32),
    Contender("apex", by_apex, needs_cuda=True)
    if has_apex()
    else Contender("apex (formula)", by_apex_formula, most=32, batch=32),
]
# Without the masks no host time is spent on waiting for the device.
UNMASKED = Contender("torch sync, no masks", lambda p: by_torch_sync(p, False), needs_cuda=True)
