"""`TensorSteps`: the steps of `syncbn_core.numpy_steps` on the memory of CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from syncbn_core.moments import Statistics
from syncbn_core.numpy_steps import Dense, NumpySteps, View, Wide, rounded, view_of_strides, wide
from syncbn_core.steps import Affine, Norm, RunningStatistics
from syncbn_torch.arrays import DTYPES, MEMORY, START, empty_like, tensor_of, views_of

Array = np.ndarray[Any, Any]


class _Running(NamedTuple):
    """`RunningStatistics` in NumPy. `written`: each tensor, and itself or a copy: the memory."""

    mean: Any
    var: Any
    num_batches_tracked: Any
    momentum: float | None
    written: Sequence[tuple[Tensor, Any]]


class TensorSteps(NumpySteps):
    """The steps for calls like that of x, whose tensors have been checked.

    Others are like x, affine and running if `_torch_private.like` says so of each. Nothing of these
    is kept. What has gaps, is not aligned or not stored as it is read (negated) is copied in each
    call. `take` and `take_pair` raise `StateError` for tensors whose memory is gone.
    """

    rounded: Any = staticmethod(
        lambda values, dtype: [tensor_of(row, dtype) for row in rounded(values, DTYPES[dtype])]
    )

    def __init__(
        self, x: Tensor, affine: Affine, running: RunningStatistics | None, masked: bool
    ) -> None:
        super().__init__()
        self._grad_dtype = (x if affine.weight is None else affine.weight).dtype
        strides, self._view = x.stride(), _view_of(x, x.stride(), masked)
        if self._view is None:  # x has gaps
            strides = torch.empty_like(x, device="meta").stride()
            self._view = _view_of(x, strides, masked)
        shape, dtype = tuple(x.shape), DTYPES[x.dtype]
        if self._view is not None:
            shape, dtype = self._view.shape, self._view.dtype
        self._forms = [(strides, shape, dtype, x.nbytes)]
        vectors = [t for t in (*affine, *(running or ())[:3]) if t is not None]
        for t in vectors:
            self._forms.append(((1,) * t.dim(), tuple(t.shape), DTYPES[t.dtype], t.nbytes))

    def threads(self) -> int:
        # torch.set_num_threads(1) also applies to our kernels
        return super().threads() if torch.get_num_threads() > 1 else 1

    def take(
        self, x: Tensor, affine: Affine, running: RunningStatistics | None, mask: Any = None
    ) -> Any:
        held, views = views_of((x, *affine, *(running or ())[:3]), self._forms)
        flat, weight, bias, *buffers = views
        own = Wide(wide(weight), wide(bias), self._grad_dtype, mask)
        updated = None
        if running is not None:
            mean, var, counter = buffers
            pairs = zip(running[:3], held[3:], strict=True)
            written = [(t, own) for t, own in pairs if t is not None]
            updated = _Running(mean, var, counter, running.momentum, written)
        return Dense(held[0], self._view, flat, self._valid(mask, x)), own, updated

    def take_pair(self, x: Any, dy: Any, affine: Any = None) -> tuple[Dense, Dense]:
        (x, dy), (flat, flat_dy) = views_of((x, dy), [self._forms[0]] * 2)
        valid = self._valid(affine.mask, x)
        return Dense(x, self._view, flat, valid), Dense(dy, self._view, flat_dy)

    def _valid(self, mask: Array | None, x: Tensor) -> Array | None:
        return None if mask is None or self._view is None else self._view.of_mask(mask, x.shape)

    def update_running(self, running: Any, statistics: Statistics) -> None:
        super().update_running(running, statistics)
        # of inference tensors there are no versions; of others, a graph may have saved them
        same = [t for t, own in running.written if own is t and not t.is_inference()]
        increment_version(same)
        for tensor, own in running.written:
            if own is not tensor:
                tensor.copy_(own)

    def _written(self, out: Any, x: Dense, dy: Dense | None, norm: Norm, means: Any) -> Any:
        view, in_place = x.view, out is x.given
        result = out if in_place else empty_like(x.given)
        if view is not None:
            target = x.flat
            if not in_place:
                target = np.ndarray(view.shape, view.dtype, MEMORY, result.data_ptr() - START)
            self._run("write", x, dy, norm, means, target)
        return result if out is None or in_place else out.copy_(result)


def _view_of(x: Tensor, strides: Sequence[int], masked: bool) -> View | None:
    """How kernels index memory of these strides; None if it has gaps, or x is empty."""
    dtype = DTYPES[x.dtype]
    in_bytes = tuple([dtype.itemsize * stride for stride in strides])
    return view_of_strides(tuple(x.shape), in_bytes, dtype, masked) if x.numel() else None
