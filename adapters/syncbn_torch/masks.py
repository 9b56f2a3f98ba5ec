"""Masks of a layer's input: `syncbn_core.masks` on tensors, by operations that torch derives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncbn_core import masks
from syncbn_core.backends.plain import column
from syncbn_core.errors import ArgumentError, DeviceError, DTypeError
from syncbn_torch.backends import plain


def mask_of_lengths(lengths: Tensor | Sequence[int], size: int) -> Tensor:
    """`(N, size)` bool: True in the first `lengths[n]` places of each sample.

    `lengths`: (N,), whole numbers, a tensor or a list. Raises `ArgumentError` for others, and for
    lengths that are not from 0 to `size`; values on a GPU and in a graph are not looked at, which
    would make the host wait.
    """
    given = torch.as_tensor(lengths)
    whole = not given.dtype.is_floating_point and not given.dtype.is_complex
    if given.dim() != 1 or (given.numel() and (not whole or given.dtype is torch.bool)):
        kind = str(given.dtype).removeprefix("torch.")
        raise ArgumentError(
            "expected the lengths of samples, whole numbers on one axis (N,), got "
            f"{kind} {tuple(given.shape)}"
        )
    if given.is_cpu and not torch.compiler.is_compiling():
        wrong = given[(given < 0) | (given > size)].tolist()
        if wrong:
            raise ArgumentError(
                f"expected lengths from 0 to {size}, got {wrong[0]}; they count places of x, such "
                "as frames, not samples"
            )
    return torch.arange(size, device=given.device) < given[:, None]


def checked_mask(mask: Tensor, x: Tensor) -> Tensor:
    """`mask` as it broadcasts against x.

    Raises `ShapeError`, `DTypeError` or `DeviceError` unless it fits.
    """
    if not isinstance(mask, Tensor):
        raise DTypeError(f"expected a mask that is a tensor, got {type(mask).__name__}")
    shape = masks.mask_shape(mask.shape, x.shape, str(mask.dtype).removeprefix("torch."))
    if mask.device != x.device:
        raise DeviceError(f"expected a mask on {x.device}, the device of x, got {mask.device}")
    return mask.reshape(shape)


def filled(x: Tensor, mask: Tensor, on_host: bool) -> tuple[Tensor, masks.Valid]:
    """x with K where the mask is False. `on_host`: whether the host may read how many are valid."""
    arrays = plain.TRACED.arrays
    count: Any = masks.valid_count(mask, x.shape)
    count = int(count) if on_host else count.to(arrays.widest(x))
    fill = masks.filling(arrays, x.detach(), mask, count)
    return torch.where(mask, x, column(fill, x)), (count, fill.to(arrays.widest(x)))


def zeroed(values: Tensor, mask: Tensor) -> Tensor:
    """`values`, and 0 where the mask is False."""
    return torch.where(mask, values, 0)
