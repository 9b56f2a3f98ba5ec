"""What the autograd nodes share: the exchange over processes, and checks in backward.

Backward of a node uses plain differentiable operations if its result must be differentiable
(`create_graph=True`) or a tensor has a tangent or is wrapped (`transforms.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from syncbn_core.errors import StateError
from syncbn_core.exchange import BACKWARD, Exchange, PartMoments
from syncbn_torch.autograd.transforms import has_tangent_or_wrapper, refuse_over_processes

__all__ = [
    "Processes",
    "check_unchanged",
    "needs_plain_backward",
]


class Processes(Exchange):
    """`Exchange` over processes, which torch's profiler shows."""

    __slots__ = ()

    def moments(self, own: PartMoments) -> tuple[PartMoments, int]:
        with record_function("syncbn.exchange"):
            return super().moments(own)

    def sums(self, sums: Any, forward: int, statistics: Any = None, kind: int = BACKWARD) -> Any:
        with record_function("syncbn.exchange"):
            return super().sums(sums, forward, statistics, kind)


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
