"""Tensors and arrays over the same memory, by DLPack: the only place where they cross."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from syncbn_core.layout import writable_view

__all__ = ["as_array", "as_tensor", "has_kernels"]

_KERNEL_DTYPES = (torch.float32, torch.float64)


def has_kernels(tensor: Tensor) -> bool:
    """Whether `syncbn_core` has a backend for this device, dtype and storage layout."""
    return (
        type(tensor) in (Tensor, Parameter)  # a subclass may have no data of its own
        and tensor.device.type == "cpu"
        and tensor.dtype in _KERNEL_DTYPES
        and tensor.layout is torch.strided
    )


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The array that shares memory with `tensor`; outside the autograd graph."""
    tensor = tensor.detach()
    if tensor.is_neg():  # a lazy negation is not in memory
        tensor = tensor.resolve_neg()
    return writable_view(np.from_dlpack(tensor))  # NumPy before 2.1 marks it read-only


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The tensor that shares memory with `array`, which must be writable."""
    return from_dlpack(array)
