"""The steps in differentiable tensor operations, for all devices, derivatives and transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncbn_core.arrays import Arrays
from syncbn_core.backends.plain import PlainOperations
from syncbn_torch.backends.tensors import ARRAYS, TensorArrays


class DifferentiableArrays(TensorArrays):
    """`TensorArrays` without writing in place, for autograd, forward-mode AD and `torch.func`.

    On a CPU it computes in float64, so that derivatives have the same range as in the CPU kernels.
    """

    def working(self, values: Tensor) -> torch.dtype:
        return self.widest(values) if values.is_cpu else super().working(values)

    def count_of(self, mask: Tensor) -> Any:
        return mask.sum()

    def product(self, values: Tensor, other: Tensor) -> Tensor:
        return values * other

    def scaled(self, values: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.addcmul(shift, values, scale).to(dtype)

    def plus_scaled(
        self, values: Tensor, other: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch.addcmul(values, other, scale).to(dtype)

    mean_and_m2: Any = Arrays.mean_and_m2  # on a CPU `var_mean` takes ten times as long


class TracedArrays(DifferentiableArrays):
    """`TensorArrays` for torch.compile, which traces no `out=` and plans memory by itself."""

    working: Any = TensorArrays.working

    def sum(self, values: Tensor, axes: tuple[int, ...]) -> Tensor:
        return values.sum(axes, dtype=self.working(values))


class TracedOperations(PlainOperations):
    """The steps that torch.compile traces."""

    def shift(self, x: Tensor) -> Tensor:
        # Inductor stores what it concatenates; else it computes the shift for each element.
        shift = super().shift(x)
        return torch.cat([shift, shift.new_zeros(1)])[:-1] if x.is_cpu else shift


OPERATIONS = PlainOperations(ARRAYS)  # called by the nodes of `autograd`
DIFFERENTIABLE = PlainOperations(DifferentiableArrays(torch))  # torch differentiates these
TRACED = TracedOperations(TracedArrays(torch))
