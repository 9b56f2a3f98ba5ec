"""Members that are processes: the order of their calls, and what errors say when one fails.

A `Transport` (MPI, NCCL, torch.distributed) moves the bytes. Here is all that does not depend on
it. Calls are numbered, so an error says which one it was. The message of an `all_reduce` carries a
label that says of which call it is. With `check_order` the ranks first compare, in every call, what
they are about to do.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from syncbn_core.comm.message_arrays import arrays_of
from syncbn_core.comm.protocol import CollectiveCall, CommunicatorBase
from syncbn_core.comm.sum_labels import label_of
from syncbn_core.errors import (
    ArgumentError,
    CommError,
    DeviceError,
    DTypeError,
    ProtocolError,
    StateError,
)

__all__ = ["ProcessCommunicator", "Transport", "grace_after"]

Array = Any

CHECK_ORDER_VARIABLE = "SYNCBN_CHECK_ORDER"
DESCRIPTION = 1024  # bytes by which `check_order` describes a call
DIGEST = 16  # of them: a hash of what has to be equal; a text follows


class Transport(Protocol):
    """What moves the bytes; each call ends, or raises a `CommError` that names `call`.

    Arrays are on the host or on a device, and results where the arrays are. For arrays that it does
    not take it raises `DeviceError` or `DTypeError` before anything is sent.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        """`(size, *values.shape)`: the arrays of all ranks, in their order."""

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        """Elementwise sum over the ranks, bitwise the same on each; a new array."""


class ProcessCommunicator(CommunicatorBase):
    """A member of a group of processes; each makes one, and all make the same calls in order.

    Args:
        transport: what moves the bytes.
        check_order: before each call compare what the ranks are about to do, by one more message
            of 1024 bytes: a `ProtocolError` on every rank then says who does what. None: as the
            environment variable SYNCBN_CHECK_ORDER says, else not.

    After a call that failed (`CommTimeout`, `CommAborted`) ranks may be out of step, so all later
    ones raise `CommError`. `all_reduce` raises a `ProtocolError` on every rank where ranks add up
    arrays of different calls; the group can go on. On a GPU nobody waits for that: such sums are
    NaN, the `ProtocolError` is raised by a later call of each rank, and the group has failed.

    A copy is the communicator itself, and there is no pickle of it.
    """

    def __init__(self, transport: Transport, *, check_order: bool | None = None) -> None:
        self.transport = transport
        self.calls = 0
        self._check_order = _check_order_by_default() if check_order is None else check_order
        self._failure: str | None = None
        self._later: deque[tuple[Callable[[], bool | None], CollectiveCall]] = deque()

    @property
    def rank(self) -> int:
        """This process's number, 0 to `size - 1`."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self.transport.size

    def __copy__(self) -> ProcessCommunicator:
        return self

    def __deepcopy__(self, memo: Any) -> ProcessCommunicator:
        return self

    def __reduce__(self) -> Any:
        raise StateError(
            f"expected something that can be pickled, got a {type(self).__name__}, which belongs "
            "to its process; save what was computed with it instead, such as a state_dict()"
        )

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; what kinds of arrays it takes, the transport says."""
        call = self._begin(call or CollectiveCall.plain("all_gather", values), "all_gather")
        return self._run(self.transport.all_gather, values, call)

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`, added in an order of the transport's own.

        `ProtocolError` where ranks are in calls of different `key`.
        """
        call = call or CollectiveCall.plain("all_reduce", values)
        arrays = arrays_of(values)
        if arrays is None:  # the transport says what it takes
            return self._run(self.transport.all_reduce, values, self._begin(call, "all_reduce"))
        label = label_of(call.key, self.size, values.dtype.itemsize)
        message = arrays.with_label(values, label)
        call = self._begin(call, "all_reduce")
        total = self._run(self.transport.all_reduce, message, call)
        result, verdict = arrays.without_label(total, values.shape, label * self.size)
        if verdict is False:
            raise _mixed_up(call)
        if verdict is not True:
            self._later.append((verdict, call))
        return result

    def _begin(self, call: CollectiveCall, operation: str) -> CollectiveCall:
        """`call` with its number, once all ranks agree what it is if that is to be checked."""
        if self._failure is not None:
            raise CommError(
                f"expected a group in which every call has ended, but this one failed before: "
                f"{self._failure}; make a new group, or start the program again"
            )
        if self._later:
            self._look_back()
        self.calls += 1
        call = call._replace(number=self.calls)
        if self._check_order:
            self._compare(call, operation)
        return call

    def _look_back(self) -> bool:
        """Raise what a device has found in earlier calls; whether it has finished all of them.

        Ranks come to know it at different moments, so they are out of step then.
        """
        while self._later:
            verdict, call = self._later[0]
            right = verdict()
            if right is None:
                return False
            self._later.popleft()
            if not right:
                error = _mixed_up(call)
                self._failure = str(error)
                raise error
        return True

    def _run(
        self,
        collective: Callable[[Array, CollectiveCall], Array],
        values: Array,
        call: CollectiveCall,
    ) -> Array:
        try:
            return collective(values, call)
        except (DeviceError, DTypeError) as error:
            if self._check_order:  # the others know of this call already
                self._failure = str(error)
            else:  # nothing has been sent
                self.calls -= 1
            raise
        except BaseException as error:  # Ctrl-C too leaves the others in this call
            self._failure = str(error) or type(error).__name__
            raise

    def _compare(self, call: CollectiveCall, operation: str) -> None:
        exact = f"{call.number} {operation} {call.key} {call.position} {call.details}"
        digest = hashlib.sha256(exact.encode()).digest()[:DIGEST]
        message = (digest + str(call).encode())[:DESCRIPTION].ljust(DESCRIPTION)
        row = np.frombuffer(bytearray(message), np.float64)  # a dtype that every transport takes
        rows = self._run(self.transport.all_gather, row, call)
        messages = [bytes(other.tobytes()) for other in rows]
        texts = [message[DIGEST:].decode(errors="replace").rstrip() for message in messages]
        if len({message[:DIGEST] for message in messages}) > 1 or not _one_name(texts):
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ProtocolError(
                f"expected the same call from every rank, got {each}; {call.remedy}"
            )


def _one_name(texts: Sequence[str]) -> bool:
    """Whether the ranks' texts name the same things.

    A rank may hold its model in one more container, so of two names one may end with the other.
    """
    names = [re.split(r"[ ,(]+", text) for text in set(texts)]
    shortest = min(names, key=lambda words: sum(map(len, words)))
    return all(
        len(words) == len(shortest)
        and all(
            long == short or long.endswith(f".{short}")
            for long, short in zip(words, shortest, strict=True)
        )
        for words in names
    )


def _mixed_up(call: CollectiveCall) -> ProtocolError:
    return ProtocolError(
        f"expected all ranks in the same call, they are in different ones in {call}; "
        f"{call.remedy}: {CHECK_ORDER_VARIABLE}=1 says which rank does what"
    )


def grace_after(seconds: float) -> float:
    """Seconds that the other ranks have to report a failure too, after a wait of `seconds`.

    Ranks begin to wait at different moments. The longer the wait was, the longer this may be.
    """
    return min(max(1.0, 0.1 * seconds), 30.0)


def _check_order_by_default() -> bool:
    """What the environment variable SYNCBN_CHECK_ORDER says: 1 or 0 (or nothing)."""
    text = os.environ.get(CHECK_ORDER_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ArgumentError(
            f"expected the environment variable {CHECK_ORDER_VARIABLE} to be 0 or 1, got {text!r}"
        )
    return text == "1"
