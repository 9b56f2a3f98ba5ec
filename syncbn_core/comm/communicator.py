"""`Communicator`: the one protocol by which layers reach the other members of their group.

Forward sends one message, a part's moments; backward one, the two sums per channel. Results
are bitwise the same on every member: parts are combined in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from syncbn_core.comm.device_message import Parcel, combine_parcels, copy_of, is_on_device
from syncbn_core.comm.master_slave import SlavePipe, SyncMaster
from syncbn_core.comm.site import Located, Site
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import ArgumentError, DeviceError, DTypeError, ProtocolError, ShapeError
from syncbn_core.moments import Moments, merge_all

__all__ = ["Communicator", "SingleCommunicator", "ThreadCommunicator", "thread_group"]

Array = Any


@runtime_checkable
class Communicator(Protocol):
    """What a layer needs of its group. Every member makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This member's number, 0 to `size - 1`."""

    @property
    def size(self) -> int:
        """Members in the group."""

    def merge_moments(self, moments: Moments) -> Moments:
        """Moments of all members' parts together; an empty part takes part like any other."""

    def all_reduce_sums(self, sums: Array) -> Array:
        """Elementwise sum over the members of a float64 array of one shape; a new array."""


class SingleCommunicator:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def merge_moments(self, moments: Moments) -> Moments:
        return moments

    def all_reduce_sums(self, sums: Array) -> Array:
        return copy_of(sums)


class _Message(NamedTuple):
    """What a member brings to a call; `forward` as in `Located`."""

    operation: str
    forward: int
    site: Site | None
    value: Any

    def __str__(self) -> str:
        if not self.forward:
            return self.operation
        name = self.site.name() if self.site else "no layer"
        return f"backward of {name}, forward in call {self.forward}"


class ThreadCommunicator(Located):
    """A member of a group of threads; made by `thread_group`, one per thread.

    Rank 0 is the master of a `SyncMaster`, so waits end as described there. Members in unlike
    calls all get a `ProtocolError`, and can go on.
    """

    def __init__(self, rank: int, size: int, master: SyncMaster, pipe: SlavePipe | None) -> None:
        self.rank = rank
        self.size = size
        self._master = master
        self._pipe = pipe
        self._calls = count(1)  # the one of all views

    def merge_moments(self, moments: Moments) -> Moments:
        number, merged = self._exchange("merge_moments", 0, moments)
        if self._site is not None:
            self._forward = number
        total: Moments = merged
        return total

    def all_reduce_sums(self, sums: Array) -> Array:
        _, total = self._exchange("all_reduce_sums", self._forward, sums)
        return copy_of(total)  # members may share the reply

    def abort(self, error: BaseException) -> None:
        """Release every member: this one can't go on because of `error`."""
        self._master.abort(error)

    def leave(self) -> None:
        """Say that this member makes no more calls; who waits for one is released."""
        self._master.leave(self.rank)

    def _exchange(self, operation: str, forward: int, value: Any) -> tuple[int, Any]:
        """`(number of the call, what came of it)`."""
        on_device = is_on_device(value)
        given = Parcel(value, self.size) if on_device else value
        message = _Message(operation, forward, self._site, given)
        pipe, number = self._pipe, next(self._calls)
        reply = self._master.run_master(message) if pipe is None else pipe.run_slave(message)
        if isinstance(reply, ProtocolError):  # one for each member, as each adds its traceback
            raise ProtocolError(str(reply))
        return number, reply.open() if on_device else reply


def thread_group(
    size: int, *, name: str = "thread group", timeout: float | None = None
) -> list[ThreadCommunicator]:
    """One communicator for each of `size` threads of this process, in the order of ranks.

    `timeout`: seconds that a member waits for the others at most; None: the process's default.
    """
    if size < 1:
        raise ArgumentError(f"expected a group of 1 or more members, got size={size}")
    master = SyncMaster(_combine, name=name, timeout=timeout)
    pipes = [master.register_slave(rank) for rank in range(1, size)]
    return [
        ThreadCommunicator(rank, size, master, pipe) for rank, pipe in enumerate([None, *pipes])
    ]


def _combine(messages: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    operations = {message.operation for _, message in messages}
    if len({(message.operation, message.forward) for _, message in messages}) > 1:
        per_rank = {rank: str(message) for rank, message in messages}
        error = ProtocolError(
            f"expected every member in the same operation, got {per_rank}; all members have to "
            "run the same layers forward and backward in the same order, and one loss"
        )
        return [(rank, error) for rank, _ in messages]  # so that all can go on
    values = [message.value for _, message in messages]
    parcels = [value for value in values if isinstance(value, Parcel)]
    if parcels and len(parcels) < len(values):
        raise DeviceError(
            f"expected arrays on the host or on GPUs from all members, got {len(parcels)} of "
            f"{len(values)} on GPUs; move them to one side"
        )
    contents = [value.value for value in parcels] if parcels else values
    sizes = set(map(_shape, contents))
    if len(sizes) > 1:
        raise ShapeError(
            f"expected the same number of channels from every member, got shapes {sorted(sizes)}"
        )
    dtypes = {str(getattr(value, "dtype", None)) for value in contents}
    if len(dtypes) > 1:
        raise DTypeError(f"expected one dtype from every member, got {', '.join(sorted(dtypes))}")
    if parcels:
        replies = combine_parcels(parcels)
        return [(rank, reply) for (rank, _), reply in zip(messages, replies, strict=True)]
    total: Any
    if operations == {"merge_moments"}:
        total = merge_all(values)
    else:
        total = values[0].copy()
        for value in values[1:]:
            total += value
    return [(rank, total) for rank, _ in messages]


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, DeviceMoments):
        return tuple(value.parts.shape)
    return tuple(np.shape(value.mean if isinstance(value, Moments) else value))
