"""Activations that a layer applies itself: by its kernels, or by torch after torch's kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from syncbn_core.moments import ActivationName
from syncbn_torch._torch_private import HOOKS

Activation = tuple[ActivationName | None, float]  # and the negative slope
NONE: Activation = (None, 0.01)
_OF_MODULES: dict[type[nn.Module], ActivationName] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.ReLU6: "relu6",
}


def activated(y: Tensor, activation: Activation) -> Tensor:
    """The activation of y, which may be overwritten."""
    match activation:
        case "relu", _:
            return F.relu(y, inplace=True)
        case "leaky_relu", negative_slope:
            return F.leaky_relu(y, negative_slope, inplace=True)
        case "silu", _:
            return F.silu(y)
        case "hardswish", _:
            return F.hardswish(y)
        case "relu6", _:
            return F.relu6(y, inplace=True)
    return y


def activation_of(module: nn.Module) -> Activation:
    """What calling `module` computes; `NONE` if that is none of these, or runs other code."""
    name = _OF_MODULES.get(type(module))
    if name is None or runs_hooks(module) or "forward" in module.__dict__:
        return NONE
    slope = getattr(module, "negative_slope", 0.01)
    return (name, slope) if slope >= 0 else NONE


_OF_ALL_MODULES = [getattr(modules, f"_global{hooks}") for hooks in HOOKS]


def runs_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs hooks, of its own or of all modules."""
    return any(map(module.__dict__.__getitem__, HOOKS)) or any(_OF_ALL_MODULES)
