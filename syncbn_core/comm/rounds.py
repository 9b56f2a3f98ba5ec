"""`Round`: the state that a `SyncMaster` and its slaves share until slaves are registered again.

Every call has a number. A message that comes after its call failed therefore raises an error at
once, and is never mistaken for a message of the next call.

The lock is held only for a few statements. The only user code that runs under it is `hash`, `==`
and `repr` of member identifiers; texts of users' errors are made before. Ctrl-C may interrupt after
any call, so the steps that release other members can safely be repeated, and fields that belong
together are set in one statement.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from syncbn_core.comm.future import NOTHING, FutureResult, Gate
from syncbn_core.comm.threads import callers_that_wait
from syncbn_core.errors import CommAborted, CommError, ProtocolError

__all__ = ["MASTER", "Cause", "Round", "Siblings", "Slave", "named", "shown"]

MASTER = 0


def shown(value: Any, limit: int = 200) -> str:
    """`repr(value)`, cut to `limit` characters; never raises."""
    try:
        return f"{value!r:.{limit}}"
    except Exception:
        return f"<{type(value).__name__}, whose repr fails>"


class Cause(NamedTuple):
    """An error and its text. The text is made outside of locks, because `__str__` is user code."""

    error: BaseException
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        kind = type(error).__name__
        try:
            text = f"{kind}: {error}"
        except Exception:
            text = f"{kind}, whose text can't be shown because its __str__ fails"
        return cls(error, text)

    def aborted(self, what: str) -> CommAborted:
        """A new error for each member: two threads must not raise the same exception object."""
        error = CommAborted(f"{what}: {self.text}")
        error.__cause__ = self.error
        return error


class Slave:
    """The state of one slave in a round."""

    __slots__ = ("busy", "calls", "message", "result", "thread")

    def __init__(self, result: FutureResult[Any]) -> None:
        self.busy: bool = False  # whether a thread is in run_slave
        self.calls: int = 0  # number of calls made so far
        self.message: Any = NOTHING  # the message of a call that waits for its reply
        self.result: FutureResult[Any] = result
        self.thread: int = 0  # identifier of the thread in run_slave


class Round:
    """One registration of slaves: their messages, and the number of calls each member made."""

    def __init__(self, name: str, timeout: float | None, siblings: Siblings | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self.siblings = siblings
        if siblings is not None:
            siblings.rounds.append(self)
        self.lock: threading.Lock = threading.Lock()
        self.gate: Gate = Gate()  # the master waits here
        self.slaves: dict[Hashable, Slave] = {}
        self.calls: int = 0  # number of calls made by the master
        self.busy: bool = False  # whether a thread is in run_master
        self.thread: int = 0  # identifier of that thread
        self.failures: dict[int, Cause] = {}
        self.left: set[Hashable] = set()
        self.broken: Cause | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.name, self.timeout)

    # The caller of the methods below holds the lock.

    @property
    def used(self) -> bool:
        """Whether it is too late to register another slave."""
        calls = self.calls or any(slave.calls for slave in self.slaves.values())
        return bool(calls or self.left or self.broken)

    def where(self, call: int) -> str:
        return f"call {call} of {self.name}"

    def missing(self, call: int) -> list[Hashable]:
        """Members that have not yet sent their message for `call`."""
        absent: list[Hashable] = [i for i, slave in self.slaves.items() if slave.calls < call]
        return absent if self.calls >= call else [MASTER, *absent]

    def check(self, call: int) -> None:
        """Raise `CommAborted` if `call` has failed or can no longer succeed."""
        if self.broken is not None:
            raise self.broken.aborted(f"{self.where(call)} was given up")
        if call in self.failures:
            raise self.failures[call].aborted(f"{self.where(call)} has failed")
        gone = [member for member in self.missing(call) if member in self.left]
        if gone:
            error = CommAborted(
                f"{self.where(call)} can't complete: {named(gone)} left without taking part; "
                "every member has to make the same number of calls; one without data passes an "
                "empty input (x[:0])"
            )
            self.fail_call(call, Cause(error, f"CommAborted: {error}"))
            try:
                raise error
            finally:
                del error

    def fail_call(self, call: int, cause: Cause) -> None:
        """Release the members that wait in `call`; those that come later get the error too."""
        self.failures.setdefault(call, cause)
        slowest = min([self.calls, *(slave.calls for slave in self.slaves.values())])
        self.failures = {k: c for k, c in self.failures.items() if k >= slowest}
        for slave in self.slaves.values():
            if slave.calls == call and slave.message is not NOTHING:
                slave.result.fail(cause.aborted(f"{self.where(call)} has failed"))
                slave.message = NOTHING
        self.gate.open()

    def break_up(self, cause: Cause) -> None:
        """Release all members, and make all later calls fail."""
        if self.broken is None:
            self.broken = cause
        for slave in self.slaves.values():
            if slave.message is not NOTHING:
                slave.result.fail(self.broken.aborted(f"{self.where(slave.calls)} was given up"))
                slave.message = NOTHING
        self.gate.open()

    # The methods below acquire the lock.

    def post(self, slave: Slave, call: int, message: Any) -> None:
        """Store the message of a slave for `call`."""
        with self.lock:
            slave.result.drop()  # an interrupted call may have left a result
            try:
                self.check(call)
            except BaseException:
                slave.calls = call
                raise
            slave.message, slave.calls = message, call
            if not self.missing(call):  # waking the master for each message would double the cost
                self.gate.open()

    def give_up(self, slave: Slave, call: int, cause: Cause, posted: bool) -> bool:
        """Let `call` fail because a slave stops waiting; False if its reply has already come."""
        with self.lock:
            if posted and slave.message is NOTHING:
                return False
            slave.calls = max(slave.calls, call)
            self.fail_call(call, cause)
            return True

    def fail(self, call: int, cause: Cause) -> None:
        """Let `call` fail because of an error in the master."""
        with self.lock:
            self.calls = max(self.calls, call)
            self.fail_call(call, cause)

    def abort(self, cause: Cause) -> None:
        with self.lock:
            self.break_up(cause)

    def close(self) -> None:
        """End the round: release all members, and drop earlier errors, which keep frames alive."""
        error = CommError("a new round has begun; register the slaves again")
        self.siblings = None
        with self.lock:
            self.broken = None
            self.failures = {}
            self.break_up(Cause.of(error))

    def leave(self, member: Hashable) -> None:
        with self.lock:
            self.left.add(member)
            for slave in self.slaves.values():
                if slave.message is not NOTHING:
                    with suppress(CommAborted):  # check has already released the members concerned
                        self.check(slave.calls)
            self.gate.open()

    def waits(self) -> dict[Hashable, tuple[int, int]]:
        """For each member that waits for another one's message: its call and its thread."""
        with self.lock:
            found: dict[Hashable, tuple[int, int]] = {
                identifier: (slave.calls, slave.thread)
                for identifier, slave in self.slaves.items()
                if slave.message is not NOTHING and self.missing(slave.calls)
            }
            if self.busy and self.missing(self.calls):
                found[MASTER] = (self.calls, self.thread)
            return found

    def look(self, member: Hashable, call: int, before: Waits | None) -> Waits | None:
        """Raise `ProtocolError` on a deadlock, when the missing members of `call` can never come.

        `before`: what the previous look returned. A member that waits in the same call at two
        looks has waited all the time between them. If this is true of all members, and each of
        them has only this thread, none can ever continue.
        """
        threads = {thread.ident for thread in threading.enumerate()} | sys._current_frames().keys()
        if len(threads - callers_that_wait) == 1:
            raise ProtocolError(
                f"expected each member in its own thread, got only one thread: {named([member])} "
                f"would wait forever in {self.where(call)}; start the members by run_in_threads, "
                "and make the same number of calls in each"
            )
        waits = None if self.siblings is None else self.siblings.everybody_waits()
        if waits is None or waits != before:
            return waits
        each = "; ".join(f"{named([one])} in {each.where(n)}" for one, (each, n) in waits.items())
        raise ProtocolError(
            f"expected every member in the same call, but all wait for each other: {each}; make "
            "the same calls in the same order on all members"
        )


Waits = dict[Hashable, tuple[Round, int]]


class Siblings:
    """Rounds that share their members, one thread per member; detects when all of them are stuck.

    Each member calls `enter` in its thread. No deadlock is reported if other threads have started
    since, because they might make calls for a member.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.threads: dict[Hashable, int] = {}
        self.others: set[int] = set(sys._current_frames())

    def enter(self, member: Hashable) -> None:
        """Note that the calling thread is the thread of `member`."""
        self.threads[member] = threading.get_ident()

    def everybody_waits(self) -> Waits | None:
        """The round and call in which each member waits; None unless all are known to wait."""
        rounds = list(self.rounds)
        gone = set.intersection(*(each.left for each in rounds))
        members = {MASTER, *(member for each in rounds for member in each.slaves)} - gone
        waits: Waits = {}
        for each in rounds:
            for member, (call, thread) in each.waits().items():
                if member in waits or self.threads.get(member) != thread:
                    return None
                waits[member] = (each, call)
        known = self.others | set(self.threads.values())
        if not members <= waits.keys() or not known.issuperset(sys._current_frames()):
            return None
        return waits


def named(identifiers: Sequence[Hashable]) -> str:
    """The members as text, such as "the master, slave 2"."""
    return ", ".join(
        "the master" if i is MASTER or i == MASTER else f"slave {shown(i)}" for i in identifiers
    )
