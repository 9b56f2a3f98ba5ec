"""`OPERATIONS` for CUDA tensors: passes raw pointers to the steps of `syncbn_core.backends.cuda`.

Torch allocates all memory. Pointers need no CuPy; DLPack would take longer than a kernel launch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.backends.cuda import kernels
from syncbn_core.backends.cuda.grid import SIZES
from syncbn_core.backends.cuda.operations import CudaOperations
from syncbn_core.backends.cuda.usable import setting
from syncbn_core.disk_cache import on_rank
from syncbn_core.layout import Layout, layout_of_strides
from syncbn_torch._torch_private import current_raw_stream, current_stream_number
from syncbn_torch.arrays import PLAIN_CLASSES
from syncbn_torch.backends import plain

__all__ = ["OPERATIONS", "TensorDeviceMemory", "supports"]

_NAMES = {getattr(torch, name): name for name in (*SIZES, "int32", "int64")}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_NO_SWITCH: AbstractContextManager[Any] = nullcontext()


@cache
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def supports(tensor: Tensor) -> bool:
    """Whether the kernels support this tensor; warns once if the kernels can't run here.

    False with SYNCBN_KERNELS=off.
    """
    return (
        tensor.device.type == "cuda"
        and type(tensor) in PLAIN_CLASSES
        and _NAMES.get(tensor.dtype) in SIZES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and _ready(tensor.device.index, tensor.dtype)
    )


@cache
def _ready(device: int, dtype: torch.dtype) -> bool:
    if setting() == "off":
        return False
    # the instruction that rounds to bfloat16 needs compute capability 8.0
    oldest = (8, 0) if dtype is torch.bfloat16 else kernels.OLDEST
    capability = kernels.compute_capability(device) if not _missing() else (0, 0)
    return capability >= oldest and not _fails(capability)


@cache
def _missing() -> tuple[str, ...]:
    missing = tuple(kernels.missing())
    if missing:
        _warn("CUDA tensors", "; ".join(missing))
    return missing


@cache
def _fails(capability: tuple[int, int]) -> bool:
    failure = kernels.compile_failure(capability)
    if failure is not None:
        _warn("tensors on GPUs of compute capability {}.{}".format(*capability), failure)
    return failure is not None


def _warn(tensors: str, reason: str) -> None:
    what = f"{tensors}{on_rank()}"
    text = f"syncbn uses plain torch operations for {what}, which is slow, because {reason}"
    warnings.warn(text, stacklevel=3)


class _Counters(NamedTuple):
    """Device memory that no tensor owns."""

    address: int
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.address


class TensorDeviceMemory:
    """`DeviceMemory` of CUDA tensors."""

    plain: plain.TensorOperations = plain.OPERATIONS

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._waiting = self._mode = 0

    def device_of(self, array: Tensor) -> int:
        return -1 if array.device.index is None else array.device.index

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        return _NO_SWITCH if torch.cuda.current_device() == index else torch.cuda.device(index)

    def stream(self, index: int) -> int:
        return int(current_raw_stream(index))

    def is_captured(self, stream: int) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pointer(self, array: Tensor) -> Any:
        return array.data_ptr()

    def dtype_name(self, array: Tensor) -> str:
        name = _NAMES.get(array.dtype)
        return str(array.dtype) if name is None else name

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[dtype], device=_device(index))

    def keeps_stream(self, stream: int) -> bool:
        # torch never destroys its own streams; the number of any other stream is its handle
        return bool(current_stream_number(torch.cuda.current_device()) != stream)

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Tensor:
        return torch.zeros(shape, dtype=_DTYPES[dtype], device=_device(index))

    def lasting_zeros(self, size: int, index: int, stream: int) -> _Counters | None:
        # not torch.zeros: in `use_mem_pool`, or while torch.compile warms up a CUDA graph, it
        # allocates from a temporary pool, whose memory is used again later
        address = kernels.lasting_zeros(index, size, stream)
        return None if address is None else _Counters(address, (size,))

    def upload(self, values: np.ndarray[Any, Any], dtype: str, index: int) -> Tensor:
        return torch.from_numpy(values).to(_device(index), _DTYPES[dtype])

    def download(self, array: Tensor) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = array.cpu().double().numpy()
        return values

    @contextmanager
    def waiting_allowed(self) -> Iterator[None]:
        # The sync debug mode is global, and setting it warns. So set it only if it is on.
        with self._counting:
            if self._waiting == 0:
                self._mode = torch.cuda.get_sync_debug_mode()
                if self._mode:
                    torch.cuda.set_sync_debug_mode(0)
            self._waiting += 1
        try:
            yield
        finally:
            with self._counting:
                self._waiting -= 1
                if self._waiting == 0 and self._mode:
                    torch.cuda.set_sync_debug_mode(self._mode)

    def join(self, arrays: list[Tensor]) -> Tensor:
        home = arrays[0].device
        return torch.cat([array.to(home) for array in arrays])

    def is_contiguous(self, array: Tensor) -> bool:
        return array.is_contiguous()

    def contiguous(self, array: Tensor) -> Tensor:
        return array if array.is_contiguous() else array.detach().contiguous()

    def dense(self, x: Tensor) -> tuple[Tensor, Layout]:
        layout = layout_of_strides(x.shape, x.stride())
        if layout is None:
            x = x.contiguous()
            layout = layout_of_strides(x.shape, x.stride())
            assert layout is not None
        return x, layout

    def like(self, other: Tensor, dense: Tensor, layout: Layout) -> Tensor:
        same = other.dtype == dense.dtype
        if (
            same
            and layout_of_strides(other.shape, other.stride()) == layout
            and not other.is_neg()
            and type(other) in PLAIN_CLASSES
        ):
            return other
        return torch.empty_like(dense).copy_(other)

    def target(
        self, dense: Tensor, layout: Layout, out: Tensor | None, *operands: Tensor
    ) -> Tensor:
        return torch.empty_like(dense) if out is None else dense  # out is x, which is dense

    def cast_to_output(self, result: Tensor, out: Tensor | None) -> Tensor:
        return result

    def mark_written(self, *arrays: Tensor) -> None:
        for array in arrays:
            if not array.is_inference():  # inference: no version
                increment_version(array)  # autograd must notice if a graph has saved it


OPERATIONS = CudaOperations(TensorDeviceMemory())
