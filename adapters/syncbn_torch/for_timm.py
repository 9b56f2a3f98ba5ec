"""Conversion of timm's layers; `convert_model` imports this module only if timm is imported.

y = act(drop(batch_norm(x)))
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, fx, nn

from syncbn_core.checks import check_eps_mode
from syncbn_core.moments import EpsMode, NormRule
from syncbn_torch.activations import NONE, Activation, activation_of, runs_hooks
from syncbn_torch.batchnorm import SynchronizedBatchNorm2d
from syncbn_torch.conversion.registry import register_conversion
from syncbn_torch.layer_state import give_number

__all__ = ["SynchronizedBatchNormAct2d"]


class SynchronizedBatchNormAct2d(SynchronizedBatchNorm2d, BatchNormAct2d):  # type: ignore[misc]
    """timm's `BatchNormAct2d` over the whole batch: input (N, C, H, W).

    Arguments are those of `BatchNormAct2d`, plus `process_group` and `eps_mode`.
    """

    def __init__(
        self,
        *args: Any,
        process_group: Any = None,
        eps_mode: EpsMode | None = None,
        **kwargs: Any,
    ) -> None:
        BatchNormAct2d.__init__(self, *args, **kwargs)
        give_number(self)
        self.process_group = process_group
        self.eps_mode: EpsMode | None = None if eps_mode is None else check_eps_mode(eps_mode)

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override] # as timm's
        layer: Any = self
        if isinstance(input, fx.Proxy):  # torch.fx records the whole layer as one node
            node: Tensor = layer._recorded_by_fx(input, SynchronizedBatchNormAct2d.forward)
            return node
        y: Tensor = super().forward(input)
        return layer.act(layer.drop(y)) if self._activation is NONE else y

    @property
    def _agreed(self) -> NormRule:
        return super()._agreed._replace(activation=type(self.act).__name__)

    @property
    def _activation(self) -> Activation:  # type: ignore[override]
        """What `act` computes, if the layer can do so itself."""
        modules: Any = self._modules  # nn.Module's lookup is slow
        drop = modules["drop"]
        if torch.compiler.is_compiling() or type(drop) is not nn.Identity or runs_hooks(drop):
            return NONE
        return activation_of(modules["act"])


register_conversion(BatchNormAct2d, SynchronizedBatchNormAct2d)
# timm itself converts a BatchNormAct2d to a SyncBatchNormAct, with the same drop and act.
register_conversion(SyncBatchNormAct, SynchronizedBatchNormAct2d)
