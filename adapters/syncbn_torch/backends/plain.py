"""The steps in differentiable tensor operations, for all devices, derivatives and transforms."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncbn_core.backends.plain import Namespace, PlainOperations
from syncbn_core.labels import Labels
from syncbn_core.moments import Moments


class TensorNamespace(Namespace):
    """`Namespace` of torch, without autograd: it overwrites temporary tensors.

    On GPUs, torch's kernels mix 16-bit and float32 operands without converted copies.
    """

    def cast(self, values: Tensor, dtype: Any) -> Tensor:
        return values.to(dtype)

    def widest(self, values: Tensor) -> torch.dtype:
        return torch.float32 if values.device.type == "mps" else torch.float64

    def working(self, values: Tensor) -> torch.dtype:
        return torch.float64 if values.dtype is torch.float64 else torch.float32

    def number(self, value: Any, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):  # not `full`, which waits for the device
            return value.to(like)
        return torch.full((), value, dtype=like.dtype, device=like.device)

    def constant(self, values: Tensor) -> Tensor:
        return values.detach()

    def difference(self, x: Tensor, values: Tensor) -> Tensor:
        return x - values

    def multiple(self, x: Tensor, values: Tensor) -> Tensor:
        return x * values

    def product(self, values: Tensor, other: Tensor) -> Tensor:
        return values.mul_(other)

    def scaled(self, values: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.addcmul(shift, values, scale, out=_room(values, dtype))

    def plus_scaled(
        self, values: Tensor, other: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.addcmul(values, other, scale, out=_room(values, dtype))

    def assign(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        # one C call writes all, so that KeyboardInterrupt can't come between two writes
        deque(map(Tensor.copy_, targets, values), maxlen=0)

    def sigmoid(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def sum(self, values: Tensor, axes: tuple[int, ...]) -> Tensor:
        return values.sum(axes, dtype=self.working(values)).to(self.widest(values))

    def mean_and_m2(
        self, values: Tensor, axes: tuple[int, ...], count: int
    ) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(values, axes, correction=0)
        wide = self.widest(values)
        return mean.to(wide), var.to(wide) * count


def _room(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` itself if it has this dtype, else a new tensor."""
    return values if values.dtype is dtype else torch.empty_like(values, dtype=dtype)


class DifferentiableNamespace(TensorNamespace):
    """`TensorNamespace` without writing in place, for autograd, forward-mode AD and `torch.func`.

    On a CPU it computes in float64, so that derivatives have the same range as in the CPU kernels.
    """

    def working(self, values: Tensor) -> torch.dtype:
        return self.widest(values) if values.is_cpu else super().working(values)

    def product(self, values: Tensor, other: Tensor) -> Tensor:
        return values * other

    def scaled(self, values: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.addcmul(shift, values, scale).to(dtype)

    def plus_scaled(
        self, values: Tensor, other: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.addcmul(values, other, scale).to(dtype)

    mean_and_m2: Any = Namespace.mean_and_m2  # on a CPU `var_mean` takes ten times as long


class TracedNamespace(DifferentiableNamespace):
    """`TensorNamespace` for torch.compile, which traces no `out=` and plans memory by itself."""

    working: Any = TensorNamespace.working


class TensorOperations(PlainOperations):
    """Plain operations that merge parts across devices."""

    def near(self, values: Tensor, like: Tensor) -> Tensor:
        return values.to(like.device)

    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        first = parts[0].rows
        near = [part._replace(rows=self.near(part.rows, first)) for part in parts]
        return super().merge(near, labels)


OPERATIONS = TensorOperations(TensorNamespace(torch))  # called by the nodes of `autograd`
DIFFERENTIABLE = TensorOperations(DifferentiableNamespace(torch))  # torch differentiates these
TRACED = TensorOperations(TracedNamespace(torch))  # torch.compile traces these
