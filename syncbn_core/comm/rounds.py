"""What a master and its slaves share from one registration to the next.

A call is known by its number. So who sends a message after its call has failed is told so at once,
and the message is never taken for one of the next call.

The lock is held for a few statements at a time, in which nothing of the user's runs but the names
of members; texts of errors are made before. Ctrl-C may cut a step off after any call. So steps that
release others can be repeated without harm, and fields that belong together are set in one
statement.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from syncbn_core.comm.future import NOTHING, FutureResult, Gate
from syncbn_core.errors import CommAborted, CommError, ProtocolError

__all__ = ["MASTER", "Cause", "Round", "Siblings", "Slave", "named", "shown"]

MASTER = 0


def shown(value: Any, limit: int = 200) -> str:
    """`repr(value)`, whatever it raises."""
    try:
        return f"{value!r:.{limit}}"
    except Exception:
        return f"<{type(value).__name__}, whose repr fails>"


class Cause(NamedTuple):
    """An error, and its text: made outside of locks, because code of the user makes it."""

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
        """A fresh error per member: one exception object must not be raised in two threads."""
        error = CommAborted(f"{what}: {self.text}")
        error.__cause__ = self.error
        return error


class Slave:
    """What a round knows of one slave."""

    __slots__ = ("busy", "calls", "message", "result", "thread")

    def __init__(self, result: FutureResult[Any]) -> None:
        self.busy = False  # a thread is in run_slave
        self.calls = 0  # calls made so far
        self.message: Any = NOTHING  # of a call that waits for its reply
        self.result = result
        self.thread = 0  # that is in run_slave


class Round:
    """One registration of slaves: their mailboxes, and how many calls each member has made."""

    def __init__(self, name: str, timeout: float | None, siblings: Siblings | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self.siblings = siblings
        if siblings is not None:
            siblings.rounds.append(self)
        self.lock = threading.Lock()
        self.gate = Gate()  # where the master waits
        self.slaves: dict[Hashable, Slave] = {}
        self.calls = 0  # calls made by the master
        self.busy = False  # a thread is in run_master
        self.thread = 0  # which one
        self.failures: dict[int, Cause] = {}
        self.left: set[Hashable] = set()
        self.broken: Cause | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.name, self.timeout)

    # The methods below are called with the lock held.

    @property
    def used(self) -> bool:
        """Whether it is too late to register another slave."""
        calls = self.calls or any(slave.calls for slave in self.slaves.values())
        return bool(calls or self.left or self.broken)

    def where(self, call: int) -> str:
        return f"call {call} of {self.name}"

    def missing(self, call: int) -> list[Hashable]:
        """Members that have not yet given their message for `call`."""
        absent: list[Hashable] = [i for i, slave in self.slaves.items() if slave.calls < call]
        return absent if self.calls >= call else [MASTER, *absent]

    def check(self, call: int) -> None:
        """Raise if `call` has failed, or can't succeed any more."""
        if self.broken is not None:
            raise self.broken.aborted(f"{self.where(call)} was given up")
        if call in self.failures:
            raise self.failures[call].aborted(f"{self.where(call)} has failed")
        gone = [member for member in self.missing(call) if member in self.left]
        if gone:
            error = CommAborted(
                f"{self.where(call)} can't complete: {named(gone)} left without taking part; "
                "every member has to make the same calls"
            )
            self.fail_call(call, Cause(error, f"CommAborted: {error}"))
            try:
                raise error
            finally:
                del error

    def fail_call(self, call: int, cause: Cause) -> None:
        """Release everybody who waits in `call`, and whoever comes to it later."""
        self.failures.setdefault(call, cause)
        everybody_is_at = min([self.calls, *(slave.calls for slave in self.slaves.values())])
        self.failures = {k: c for k, c in self.failures.items() if k >= everybody_is_at}
        for slave in self.slaves.values():
            if slave.calls == call and slave.message is not NOTHING:
                slave.result.fail(cause.aborted(f"{self.where(call)} has failed"))
                slave.message = NOTHING
        self.gate.open()

    def break_up(self, cause: Cause) -> None:
        """Release everybody, in this call and in all later ones."""
        if self.broken is None:
            self.broken = cause
        for slave in self.slaves.values():
            if slave.message is not NOTHING:
                slave.result.fail(self.broken.aborted(f"{self.where(slave.calls)} was given up"))
                slave.message = NOTHING
        self.gate.open()

    # The methods below take the lock.

    def post(self, slave: Slave, call: int, message: Any) -> None:
        """The slave's message for its call."""
        with self.lock:
            slave.result.drop()  # what an interrupted call may have left there
            try:
                self.check(call)
            except BaseException:
                slave.calls = call
                raise
            slave.message, slave.calls = message, call
            if not self.missing(call):  # waking the master for each would cost as much again
                self.gate.open()

    def give_up(self, slave: Slave, call: int, cause: Cause, posted: bool) -> bool:
        """A slave stops waiting for `call`, which fails; False if its reply has come."""
        with self.lock:
            if posted and slave.message is NOTHING:
                return False
            slave.calls = max(slave.calls, call)
            self.fail_call(call, cause)
            return True

    def fail(self, call: int, cause: Cause) -> None:
        """The master's call has failed."""
        with self.lock:
            self.calls = max(self.calls, call)
            self.fail_call(call, cause)

    def abort(self, cause: Cause) -> None:
        with self.lock:
            self.break_up(cause)

    def close(self) -> None:
        """Release everybody for good, and forget earlier errors: they keep frames alive."""
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
                    with suppress(CommAborted):  # check has released whom it concerns
                        self.check(slave.calls)
            self.gate.open()

    def waits(self) -> dict[Hashable, tuple[int, int]]:
        """Members that wait for the message of another one: in which call, in which thread."""
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
        """Raise `ProtocolError` where whoever is missing in `call` can't come.

        `before`: what the last look has returned. Who waits in the same call at two looks has
        waited all the time between them; when all members have, in their only threads, none can
        ever go on.
        """
        if threading.active_count() == 1 and len(sys._current_frames()) == 1:
            raise ProtocolError(
                f"{named([member])} would wait for ever in {self.where(call)}: no other thread is "
                "running that could call the others; each member needs a thread of its own "
                "(run_in_threads)"
            )
        waits = None if self.siblings is None else self.siblings.everybody_waits()
        if waits is None or waits != before:
            return waits
        each = "; ".join(f"{named([one])} in {each.where(n)}" for one, (each, n) in waits.items())
        raise ProtocolError(
            f"expected every member in the same call, but all wait for each other: {each}; all "
            "have to make the same calls in the same order"
        )


Waits = dict[Hashable, tuple[Round, int]]


class Siblings:
    """Rounds with the same members, each of which is one thread: finds out when all are stuck.

    Each member calls `enter` in its thread. Where other threads have begun since, which may be
    those of a member and call in its place, nothing is found out.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.threads: dict[Hashable, int] = {}
        self.others = set(sys._current_frames())

    def enter(self, member: Hashable) -> None:
        """The calling thread is that of `member`."""
        self.threads[member] = threading.get_ident()

    def everybody_waits(self) -> Waits | None:
        """In which call of which round each member waits; None if one does not, or may not."""
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
    """`the master, slave 2`."""
    return ", ".join(
        "the master" if i is MASTER or i == MASTER else f"slave {shown(i)}" for i in identifiers
    )
