"""The ranks of a check: they tell each other what they do, so that none waits for ever."""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from syncbn_core.comm import CollectiveCall, Communicator
from syncbn_core.errors import ArgumentError, CommError, ProtocolError
from syncbn_torch.process_group import communicator_for, group_of
from syncbn_verify.copies import SYNCHRONIZED

T = TypeVar("T")


class Alone:
    """A check within this process, in `size` replicas: there is nobody to talk to."""

    kind = "replicas"
    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def together(self, work: Callable[[], T], expected: str) -> T:
        """What `work` returns."""
        return work()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which can be pickled, in rank order."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors of rank 0 to all ranks, in place."""

    def agree(self, lines: list[str], remedy: str) -> None:
        """Raise `ArgumentError` on every rank unless all ranks have the same lines of text."""

    def compare(self, text: str) -> None:
        """Raise `ProtocolError` on every rank unless all ranks do the same."""

    def wrong_groups(self, layers: Mapping[str, nn.Module]) -> dict[str, str]:
        """Why layers do not synchronize over this group, by name."""
        return {}


class Ranks(Alone):
    """The ranks of a process group, of which this process is one.

    Before every exchange of a layer, the ranks compare what they are about to do. A rank that has
    finished, or failed, takes part in these comparisons until all have. So every rank finds out
    in the same moment that their calls differ, and nobody waits for a message that never comes.
    """

    kind = "ranks"

    def __init__(self, process_group: Any) -> None:
        group = group_of(process_group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ArgumentError(
                "expected a process_group that this process belongs to; call this in the ranks of "
                "the group only"
            )
        super().__init__(dist.get_world_size(group))
        self._group = weakref.ref(group)  # one that outlives its end can abort the process
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.stopped: str = ""

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group())
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
        return super().from_first(value if self.rank == 0 else None)

    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.data, self.members[0], group=self._group())

    def agree(self, lines: list[str], remedy: str) -> None:
        first, *others = self.gather(lines)
        for rank, theirs in enumerate(others, start=1):
            for a, b in zip_longest(first, theirs, fillvalue="nothing more"):
                if a != b:
                    raise ArgumentError(
                        f"expected the same on all ranks, got {a} on rank 0 and {b} on rank "
                        f"{rank}; {remedy}"
                    )

    def add_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Sums over all ranks, which have tensors of the same names, in place."""
        for tensor in tensors.values():
            dist.all_reduce(tensor, group=self._group())

    def compare(self, text: str) -> None:
        if not self.stopped:
            said = self.gather(text)
            if len(set(said)) > 1:
                each = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))
                self.stopped = f"expected the same call from every rank, got {each}"
        if self.stopped:
            raise ProtocolError(self.stopped)

    def finish(self, what: str, error: str) -> str:
        """Wait until all ranks have finished; returns the first error of any rank, or ""."""
        with contextlib.suppress(ProtocolError):
            self.compare(f"{what} failed, {error}" if error else f"{what} is over")
        follows = bool(self.stopped) and (not error or self.stopped in error)
        text = self.stopped if follows else f"rank {self.rank}: {error}" if error else ""
        errors = [pair for pair in self.gather((follows, text)) if pair[1]]
        return str(min(errors)[1]) if errors else ""  # first those that follow from no other

    def wrong_groups(self, layers: Mapping[str, nn.Module]) -> dict[str, str]:
        def groups() -> dict[str, tuple[str, str]]:
            ours = {n: x for n, x in layers.items() if isinstance(x, SYNCHRONIZED)}
            return {name: self._group_of(layer.process_group) for name, layer in ours.items()}

        wrong: dict[str, str] = {}
        each = self.gather(self.together(groups, "layers with a usable process_group"))
        for name in each[0]:
            reasons = [found[name][0] for found in each if found[name][0]]
            if reasons:
                wrong[name] = reasons[0]
            elif len({found[name][1] for found in each}) > 1:
                wrong[name] = "its process_group is another one on some ranks. Give all the same"
        return wrong

    def _group_of(self, given: Any) -> tuple[str, str]:
        """Why a process_group is not that of the check, and its name."""
        remedy = f"; the batch was split over the ranks {self.members}. Give it their group"
        try:
            communicator = communicator_for(given)
        except CommError:
            return f"its process_group does not contain rank {self.rank}{remedy}", ""
        if isinstance(given, Communicator):
            size = 1 if communicator is None else communicator.size
            same = size == self.size
            return "" if same else f"its communicator has {size} of {self.size} ranks{remedy}", ""
        group = group_of(given)
        members = dist.get_process_group_ranks(group)
        same = set(members) == set(self.members)
        return (
            "" if same else f"its process_group has the ranks {members}{remedy}",
            group.group_name,
        )

    def watch(self, layers: Mapping[str, nn.Module]) -> None:
        """Let layers compare their calls on all ranks before they exchange anything."""
        for name, layer in layers.items():
            if isinstance(layer, SYNCHRONIZED):
                inner = communicator_for(layer.process_group)
                if inner is not None:
                    layer.process_group = _Watched(inner, self, name)


def group_for(count: int | None, process_group: Any, counted: str, default: int) -> Alone:
    """The ranks of a group, or this process alone with `count` parts, as the user asks."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if count is not None and process_group is not None:
        raise ArgumentError(f"expected {counted} or process_group, got both; leave one out")
    if count is not None or (process_group is None and not several):
        if count is not None and (not isinstance(count, int) or count < 2):
            raise ArgumentError(f"expected 2 or more {counted}, got {count!r}")
        return Alone(count or default)
    ranks = Ranks(process_group)
    if ranks.size < 2:
        raise ArgumentError("expected a process_group of 2 or more ranks, got one of 1 rank")
    return ranks


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
        size, dtype = "x".join(map(str, values.shape)), str(values.dtype).removeprefix("torch.")
        self._ranks.compare(f"{kind} of {self._name} ({size} {dtype})")


def first_line(error: Exception) -> str:
    """Class and message of an error, without what follows in further lines."""
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0]
