"""Figures of one comparison: which tensors, how far they differ, how far they may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncbn_torch.data_parallel.containers import node

__all__ = [
    "Tolerance",
    "buffer_difference",
    "difference",
    "join_axis",
    "joined",
    "moments",
    "tensors_of",
    "tolerance",
]


class Tolerance:
    """What counts as rounding, as a share of the largest value: of a layer, of the whole model.

    Rounding errors grow from layer to layer, so the whole model may differ by more. In 16 bits
    they grow so much that nothing can be said about the whole model.
    """

    def __init__(self, layer: float, model: float) -> None:
        self.layer = layer
        self.model = model


_TOLERANCES = {torch.float64: Tolerance(1e-8, 1e-6), torch.float32: Tolerance(2e-4, 1e-2)}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """The tolerance for tensors of `dtype`; types of 16 bits have the widest."""
    return _TOLERANCES.get(dtype, Tolerance(2e-2, math.inf))


def tensors_of(output: Any) -> list[Tensor]:
    """The floating tensors in what a model returns: in containers, or attributes of an object."""
    found: list[Tensor] = []
    _collect(output, found, ())
    if not found and not isinstance(output, Tensor):
        _collect(getattr(output, "__dict__", None), found, (output,))
    return [tensor for tensor in found if tensor.is_floating_point()]


def _collect(tree: Any, found: list[Tensor], around: tuple[Any, ...]) -> None:
    """Append the tensors in `tree`. `around`: the containers that it lies in, which it may hold."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return
    container = None if any(tree is outer for outer in around) else node(tree)
    for value in () if container is None else container.values:
        _collect(value, found, (*around, tree))


def difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference, as a share of the largest value of `expected` or of `floor`.

    NaN and infinity equal themselves. Different shapes, or NaN in one only, give infinity.
    """
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    if not actual.numel():
        return 0.0
    apart = (actual - expected).abs().max().item()
    if math.isfinite(apart):
        return apart and apart / (max(expected.abs().max().item(), floor) or 1.0)
    differing = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if not differing.any():
        return 0.0
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0
    apart = (actual - expected)[differing].abs().max().item() / (max(largest, floor) or 1.0)
    return apart if apart == apart else float("inf")


def buffer_difference(after: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float | None:
    """The largest difference of buffers with the same names; None if there are none.

    A running mean may be rounding alone, after a layer whose output has mean 0. So it is compared
    with the running standard deviation, if that is larger.
    """
    found = []
    for name, buffer in expected.items():
        if name in after:
            place, is_mean, _ = name.rpartition("running_mean")
            var = expected.get(f"{place}running_var") if is_mean else None
            floor = 0.0 if var is None or not var.numel() else var.abs().max().item() ** 0.5
            floor = floor if math.isfinite(floor) else 0.0
            found.append(difference(after[name].to(buffer.device), buffer, floor))
    return max(found, default=None)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Layer inputs (N, C, *spatial) of all parts as one; parts may differ in spatial sizes."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    columns = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], dim=1)
    return columns.reshape(1, len(columns), -1, *[1] * (parts[0].dim() - 3))


def moments(x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel of x (N, C, *spatial): (2, C), float64."""
    columns = x.detach().double().movedim(1, 0).flatten(1)
    return torch.stack([columns.mean(1), columns.std(1, correction=0)])


def join_axis(whole: torch.Size, parts: Sequence[torch.Size]) -> int | None:
    """The axis along which tensors of these shapes join to one of shape `whole`.

    None if every part has the shape of the whole: then it is a mean over samples. Raises
    ValueError if the shapes do not fit together.
    """
    if all(part == whole for part in parts):
        return None
    for axis in range(len(whole)):
        rest = [(*part[:axis], *part[axis + 1 :]) for part in parts]
        total = sum(part[axis] for part in parts if axis < len(part))
        if total == whole[axis] and set(rest) == {(*whole[:axis], *whole[axis + 1 :])}:
            return axis
    raise ValueError(f"{tuple(whole)} of the undivided batch, {[*map(tuple, parts)]} of the parts")
