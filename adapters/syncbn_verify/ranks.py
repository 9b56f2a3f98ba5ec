"""A check over processes: the ranks tell each other what they do, so that none waits for ever."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncbn_core.comm import CollectiveCall, Communicator
from syncbn_core.errors import ArgumentError, CommError, ProtocolError
from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.process_group import communicator_for, group_of

__all__ = ["Ranks", "first_line"]

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, of which this process is one.

    Before every exchange of a layer, the ranks compare what they are about to do. A rank that has
    finished, or failed, takes part in these comparisons until all have. So every rank finds out
    in the same moment that their calls differ, and nobody waits for a message that never comes.
    """

    def __init__(self, process_group: Any) -> None:
        group = group_of(process_group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ArgumentError(
                "expected a process_group that this process belongs to; call verify_sync in the "
                "ranks of the group only"
            )
        self._group = weakref.ref(group)  # one that outlives its end can abort the process
        self.size = dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        self.stopped = ""

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which can be pickled, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], T], expected: str) -> T:
        """What `work` returns on this rank. If it raises on one rank, all ranks raise.

        Other ranks raise `ArgumentError`, which says what was `expected`, so that none goes on and
        waits. `work` must not communicate.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        texts = self.gather("" if error is None else first_line(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise ArgumentError(f"expected {expected}, but on rank {rank} it raised {text}")
        return result

    def from_first(self, value: Any) -> Any:
        """The value of rank 0 on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]

    def add_up(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The sums over all ranks, by name. A rank may lack some; `like` has all of them."""
        names = sorted(set().union(*self.gather(list(tensors))))
        sums = {name: tensors.get(name, torch.zeros_like(like[name])) for name in names}
        for total in sums.values():
            dist.all_reduce(total, group=self.group)
        return sums

    def agree(self, described: Mapping[str, str]) -> None:
        """Raise `ArgumentError` on every rank unless all ranks describe the same check.

        A digest is sent first: it has the same size everywhere, whatever the ranks are up to.
        """
        own = dict(described)
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return
        first, *others = self.gather(own)
        for rank, theirs in enumerate(others, start=1):
            for place in dict.fromkeys([*first, *theirs]):
                a, b = first.get(place, "nothing"), theirs.get(place, "nothing")
                if a != b:
                    what, _, where = place.partition(", ")
                    raise ArgumentError(
                        f"expected the same {what} on all ranks, got {where or what}: {a} on rank "
                        f"0 and {b} on rank {rank}; pass the same model and the whole batch"
                    )
        raise ArgumentError(
            "expected the same model and batch on all ranks, got their parts in unlike order; "
            "build the model in the same way everywhere"
        )

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors of rank 0 to all ranks, which have such tensors too, in place."""
        for tensor in tensors:
            dist.broadcast(tensor.data, self.members[0], group=self.group)

    def compare(self, text: str) -> None:
        """Raise `ProtocolError` on every rank unless all ranks do the same."""
        if self.stopped:
            raise ProtocolError(self.stopped)
        said = self.gather(text)
        if len(set(said)) > 1:
            each = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))
            self.stopped = f"expected the same call from every rank, got {each}"
            raise ProtocolError(self.stopped)

    def finish(self, what: str, error: str) -> str:
        """Wait until all ranks have finished; returns the first error of any rank, or ""."""
        if not self.stopped:
            with contextlib.suppress(ProtocolError):
                self.compare(f"{what} failed, {error}" if error else f"{what} is over")
        follows = bool(self.stopped) and (not error or self.stopped in error)
        text = self.stopped if follows else f"rank {self.rank}: {error}" if error else ""
        errors = [pair for pair in self.gather((follows, text)) if pair[1]]
        return str(min(errors)[1]) if errors else ""  # first those that follow from no other

    def wrong_groups(self, layers: Mapping[str, nn.Module]) -> tuple[dict[str, str], bool]:
        """Why layers do not synchronize over this group, and whether the model can run anyway."""
        own = self.together(
            lambda: {name: self._wrong_group(layer) for name, layer in layers.items()},
            "layers with a usable process_group",
        )
        wrong: dict[str, str] = {}
        can_run = True
        every = self.gather(own)
        for found in every:
            for name, (reason, runs, _) in found.items():
                can_run = can_run and runs
                if reason:
                    wrong.setdefault(name, reason)
        for name in layers:
            if name not in wrong and len({found[name][2] for found in every}) > 1:
                wrong[name] = "its process_group is another one on some ranks. Give all the same"
                can_run = False
        return wrong, can_run

    def _wrong_group(self, layer: nn.Module) -> tuple[str, bool, str]:
        """Why its group is wrong, whether it can run, and the name of a right group."""
        if not isinstance(layer, _SynchronizedBatchNorm):
            return "", True, ""
        remedy = (
            f"; the batch was split over the ranks {_listed(self.members)}. Give it their group"
        )
        try:
            communicator = communicator_for(layer.process_group)
        except CommError:
            return f"its process_group does not contain rank {self.rank}{remedy}", False, ""
        if isinstance(layer.process_group, Communicator):
            size = 1 if communicator is None else communicator.size
            same = size == self.size
            reason = "" if same else f"its communicator has {size} of {self.size} ranks{remedy}"
            return reason, True, ""
        group = group_of(layer.process_group)
        members = dist.get_process_group_ranks(group)
        if set(members) == set(self.members):
            return "", True, str(group.group_name)
        inside = set(members) <= set(self.members)
        return f"its process_group has the ranks {_listed(members)}{remedy}", inside, ""

    def watch(self, layers: Mapping[str, nn.Module]) -> None:
        """Let layers compare their calls on all ranks before they exchange anything."""
        for name, layer in layers.items():
            if isinstance(layer, _SynchronizedBatchNorm):
                inner = communicator_for(layer.process_group)
                if inner is not None:
                    layer.process_group = _Watched(inner, self, name)


class _Watched:
    """The communicator of one layer, which first compares the calls of all ranks."""

    def __init__(self, inner: Communicator, ranks: Ranks, name: str) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._ranks, self._name = inner, ranks, name

    def all_gather(self, values: Any, call: CollectiveCall | None = None) -> Any:
        self._compare("forward", values, call)
        return self._inner.all_gather(values, call)

    def all_reduce(self, values: Any, call: CollectiveCall | None = None) -> Any:
        self._compare("backward", values, call)
        return self._inner.all_reduce(values, call)

    def _compare(self, kind: str, values: Any, call: CollectiveCall | None) -> None:
        if call is not None:
            kind, *_ = call.name().partition(" of ")
        self._ranks.compare(f"{kind} of {self._name}{_type_of(values)}")


def first_line(error: Exception) -> str:
    """Class and message of an error, without what follows in further lines."""
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0]


def _type_of(values: Any) -> str:
    return f" ({'x'.join(map(str, values.shape))} {str(values.dtype).removeprefix('torch.')})"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
