"""What the autograd nodes share: the exchange over processes, and checks of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.profiler import record_function

from syncbn_core.errors import StateError
from syncbn_core.exchange import BACKWARD, Exchange, PartMoments
from syncbn_torch._torch_private import forward_ad_active, function_transforms_active, is_wrapped

__all__ = ["Processes", "check_unchanged", "has_tangent_or_wrapper", "refuse_transforms"]


class Processes(Exchange):
    """`Exchange` over processes, which torch's profiler shows."""

    __slots__ = ()

    def moments(self, own: PartMoments) -> tuple[PartMoments, int]:
        with record_function("syncbn.exchange"):
            return super().moments(own)

    def sums(self, sums: Any, forward: int, statistics: Any = None, kind: int = BACKWARD) -> Any:
        with record_function("syncbn.exchange"):
            return super().sums(sums, forward, statistics, kind)


def has_tangent_or_wrapper(*tensors: Tensor | None) -> bool:
    """Whether one has a tangent of forward-mode AD, or is wrapped by a transform or batched.

    Our kernels only see memory addresses, and would miss both.
    """
    dual = forward_ad_active()
    for tensor in tensors:
        if tensor is not None and (
            is_wrapped(tensor) or (dual and forward_ad.unpack_dual(tensor).tangent is not None)
        ):
            return True
    return False


def refuse_transforms(name: Callable[[], str], *tensors: Tensor | None) -> None:
    """Raise `StateError` in a function transform, or if a tensor has a tangent or is wrapped.

    For what synchronizes, which errors call `name()`: messages and threads don't take such tensors.
    """
    if function_transforms_active() or has_tangent_or_wrapper(*tensors):
        raise StateError(
            f"expected plain tensors in {name()}, which synchronizes over replicas or processes, "
            "got a function transform (torch.func), batched gradients (is_grads_batched, "
            "vectorize=True) or forward-mode AD; compute these derivatives in one process without "
            "replicas, or higher ones by create_graph=True"
        )


def check_unchanged(x: Tensor, dy: Tensor) -> None:
    """Raise `StateError` if the x of backward, given dy, can't be the x of the forward."""
    if x.shape != dy.shape or x.dtype is not dy.dtype:
        raise StateError(
            f"expected in backward the input that the layer had in forward, of shape "
            f"{tuple(dy.shape)} and {dy.dtype}, got one of shape {tuple(x.shape)} and {x.dtype}: "
            "it was replaced in between, for example by input.data = ...; do that after backward"
        )
