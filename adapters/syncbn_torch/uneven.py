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


def in_step(loader: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield the batches of `loader`, then empty ones, until no rank of `group` has any left.

    So all ranks call the model equally often. An empty batch is this rank's last one with every
    tensor in it cut to `tensor[:0]`; layers that synchronize count it as nothing. Without process
    groups the batches of `loader`.

    Costs one small `all_reduce` a step, on the current CUDA device with NCCL, else on the CPU.
    Raises `BatchSizeError`, on all ranks, if a rank has no batch at all while others have.
    """
    if not _initialized():
        yield from loader
        return
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    end: Any = object()
    last = end
    for batch in chain(loader, repeat(end)):
        if batch is not end:
            last = batch
        have = torch.tensor([batch is not end, last is not end], dtype=torch.int64, device=device)
        dist.all_reduce(have, group=group)
        with_batch, with_any = have.tolist()
        if not with_batch:
            return
        if with_any < dist.get_world_size(group):
            raise BatchSizeError(
                f"expected at least one batch on every rank, got none on "
                f"{dist.get_world_size(group) - with_any} of {dist.get_world_size(group)}; give "
                "each rank a batch, which may have no samples"
            )
        yield pytree.tree_map_only(Tensor, _emptied, last) if batch is end else batch


def _emptied(tensor: Tensor) -> Tensor:
    return tensor[:0] if tensor.ndim else tensor


def mean_over_ranks(losses: Tensor, group: Any = None) -> Tensor:
    """The loss to differentiate under wrappers that average gradients over ranks.

    Args:
        losses: those of this rank's samples, pixels or tokens, of any shape; also none.
        group: a process group of torch, or None for the default group.

    Returns `losses.sum() * world_size / count`, a scalar, where `count` is the number of losses of
    all ranks. Its mean over the ranks is the mean of all losses, and after
    `DistributedDataParallel` or `fully_shard` the gradients are those of that mean, however the
    losses are spread. Without process groups it is `losses.mean()`; 0 if nobody has a loss.

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
