"""What the nodes of the autograd graph share: how sums travel, and what a backward pass leaves.

Backward of a node runs plain differentiable operations where its own result has to be
differentiable (`create_graph=True`), or where tensors are more than their memory (`transforms.py`).
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn_core.comm import Communicator
from syncbn_core.errors import StateError
from syncbn_core.moment_exchange import CallSite, exchange_sums
from syncbn_torch._torch_private import backward_task, run_after_backward
from syncbn_torch.autograd.transforms import beyond_memory, refuse_over_processes

__all__ = ["BackwardPass", "BackwardPasses", "Processes", "needs_plain_backward"]


class Processes(NamedTuple):
    """The processes that a layer synchronizes over, and who it is among them."""

    communicator: Communicator
    site: CallSite

    def all_reduce(self, sums: Any, call: int) -> Any:
        """The sums of backward over all processes; `call`: the number of the forward's exchange."""
        if torch.is_grad_enabled():
            raise StateError(
                "second derivatives (create_graph=True) don't go through a process group; "
                "compute them in one process, or use layers without process_group there"
            )
        return exchange_sums(self.communicator, sums, self.site, call)


def needs_plain_backward(processes: Processes | None, *tensors: Any) -> bool:
    """Whether a step of backward on `tensors` takes plain operations.

    `StateError` for what can't be sent to other processes.
    """
    beyond = beyond_memory(*tensors)
    if beyond and processes is not None:
        refuse_over_processes("the backward of a layer")
    return beyond or torch.is_grad_enabled()


class BackwardPass:
    """The mailbox of one backward pass: what the nodes of one exchange leave for each other.

    Attributes:
        pending_grads: of each replica whose y is part of the loss, what `Normalize` left for
            `AllReduce` and `LocalMoments`: dy, weight and the weighted sums (2, C).
        total: the sums over all members, which `AllReduce` left for every `LocalMoments`.
    """

    __slots__ = ("__weakref__", "pending_grads", "total")

    def __init__(self) -> None:
        self.pending_grads: dict[Any, tuple[Tensor, Tensor | None, Any]] = {}
        self.total: Any = None

    def end(self) -> None:
        """Drop what the nodes have left."""
        self.pending_grads.clear()


class BackwardPasses:
    """The backward passes over one exchange.

    They may come one after the other, may stop half way (gradients of the weight alone), and may
    run at the same time in several threads. Each is kept by autograd's own task, so it goes when
    that task ends or fails.
    """

    __slots__ = ("_by_task",)

    _beginning = threading.Lock()  # the threads of several devices may be in one pass

    def __init__(self) -> None:
        self._by_task: dict[int, weakref.ref[BackwardPass]] = {}

    def current(self) -> BackwardPass:
        """The pass that this thread is in."""
        task, by_task = backward_task(), self._by_task
        with self._beginning:
            known = by_task.get(task)
            current = None if known is None else known()
            if current is None:
                current = BackwardPass()
                by_task[task] = weakref.ref(current, lambda _: by_task.pop(task, None))
                run_after_backward(partial(BackwardPass.end, current))
        return current
