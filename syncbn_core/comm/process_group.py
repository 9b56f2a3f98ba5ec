"""`ProcessCommunicator`: the members of a group are processes.

A `Transport` (MPI, NCCL, torch.distributed) moves the bytes. This module holds the parts that do
not depend on it: calls are numbered for error messages, and a failed group stays failed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from syncbn_core.arrays import arrays_of, copy_of
from syncbn_core.comm.alarm import Alarm
from syncbn_core.comm.protocol import CollectiveCall
from syncbn_core.errors import (
    CommError,
    DeviceError,
    DTypeError,
    ProtocolError,
    StateError,
)

Array = Any


class Transport(Protocol):
    """Moves the bytes between the processes of a group.

    Arrays may be on the host or on a device; a result is where its input is. A failed collective
    raises a `CommError` that names `call`. For unsupported arrays it raises `DeviceError` or
    `DTypeError` before anything is sent.

    One with `on_device` also has `gather_in_place(rows, row, call)`: it fills `rows` `(size, n)` of
    a device, a part of which is `row` `(1, n)`, this rank's.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """Whether arrays on a device are sent without the host."""

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        """The arrays of all ranks in rank order, `(size, *values.shape)`."""

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        """The elementwise sum over all ranks, bitwise the same on each; may overwrite `values`."""


class ProcessCommunicator:
    """A member of a group of processes. Each process makes one, and all make the same calls.

    Args:
        transport: moves the bytes between the processes.

    After a failed call (`CommTimeout`, `CommAborted`) all later calls raise `CommError`, because
    the ranks may be in different calls.

    Attributes:
        rank: this process's number, 0 to `size - 1`.
        size: the number of processes in the group.
        on_device: whether arrays on a device are sent without the host.

    Threads of a process take turns: each waits for the call of another, which ends by its deadline.

    `copy` and `deepcopy` return the communicator itself. Pickling raises `StateError`.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank: int = transport.rank
        self.size: int = transport.size
        self.on_device: bool = transport.on_device
        self.calls: int = 0
        self.lock: Any = getattr(transport, "lock", None) or threading.RLock()
        self._failure: str | None = None
        self._alarm: Alarm | None = None

    def __copy__(self) -> ProcessCommunicator:
        return self

    def __deepcopy__(self, memo: Any) -> ProcessCommunicator:
        return self

    def __reduce__(self) -> Any:
        raise StateError(
            f"expected an object that can be pickled, got a {type(self).__name__}, which belongs "
            "to its process; save the results instead, such as a state_dict()"
        )

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`, for the arrays that the transport supports."""
        call = self._begin(call or CollectiveCall.plain("all_gather", values))
        return self._run(self.transport.all_gather, values, call)

    def gather_in_place(self, rows: Array, row: Array, call: CollectiveCall) -> None:
        """`all_gather` on a device into `rows` `(size, n)`; `row`: this rank's part of it."""
        transport: Any = self.transport
        self._run(transport.gather_in_place, rows, row, self._begin(call))

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """As in `Communicator`; the transport chooses the order of addition."""
        known = arrays_of(values) is not None  # of an unknown library: the transport checks it
        return self.add_up(copy_of(values) if known else values, call)

    def add_up(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """`all_reduce` that may write the result into `values`."""
        call = self._begin(call or CollectiveCall.plain("all_reduce", values))
        return self._run(self.transport.all_reduce, values, call)

    def connect(self, call: CollectiveCall) -> None:
        """Find the other ranks in the first call, before this one compiles what others wait for."""
        connect = getattr(self.transport, "connect", None)
        if connect is not None and not self.calls:
            self._run(lambda _, call: connect(call), None, call._replace(number=1))

    def alarm(self, like: Array, call_at: Callable[[float], CollectiveCall]) -> Alarm:
        """The `Alarm` of this group: once a device sets it, the next call raises `ProtocolError`.

        Made on first use, for the library of `like`, with this `call_at`.
        """
        if self._alarm is None:
            self._alarm = Alarm(like, call_at)
        return self._alarm

    def _begin(self, call: CollectiveCall) -> CollectiveCall:
        """`call` with its number, if no call before has failed."""
        if self._failure is not None:
            raise CommError(
                f"expected a working group, got one in which a call failed before: "
                f"{self._failure}; make a new group, or restart the program"
            )
        if self._alarm is not None:
            self.check_alarm()
        self.calls += 1
        return call if call.number == self.calls else call._replace(number=self.calls)

    def check_alarm(self) -> None:
        """Raise `ProtocolError` if a device has found wrong labels.

        The ranks notice it in different calls, so the group has failed then.
        """
        call = None if self._alarm is None else self._alarm.call()
        if call is not None:
            error = ProtocolError(
                f"expected all ranks in the same call, got different ones in {call}; {call.remedy}"
            )
            self._failure = str(error)
            raise error

    def _run(self, collective: Callable[..., Array], *arguments: Any) -> Array:
        try:
            with self.lock:
                return collective(*arguments)
        except (DeviceError, DTypeError):  # nothing has been sent
            self.calls -= 1
            raise
        except BaseException as error:  # Ctrl-C as well leaves the other ranks in this call
            self._failure = str(error) or type(error).__name__
            raise


def same_names(texts: Sequence[str]) -> bool:
    """Whether the texts of all ranks are equal up to prefixes of names.

    A rank may wrap its model in one more container: "block.last" equals "model.block.last".
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


def grace_after(seconds: float) -> float:
    """How many seconds to wait for the other ranks to report a failure, after a timeout.

    Ranks start to wait at different times, so their timeouts pass at different times too. Returns a
    tenth of the timeout `seconds`, but 1 to 30.
    """
    return min(max(1.0, 0.1 * seconds), 30.0)


def reports_of_others(
    tell: Callable[[], None],
    read: Callable[[int], str | None],
    others: Sequence[int],
    grace: float,
) -> dict[int, str | None] | None:
    """What each of `others` has reported of a failed call within `grace` seconds; None for nothing.

    `tell()` reports for this rank; `read(other)` is what another has reported. Returns None if they
    raise or hang.
    """
    heard: dict[int, str | None] = dict.fromkeys(others)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            tell()
            deadline = time.monotonic() + grace
            while None in heard.values() and time.monotonic() < deadline:
                for other, text in heard.items():
                    heard[other] = read(other) if text is None else text
                time.sleep(0.01)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(grace + 1.0)  # what they ask may hang; this rank must not
    return None if errors or thread.is_alive() else dict(heard)


def describe_other_ranks(call: CollectiveCall, reports: Mapping[str, str | None]) -> str:
    """Where the other ranks were when `call` failed, and what to do, as text.

    `reports`: the other ranks, as the text shall name them, each with `str` of the call in which it
    waited, or None if it has not reported.
    """
    silent = [rank for rank, text in reports.items() if text is None]
    elsewhere: dict[str, list[str]] = {}
    for rank, text in reports.items():
        if text is not None and not same_names([text, str(call)]):
            elsewhere.setdefault(text, []).append(rank)
    parts = [f"rank {', '.join(ranks)} waited in {text}" for text, ranks in elsewhere.items()]
    if elsewhere:
        parts.append(call.remedy)
    if silent:
        parts.append(f"no sign in this call of rank {', '.join(silent)}")
        parts.append(
            "look there for the first error, or for fewer batches than on other ranks, which "
            "syncbn_torch.in_step allows"
        )
    if not parts:
        return (
            "the other ranks waited in the same call, so one was only late; if it needs that long, "
            "give the group a longer timeout"
        )
    return "; ".join(parts)
