"""Numbers that one thread's backward leaves for another's, perhaps on another GPU.

Autograd runs a node on the stream of its forward and orders streams along the graph's edges. But a
copy between GPUs runs on the stream that the *copying* thread has current on the source's device,
which is its default stream: with streams of the user's own it would not wait for what it copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Handover"]


class Handover:
    """A value, and the stream that writes it if it is on a GPU."""

    __slots__ = ("stream", "value")

    def __init__(self, value: Any) -> None:
        on_gpu = isinstance(value, Tensor) and value.is_cuda
        self.value = value
        self.stream = torch.cuda.current_stream(value.device) if on_gpu else None

    def on(self, device: torch.device) -> Any:
        """The value where `device` is, for its current stream; what is on the host stays there."""
        if self.stream is None or self.value.device == device:
            return self.value
        with torch.cuda.stream(self.stream):
            return self.value.to(device)
