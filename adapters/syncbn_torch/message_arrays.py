"""How a message carries tensors; `syncbn_core.comm.message_arrays` has the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncbn_core.comm.message_arrays import HostCopy, Verdict, register_arrays
from syncbn_torch.backends.memory import as_array, as_tensor

__all__ = ["TensorArrays"]


class TensorArrays:
    """`MessageArrays` for tensors; on CUDA, checking a label does not make the host wait."""

    @staticmethod
    def to_host(values: Tensor) -> np.ndarray[Any, Any]:
        return as_array(values.cpu())

    @staticmethod
    def from_host(values: np.ndarray[Any, Any], like: Tensor) -> Tensor:
        return as_tensor(values).to(like)

    @staticmethod
    def with_label(values: Tensor, label: int) -> Tensor:
        return torch.cat([values.reshape(-1), values.new_full((1,), label)])

    @staticmethod
    def without_label(total: Tensor, shape: tuple[int, ...], label: int) -> tuple[Tensor, Verdict]:
        values, found = total[:-1].view(shape), total[-1:]
        if not _on_cuda(total):
            return values, found.item() == label
        if values.is_floating_point():
            values = torch.where(found == label, values, float("nan"))
        if _captures(total):
            return values, True
        on_host, copied = _sent_to_host(found)

        def verdict() -> bool | None:
            if _captures(total) or not copied.query():
                return None
            return on_host.item() == label

        return values, verdict

    @staticmethod
    def fill(values: Tensor, number: float) -> None:
        values.fill_(number)

    @staticmethod
    def copy_to_host(values: Tensor) -> HostCopy | None:
        if not _on_cuda(values):
            copy = as_array(values.detach().clone())
            return HostCopy(lambda: copy)
        if _captures(values):
            return None
        on_host, copied = _sent_to_host(values)

        def wait() -> np.ndarray[Any, Any]:
            copied.synchronize()
            return as_array(on_host)

        return HostCopy(wait, copied.query, lambda: not _captures(values))

    @staticmethod
    def finish(values: Tensor) -> None:
        if _on_cuda(values) and not _captures(values):
            torch.cuda.current_stream(values.device).synchronize()


register_arrays(Tensor, TensorArrays())


def _on_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, when the device can't be queried."""
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


def _sent_to_host(found: Tensor) -> tuple[Tensor, Any]:
    """`(copy of found on the host, event that the device records once it is complete)`."""
    with torch.cuda.device(found.device):
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    return on_host, copied
