"""`ThreadCommunicator`: the members of a group are threads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.arrays import arrays_of
from syncbn_core.comm.master_slave import SlavePipe, SyncMaster
from syncbn_core.comm.protocol import SAME_CALLS, CollectiveCall
from syncbn_core.errors import ArgumentError, DeviceError, DTypeError, ProtocolError, ShapeError

Array = Any


class _Message(NamedTuple):
    """A member's input of one call."""

    operation: str
    array: np.ndarray[Any, Any]
    call: CollectiveCall | None

    def __str__(self) -> str:
        return self.operation if self.call is None else self.call.what()


class ThreadCommunicator:
    """A member of a group of threads; `thread_group` makes one per thread.

    Takes NumPy arrays, and those of CuPy or torch on any device by copies on the host;
    `DeviceError` for others. Rank 0 is the master of a `SyncMaster`, whose module describes when a
    wait ends.

    If members make different calls, all get a `ProtocolError` and the group stays usable. If their
    arrays do not match, rank 0 gets a `ShapeError` or `DTypeError`, and the others a `CommAborted`
    that contains its text.
    """

    def __init__(self, rank: int, size: int, master: SyncMaster, pipe: SlavePipe | None) -> None:
        self.rank = rank
        self.size = size
        self._master = master
        self._pipe = pipe

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; a NumPy result is read-only."""
        return self._exchange("all_gather", values, call)

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; the arrays are added in rank order."""
        total = self._exchange("all_reduce", values, call)
        return total.copy() if isinstance(total, np.ndarray) else total

    def abort(self, error: BaseException) -> None:
        """Release every member now, because this one can't continue: `CommAborted` for all."""
        self._master.abort(error)

    def leave(self) -> None:
        """Declare that this member makes no more calls; members that wait for it are released."""
        self._master.leave(self.rank)

    def _exchange(self, operation: str, values: Array, call: CollectiveCall | None) -> Array:
        arrays = None if isinstance(values, (np.ndarray, np.generic)) else arrays_of(values)
        if arrays is None and not isinstance(values, (np.ndarray, np.generic)):
            kind = f"{type(values).__module__}.{type(values).__name__}"
            raise DeviceError(
                f"expected NumPy or CuPy arrays in a group of threads, got {kind}; convert them "
                "first, for example with numpy.asarray"
            )
        message = _Message(operation, arrays.to_host(values) if arrays else values, call)
        pipe = self._pipe
        reply = self._master.run_master(message) if pipe is None else pipe.run_slave(message)
        if isinstance(reply, ProtocolError):  # a new error per member: each adds its own traceback
            raise ProtocolError(str(reply))
        return arrays.from_host(reply.copy(), values) if arrays else reply


def thread_group(
    size: int, *, name: str = "thread group", timeout: float | None = None
) -> list[ThreadCommunicator]:
    """One communicator for each of `size` threads of this process, in rank order.

    Args:
        size: the number of members.
        name: the name of the group in error messages.
        timeout: the most seconds that a member waits for the others; None for the default
            (`syncbn_core.comm.get_default_timeout`).

    Raises `ArgumentError` if `size` is less than 1, or for a timeout that is not finite and > 0.
    """
    if size < 1:
        raise ArgumentError(f"expected a group of 1 or more members, got size={size}")
    master = SyncMaster(_combine, name=name, timeout=timeout)
    pipes = [master.register_slave(rank) for rank in range(1, size)]
    return [
        ThreadCommunicator(rank, size, master, pipe) for rank, pipe in enumerate([None, *pipes])
    ]


def _combine(ranked: list[tuple[Hashable, _Message]]) -> list[tuple[Hashable, Any]]:
    """The master's callback: replies a result, or an error for each to raise."""
    messages = [message for _, message in ranked]
    if len({message.operation for message in messages}) > 1:
        per_rank = {rank: str(message) for rank, message in ranked}
        remedy = next((message.call.remedy for message in messages if message.call), SAME_CALLS)
        error = ProtocolError(
            f"expected every member in the same operation, got {per_rank}; {remedy}"
        )
        # Returned, not raised here: so every member raises it, and none a CommAborted.
        return [(rank, error) for rank, _ in ranked]
    _require_alike(messages)
    values = [message.array for message in messages]
    result = np.stack(values) if messages[0].operation == "all_gather" else _added(values)
    result.flags.writeable = False  # all members share it
    return [(rank, result) for rank, _ in ranked]


def _require_alike(messages: list[_Message]) -> None:
    """Raise unless all arrays have the same shape and dtype."""
    arrays = [message.array for message in messages]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ShapeError(
            f"expected arrays of one shape from every member, got shapes {sorted(shapes)} in "
            f"{messages[0]}; check what each member passes"
        )
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        raise DTypeError(
            f"expected one dtype from every member, got {', '.join(sorted(map(str, dtypes)))} in "
            f"{messages[0]}; convert the arrays first"
        )


def _added(values: list[Array]) -> Array:
    """The sum of NumPy arrays, added in their order."""
    total = np.array(values[0])
    for value in values[1:]:
        total += value
    return total
