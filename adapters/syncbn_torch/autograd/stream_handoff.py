"""Numbers that one thread's backward leaves for another's, perhaps on another GPU.

Autograd runs a node on the stream of its forward and orders streams along the graph's edges, but
on that node's own device alone: on others the thread has its default stream current. So with
streams of the user's own, neither a copy from another GPU nor arithmetic there would wait for what
they read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["StreamHandoff"]


class StreamHandoff:
    """A value, and the stream that writes it if it is on a GPU."""

    __slots__ = ("stream", "value")

    def __init__(self, value: Any) -> None:
        on_gpu = isinstance(value, Tensor) and value.is_cuda
        self.value = value
        self.stream = torch.cuda.current_stream(value.device) if on_gpu else None

    def on(self, device: torch.device) -> Any:
        """The value where `device` is, for its current stream; what is on the host stays there."""
        if self.stream is None:
            return self.value
        if self.value.device != device:
            with self.current():
                return self.value.to(device)
        here = torch.cuda.current_stream(device)
        if here != self.stream:
            here.wait_stream(self.stream)
            self.value.record_stream(here)
        return self.value

    def current(self) -> AbstractContextManager[Any]:
        """Within it, what is done to the value runs on its own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
