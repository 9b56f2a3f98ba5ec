"""Figures of one comparison: which tensors, how far they differ, how far they may."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncbn_torch.data_parallel.pytrees import Tree, hidden_tensor

__all__ = [
    "Found",
    "Tolerance",
    "both_nan",
    "buffer_difference",
    "difference",
    "found_in",
    "join_axis",
    "joined",
    "largest",
    "moments",
    "scale_of",
    "shaken",
    "tolerance",
]


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding.

    Attributes:
        layer, model: the largest difference of a layer's results, and of the whole model's, as a
            share of the scale that `scale_of` gives. In 16 bits rounding grows so much that nothing
            can be said about the whole model.
        shake: the relative size of the random changes that show how far rounding can lead.
        factor: how many times their effect a difference may be.
    """

    layer: float
    model: float
    shake: float
    factor: float


def _tolerance(
    dtype: torch.dtype, layer: float, model: float, steps: int, factor: float
) -> Tolerance:
    return Tolerance(layer, model, steps * torch.finfo(dtype).eps, factor)


_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: _tolerance(torch.float64, 1e-8, 1e-6, 64, 1000),
    torch.float32: _tolerance(torch.float32, 2e-4, 1e-2, 16, 100),
    torch.float16: _tolerance(torch.float16, 2e-2, math.inf, 2, 4),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """The tolerance for tensors of `dtype`; types of 16 bits have the widest."""
    return _TOLERANCES.get(dtype) or _tolerance(torch.bfloat16, 2e-2, math.inf, 2, 4)


@dataclass
class Found:
    """The tensors in what a model returns, with the paths to them.

    Complex ones are seen as pairs of real numbers, NumPy arrays as tensors. `hidden`: the paths to
    tensors which can't be compared, since nothing is known about the class of what holds them.
    """

    tensors: list[Tensor]
    paths: list[str]
    hidden: list[str]


def found_in(output: Any) -> Found:
    """What can be compared in a model's output: in containers, or attributes of one object."""
    found = Found([], [], [])
    _collect(output, "output", found)
    attributes = getattr(output, "__dict__", None)
    if not found.tensors and not isinstance(output, Tensor) and attributes:
        found.hidden.clear()
        for name, value in attributes.items():
            if value is not output:
                _collect(value, f"output.{name}", found)
    return found


def _collect(tree: Any, root: str, found: Found) -> None:
    """Append what is in `tree`."""
    nested = Tree(tree)
    for path, value in zip(nested.paths(root), nested.values, strict=True):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(np.array(value))
        if isinstance(value, Tensor):
            real = _real(value)
            if real is None:
                found.hidden.append(f"{path} ({value.layout}, {value.dtype})")
            else:
                found.tensors.append(real)
                found.paths.append(path)
        elif (place := hidden_tensor(value)) is not None:
            found.hidden.append(f"{path}{place} (in a {type(value).__name__})")


def _real(tensor: Tensor) -> Tensor | None:
    """A dense tensor with the same values, of complex ones real and imaginary parts, or None."""
    if tensor.is_nested or tensor.is_quantized:
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def shaken(tensor: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """`tensor` with each value changed by a random share of at most `amount`, as rounding does."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return tensor
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    changes = 2 * torch.rand(real.shape, generator=generator, dtype=torch.float64) - 1
    real = real * (1 + amount * changes).to(real)
    return torch.view_as_complex(real) if tensor.is_complex() else real


def scale_of(
    expected: Tensor, limit: float, tolerance: Tolerance, other: Tensor | None = None
) -> Tensor:
    """What differences of each value are shares of; shape of `expected`, float64.

    It is the value itself, or a usual one of the tensor if that is larger. So one huge value hides
    nothing. A value of rounding alone has a larger scale: `limit` times it is `tolerance.factor`
    times the effect of small changes. `other`: the result with such changes of what went in.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.zeros((), dtype=torch.float64, device=expected.device)
    values = _doubled(expected).abs()
    scale = values + _usual(values)
    noise = torch.zeros_like(values)
    if other is not None and other.shape == expected.shape:
        noise = (_doubled(other).to(values.device) - _doubled(expected)).abs()
        noise = noise.nan_to_num(0.0, 0.0)
    floor = tolerance.shake / tolerance.factor  # nothing may go in, as where the model makes ones
    return scale + tolerance.factor / limit * (noise + _usual(noise) + floor)


def _usual(values: Tensor) -> float:
    """The median of finite values that are at least 0."""
    finite = values[values.isfinite()]
    return finite.median().item() if finite.numel() else 0.0


def difference(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """The largest difference, each as a share of its `scale`.

    NaN and infinity equal themselves. Different shapes, or NaN in one only, give infinity.
    """
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = _doubled(actual).to(expected.device), _doubled(expected)
    differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if not differs.any():
        return 0.0
    shares = ((actual - expected).abs() / scale.expand_as(expected))[differs]
    # infinity minus infinity of another sign, or NaN in one only
    return shares.nan_to_num(math.inf, math.inf).max().item()


def buffer_difference(
    after: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    limit: float,
    allowed: Tolerance,
) -> float | None:
    """The largest difference of tensors by name; `other`: after small changes."""
    return largest(
        difference(after[name], tensor, scale_of(tensor, limit, allowed, other.get(name)))
        for name, tensor in expected.items()
        if name in after
    )


def both_nan(actual: Tensor, expected: Tensor) -> bool:
    """Whether some value is NaN in both, so that it can't be compared."""
    return actual.shape == expected.shape and bool(
        (actual.isnan().to(expected.device) & expected.isnan()).any()
    )


def _doubled(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def largest(figures: Iterable[float | None]) -> float | None:
    """The largest figure that is known; None if none is."""
    return max((figure for figure in figures if figure is not None), default=None)


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
