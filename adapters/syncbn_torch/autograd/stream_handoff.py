"""`StreamHandoff`: pass a value between backward threads, perhaps from another GPU.

Autograd runs a node on the stream of its forward and orders streams along the graph's edges, but
only on the node's own device. On other devices the default stream is current. If the user runs
the model on other streams, work on such a device would not wait for the value that it reads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["StreamHandoff"]


class StreamHandoff:
    """A value and, if it is on a GPU, the stream that writes it."""

    __slots__ = ("stream", "value")

    def __init__(self, value: Any) -> None:
        on_gpu = isinstance(value, Tensor) and value.is_cuda
        self.value = value
        self.stream = torch.cuda.current_stream(value.device) if on_gpu else None

    def on(self, device: torch.device) -> Any:
        """The value, safe to use on the current stream of `device`; a host value stays there."""
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
        """A context manager in which work on the value runs on its own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
