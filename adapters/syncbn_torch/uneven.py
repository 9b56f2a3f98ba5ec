"""Ranks with unlike numbers of batches or samples: `in_step`, `mean_over_ranks`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.errors import BatchSizeError, DTypeError
from syncbn_torch.data_parallel.pytrees import Tree, hidden_tensor


def in_step(loader: Iterable[Any], group: Any = None, *, empty: Any = None) -> Iterator[Any]:
    """Yield the batches of `loader`, then empty ones, until no rank of `group` has any left.

    So all ranks call the model equally often; layers that synchronize count an empty batch as
    nothing. Without process groups these are the batches of `loader`.

    Args:
        loader: any iterable of batches, as many as this rank has.
        group: a process group of torch, or None for the default group.
        empty: a batch without samples. None: the last batch with every tensor and NumPy array in
            it cut to `[:0]`, which is wrong for lists with a tensor per sample.

    Costs one small `all_reduce` a step, on the current CUDA device with NCCL, else on the CPU.
    Raises `BatchSizeError` on all ranks if others have batches while a rank without `empty` had
    none, or one without tensors, or with some that an object of an unknown class holds.
    """
    if not _initialized():
        yield from loader
        return
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    size, end = dist.get_world_size(group), object()
    last: Any = None
    for batch in chain(loader, repeat(end)):
        if batch is end and empty is None:
            empty = _emptied(last)
        stuck = batch is end and empty is None
        have = torch.tensor([batch is not end, stuck], dtype=torch.int64, device=device)
        dist.all_reduce(have, group=group)
        with_batch, of_stuck = have.tolist()
        if not with_batch:
            return
        if of_stuck:
            raise BatchSizeError(
                f"expected a batch on every rank, got none on {of_stuck} of {size}, and in_step "
                "can't make one without samples there; give it as `empty`"
            )
        last = batch if batch is not end else last
        yield batch if batch is not end else empty


def _emptied(batch: Any) -> Any:
    """`batch` without samples; None where there is no way, so that no other rank waits."""
    found = Tree(batch)
    arrays = [isinstance(value, Tensor | np.ndarray) for value in found.values]
    if not any(arrays) or any(map(hidden_tensor, found.values)):
        return None
    with suppress(Exception):  # of a class that can't be made anew, of tensors of other layouts
        return found.made_of(
            value[:0] if is_array and value.ndim else value
            for value, is_array in zip(found.values, arrays, strict=True)
        )


def mean_over_ranks(losses: Tensor, group: Any = None) -> Tensor:
    """The loss to differentiate under wrappers that average gradients over ranks.

    Args:
        losses: one per sample, pixel or token of this rank, in any shape; may be empty.
        group: a process group of torch, or None for the default group.

    Returns `losses.sum() * world_size / count`, a scalar, where `count` is the number of losses of
    all ranks. Its mean over the ranks is the mean of all losses, and after
    `DistributedDataParallel` or `fully_shard` the gradients are those of that mean, however the
    losses are spread. Without process groups it is `losses.mean()`; 0 if no rank has a loss.

    Every rank calls it. Raises `DTypeError` if `losses` is no tensor of floating point numbers.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise DTypeError(f"expected a tensor of floating point losses, got {got}")
    count = torch.tensor(losses.numel(), device=losses.device)
    size = 1
    if _initialized():
        dist.all_reduce(count, group=group)
        size = dist.get_world_size(group)
    wide = torch.promote_types(losses.dtype, torch.float32)  # sums of 16 bits overflow
    return (losses.sum(dtype=wide) * size / count.clamp(min=1)).to(losses.dtype)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
