"""Batch normalization in plain, differentiable tensor operations.

For devices that have no kernels, and for gradients of gradients. The formulas are those of
`syncbn_core.functional`; statistics and sums are float64 where the device has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncbn_core.moments import Moments

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


def moments(x: Tensor) -> Moments:
    """Moments of x (N, C, *spatial); zeros for an empty x."""
    wide = x.to(wide_dtype(x))
    if x.numel() == 0:
        return Moments(0, wide.new_zeros(x.shape[1]), wide.new_zeros(x.shape[1]))
    mean = wide.mean(_axes(x))
    m2 = (wide - column(mean, x)).square().sum(_axes(x))
    return Moments(x.numel() // x.shape[1], mean, m2)


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
