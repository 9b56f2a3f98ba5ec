"""Ranks with unlike numbers of batches or samples: `in_step`, `mean_over_ranks`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.errors import BatchSizeError, DTypeError
from syncbn_torch._torch_private import pytree

__all__ = ["in_step", "mean_over_ranks"]


def in_step(loader: Iterable[Any], group: Any = None, *, empty: Any = None) -> Iterator[Any]:
    """Yield the batches of `loader`, then empty ones, until no rank of `group` has any left.

    So all ranks call the model equally often; layers that synchronize count an empty batch as
    nothing. Without process groups these are the batches of `loader`.

    Args:
        loader: any iterable of batches, as many as this rank has.
        group: a process group of torch, or None for the default group.
        empty: a batch without samples. None: the last batch with every tensor in it cut to
            `tensor[:0]`, which is wrong for lists with a tensor per sample.

    Costs one small `all_reduce` a step, on the current CUDA device with NCCL, else on the CPU.
    Raises `BatchSizeError` on all ranks if a rank without `empty` has no batch while others have.
    """
    if not _initialized():
        yield from loader
        return
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    size, end = dist.get_world_size(group), object()
    last: Any = end
    for batch in chain(loader, repeat(end)):
        if batch is not end:
            last = batch
        ready = last is not end or empty is not None
        have = torch.tensor([batch is not end, ready], dtype=torch.int64, device=device)
        dist.all_reduce(have, group=group)
        with_batch, of_ready = have.tolist()
        if not with_batch:
            return
        if of_ready < size:
            raise BatchSizeError(
                f"expected a batch on every rank, got none on {size - of_ready} of {size}; give "
                "in_step a batch without samples as `empty`"
            )
        if batch is not end:
            yield batch
        else:
            yield empty if empty is not None else pytree.tree_map_only(Tensor, _emptied, last)


def _emptied(tensor: Tensor) -> Tensor:
    return tensor[:0] if tensor.ndim else tensor


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
    return losses.sum() * size / count.clamp(min=1)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
