"""Tensors and NumPy arrays over the same memory, and whether the CPU kernels take a tensor.

Tensors become arrays by their address: `tensor.numpy()` would make their storage one that can't be
resized, which FSDP does, and DLPack takes longer. NumPy has no bfloat16: its bits go as
uint16, as the kernels take them.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from importlib import import_module
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from syncbn_core.errors import StateError
from syncbn_torch._torch_private import function_transforms_active

__all__ = [
    "NUMPY_DTYPES",
    "PLAIN",
    "as_array",
    "as_tensor",
    "check_storage",
    "empty_like",
    "huge_pages_on_request",
    "in_memory",
    "shared_array",
    "takes",
]

LARGE = 1 << 22  # bytes from which NumPy, too, asks for huge pages
_MADV_HUGEPAGE = 14
NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
    torch.int64: np.dtype(np.int64),  # of a counter
}
PLAIN = (Tensor, Parameter)  # a subclass may have no data of its own
_KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def takes(tensor: Tensor) -> bool:
    """Whether the CPU kernels take this tensor: its device, dtype and storage layout."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.dtype in _KERNEL_DTYPES
        and tensor.layout is torch.strided
        and (tensor.dtype is not torch.float16 or _has_half())
    )


@cache
def _has_half() -> bool:
    return import_module("syncbn_core.kernels.cpu.numerics").has_half()  # type: ignore[no-any-return]


def in_memory(tensor: Tensor) -> Tensor:
    """A plain `tensor`, or a copy of it where its address is not that of its values, aligned.

    `StateError` for one whose storage was freed, or ends before its last element.
    """
    if not (
        tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
        and not tensor.storage_offset()
    ):
        _check_extent(tensor)
    if tensor.is_neg():  # negated when it is read
        return tensor.detach().resolve_neg()
    address, size = tensor.data_ptr(), tensor.element_size()
    if address == tensor.storage_offset() * size and tensor.numel() > 0:  # zeros without memory
        return tensor.detach().clone()
    return tensor.detach().clone() if address % size else tensor


def check_storage(*tensors: Tensor | None) -> None:
    """`StateError` where torch would read or write beyond the memory of a plain CPU tensor.

    Others pass, and all of them while torch traces or transforms a program.
    """
    if torch.compiler.is_compiling() or function_transforms_active():
        return
    for tensor in tensors:
        if (
            tensor is not None
            and type(tensor) in PLAIN
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not (
                tensor.is_contiguous()
                and tensor.untyped_storage().nbytes() >= tensor.nbytes
                and not tensor.storage_offset()
            )
        ):
            _check_extent(tensor)


def _check_extent(tensor: Tensor) -> None:
    """Raise unless the storage of a strided tensor on the CPU reaches to its last element.

    The slow path: callers have ruled out contiguous tensors at the start of their storage.
    """
    held = tensor.untyped_storage().nbytes()
    if tensor.is_contiguous():
        due = tensor.nbytes
    elif tensor.numel() == 0:
        return
    else:
        strides = tensor.stride()
        last = sum(map(mul, tensor.shape, strides)) - sum(strides)  # sum((n - 1) * stride)
        due = (last + 1) * tensor.element_size()
    offset = tensor.storage_offset()
    if offset and due:
        due += int(offset) * tensor.element_size()
    if held >= due or tensor._is_zerotensor():
        return
    shape = tuple(tensor.shape)
    if held == 0:
        raise StateError(
            f"expected a tensor with its values, got one of shape {shape} whose storage was "
            "freed; if a wrapper such as FSDP has done so, call the wrapped model"
        )
    raise StateError(
        f"expected a storage of at least {due} bytes under a tensor of shape {shape}, got "
        f"{held}; undo the untyped_storage().resize_() that cut it"
    )


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The array that shares memory with a `tensor` on the CPU; outside the autograd graph."""
    return shared_array(in_memory(tensor))


def shared_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """`as_array` of what `in_memory` gives back as it is."""
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), NUMPY_DTYPES[tensor.dtype])
    dtype = NUMPY_DTYPES[tensor.dtype]
    size = dtype.itemsize
    if tensor.is_contiguous():
        strides, extent = None, tensor.numel() * size
    else:
        strides = tuple([size * stride for stride in tensor.stride()])
        extent = size + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    memory: Any = (ctypes.c_char * extent).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as the array does
    return np.ndarray(tensor.shape, dtype, memory, 0, strides)


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The tensor that shares memory with `array`, which must be writable."""
    return torch.from_numpy(array)


def empty_like(x: Tensor) -> Tensor:
    """A new tensor like x, on huge pages where the system grants them to who asks (Linux).

    A large result is new memory each time, and to get it page by page takes longer than to
    compute it: 80 instead of 30 ms for 103 MB.
    """
    y = torch.empty_like(x)
    size = y.numel() * y.element_size()
    if size >= LARGE and huge_pages_on_request():
        begin = -(-y.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (y.data_ptr() + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(begin, length, _MADV_HUGEPAGE)  # only advice: nobody asks what came of it
    return y


@cache
def huge_pages_on_request() -> bool:
    """Whether this system has huge pages for those who ask, and for nobody else."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "[madvise]" in file.read()
    except OSError:  # not Linux, or hidden from a container
        return False


@cache
def _madvise() -> Any:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
