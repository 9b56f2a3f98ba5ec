"""The dtypes and types of tensors that layers take, and the memory of tensors on the CPU."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from syncbn_core.errors import StateError
from syncbn_torch._torch_private import function_transforms_active, is_jit_tracing

__all__ = [
    "FLOATS",
    "HALVES",
    "PLAIN",
    "PLAIN_OR_NONE",
    "as_tensor",
    "check_storage",
    "dltensors",
    "empty_like",
    "holds_all_values",
    "huge_pages_on_request",
    "resolved",
    "supports",
]

LARGE = 1 << 22  # bytes; NumPy asks for huge pages from the same size on
_MADV_HUGEPAGE = 14
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # that layers take
HALVES = (torch.float16, torch.bfloat16)
PLAIN = (Tensor, Parameter)  # a subclass may have no data of its own
PLAIN_OR_NONE = frozenset((*PLAIN, type(None)))
# The size of a DLTensor in 8-byte words; DLPack's code of the CPU, and of dtypes (kind, bits).
WORDS = 6
_CPU = 1
_DLPACK_DTYPES = {
    torch.float64: 2 | 64 << 8,
    torch.float32: 2 | 32 << 8,
    torch.float16: 2 | 16 << 8,
    torch.bfloat16: 4 | 16 << 8,
    torch.int64: 64 << 8,
    torch.int32: 32 << 8,
    torch.int16: 16 << 8,
    torch.int8: 8 << 8,
    torch.uint8: 1 | 8 << 8,
}


def supports(tensor: Tensor) -> bool:
    """Whether the CPU kernels support the type, device, dtype and layout of this tensor."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.dtype in FLOATS
        and tensor.layout is torch.strided
        and not kernels_forbidden()
        and (tensor.dtype is not torch.float16 or _has_half())
    )


@cache
def kernels_forbidden() -> bool:
    """Whether Numba may not compile; then one warning says so."""
    return import_module("syncbn_core.backends.cpu.plain").kernels_forbidden()  # type: ignore[no-any-return]


@cache
def _has_half() -> bool:
    return import_module("syncbn_core.kernels.cpu.numerics").has_half()  # type: ignore[no-any-return]


def resolved(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if its memory does not hold its values or is not aligned.

    For plain CPU tensors. Raises `StateError` if the storage was freed or is too small.
    """
    if not (
        tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
        and not tensor.storage_offset()
    ):
        _check_extent(tensor)
    if tensor.is_neg():  # torch negates such a view on each read
        return tensor.detach().resolve_neg()
    address, size = tensor.data_ptr(), tensor.element_size()
    if address == tensor.storage_offset() * size and tensor.numel() > 0:  # null: implicit zeros
        return tensor.detach().clone()
    return tensor.detach().clone() if address % size else tensor


def holds_all_values(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor holds all its values, as they are.

    For a tensor that is not dense, the end of the memory is not checked.
    """
    due, offset = tensor.nbytes, tensor.storage_offset()
    if offset:
        offset *= tensor.element_size()
        if tensor.data_ptr() == offset:  # null: the storage was freed, or implicit zeros
            return False
    return not tensor.is_neg() and tensor.untyped_storage().nbytes() >= due + offset


def check_storage(*tensors: Tensor | None) -> None:
    """Raise `StateError` if torch would read or write beyond the memory of a tensor.

    Checks only plain CPU tensors, and nothing under torch.compile, torch.jit.trace or function
    transforms.
    """
    if torch.compiler.is_compiling() or is_jit_tracing() or function_transforms_active():
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
    """Raise `StateError` if the storage of a strided CPU tensor ends before its last element."""
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
            "freed; if a wrapper such as FSDP freed it, call the wrapped model"
        )
    raise StateError(
        f"expected a storage of at least {due} bytes for a tensor of shape {shape}, got "
        f"{held}; undo the untyped_storage().resize_() that shortened it"
    )


def dltensors(tensors: Sequence[Tensor | None]) -> tuple[list[int], Any]:
    """Addresses of DLTensors for plain CPU tensors (0 for None), and objects that keep them alive.

    For torch before 2.10, which has no C exchange API.
    """
    words: list[int] = []
    kept: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            words += [0] * WORDS
            continue
        axes = array("q", [*tensor.shape, *tensor.stride()])
        kept.append(axes)
        address, rank = axes.buffer_info()[0], tensor.dim()
        device = _CPU if tensor.is_cpu and tensor.layout is torch.strided else 0
        dtype = _DLPACK_DTYPES.get(tensor.dtype, 255) << 32 | 1 << 48
        words += [tensor.data_ptr(), device, rank | dtype, address, address + 8 * rank, 0]
    memory = array("q", words)
    kept.append(memory)
    begin, _ = memory.buffer_info()
    addresses = [0 if t is None else begin + 8 * WORDS * i for i, t in enumerate(tensors)]
    return addresses, kept


def as_tensor(values: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """`values`, or a tensor that shares memory with a writable array."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def empty_like(x: Tensor) -> Tensor:
    """A new tensor like x, on huge pages if Linux offers them through madvise.

    A large result is new memory each time. With small pages, mapping the pages takes longer than
    the computation (80 ms instead of 30 ms for 103 MB).
    """
    y = torch.empty_like(x)
    size = y.nbytes
    if size >= LARGE and huge_pages_on_request():
        begin = -(-y.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (y.data_ptr() + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(begin, length, _MADV_HUGEPAGE)  # only advice, so the result is not checked
    return y


@cache
def huge_pages_on_request() -> bool:
    """Whether Linux gives huge pages only on request, by madvise."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "[madvise]" in file.read()
    except OSError:  # not Linux, or a container hides the file
        return False


@cache
def _madvise() -> Any:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
