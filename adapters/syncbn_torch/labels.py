"""How tensors carry the label of `syncbn_core.comm.labels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncbn_core.comm.labels import Verdict

__all__ = ["TensorSums"]


class TensorSums:
    """Tensors: on CUDA the host waits for nothing, elsewhere all is known at once."""

    @staticmethod
    def pack(sums: Tensor, label: int) -> Tensor:
        return torch.cat([sums.reshape(-1), sums.new_full((1,), label)])

    @staticmethod
    def unpack(total: Tensor, shape: tuple[int, ...], label: int) -> tuple[Tensor, Verdict]:
        sums, found = total[:-1].view(shape), total[-1:]
        if not _on_cuda(total):
            return sums, found.item() == label
        if sums.is_floating_point():
            sums = torch.where(found == label, sums, float("nan"))
        if _captures(total):
            return sums, True
        on_host, come = _sent_to_host(found)

        def verdict() -> bool | None:
            if _captures(total) or not come.query():
                return None
            return on_host.item() == label

        return sums, verdict


def _on_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _captures(tensor: Tensor) -> bool:
    """Whether a graph is being captured: nothing may be asked of the device then."""
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


def _sent_to_host(found: Tensor) -> tuple[Tensor, Any]:
    """A copy of `found` on the host, there once the event has come."""
    with torch.cuda.device(found.device):
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        come = torch.cuda.Event()
        come.record()
    return on_host, come
