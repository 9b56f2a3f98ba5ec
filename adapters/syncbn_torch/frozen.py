"""Layers that use their running statistics in training too, and send nothing to other members."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from syncbn_core.errors import StateError
from syncbn_torch.batchnorm import SynchronizedBatchNorm2d
from syncbn_torch.conversion.registry import register_conversion
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.rules import convertible
from syncbn_torch.layer_state import LayerState
from syncbn_torch.module_names import name_of


def freeze(model: nn.Module, affine: bool = False) -> None:
    """Let all synchronized layers of `model`, itself included, use their running statistics.

    They do so in training too, also after `model.train()`: they compute as in eval, update nothing
    and send nothing. `affine`: also stop the gradients of weight and bias. Copies and pickles stay
    frozen; a state dictionary does not record it. Freeze the layers of all processes alike.

    Raises `StateError`, with nothing changed, for a layer without running statistics, and for
    layers of torch, which `convert_model` has to convert before.
    """
    layers, plain = _layers(model), convertible(model)
    if plain:
        raise StateError(
            f"expected synchronized layers, got {len(plain)} that are not, the first of them "
            f"{next(iter(plain.values())) or 'the model'}; call convert_model before freeze"
        )
    if not layers:
        text = f"freeze found no batch norm layer in {type(model).__name__}, so it changed nothing"
        warnings.warn(text, UserWarning, stacklevel=2)
    for layer in layers:
        if layer.running_mean is None or layer.running_var is None:
            raise StateError(
                f"expected running statistics in {name_of(layer)}, which is to be frozen; make it "
                "with track_running_stats=True"
            )
    for layer in layers:
        trained = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
        stopped = list(trained) if affine else []
        for name in stopped:
            trained[name].requires_grad_(False)
        layer._frozen = (layer._frozen or []) + stopped


def unfreeze(model: nn.Module) -> None:
    """Undo `freeze` in all layers of `model`; those that are not frozen stay as they are.

    They use and update statistics of the batch again in training. Parameters whose gradients
    `freeze(affine=True)` has stopped get gradients again.
    """
    for layer in _layers(model):
        for name in layer._frozen or ():
            layer.get_parameter(name).requires_grad_()
        layer._frozen = None


def register_frozen(cls: type[nn.Module]) -> None:
    """Let `convert_model` make a frozen layer of each `cls`, and `revert_model` a `cls` of that.

    `cls`: the `FrozenBatchNorm2d` of torchvision or detectron2, or a class like them: made by
    `cls(num_features, eps=eps)`, with weight, bias, running_mean and running_var as buffers. The
    layer is a `SynchronizedBatchNorm2d`; `unfreeze` lets it train.
    """

    def thawed(frozen: Any) -> nn.Module:
        layer = SynchronizedBatchNorm2d(len(frozen.weight), frozen.eps).to(frozen.weight)
        layer.load_state_dict(frozen.state_dict(), strict=False)
        freeze(layer.train(frozen.training), affine=True)
        return layer

    def frozen(layer: Any) -> nn.Module:
        made = cls(layer.num_features, eps=layer.eps).to(layer.weight)
        made.load_state_dict({name: layer.state_dict()[name] for name in made.state_dict()})
        return made.train(layer.training)

    register_conversion(cls, thawed, frozen)


def _layers(model: nn.Module) -> list[LayerState]:
    return [module for module in modules_of(model) if isinstance(module, LayerState)]
