"""A plugin for Lightning: `sync_batchnorm=True` then uses our layers, not torch's SyncBatchNorm."""

from __future__ import annotations

import sys

from torch import nn

from syncbn_core.errors import StateError
from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.conversion.convert import convert_model, revert_model
from syncbn_torch.conversion.replacement import modules_of, swap_modules

__all__ = ["SyncBatchNormPlugin"]


class SyncBatchNormPlugin:
    """Makes Lightning's Trainer synchronize batch norm layers with this package, on CPU too.

    Use: `Trainer(sync_batchnorm=True, plugins=[SyncBatchNormPlugin()], strategy="ddp", ...)`. When
    `fit` begins in several processes, the plugin calls `convert_model` on the LightningModule; when
    `fit` has ended, it converts these layers back to torch's.

    Works with `lightning` and with `pytorch_lightning`. Raises `StateError` if neither has been
    imported.
    """

    def __init__(self) -> None:
        if not _register():
            raise StateError(
                "expected lightning.pytorch or pytorch_lightning to be imported, found neither; "
                "import the one whose Trainer you use before you make the plugin"
            )
        self._converted: list[nn.Module] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """`convert_model(model)`; Lightning calls it before it wraps the model."""
        before = set(_synchronized(model))
        model = convert_model(model)
        self._converted = [layer for layer in _synchronized(model) if layer not in before]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`: layers that were synchronized before `apply` stay synchronized."""
        reverted = {layer: revert_model(layer) for layer in self._converted}
        self._converted = []
        new = {layer: result for layer, result in reverted.items() if result is not layer}
        swap_modules(modules_of(model), new)
        return new.get(model, model)


def _synchronized(model: nn.Module) -> list[nn.Module]:
    """Our layers, and layers that functions registered for conversion returned."""
    return [
        module
        for module in modules_of(model)
        if isinstance(module, _SynchronizedBatchNorm) or "_converted_by" in vars(module)
    ]


def _register() -> bool:
    """Make the imported Lightning packages accept the plugin; returns whether one is imported.

    Lightning accepts only subclasses of its abstract class TorchSyncBatchNorm. This registers the
    plugin as a virtual subclass, so that the module need not import Lightning, which takes seconds.
    """
    packages = ("lightning.pytorch", "pytorch_lightning")
    layer_syncs = [sys.modules.get(f"{package}.plugins.layer_sync") for package in packages]
    for module in filter(None, layer_syncs):
        module.TorchSyncBatchNorm.register(SyncBatchNormPlugin)
    return any(layer_syncs)


_register()  # LightningCLI looks at the class before it makes a plugin
