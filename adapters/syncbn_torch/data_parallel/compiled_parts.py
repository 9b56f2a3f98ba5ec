"""The parts of a model that torch.compile has compiled; replicas run without their graphs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import cast

from torch import nn

__all__ = ["compiled_parts", "warn_of_compiled_parts", "without_graphs"]


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of the modules of `model` that are compiled."""
    return [
        name
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or _is_optimized(module)
    ]


def warn_of_compiled_parts(names: Sequence[str]) -> None:
    """Warn that replicas run the modules of these names, at least one, without graphs."""
    more = f" and {len(names) - 1} more modules" if len(names) > 1 else ""
    warnings.warn(
        f"{names[0] or 'the model itself'}{more} {'are' if more else 'is'} compiled, but several "
        "replicas run without graphs: torch.compile can't trace messages between threads",
        UserWarning,
        stacklevel=7,  # the caller of the wrapper
    )


def without_graphs(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of `module` without compiled parts, whose graphs would call the original layers.

    Modules without compiled parts are not copied. `known`: the copies by original.
    """
    if module not in known:
        known[module] = module
        if _is_optimized(module):
            known[module] = without_graphs(cast(nn.Module, module._orig_mod), known)
        else:
            children = module._modules.items()
            own = {k: None if m is None else without_graphs(m, known) for k, m in children}
            if any(own[key] is not child for key, child in children) or module._compiled_call_impl:
                copied = known[module] = cast(nn.Module, module._replicate_for_data_parallel())
                copied._parameters, copied._modules = dict(module._parameters), own
                copied.__dict__.pop("_compiled_call_impl", None)
    return known[module]


def _is_optimized(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile(model)` returned."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
