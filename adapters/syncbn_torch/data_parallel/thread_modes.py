"""The modes, device and stream that replica threads take over from the calling thread.

No replica runs in the calling thread. Autograd counts nodes per thread, and that count decides in
which order it adds up the gradients of shared parameters; in new threads it is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from syncbn_torch._torch_private import InheritedModes, restored_forward_ad

__all__ = ["call_within", "modes_of_caller", "place_of"]

Modes = list[Callable[[], AbstractContextManager[Any]]]


def modes_of_caller() -> tuple[Modes, Modes]:
    """The modes for all replicas, and those for replica 0 alone, which other threads don't inherit.

    All have the gradient, inference, forward AD and autocast modes. Torch's function and dispatch
    modes and hooks for saved tensors need not be safe in several threads at the same time.
    """
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    modes: Modes = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        restored_forward_ad(),
    ]
    for kind in kinds:
        settings: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        modes.append(partial(torch.autocast, kind, **settings))
    inherited = InheritedModes()
    return modes, [lambda: inherited]


def place_of(device: torch.device) -> Modes:
    """Context managers for a GPU and the calling thread's current stream on it; none for CPU."""
    if device.type != "cuda":
        return []
    stream = torch.cuda.current_stream(device)
    return [partial(torch.cuda.device, device), partial(torch.cuda.stream, stream)]


def call_within(modes: Modes, call: Callable[[], Any]) -> Any:
    """Run `call()` inside all `modes`; the first mode is the outermost.

    Not with ExitStack or a generator: they assign `__traceback__`, which some errors forbid.
    """
    if not modes:
        return call()
    with modes[0]():
        return call_within(modes[1:], call)
