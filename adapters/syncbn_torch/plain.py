"""Batch normalization in plain, differentiable tensor operations.

For devices that have no kernels, and for gradients of gradients. The formulas are those of
`syncbn_core.functional`; statistics and sums are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["backward_input", "backward_reduce", "column", "invstd_from_var", "moments", "normalize"]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of statistics: float64, or float32 on devices without it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def column(values: Tensor, like: Tensor) -> Tensor:
    """Per-channel `values` (C,) shaped to broadcast against `like` (N, C, *spatial)."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def invstd_from_var(var: Tensor, eps: float, eps_mode: str) -> Tensor:
    """`1 / sqrt(var + eps)`, or for "clamp" `1 / sqrt(max(var, eps))`."""
    return (var.clamp(min=eps) if eps_mode == "clamp" else var + eps).rsqrt()


def moments(x: Tensor) -> Tensor:
    """`[mean, m2]` of x (N, C, *spatial), `(2, C)`; zeros for an empty x."""
    wide = x.to(wide_dtype(x))
    if x.numel() == 0:
        return wide.new_zeros(2, x.shape[1])
    mean = wide.mean(_axes(x))
    return torch.stack([mean, (wide - column(mean, x)).square().sum(_axes(x))])


def normalize(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """`y = (x - mean) * invstd * weight + bias`, in the dtype of x."""
    y = (x.to(mean.dtype) - column(mean, x)) * column(invstd, x)
    if weight is not None:
        y = y * column(weight, x)
    if bias is not None:
        y = y + column(bias, x)
    return y.to(x.dtype)


def backward_reduce(x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """`(sum(dy), sum(dy * xhat))`, each `(C,)`."""
    wide = dy.to(mean.dtype)
    xhat = (x.to(mean.dtype) - column(mean, x)) * column(invstd, x)
    return wide.sum(_axes(x)), (wide * xhat).sum(_axes(x))


def backward_input(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    mean_dy: Tensor,
    mean_dy_xhat: Tensor,
) -> Tensor:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`, in the dtype of x."""
    scale = column(invstd, x)
    xhat = (x.to(mean.dtype) - column(mean, x)) * scale
    inner = dy.to(mean.dtype)
    if weight is not None:
        inner = inner * column(weight, x)
    return (scale * (inner - column(mean_dy, x) - xhat * column(mean_dy_xhat, x))).to(x.dtype)


def merged_statistics(
    xs: Sequence[Tensor], eps: float, eps_mode: str
) -> tuple[int, Tensor, Tensor, Tensor]:
    """`(count, mean, var, invstd)` over all parts `xs`, differentiable by each."""
    count = sum(x.numel() // x.shape[1] for x in xs)
    wide = [x.to(wide_dtype(x)) for x in xs]
    home = wide[0].device
    mean = sum((w.sum(_axes(w)).to(home) for w in wide[1:]), wide[0].sum(_axes(wide[0]))) / count
    squares = [(w - column(mean.to(w.device), w)).square().sum(_axes(w)).to(home) for w in wide]
    var = sum(squares[1:], squares[0]) / count
    return count, mean, var, invstd_from_var(var, eps, eps_mode)


def input_gradient(
    member: int,
    xs: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    eps: float,
    eps_mode: str,
) -> Tensor:
    """dx of `xs[member]`, differentiable by every x, dy and weight; for second derivatives."""
    count, mean, var, invstd = merged_statistics(xs, eps, eps_mode)
    sums = torch.zeros(2, mean.numel(), dtype=mean.dtype, device=mean.device)
    for x, dy, weight in zip(xs, dys, weights, strict=True):
        if dy is not None:
            here = (mean.to(x.device), invstd.to(x.device))
            part = torch.stack(backward_reduce(x, dy, *here))
            sums = sums + (part if weight is None else part * weight).to(sums.device)
    mean_dy, mean_dy_xhat = sums / count
    if eps_mode == "clamp":
        mean_dy_xhat = torch.where(var < eps, 0.0, mean_dy_xhat)
    x, dy = xs[member], dys[member]
    per_channel = (mean, invstd, mean_dy, mean_dy_xhat)
    mean, invstd, mean_dy, mean_dy_xhat = (v.to(x.device) for v in per_channel)
    if dy is None:
        dy = torch.zeros_like(x)
    return backward_input(x, dy, mean, invstd, weights[member], mean_dy, mean_dy_xhat)
