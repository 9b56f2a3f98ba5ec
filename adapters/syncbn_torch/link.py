"""How a replica of a layer reaches the other replicas, and what it does when they are gone."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from syncbn_core.comm import SyncMaster
from syncbn_core.errors import CheckpointError, CommAborted, StateError
from syncbn_core.moments import Moments
from syncbn_torch import functional
from syncbn_torch.arithmetic import same_bits
from syncbn_torch.names import name_of
from syncbn_torch.replicate import CallbackContext
from syncbn_torch.statistics import recomputing

__all__ = ["Link", "Unconnected", "adopted"]


class Link:
    """A replica's way to the other replicas, for one forward of the replicated model."""

    def __init__(self, context: CallbackContext, copy_id: int) -> None:
        self.context = context
        self.is_master = copy_id == 0
        if self.is_master:
            context.sync_master = SyncMaster(functional.merge_members, name=context.name)
        else:
            self.pipe = context.sync_master.register_slave(copy_id)
        self.history: list[tuple[Moments, functional.Call, bool]] = []

    def check(self) -> None:
        """Raise if nobody waits for this replica any more."""
        if self.context.disowned:
            raise CommAborted(
                f"{self.context.name}: the forward that this replica belonged to was given up: "
                f"{self.context.disowned}"
            )

    def exchange(
        self, x: Tensor, member: functional.Member, edge: Tensor, call: functional.Call
    ) -> tuple[Tensor, bool]:
        """`(edge from the merging node, whether it merged anything)`; sets the member's call.

        When the forward is over, the others can't be reached any more; what runs then is
        activation checkpointing, and gets the statistics of the first time.
        """
        if self.context.is_over():
            member.call = self._earlier_call(member.part)
            return edge, False
        call.context = self.context
        message = (member, edge, call, tuple(x.shape))
        if self.is_master:
            merged = self.context.sync_master.run_master(message)
        else:
            merged = self.pipe.run_slave(message)
        self.history.append((member.part, member.call, torch.is_grad_enabled()))
        return merged, True

    def _earlier_call(self, part: Moments) -> functional.Call:
        found = [(call, graph) for seen, call, graph in self.history if same_bits(seen, part)]
        if not found:
            raise CheckpointError(
                f"{self.context.name} of a replica was called after the forward of its "
                "DataParallelWithCallback, with an input that it had not seen; call the wrapped "
                "model instead, and keep random numbers (dropout) out of what is checkpointed in "
                "replicas: they share one generator"
            )
        if torch.is_grad_enabled() and not all(graph for _, graph in found):
            raise CheckpointError(
                f"{self.context.name} was recomputed by a reentrant checkpoint, one replica at a "
                "time, which can't be synchronized; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        call = found[0][0]
        if not all(same_bits(call.total, other.total) for other, _ in found):
            raise CheckpointError(
                f"{self.context.name} was recomputed with an input that a replica had in several "
                "calls, whose statistics over all replicas differ; checkpoint these calls apart "
                "from each other by layers of their own, or not at all"
            )
        return call


class Unconnected:
    """The link of a copy to which no replication callback has come yet: `nn.DataParallel`'s."""

    is_master = False

    def __init__(self, original: nn.Module) -> None:
        self.original = original

    def check(self) -> None:
        """Nothing is wrong until the other copies are needed."""

    def exchange(self, *_: Any) -> NoReturn:
        raise StateError(
            f"{name_of(self.original)} runs in a replica that can't reach the others: no "
            "replication callback came; use DataParallelWithCallback instead of nn.DataParallel, "
            "or call patch_replication_callback on it"
        )


class _Name:
    """What errors call a layer; looked for when it is printed, as that takes time."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __str__(self) -> str:
        return name_of(self.layer)


class _BareContext(CallbackContext):
    """For wrappers of other projects, which tell neither size nor end of a forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(cast(str, _Name(layer)))

    def is_over(self) -> bool:
        """What runs in backward is a recomputation."""
        return recomputing()


def adopted(context: Any, layer: nn.Module) -> CallbackContext:
    """`context`, or one of ours that the copies of `layer` share through any other object."""
    if isinstance(context, CallbackContext):
        return context
    own: CallbackContext | None = getattr(context, "syncbn_context", None)
    if own is None:
        own = context.syncbn_context = _BareContext(layer)
    return own
