"""Detect tensors that have a tangent or are wrapped by a function transform.

Forward-mode AD (`torch.autograd.forward_ad`) gives tensors a tangent. `torch.func` wraps tensors;
so do `is_grads_batched` and `jacobian(vectorize=True)`, by an older vmap. Our kernels only see
memory addresses and would miss both. So such tensors use plain differentiable operations, and
raise an error where numbers leave torch (messages between processes, other threads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from syncbn_core.errors import StateError
from syncbn_torch._torch_private import (
    forward_ad_active,
    function_transforms_active,
    is_wrapped,
)

__all__ = [
    "has_tangent_or_wrapper",
    "needs_plain_forward",
    "refuse_in_replicas",
    "refuse_over_processes",
]


def has_tangent_or_wrapper(*tensors: Any) -> bool:
    """Whether one of `tensors` has a tangent or is wrapped; other objects do not count."""
    dual = forward_ad_active()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            if is_wrapped(tensor):
                return True
            if dual and forward_ad.unpack_dual(tensor).tangent is not None:
                return True
    return False


def needs_plain_forward(
    name: Callable[[], str], replicas: bool, processes: bool, *operands: Tensor | None
) -> bool:
    """Whether a forward needs plain operations; `StateError` if it then can't be synchronized.

    All replicas get the same answer, because their messages must be of one kind.
    """
    wrapped = function_transforms_active()
    if not (wrapped or forward_ad_active()):
        return False
    if processes and (wrapped or replicas):
        if wrapped or has_tangent_or_wrapper(*operands):
            refuse_over_processes(name())
        return False
    if wrapped and replicas:
        refuse_in_replicas(name())
    return True


def refuse_over_processes(who: str) -> None:
    """Raise `StateError`: `who` got tensors with a tangent or wrapped by a transform."""
    raise StateError(
        f"expected plain tensors in {who}, which synchronizes over processes, got tensors of a "
        "function transform (torch.func, is_grads_batched, vectorize=True), or of forward-mode AD "
        "with several replicas per process or in a dual level that began after the forward; open "
        "the dual level before the forward, with one replica per process, or compute these "
        "derivatives in one process"
    )


def refuse_in_replicas(who: str) -> None:
    """Raise `StateError` inside a function transform, which other threads don't inherit."""
    if function_transforms_active():
        raise StateError(
            f"expected {who} outside of function transforms, got a call inside one "
            "(torch.func.grad, jvp, vmap, ...), which replica threads do not inherit; transform "
            "the model without its wrapper, or use torch.autograd (forward_ad works too)"
        )
