"""Find calls of `F.batch_norm` in training outside of layers: these never synchronize."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from syncbn_torch.conversion.replacement import modules_of
from syncbn_verify.recording import Recorder, norm_layers

__all__ = ["FunctionalCalls"]

_FUNCTIONS = (F.batch_norm, torch.batch_norm)
_TRAINING = 5  # the position of this argument, in both


class FunctionalCalls(TorchFunctionMode):
    """The calls in a `with` block, as pairs: name of the module in `model`, and shape of the input.

    Calls within batch norm layers are left out, since such layers are judged by themselves.
    `model`: a copy; its layers are recorded from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.Size]] = []
        self._recorder = Recorder(norm_layers(model), remember=lambda x: x[:0])
        self._running: list[str] = ["the model itself"]
        for module, name in modules_of(model).items():
            if name and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, *_: Any) -> None:
        self._running.append(name)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS and not self._recorder.depth:
            x = args[0] if args else kwargs["input"]
            if kwargs.get("training", args[_TRAINING] if len(args) > _TRAINING else False):
                self.found.append((self._running[-1], x.shape))
        return func(*args, **kwargs)
