"""One master and its slaves exchange messages, call after call. Knows nothing of batch norm.

    # callback([(0, message), (identifier, message), ...]) -> [(0, reply), (identifier, reply), ...]
    master = SyncMaster(callback)
    pipe = master.register_slave(identifier)   # one pipe per slave; before anybody calls
    reply = pipe.run_slave(message)            # in each slave's thread
    reply = master.run_master(message)         # in the master's thread

In every call each member gives one message and gets one reply. Messages reach the callback
master first, then in the order of registration, whoever came first. Any object is a message
or a reply, None included.

No wait is without an end. Each has a deadline, and each is woken at once when

- the callback fails: that call fails for every member, the next one can succeed;
- a member times out: that call fails for every member, a late message of it included;
- a member leaves (`leave`) without the message that others wait for;
- somebody calls `abort`, because a member died: this and every later call fails, until slaves
  are registered anew.

Registering a slave after a call has been made begins a new round: earlier pipes are closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from syncbn_core.comm.deadline import check_timeout, seconds_of
from syncbn_core.errors import ArgumentError, CommAborted, CommError, CommTimeout, ProtocolError

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]

T = TypeVar("T")
MasterCallback = Callable[[list[tuple[Hashable, Any]]], Sequence[tuple[Hashable, Any]]]


class _Nothing:
    """Marks an empty place, so that None can be a value."""

    def __repr__(self) -> str:
        return "<nothing>"


_NOTHING: Any = _Nothing()


class FutureResult(Generic[T]):
    """A place for one value, filled by one thread and emptied by another.

    `timeout`: seconds that `get` waits at most; None takes the default in force at that time.
    A copy or a pickle of it is a new, empty one.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = None if timeout is None else check_timeout(timeout)
        self._filled = threading.Condition(threading.Lock())
        self._value: T = _NOTHING
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FutureResult, (self._timeout,)

    def put(self, result: T) -> None:
        """Fill the place; any value will do. `ProtocolError` if the last one was not taken."""
        with self._filled:
            if self._value is not _NOTHING or self._error is not None:
                raise ProtocolError(
                    "expected an empty FutureResult, got one whose last result nobody has "
                    "taken with get(); use one FutureResult per exchange"
                )
            self._value = result
            self._filled.notify()

    def fail(self, error: BaseException) -> None:
        """Make the waiting, or the next, `get` raise `error`; a value not taken is dropped."""
        with self._filled:
            self._value = _NOTHING
            self._error = error
            self._filled.notify()

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value and take it out.

        Raises `CommTimeout` after `timeout` seconds (None: the object's own, else the default),
        or what `fail` was given.
        """
        seconds = seconds_of(timeout if timeout is not None else self._timeout)
        with self._filled:
            if not self._filled.wait_for(self._has_come, seconds):
                raise CommTimeout(f"expected a result within {seconds:g} s, none came")
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # else the traceback's frame and the error keep each other alive
            value, self._value = self._value, _NOTHING
            return value

    def drop(self) -> None:
        """Empty the place, if anything is in it."""
        with self._filled:
            self._value = _NOTHING
            self._error = None

    def _has_come(self) -> bool:
        return self._value is not _NOTHING or self._error is not None


class _Slave:
    """What a round knows of one slave."""

    __slots__ = ("calls", "message", "result")

    def __init__(self, result: FutureResult[Any]) -> None:
        self.calls = 0  # messages given so far
        self.message: Any = _NOTHING
        self.result = result


MASTER = 0


class _Round:
    """One registration of slaves: their mailboxes, and how many calls each member has made.

    A call is known by its number, so a message that comes after its call has failed is told
    so at once, and is never taken for the next one.
    """

    def __init__(self, name: str, timeout: float | None) -> None:
        self.name = name
        self.timeout = timeout
        self.changed = threading.Condition(threading.Lock())
        self.slaves: dict[Hashable, _Slave] = {}
        self.calls = 0  # calls made by the master
        self.busy = False  # a thread is in run_master
        self.failures: dict[int, BaseException] = {}
        self.left: set[Hashable] = set()
        self.broken: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached_round, (self.name, self.timeout)

    # The methods below are called with `self.changed` held.

    def where(self, call: int) -> str:
        return f"call {call} of {self.name}"

    def missing(self, call: int) -> list[Hashable]:
        """Members that have not yet given their message for `call`."""
        absent: list[Hashable] = [i for i, slave in self.slaves.items() if slave.calls < call]
        return absent if self.calls >= call else [MASTER, *absent]

    def check(self, call: int) -> None:
        """Raise if `call` has failed, or can't succeed any more."""
        if self.broken is not None:
            raise _aborted(f"{self.where(call)} was given up", self.broken)
        if call in self.failures:
            raise _aborted(f"{self.where(call)} has failed", self.failures[call])
        gone = [member for member in self.missing(call) if member in self.left]
        if gone:
            error = CommAborted(
                f"{self.where(call)} can't complete: {_members(gone)} left without taking part; "
                "every member has to make the same calls"
            )
            self.fail(call, error)
            try:
                raise error
            finally:
                del error

    def fail(self, call: int, error: BaseException) -> None:
        """Release everybody who waits in `call`, and whoever comes to it later."""
        self.failures.setdefault(call, error)
        everybody_is_at = min([self.calls, *(slave.calls for slave in self.slaves.values())])
        self.failures = {k: e for k, e in self.failures.items() if k >= everybody_is_at}
        for slave in self.slaves.values():
            if slave.calls == call and slave.message is not _NOTHING:
                slave.message = _NOTHING
                slave.result.fail(_aborted(f"{self.where(call)} has failed", error))
        self.changed.notify_all()

    def break_up(self, error: BaseException) -> None:
        if self.broken is None:
            self.broken = error
            for slave in self.slaves.values():
                if slave.message is not _NOTHING:
                    slave.message = _NOTHING
                    slave.result.fail(_aborted(f"{self.where(slave.calls)} was given up", error))
            self.changed.notify_all()

    # The methods below take the lock.

    def post(self, identifier: Hashable, message: Any) -> int:
        """A slave's message for its next call; returns the number of that call."""
        with self.changed:
            slave = self.slaves.get(identifier)
            if slave is None:
                raise CommError(
                    f"the pipe of slave {identifier!r} is not connected: it is a copy, or its "
                    "round is over; call register_slave on the master in use"
                )
            if slave.message is not _NOTHING:
                raise ProtocolError(
                    f"slave {identifier!r} sent a message for {self.where(slave.calls + 1)} while "
                    "its last one is unanswered; use one pipe in one thread at a time"
                )
            slave.calls += 1
            self.check(slave.calls)
            slave.message = message
            if not self.missing(slave.calls):  # waking the master for each would cost as much again
                self.changed.notify_all()
            return slave.calls

    def give_up(self, identifier: Hashable, call: int, error: BaseException) -> bool:
        """A slave stops waiting for `call`, which fails; False if its reply has just come."""
        with self.changed:
            if self.slaves[identifier].message is _NOTHING:
                return False
            self.slaves[identifier].message = _NOTHING
            self.fail(call, error)
            return True

    def abort(self, error: BaseException) -> None:
        with self.changed:
            self.break_up(error)

    def close(self) -> None:
        """Release everybody for good, and forget earlier errors: they keep frames alive."""
        with self.changed:
            self.broken = None
            self.failures = {}
            self.break_up(CommError("a new round has begun; register the slaves again"))

    def leave(self, member: Hashable) -> None:
        with self.changed:
            self.left.add(member)
            for slave in self.slaves.values():
                if slave.message is not _NOTHING:
                    with suppress(CommAborted):  # check has released whom it concerns
                        self.check(slave.calls)
            self.changed.notify_all()


def _detached_round(name: str, timeout: float | None) -> _Round:
    return _Round(name, timeout)


def _members(identifiers: Sequence[Hashable]) -> str:
    names = ["the master" if i == MASTER else f"slave {i!r}" for i in identifiers]
    return ", ".join(names)


def _aborted(what: str, cause: BaseException) -> CommAborted:
    """A fresh error per member: one exception object must not be raised in two threads."""
    error = CommAborted(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


class SlavePipe(NamedTuple):
    """A slave's end: where its messages go, and where its replies come.

    A copy or a pickle of a pipe is not connected; `run_slave` on it raises `CommError`.
    """

    identifier: Hashable
    queue: Any
    result: FutureResult[Any]

    def run_slave(self, msg: Any) -> Any:
        """Give `msg` for the next call and wait for the reply.

        Raises `CommTimeout` at the deadline, naming the call and who is missing; `CommAborted`
        when the call failed elsewhere; `CommError` for a pipe of an earlier round.
        """
        current: _Round = self.queue
        call = current.post(self.identifier, msg)
        try:
            seconds = seconds_of(current.timeout)
            return self.result.get(seconds)
        except CommAborted:
            raise
        except CommTimeout:
            with current.changed:
                absent = [member for member in current.missing(call) if member != self.identifier]
            late = CommTimeout(
                f"slave {self.identifier!r} waited {seconds:g} s for its reply in "
                f"{current.where(call)}; "
                + (f"missing: {_members(absent)}" if absent else "the callback is still at work")
            )
            gave_up = current.give_up(self.identifier, call, late)
            try:
                if gave_up:
                    raise late from None
            finally:
                del late
            return self.result.get(seconds)
        except BaseException as error:  # Ctrl-C: the others must not wait for this slave
            if not current.give_up(self.identifier, call, error):
                self.result.drop()
            raise

    def abort(self, error: BaseException) -> None:
        """Release every member now: this slave can't go on because of `error`."""
        self.queue.abort(error)

    def leave(self) -> None:
        """Say that this slave makes no more calls; who waits for one is released."""
        self.queue.leave(self.identifier)


class SyncMaster:
    """The master's end.

    Args:
        master_callback: gets `[(0, master_msg), (identifier, msg), ...]`, master first, then
            slaves in the order of registration; returns `[(0, reply), (identifier, reply),
            ...]`, master first, one reply per member.
        name: what error messages call this exchange, for example the name of a layer.
        timeout: deadline of every wait in seconds; None takes the process's default
            (`set_default_timeout`, or the environment variable `SYNCBN_TIMEOUT`, or 300).

    A copy or a pickle has the callback and the settings, and no slaves.
    """

    def __init__(
        self,
        master_callback: MasterCallback,
        *,
        name: str = "SyncMaster",
        timeout: float | None = None,
    ) -> None:
        self._callback = master_callback
        self._name = name
        self._timeout = None if timeout is None else check_timeout(timeout)
        self._round = _Round(name, self._timeout)
        self._registering = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"callback": self._callback, "name": self._name, "timeout": self._timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["callback"], name=state["name"], timeout=state["timeout"]
        )

    @property
    def nr_slaves(self) -> int:
        """Slaves registered in the present round."""
        return len(self._round.slaves)

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """A pipe for a slave called `identifier`: any hashable but 0, which is the master.

        The first registration after a call, or after an abort, begins a new round. Raises
        `ArgumentError` for an identifier that is taken.
        """
        with self._registering:
            current = self._round
            if current.calls or current.broken is not None:
                self.clear_slaves()
                current = self._round
        with current.changed:
            if identifier == MASTER or identifier in current.slaves:
                raise ArgumentError(
                    f"expected a slave identifier that is not taken, got {identifier!r}; "
                    f"0 is the master, in use are {list(current.slaves)!r}"
                )
            result: FutureResult[Any] = FutureResult(self._timeout)
            current.slaves[identifier] = _Slave(result)
        return SlavePipe(identifier, current, result)

    def clear_slaves(self) -> None:
        """Forget every slave and begin a new round; who still waits in the old one is released."""
        old, self._round = self._round, _Round(self._name, self._timeout)
        old.close()

    def run_master(self, master_msg: Any) -> Any:
        """Collect one message from every slave, call the callback, hand out the replies.

        Raises what the callback raised; `ProtocolError` if its replies have the wrong form;
        `CommTimeout` at the deadline, naming the call and who is missing; `CommAborted` when
        the call failed elsewhere. In each case the slaves in this call are released too.
        """
        current = self._round
        with current.changed:
            if current.busy:
                raise ProtocolError(
                    f"two threads are in run_master of {self._name}; one master, one thread"
                )
            current.busy = True
        try:
            return self._run(current, master_msg)
        finally:
            current.busy = False

    def _run(self, current: _Round, master_msg: Any) -> Any:
        with current.changed:
            current.calls += 1
            call = current.calls
        try:
            messages = self._collect(current, call)
            replies = self._callback([(MASTER, master_msg), *messages])
            _check_replies(replies, [MASTER, *current.slaves], current.where(call))
        except BaseException as error:
            with current.changed:
                current.fail(call, error)
            raise
        with current.changed:
            current.check(call)  # a slave may have given up while the callback was at work
            for identifier, reply in replies[1:]:
                slave = current.slaves[identifier]
                slave.message = _NOTHING
                slave.result.put(reply)
        return replies[0][1]

    def _collect(self, current: _Round, call: int) -> list[tuple[Hashable, Any]]:
        """Wait for every slave's message of `call`; in the order of registration."""
        seconds = seconds_of(self._timeout)
        deadline = time.monotonic() + seconds
        with current.changed:
            while True:
                current.check(call)
                missing = current.missing(call)
                if not missing:
                    return [(i, slave.message) for i, slave in current.slaves.items()]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommTimeout(
                        f"the master waited {seconds:g} s in {current.where(call)}; "
                        f"missing: {_members(missing)}"
                    )
                current.changed.wait(left)

    def abort(self, error: BaseException) -> None:
        """Release every member now, because of `error`, in this round's present and later calls."""
        self._round.abort(error)

    def leave(self, identifier: Hashable = MASTER) -> None:
        """Say that a member makes no more calls in this round; who waits for one is released."""
        self._round.leave(identifier)


def _check_replies(replies: Any, members: list[Hashable], where: str) -> None:
    try:
        identifiers = [identifier for identifier, _ in replies]
        complete = len(identifiers) == len(members) and set(identifiers) == set(members)
    except (TypeError, ValueError):
        raise ProtocolError(
            f"expected the master callback to return [(identifier, reply), ...] in {where}, "
            f"got {replies!r:.200}"
        ) from None
    if not complete or identifiers[0] != MASTER:
        raise ProtocolError(
            f"expected the master callback to return one reply per member in {where}, master "
            f"first: identifiers {members!r}, got {identifiers!r}"
        )
