"""`OPERATIONS` for CPU tensors: the steps of `syncbn_core.numpy_steps` on their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.moments import Statistics
from syncbn_core.numpy_steps import Dense, NumpySteps, Wide, rounded, view_of, wide
from syncbn_core.steps import Affine, Norm, RunningStatistics
from syncbn_torch._torch_private import like
from syncbn_torch.arrays import (
    DTYPES,
    MEMORY,
    START,
    array_of,
    empty_like,
    tensor_of,
    views_of,
)

__all__ = ["OPERATIONS", "PlannedSteps"]

Array = np.ndarray[Any, Any]


class _Running(NamedTuple):
    """`RunningStatistics` in NumPy. `written`: the tensors of which autograd counts versions."""

    mean: Any
    var: Any
    num_batches_tracked: Any
    momentum: float | None
    written: Sequence[Tensor]


def _with_versions(running: RunningStatistics) -> list[Tensor]:
    # of inference tensors there are no versions; of others, a graph may have saved them
    return [b for b in running[:3] if b is not None and not b.is_inference()]


class TensorSteps(NumpySteps):
    """The steps for plain CPU tensors. Statistics and sums that are exchanged are NumPy arrays."""

    array: Any = staticmethod(array_of)
    empty_like: Any = staticmethod(empty_like)
    rounded: Any = staticmethod(
        lambda values, dtype: [tensor_of(row, dtype) for row in rounded(values, DTYPES[dtype])]
    )

    def threads(self) -> int:
        # torch.set_num_threads(1) also applies to our kernels
        return super().threads() if torch.get_num_threads() > 1 else 1

    def running(self, running: RunningStatistics) -> _Running:
        mean, var, counter = [array_of(own, written=True) for own in running[:3]]
        return _Running(mean, var, counter, running.momentum, _with_versions(running))

    def update_running(self, running: Any, statistics: Statistics) -> None:
        super().update_running(running, statistics)
        increment_version(running.written)


class PlannedSteps(TensorSteps):
    """`TensorSteps` for calls like that of x, whose tensors have been checked.

    Others are like x, affine and running if `_torch_private.like` says so of each. Such are read
    by what was found out here; nothing of these is kept. Tensors that differ from the memory that
    they have (negated, strided, gone) are taken as in `TensorSteps`.
    """

    def __init__(
        self, x: Tensor, affine: Affine, running: RunningStatistics | None, masked: bool
    ) -> None:
        self._serial = OPERATIONS.serial
        vectors = [t for t in (*affine, *(running or ())[:3]) if t is not None]
        view = view_of(array_of(x), masked) if x.numel() else None
        if (
            any(t.is_neg() or t._is_zerotensor() for t in (x, *vectors))
            or not all(t.is_contiguous() for t in vectors)
            or torch.empty_like(x, device="meta").stride() != x.stride()
        ):
            view = None
        self._view = view
        self._grad_dtype = (x if affine.weight is None else affine.weight).dtype
        if view is not None:
            self._of_x = view.shape, view.dtype, x.nbytes
            self._forms = [self._of_x]
            self._forms += [(tuple(t.shape), DTYPES[t.dtype], t.nbytes) for t in vectors]
            self._alike = like((x, x.detach()))

    def take(
        self, x: Tensor, affine: Affine, running: RunningStatistics | None, mask: Any = None
    ) -> Any:
        view, tensors = self._view, (x, *affine, *(running or ())[:3])
        views = None if view is None else views_of(tensors, self._forms)
        if view is None or views is None:
            return super().take(x, affine, running, mask)
        flat, weight, bias, *buffers = views
        own = Wide(wide(weight), wide(bias), self._grad_dtype, mask)
        held = None
        if running is not None:
            mean, var, counter = buffers
            held = _Running(mean, var, counter, running.momentum, _with_versions(running))
        return Dense(x, view, flat, view.of_mask(mask, x.shape)), own, held

    def take_pair(self, x: Tensor, dy: Tensor, affine: Any = None) -> tuple[Dense, Dense]:
        view, views = self._view, None
        if view is not None and self._alike(x, dy):
            views = views_of((x, dy), (self._of_x, self._of_x))
        if view is None or views is None:
            return super().take_pair(x, dy, affine)
        valid = view.of_mask(affine.mask, x.shape)
        return Dense(x, view, views[0], valid), Dense(dy, view, views[1])

    def _written(
        self, step: str, out: Any, x: Dense, sources: Sequence[Array], norm: Norm, *numbers: Any
    ) -> Any:
        view = self._view
        if view is None or out is not None or x.view is not view:
            return super()._written(step, out, x, sources, norm, *numbers)
        result = empty_like(x.given)
        target = np.ndarray(view.shape, view.dtype, MEMORY, result.data_ptr() - START)
        self._run(step, x, sources, norm, x.valid, *numbers, target)
        return result


OPERATIONS = TensorSteps()
