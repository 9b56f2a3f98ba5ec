"""The steps of an implementation by mean and invstd, as functions: for tests that compare them."""

from typing import Any

import numpy as np

from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Affine, Norm, Operations

Array = np.ndarray[Any, Any]
RULE = NormRule()


class Steps:
    """`Steps(operations)`: each step with plain arguments; `parallel=False` in one thread."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    def chosen(self, parallel: bool) -> Operations:
        return self.operations if parallel else self.operations.serial

    def moments(self, x: Array, *, parallel: bool = True) -> Moments:
        chosen = self.chosen(parallel)
        moments: Moments = chosen.moments(chosen.take(x, Affine(), None)[0])
        return moments

    def normalize(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        bias: Array | None,
        *,
        out: Array | None = None,
        parallel: bool = True,
    ) -> Array:
        """`y = (x - mean) * invstd * weight + bias`."""
        chosen = self.chosen(parallel)
        own, affine, _ = chosen.take(x, Affine(weight, bias), None)
        y: Array = chosen.forward(own, self.norm(mean, invstd, affine), None, out)
        return y

    def backward_reduce(
        self, x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
    ) -> tuple[Array, Array]:
        """`(sum(dy), sum(dy * xhat))`."""
        operations = self.chosen(parallel)
        pair, (_, affine, _) = operations.take_pair(x, dy), operations.take(x, Affine(), None)
        sums = operations.backward_reduce(*pair, self.norm(mean, invstd, affine))
        return sums.exchange[0], sums.exchange[1]

    def backward_input(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        mean_dy: Array,
        mean_dy_xhat: Array,
        *,
        out: Array | None = None,
        parallel: bool = True,
    ) -> Array:
        """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`."""
        total = np.stack([mean_dy, mean_dy_xhat])  # over a count of 1
        chosen = self.chosen(parallel)
        _, affine, _ = chosen.take(x, Affine(weight), None)
        operands = (self.norm(mean, invstd, affine), total, out)
        dx: Array = chosen.backward_input(*chosen.take_pair(x, dy), *operands)
        return dx

    def norm(self, mean: Array, invstd: Array, affine: Any) -> Norm:
        """By statistics of one value per channel."""
        table = np.concatenate([[1], mean, np.zeros_like(mean), invstd], dtype=float)
        return Norm(Statistics(table, 1), affine, RULE)
