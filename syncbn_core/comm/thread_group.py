"""`ThreadCommunicator`: the members of a group are threads, with NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.comm.device_message import (
    DeviceMessage,
    Reply,
    add_messages,
    gather_messages,
    is_on_device,
)
from syncbn_core.comm.master_slave import SlavePipe, SyncMaster
from syncbn_core.comm.protocol import SAME_CALLS, CollectiveCall, CommunicatorBase
from syncbn_core.errors import ArgumentError, DeviceError, DTypeError, ProtocolError, ShapeError

__all__ = ["ThreadCommunicator", "thread_group"]

Array = Any


class _Message(NamedTuple):
    """A member's input of one call. `value`: a NumPy array, or a `DeviceMessage` for CuPy."""

    operation: str
    value: Any
    call: CollectiveCall | None

    @property
    def kind(self) -> tuple[str, int | None]:
        """The part that must be the same on all members."""
        return self.operation, None if self.call is None else self.call.key

    @property
    def array(self) -> Array:
        return self.value.array if isinstance(self.value, DeviceMessage) else self.value

    def __str__(self) -> str:
        return self.operation if self.call is None else self.call.what()


class ThreadCommunicator(CommunicatorBase):
    """A member of a group of threads; `thread_group` makes one per thread.

    Takes NumPy arrays, or CuPy arrays of any device and stream; `DeviceError` for others. Rank 0
    is the master of a `SyncMaster`, whose module describes when a wait ends.

    If members make different calls, all get a `ProtocolError` and the group stays usable. If their
    arrays do not match, rank 0 gets a `ShapeError`, `DTypeError` or `DeviceError` (host and GPU
    mixed), and the others a `CommAborted` that contains its text.
    """

    def __init__(self, rank: int, size: int, master: SyncMaster, pipe: SlavePipe | None) -> None:
        self.rank = rank
        self.size = size
        self._master = master
        self._pipe = pipe

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; a NumPy result is read-only."""
        reply = self._exchange("all_gather", values, (self.size,), call)
        return reply.array if isinstance(reply, Reply) else reply

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; the arrays are added in rank order."""
        reply = self._exchange("all_reduce", values, (), call)
        return reply.own() if isinstance(reply, Reply) else reply.copy()

    def abort(self, error: BaseException) -> None:
        """Release every member now, because this one can't continue: `CommAborted` for all."""
        self._master.abort(error)

    def leave(self) -> None:
        """Declare that this member makes no more calls; members that wait for it are released."""
        self._master.leave(self.rank)

    def _exchange(
        self,
        operation: str,
        values: Array,
        prefix: tuple[int, ...],
        call: CollectiveCall | None,
    ) -> Any:
        """An array of the shape `(*prefix, *values.shape)`; on a device a Reply that holds it."""
        if is_on_device(values):
            value: Any = DeviceMessage(values, prefix)
        elif isinstance(values, (np.ndarray, np.generic)):
            value = values
        else:
            kind = f"{type(values).__module__}.{type(values).__name__}"
            raise DeviceError(
                f"expected NumPy or CuPy arrays in a group of threads, got {kind}; convert them "
                "first, for example with numpy.asarray"
            )
        message = _Message(operation, value, call)
        self.calls += 1
        pipe = self._pipe
        reply = self._master.run_master(message) if pipe is None else pipe.run_slave(message)
        if isinstance(reply, ProtocolError):  # a new error per member: each adds its own traceback
            raise ProtocolError(str(reply))
        if isinstance(reply, Reply):
            reply.open()
        return reply


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
    kind = messages[0].kind
    if any(message.kind != kind for message in messages):
        per_rank = {rank: str(message) for rank, message in ranked}
        remedy = next((message.call.remedy for message in messages if message.call), SAME_CALLS)
        error = ProtocolError(
            f"expected every member in the same operation, got {per_rank}; {remedy}"
        )
        # Returned, not raised here: so every member raises it, and none a CommAborted.
        return [(rank, error) for rank, _ in ranked]
    _require_alike(messages)
    gathers = messages[0].operation == "all_gather"
    values = [message.value for message in messages]
    if isinstance(values[0], DeviceMessage):
        replies = gather_messages(values) if gathers else add_messages(values)
        return [(rank, reply) for (rank, _), reply in zip(ranked, replies, strict=True)]
    result = _stacked(values) if gathers else _added(values)
    result.flags.writeable = False  # all members share it
    return [(rank, result) for rank, _ in ranked]


def _require_alike(messages: list[_Message]) -> None:
    """Raise unless all arrays have the same library, shape and dtype."""
    arrays = [message.array for message in messages]
    first = arrays[0]
    if all(
        type(array) is type(first) and array.shape == first.shape and array.dtype == first.dtype
        for array in arrays
    ):
        return
    on_device = sum(isinstance(message.value, DeviceMessage) for message in messages)
    if 0 < on_device < len(messages):
        raise DeviceError(
            f"expected all arrays on the host or all on GPUs, got {on_device} of "
            f"{len(messages)} on GPUs in {messages[0]}; move the others"
        )
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ShapeError(
            f"expected arrays of one shape from every member, got shapes {sorted(shapes)} in "
            f"{messages[0]}; check what each member passes"
        )
    dtypes = {str(array.dtype) for array in arrays}
    if len(dtypes) > 1:
        raise DTypeError(
            f"expected one dtype from every member, got {', '.join(sorted(dtypes))} in "
            f"{messages[0]}; convert the arrays first"
        )


def _stacked(values: list[Array]) -> Array:
    """A new NumPy array with one row per array."""
    rows = np.empty((len(values), *values[0].shape), values[0].dtype)
    for index, value in enumerate(values):
        rows[index] = value
    return rows


def _added(values: list[Array]) -> Array:
    """The sum of NumPy arrays, added in their order."""
    total = np.array(values[0])
    for value in values[1:]:
        total += value
    return total
