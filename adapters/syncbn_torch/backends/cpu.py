"""`OPERATIONS` for CPU tensors: lends their memory to the steps of `syncbn_core.backends.cpu`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncbn_core.backends.cpu.operations import CpuOperations
from syncbn_core.borrow import exchange_function
from syncbn_core.kernels.cpu.numerics import has_half
from syncbn_core.kernels.cpu.operands import ANYWHERE, DLTENSORS, REFUSED, look
from syncbn_core.layout import layout_of_strides
from syncbn_torch._torch_private import increment_versions
from syncbn_torch.backends.memory import (
    PLAIN,
    as_tensor,
    dltensors,
    empty_like,
    holds_all_values,
    resolved,
)

__all__ = ["OPERATIONS", "TensorMemory", "look_at"]

Array = np.ndarray[Any, Any]
_NOTHING = id(None)
_HALF = has_half()
_FUNCTION = exchange_function(Tensor)


class TensorMemory:
    """`HostMemory` of CPU tensors."""

    def may_use_threads(self) -> bool:
        return torch.get_num_threads() > 1  # torch.set_num_threads(1) also applies to our kernels

    def look(self, calls: Array, threads: int, arrays: Sequence[Tensor | None]) -> int:
        for array in arrays:  # a subclass may have no data of its own
            if array is not None and not (type(array) in PLAIN and holds_all_values(array)):
                return REFUSED
        return look_at(calls, threads, arrays)

    def dense(self, x: Tensor) -> Tensor:
        x = resolved(x)
        return x if _is_dense(x) else torch.empty_like(x).copy_(x)

    def dense_pair(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x = self.dense(x)
        if type(dy) in PLAIN:
            dy = resolved(dy)
            if dy.dtype == x.dtype and dy.stride() == x.stride():
                return x, dy
        copied = torch.empty_like(x)
        copied.copy_(dy)  # which returns an object of the class of dy
        return x, copied

    def target(self, dense: Tensor, out: Tensor | None, *operands: Tensor) -> Tensor:
        return empty_like(dense) if out is None else out

    def cast_to_output(self, result: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        return result

    def empty_like(self, x: Tensor, out: Tensor | None) -> Tensor:
        return torch.empty_like(x)

    def wide(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else resolved(values.detach()).to(torch.float64).contiguous()

    def gradients(self, like: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if like is None else like.dtype
        return torch.empty(channels, dtype=dtype), torch.empty(channels, dtype=dtype)

    def rounded(self, wide: Tensor, like: Tensor) -> Tensor:
        return wide.to(like.dtype)

    def mark_written(self, *arrays: Tensor | None) -> None:
        # inference tensors have no version; of others, autograd must notice if a graph saved them
        increment_versions([a for a in arrays if a is not None and not a.is_inference()])

    def assign(self, targets: Sequence[Tensor], values: Sequence[Any]) -> None:
        deque(map(Tensor.copy_, targets, map(as_tensor, values)), maxlen=0)


def look_at(
    calls: Array, threads: int, arrays: Sequence[Tensor | None], expected: Array = ANYWHERE
) -> int:
    """`operands.look` for plain tensors with all their values; negative if kernels can't run."""
    function, nothing = _FUNCTION, _NOTHING
    places: Any = map(id, arrays)
    if not function:
        function, nothing = DLTENSORS, 0
        try:
            places, _kept = dltensors(arrays)
        except RuntimeError:  # wrapped by a transform
            return REFUSED
    objects = np.fromiter(places, np.int64, len(arrays))
    return look(function, nothing, objects, threads, _HALF, calls, expected)  # type: ignore[no-any-return]


OPERATIONS = CpuOperations(TensorMemory())


def _is_dense(x: Tensor) -> bool:
    return layout_of_strides(x.shape, x.stride()) is not None
