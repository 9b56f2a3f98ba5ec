"""What the autograd nodes share: the exchange over processes, and checks in backward.

Backward of a node uses plain differentiable operations if its result must be differentiable
(`create_graph=True`) or a tensor has a tangent or is wrapped (`transforms.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from syncbn_core.comm import Communicator
from syncbn_core.errors import StateError
from syncbn_core.moment_exchange import (
    BACKWARD,
    CallSite,
    PartMoments,
    exchange_moments,
    exchange_sums,
)
from syncbn_torch.autograd.transforms import has_tangent_or_wrapper, refuse_over_processes

__all__ = [
    "Processes",
    "check_unchanged",
    "needs_plain_backward",
]


class Processes(NamedTuple):
    """The processes that a layer synchronizes over, and the layer's identity among them."""

    communicator: Communicator
    site: CallSite

    def exchange_moments(self, part: PartMoments) -> tuple[PartMoments, int]:
        """The moments of the whole batch, given those of a part, and the number of the exchange."""
        with record_function("syncbn.exchange"):
            (total,), number = exchange_moments(self.communicator, [part], self.site)
        return total, number

    def all_reduce(
        self, sums: Any, call: int, statistics: Any = None, purpose: int = BACKWARD
    ) -> Any:
        """Add up `sums` over all processes; arguments as of `exchange_sums`."""
        with record_function("syncbn.exchange"):
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
