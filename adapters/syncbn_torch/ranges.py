"""Named ranges for torch's profilers, by layer.

    syncbn.forward layer1.0.bn1     a layer's forward in training
    syncbn.exchange layer1.0.bn1    in forward or backward: sending to other members, and waiting
    syncbn.backward layer1.0.bn1    the node of the layer's backward; one for all replicas

`torch.profiler` shows them; so do Nsight Systems under `torch.autograd.profiler.emit_nvtx` and
VTune under `emit_itt`. While none of these runs, a layer reads one flag and builds no name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from syncbn_torch._torch_private import profiler, transforming

__all__ = ["name_backward", "span"]

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def span(what: str, name: Callable[[], str]) -> AbstractContextManager[Any]:
    """The range `syncbn.{what} {name()}` if a profiler runs, else a context that does nothing."""
    if not profiler._is_profiler_enabled:
        return _NO_RANGE
    without_class = re.sub(r" \(\w+\)", "", name())
    return record_function(f"syncbn.{what} {without_class}")


def name_backward(output: Tensor, name: Callable[[], str]) -> None:
    """Put the node that computed `output` into a range whenever a backward pass runs it."""
    node = output.grad_fn
    if node is None or transforming():
        return
    opened: list[AbstractContextManager[Any]] = []

    def begin(_: Any) -> None:
        opened[:] = [span("backward", name)]  # drops a range that an error left open
        opened[0].__enter__()

    def end(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    node.register_prehook(begin)
    node.register_hook(end)
