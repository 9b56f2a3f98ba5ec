"""`ARRAYS`: what is needed of torch's tensors.

Torch allocates all memory. Kernels get addresses; DLPack would take longer than a kernel launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import filterfalse
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.arrays import LEGACY_STREAMS, DeviceArrays, register_arrays
from syncbn_core.backends.cuda import kernels
from syncbn_core.layout import Layout, layout_of_strides
from syncbn_torch._torch_private import (
    current_device,
    current_raw_stream,
    current_stream_number,
)
from syncbn_torch.arrays import NAMES, PLAIN_CLASSES, as_tensor

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_NO_SWITCH: AbstractContextManager[Any] = nullcontext()


@cache
def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


class TensorArrays(DeviceArrays):
    """`DeviceArrays` of torch, without autograd: it overwrites temporary tensors.

    On GPUs, torch's kernels mix 16-bit and float32 operands without converted copies.
    """

    pointer: Any = staticmethod(Tensor.data_ptr)

    def device_of(self, array: Tensor) -> int:
        return array.device.index if array.is_cuda else -1

    def near(self, values: Tensor, like: Tensor) -> Tensor:
        return values.to(like.device)

    def copy(self, values: Tensor) -> Tensor:
        return values.detach().clone(memory_format=torch.contiguous_format)

    def to_host(self, values: Tensor) -> np.ndarray[Any, Any]:
        if not values.is_cuda:
            return values.numpy(force=True)
        with torch.cuda.device(values.device):  # torch may have been told to report other waiting
            on_host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            on_host.copy_(values.detach(), non_blocking=True)
            torch.cuda.current_stream().record_event().synchronize()
        return on_host.numpy()

    def from_host(self, values: np.ndarray[Any, Any], like: Tensor) -> Tensor:
        tensor = as_tensor(values)
        if like.is_cuda:  # as in `to_host`
            tensor = tensor.pin_memory()
        return tensor.to(like, non_blocking=True)

    def cast(self, values: Tensor, dtype: Any) -> Tensor:
        return values.to(dtype)

    def widest(self, values: Tensor) -> torch.dtype:
        return torch.float32 if values.device.type == "mps" else torch.float64

    def working(self, values: Tensor) -> torch.dtype:
        return torch.float64 if values.dtype is torch.float64 else torch.float32

    def number(self, value: Any, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):  # not `full`, which waits for the device
            return value.to(like)
        return torch.full((), value, dtype=like.dtype, device=like.device)

    def constant(self, values: Tensor) -> Tensor:
        return values.detach()

    def difference(self, x: Tensor, values: Tensor) -> Tensor:
        return x - values

    def multiple(self, x: Tensor, values: Tensor) -> Tensor:
        return x * values

    def product(self, values: Tensor, other: Tensor) -> Tensor:
        return values.mul_(other)

    def scaled(self, values: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.addcmul(shift, values, scale, out=_room(values, dtype))

    def plus_scaled(
        self, values: Tensor, other: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.addcmul(values, other, scale, out=_room(values, dtype))

    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        # one C call writes all, so that KeyboardInterrupt can't come between two writes
        deque(map(Tensor.copy_, targets, values), maxlen=0)

    def sigmoid(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def select(self, mask: Tensor, x: Tensor, other: Any) -> Tensor:
        return torch.where(mask, x, other)

    def count_of(self, mask: Tensor) -> Any:
        count = mask.sum()
        return int(count) if count.is_cpu else count

    def sum(self, values: Tensor, axes: tuple[int, ...]) -> Tensor:
        return values.sum(axes, dtype=self.working(values)).to(self.widest(values))

    def mean_and_m2(
        self, values: Tensor, axes: tuple[int, ...], count: int
    ) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(values, axes, correction=0)
        wide = self.widest(values)
        return mean.to(wide), var.to(wide) * count

    def is_current(self, index: int) -> bool:
        return index < 0 or current_device() == index

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        return _NO_SWITCH if self.is_current(index) else torch.cuda.device(index)

    def stream(self, index: int) -> int:
        return int(current_raw_stream(index))

    def is_captured(self, index: int) -> bool:
        if index < 0:
            return False
        with self.on_device(index):
            stream = self.stream(index)
            return stream not in LEGACY_STREAMS and torch.cuda.is_current_stream_capturing()

    def keeps_stream(self, stream: int) -> bool:
        # torch never destroys its own streams; the number of any other stream is its handle
        return bool(current_stream_number(torch.cuda.current_device()) != stream)

    def dtype_name(self, dtype: torch.dtype) -> str:
        return NAMES[dtype]

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[dtype], device=_device(index))

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Tensor:
        return torch.zeros(shape, dtype=_DTYPES[dtype], device=_device(index))

    def lasting_zeros(self, size: int, index: int, stream: int) -> tuple[int, Any] | None:
        # not torch.zeros: in `use_mem_pool`, or while torch.compile warms up a CUDA graph, it
        # allocates from a temporary pool, whose memory is used again later
        address = kernels.lasting_zeros(index, size, stream)
        return None if address is None else (address, None)

    def is_contiguous(self, array: Tensor) -> bool:
        return array.is_contiguous()

    def layout(self, array: Tensor) -> Layout | None:
        if array.is_neg() or array._is_zerotensor() or type(array) not in PLAIN_CLASSES:
            return None
        return layout_of_strides(array.shape, array.stride())

    def form(self, array: Tensor) -> tuple[Any, ...]:
        lazy = array.is_neg() or array._is_zerotensor()
        return array.shape, array.stride(), array.dtype, lazy or type(array) not in PLAIN_CLASSES

    def empty_like(self, dense: Tensor, layout: Layout) -> Tensor:
        return torch.empty_like(dense)

    def mark_written(self, arrays: Sequence[Tensor]) -> None:
        # autograd must notice if a graph has saved one; of inference tensors there are no versions
        increment_version([*filterfalse(Tensor.is_inference, arrays)])

    def page_locked(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):  # it is written in other modes too
            return torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=like.is_cuda)

    def write_where(self, wrong: Tensor, number: float, word: Tensor) -> None:
        now = word.to(wrong.device, non_blocking=True)
        new = torch.where(wrong & (now == 0), number, now)
        word.copy_(new, non_blocking=True)


def _room(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` itself if it has this dtype, else a new tensor."""
    return values if values.dtype is dtype else torch.empty_like(values, dtype=dtype)


ARRAYS = TensorArrays(torch)
register_arrays(Tensor, ARRAYS)
