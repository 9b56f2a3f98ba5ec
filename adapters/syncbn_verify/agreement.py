"""What all ranks must have in common before a check: it decides which messages they send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.data_parallel.pytrees import PLAIN, Tree
from syncbn_verify.recording import is_norm

__all__ = ["description", "plain_values", "with_plain_values"]


def description(model: nn.Module, batch: Any, **arguments: Any) -> dict[str, str]:
    """Text by what it describes, such as "model, conv.weight"; values of tensors are left out.

    Devices count by their type, since ranks have devices of their own.
    """
    described = {f"argument {name}": str(value) for name, value in arguments.items()}
    for module, name in modules_of(model).items():
        place = f"model, {name or 'the model itself'}"
        described[place] = "training mode" if module.training else "eval mode"
        if is_norm(module):
            described[place] += f", {module!r}"
        if isinstance(module, _SynchronizedBatchNorm):
            described[place] += f", {module.effective_eps_mode}"
        for held in (module.named_parameters, module.named_buffers):
            for key, tensor in held(recurse=False):
                where = f"model, {name}.{key}" if name else f"model, {key}"
                described[where] = _of_tensor(tensor)
    found = Tree(batch)
    for place, value in zip(found.paths(""), found.values, strict=True):
        described[f"batch, {place or 'the batch itself'}"] = (
            _of_tensor(value) if isinstance(value, Tensor) else type(value).__name__
        )
    return described


def plain_values(tree: Any) -> list[Any]:
    """The numbers and strings in nested containers, and lists of nothing else, in their order."""
    return [value for value in Tree(tree).values if _is_plain(value)]


def with_plain_values(tree: Any, values: Iterator[Any]) -> Any:
    """The same containers with other numbers and strings, those of `plain_values`."""
    found = Tree(tree)
    return found.made_of(next(values) if _is_plain(value) else value for value in found.values)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or type(value) in (list, tuple)


def _of_tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    needs = ", requires_grad" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device.type}{needs}"
