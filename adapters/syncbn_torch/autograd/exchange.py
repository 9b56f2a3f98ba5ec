"""What the autograd nodes share: the exchange over processes, and the state of a backward pass.

Backward of a node uses plain differentiable operations if its result must be differentiable
(`create_graph=True`) or a tensor has a tangent or is wrapped (`transforms.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn_core.backends.base import Affine
from syncbn_core.comm import Communicator
from syncbn_core.errors import StateError
from syncbn_core.moment_exchange import (
    BACKWARD,
    CallSite,
    PartMoments,
    exchange_moments,
    exchange_sums,
)
from syncbn_torch import ranges
from syncbn_torch._torch_private import backward_task, run_after_backward
from syncbn_torch.autograd.transforms import has_tangent_or_wrapper, refuse_over_processes

__all__ = [
    "BackwardPass",
    "BackwardPasses",
    "Processes",
    "check_unchanged",
    "needs_plain_backward",
    "wanted_gradients",
]


class Processes(NamedTuple):
    """The processes that a layer synchronizes over, and the layer's identity among them."""

    communicator: Communicator
    site: CallSite

    def exchange_moments(
        self, parts: Sequence[PartMoments], with_kernels: bool
    ) -> tuple[list[PartMoments], int]:
        """The moments of the whole batch for each of `parts`, and the number of the exchange."""
        with ranges.span("exchange", self.site.name):
            return exchange_moments(self.communicator, parts, self.site, with_kernels)

    def all_reduce(
        self, sums: Any, call: int, statistics: Any = None, purpose: int = BACKWARD
    ) -> Any:
        """Add up `sums` over all processes; arguments as of `exchange_sums`."""
        with ranges.span("exchange", self.site.name):
            return exchange_sums(self.communicator, sums, self.site, call, statistics, purpose)


def needs_plain_backward(processes: Processes | None, *tensors: Any) -> bool:
    """Whether backward on `tensors` needs plain operations; `StateError` if they can't be sent."""
    beyond = has_tangent_or_wrapper(*tensors)
    if beyond and processes is not None:
        refuse_over_processes("the backward of a layer")
    return beyond or torch.is_grad_enabled()


def check_unchanged(x: Tensor, dy: Tensor) -> None:
    """Raise `StateError` if the x of backward, given dy, can't be the x of the forward."""
    if x.shape != dy.shape or x.dtype is not dy.dtype:
        raise StateError(
            f"expected in backward the input that the layer had in forward, of shape "
            f"{tuple(dy.shape)} and {dy.dtype}, got one of shape {tuple(x.shape)} and {x.dtype}: "
            "it was replaced in between, for example by input.data = ...; do that after backward"
        )


class BackwardPass:
    """The values that the nodes of one exchange pass to each other in one backward pass.

    Attributes:
        pending_grads: `(dy, affine, weighted sums (2, C))` for each replica whose y is part of
            the loss; from `Normalize`, for `AllReduce` and `LocalMoments`.
        total: the sums over all members; from `AllReduce`, for every `LocalMoments`.
        moments: of the whole batch, differentiable, with create_graph=True; made for the first node
            that asks, which holds `making`.
    """

    __slots__ = ("__weakref__", "making", "moments", "pending_grads", "total")

    def __init__(self) -> None:
        self.pending_grads: dict[Any, tuple[Tensor, Affine, Any]] = {}
        self.total: Any = None
        self.moments: Any = None
        self.making = threading.Lock()

    def end(self) -> None:
        """Drop gradients that no node has taken."""
        self.pending_grads.clear()


class BackwardPasses:
    """The backward passes over one exchange: several in turn, or at the same time in threads.

    A pass may skip nodes (gradients of the weight alone). Only autograd's task keeps it alive, so
    it is freed when that task ends or fails.
    """

    __slots__ = ("_by_task",)

    _beginning = threading.Lock()  # autograd runs one pass in a thread per device

    def __init__(self) -> None:
        self._by_task: dict[int, weakref.ref[BackwardPass]] = {}

    def current(self) -> BackwardPass:
        """The pass that this thread runs."""
        task, by_task = backward_task(), self._by_task
        with self._beginning:
            reference = by_task.get(task)
            current = None if reference is None else reference()
            if current is None:
                current = BackwardPass()
                by_task[task] = weakref.ref(current, lambda _: by_task.pop(task, None))
                run_after_backward(partial(BackwardPass.end, current))
        return current


def wanted_gradients(
    ctx: Any, first: int, grad_weight: Tensor, grad_bias: Tensor
) -> list[Tensor | None]:
    """The gradients that autograd needs of weight and bias, inputs `first` and `first + 1`."""
    by_weight, by_bias = ctx.needs_input_grad[first : first + 2]
    return [grad_weight if by_weight else None, grad_bias if by_bias else None]
