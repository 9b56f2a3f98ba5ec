"""Replace modules of a model by others with the same state."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.reference import BatchNorm2dReimpl

__all__ = ["replace_modules", "unknown_kind", "with_class"]


def with_class(target: type[nn.Module], module: nn.Module) -> nn.Module:
    """A `target` with the state of `module`: same parameters, buffers, hooks, attributes."""
    new = target.__new__(target)
    new.__dict__ = module.__dict__.copy()
    for registry in ("_parameters", "_buffers", "_modules"):
        new.__dict__[registry] = module.__dict__[registry].copy()
    return new


def unknown_kind(module: nn.Module) -> str | None:
    """Why a conversion can't handle `module`; None for modules that it need not handle."""
    ours = isinstance(module, BatchNorm2dReimpl) or hasattr(module, "__data_parallel_replicate__")
    if isinstance(module, _BatchNorm) and not ours:
        return "an unknown subclass of BatchNorm; convert it by hand"
    if isinstance(module, nn.DataParallel) and not isinstance(module, DataParallelWithCallback):
        return "a subclass of DataParallel; call patch_replication_callback on it"
    return None


def replace_modules(
    module: nn.Module, choose: Callable[[nn.Module], nn.Module | str | None], caller: str
) -> nn.Module:
    """Replace each module by what `choose` returns; None or a reason (str) keeps the old one."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
    done: dict[nn.Module, nn.Module] = {}
    kept: list[str] = []

    def visit(old: nn.Module, name: str) -> nn.Module:
        if old in done:
            return done[old]
        chosen = choose(old)
        if isinstance(chosen, str):
            kept.append(f"{name or 'the module'} ({type(old).__qualname__}: {chosen})")
        new = chosen if isinstance(chosen, nn.Module) else old
        done[old] = done[new] = new
        for key, child in list(new._modules.items()):
            if child is not None:
                replacement = visit(child, f"{name}.{key}" if name else key)
                if replacement is not child:
                    new._modules[key] = replacement
        return new

    result = visit(module, "")
    if kept:
        warnings.warn(f"{caller} left as they are: {'; '.join(kept)}", UserWarning, stacklevel=3)
    return result
