"""The dtypes and types of tensors that layers take, and the memory of tensors on the CPU."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from syncbn_core.errors import StateError

LARGE = 1 << 22  # bytes; NumPy asks for huge pages from the same size on
_MADV_HUGEPAGE = 14
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # that layers take
HALVES = (torch.float16, torch.bfloat16)
PLAIN_CLASSES = (Tensor, Parameter)  # a subclass may have no data of its own
# the names of all dtypes, as NumPy has them
NAMES = {
    own: str(own).removeprefix("torch.")
    for own in vars(torch).values()
    if isinstance(own, torch.dtype)
}

Array = np.ndarray[Any, Any]

# All addresses of the process, as one buffer. `Tensor.numpy()` would forbid to resize a storage,
# which FSDP does; `numpy.from_dlpack` takes three times as long, and no bfloat16.
START = 1  # NumPy takes an address of 0 for none
MEMORY: Any = (ctypes.c_byte * (1 << 62)).from_address(START)
DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]
} | {torch.bfloat16: np.dtype("uint16")}


def supports(tensor: Tensor) -> bool:
    """Whether the CPU kernels support the type, device, dtype and layout of this tensor."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.is_cpu
        and tensor.dtype in FLOATS
        and tensor.layout is torch.strided
        and not kernels_forbidden()
        and (tensor.dtype is not torch.float16 or _has_half())
    )


@cache
def kernels_forbidden() -> bool:
    """Whether Numba may not compile; then one warning says so."""
    return import_module("syncbn_core.backends.plain_numpy").kernels_forbidden()  # type: ignore[no-any-return]


@cache
def _has_half() -> bool:
    return import_module("syncbn_core._kernels.cpu.numerics").has_half()  # type: ignore[no-any-return]


# strides of a tensor without gaps, the shape of its view, dtype, bytes
Form = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any], int]


def views_of(
    tensors: Sequence[Tensor | None], forms: Sequence[Form]
) -> tuple[list[Tensor | None], list[Any]]:
    """`(tensors, their memory)`, with a copy in place of each tensor that does not lie in its form.

    `forms`: of those that are not None. Memory is aligned. The caller keeps the tensors alive.
    Raises `StateError` if a storage was freed or is too small.
    """
    held, known = list(tensors), iter(forms)
    views: list[Any] = []
    for n, tensor in enumerate(tensors):
        if tensor is None:
            views.append(None)
            continue
        (strides, shape, dtype, size), place = next(known), tensor.data_ptr()
        end = tensor.storage_offset() * dtype.itemsize + size
        if (
            tensor.stride() != strides
            or tensor.untyped_storage().nbytes() < end
            or place % dtype.itemsize
            or tensor.is_neg()
            or tensor._is_zerotensor()
        ):
            held[n] = tensor = _in_form(tensor, strides)
            place = tensor.data_ptr()
        views.append(np.ndarray(shape, dtype, MEMORY, place - START))
    return held, views


def _in_form(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """`tensor`, or a copy of it that has memory of these strides."""
    _check_extent(tensor)
    own = zip(tensor.shape, tensor.stride(), strides, strict=True)
    in_order = all(size == 1 or a == b for size, a, b in own)
    # torch negates some views on each read, and some zeros have no memory
    lazy = tensor.is_neg() or tensor._is_zerotensor()
    if in_order and not lazy and not tensor.data_ptr() % tensor.element_size():
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def tensor_of(array: Array, dtype: torch.dtype) -> Tensor:
    """A tensor of `dtype` that shares memory with `array`, in which bfloat16 is uint16."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def _check_extent(tensor: Tensor) -> None:
    """Raise `StateError` if the storage of a strided CPU tensor ends before its last element."""
    if not tensor.numel() or tensor._is_zerotensor():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum([(size - 1) * stride for size, stride in steps])
    due, held = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if held >= due:
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


def as_tensor(values: Tensor | Array) -> Tensor:
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
