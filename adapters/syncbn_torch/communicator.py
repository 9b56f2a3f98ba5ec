"""The `Communicator` protocol over torch.distributed: one member per process.

Forward is one all_gather of 2C + 1 numbers, merged in rank order, backward one all_reduce
of 2C.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.errors import CommError
from syncbn_core.moments import Moments, merge_all
from syncbn_core.packed import PackedMoments
from syncbn_torch.cuda import collapse
from syncbn_torch.interop import as_array
from syncbn_torch.statistics import Channelwise, tensor_of

__all__ = ["DistributedCommunicator", "communicator_for"]


class DistributedCommunicator:
    """A process group as a communicator, for arrays and for tensors on the group's device."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise CommError(
                f"expected a process_group that this process belongs to, got one without rank "
                f"{dist.get_rank()} of the world; give each process its own group"
            )

    def merge_moments(self, moments: Moments) -> Moments:
        """Moments over all ranks, bitwise the same on each; an empty part takes part.

        Packed moments stay on their device, where the next kernel merges them: nothing waits, and
        the count over all ranks is known there only.
        """
        if isinstance(moments, PackedMoments):
            own = collapse(moments).parts
            parts = own.new_empty(self.size, own.shape[1])
            dist.all_gather_into_tensor(parts, own, group=self._group)
            return PackedMoments(parts, None, torch.cat)
        mean, m2 = tensor_of(moments.mean), tensor_of(moments.m2)
        packed = torch.cat([mean.new_tensor([float(moments.count)]), mean, m2])
        gathered = [torch.empty_like(packed) for _ in range(self.size)]
        dist.all_gather(gathered, packed, group=self._group)
        kind = (lambda t: t) if isinstance(moments.mean, Tensor) else as_array
        every = [(int(p[0]), *p[1:].view(2, -1)) for p in gathered]
        return merge_all([Moments(count, kind(mean), kind(m2)) for count, mean, m2 in every])

    def all_reduce_sums(self, sums: Channelwise) -> Channelwise:
        """Elementwise sum over all ranks; a new array, or tensor, as `sums` is."""
        total = tensor_of(sums).contiguous().clone()
        dist.all_reduce(total, group=self._group)
        return total if isinstance(sums, Tensor) else as_array(total)


def communicator_for(process_group: Any) -> DistributedCommunicator | None:
    """The group given, or the default one of an initialized world; None for a single process."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    communicator = DistributedCommunicator(process_group)
    return communicator if communicator.size > 1 else None
