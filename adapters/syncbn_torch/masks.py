"""Masks of a layer's input, see `syncbn_core.masks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncbn_core import masks
from syncbn_core.errors import ArgumentError, DeviceError, DTypeError


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
