"""Batch norm in modules that torch.jit has scripted or traced: it can neither change nor wait."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

# When a call of batch norm takes the statistics of its input.
Statistics = Literal["always", "in training", "never"]

# These operations, with the position of their argument `training`.
_OPERATIONS = {"aten::batch_norm": 5, "aten::native_batch_norm": 5}


def scripted_batch_norm(module: nn.Module) -> Statistics | None:
    """When a scripted or traced module takes the statistics of its input.

    None for a module without batch norm, for one whose submodules call it, and for all modules
    that torch.jit has not compiled.
    """
    found = _calls(module)
    if not found or any(_calls(inner) for inner in module.modules() if inner is not module):
        return None
    if True in found:
        return "always"
    return "in training" if None in found else "never"


def uses_batch(module: nn.Module) -> bool:
    """Whether a scripted or traced module takes the statistics of its input as it is now."""
    statistics = scripted_batch_norm(module)
    without = hasattr(module, "running_mean") and module.running_mean is None
    return statistics == "always" or (
        statistics == "in training" and (bool(module.training) or without)
    )


def name_of_scripted(module: nn.Module) -> str:
    """The name of the class; for a scripted or traced module, of the one it was made of."""
    if isinstance(module, torch.jit.ScriptModule):
        return f"{getattr(module, 'original_name', type(module).__name__)} of torch.jit"
    return type(module).__name__


def _calls(module: nn.Module) -> list[bool | None]:
    """The argument `training` of each call of batch norm; None where it is not constant."""
    if not isinstance(module, torch.jit.ScriptModule):
        return []
    graph: Any = getattr(module, "inlined_graph", None)  # a ModuleList has none
    return [
        list(node.inputs())[place].toIValue()
        for kind, place in _OPERATIONS.items()
        for node in (graph.findAllNodes(kind) if graph is not None else ())
    ]
