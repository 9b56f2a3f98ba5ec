"""Compare tensors of two steps: how far they differ, what is rounding, how parts join."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncbn_torch.data_parallel.pytrees import Tree, hidden_tensor


class Tolerance(NamedTuple):
    """The largest differences that count as rounding, as `difference` gives them.

    `layer`, `model`: of a layer's results for equal input, and of the whole model's. `floor`: the
    size below which values count as rounding alone. `gradients`: whether those of the whole model
    can be compared: in float32 rounding can switch a ReLU on or off. In 16 bits it grows so much
    that nothing can be said about the whole model.
    """

    layer: float
    model: float
    floor: float
    gradients: bool = False


_TOLERANCES = {
    torch.float64: Tolerance(1e-8, 1e-6, 1e-5, gradients=True),
    torch.float32: Tolerance(2e-4, 1e-2, 1e-3),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """The tolerance for a model that computes in `dtype`; types of 16 bits have the widest."""
    return _TOLERANCES.get(dtype, Tolerance(2e-2, math.inf, 1e-2))


def difference(actual: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference, each as a share of |value| + median of |values| + `floor`.

    So one huge value hides nothing. NaN and infinity equal themselves. Other shapes, whole numbers
    that differ, and NaN in one only give infinity.
    """
    if actual.shape != expected.shape:
        return math.inf
    exact = not (expected.is_floating_point() or expected.is_complex())
    actual, expected = _doubled(actual).to(expected.device), _doubled(expected)
    differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if not differs.any():
        return 0.0
    sizes = expected.abs()
    finite = sizes[sizes.isfinite()]
    usual = finite.median().item() if finite.numel() else 0.0
    shares = ((actual - expected).abs() / (sizes + usual + floor))[differs]
    # NaN: infinity minus another infinity, or NaN in one only
    return math.inf if exact else shares.nan_to_num(math.inf, math.inf).max().item()


def _doubled(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def largest(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float
) -> float | None:
    """The largest difference of tensors of the same name; None if there is none."""
    both = expected.keys() & actual.keys()
    return max((difference(actual[name], expected[name], floor) for name in both), default=None)


def tensors_of_output(output: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors in a model's output, by path, and the paths to those that can't be compared.

    Looks into containers, or into the attributes of one object. Complex tensors are seen as pairs
    of real numbers, sparse ones as dense, NumPy arrays as tensors.
    """
    found = Tree(output)
    if not any(isinstance(value, (Tensor, np.ndarray)) for value in found.values):
        attributes = getattr(output, "__dict__", {}).items()
        found = Tree({key: value for key, value in attributes if value is not output} or output)
    tensors, hidden = {}, []
    for path, value in zip(found.paths("output"), found.values, strict=True):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(np.array(value))
        if not isinstance(value, Tensor):
            place = hidden_tensor(value)
            hidden += [] if place is None else [f"{path}{place} (in a {type(value).__name__})"]
        elif value.is_nested or value.is_quantized:
            hidden.append(f"{path} ({value.layout}, {value.dtype})")
        else:
            value = value if value.layout is torch.strided else value.to_dense()
            complex_ = value.is_complex()
            tensors[path] = torch.view_as_real(value.resolve_conj()) if complex_ else value
    return tensors, hidden


def joined_values(parts: Sequence[Tensor]) -> Tensor:
    """Layer inputs (N, C, *spatial) of all parts as one; parts may differ in spatial sizes."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    columns = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], dim=1)
    return columns.reshape(1, len(columns), -1, *[1] * (parts[0].dim() - 3))


def moments(x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel of x (N, C, *spatial): (2, C), float64."""
    columns = x.detach().double().movedim(1, 0).flatten(1)
    return torch.stack([columns.mean(1), columns.std(1, correction=0)])


def join_axis(whole: torch.Size, shapes: Iterable[torch.Size]) -> int | None:
    """The axis along which tensors of these shapes join to one of shape `whole`.

    -1 if every part has the shape of the whole: then it is a mean over samples, or a count. None if
    the shapes do not fit together.
    """
    shapes = list(shapes)
    if all(shape == whole for shape in shapes):
        return -1
    for axis in range(len(whole)):
        rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        total = sum(shape[axis] for shape in shapes if axis < len(shape))
        if total == whole[axis] and rest == {(*whole[:axis], *whole[axis + 1 :])}:
            return axis
    return None


def pieces(dy: Tensor, shapes: Sequence[torch.Size], sizes: Sequence[int]) -> list[Tensor]:
    """The cotangents of each part: rows of `dy`, or its share; zeros if they don't fit."""
    axis = join_axis(dy.shape, shapes)
    if axis is None:
        return [dy.new_zeros(shape) for shape in shapes]
    if axis < 0:
        return [dy * (size / sum(sizes)) for size in sizes]
    return list(dy.split([shape[axis] for shape in shapes], axis))


def joined_outputs(y: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """What all parts returned in place of `y`, which is of the whole batch; None: it doesn't fit.

    Of tensors that each part has in the same shape it is the mean over samples; of whole numbers
    the common value, or the sum, since they may be counts.
    """
    axis = join_axis(y.shape, [part.shape for part in parts])
    parts = [part.to(y.device) for part in parts]
    if axis is None:
        return None
    if axis >= 0:
        return torch.cat(parts, axis)
    if not y.is_floating_point():
        return y if all(torch.equal(part, y) for part in parts) else torch.stack(parts).sum(0)
    return torch.stack([p * (n / sum(sizes)) for p, n in zip(parts, sizes, strict=True)]).sum(0)
