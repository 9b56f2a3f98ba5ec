"""`SyncMaster`: a master and its slaves exchange one message and one reply each in every call.

    # callback([(0, message), (identifier, message), ...]) -> [(0, reply), (identifier, reply), ...]
    master = SyncMaster(callback)
    pipe = master.register_slave(identifier)   # once per slave, before the first call
    reply = pipe.run_slave(message)            # in each slave's thread
    reply = master.run_master(message)         # in the master's thread

The callback gets the messages master first, then in the order of registration, in whatever order
they arrived. Messages and replies may be any objects, None included.

Every wait has a deadline. A wait also ends at once, with an error, when

- the callback raises: the call fails for all members; the next call can succeed;
- a member times out: the call fails for all members, also for those that come later;
- a member that others wait for has called `leave`;
- `abort` is called, because a member died: this call and all later ones fail, until slaves
  are registered again.

Registering a slave after the first call starts a new round and closes all earlier pipes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from syncbn_core import clock
from syncbn_core.comm.timeouts import check_timeout, remedy_for, seconds_of
from syncbn_core.errors import (
    ArgumentError,
    CommAborted,
    CommError,
    CommTimeout,
    ProtocolError,
    StateError,
)

T = TypeVar("T")
Messages = list[tuple[Hashable, Any]]
MasterCallback = Callable[[Messages], Iterable[tuple[Hashable, Any]]]

MASTER = 0


class Round:
    """One registration of slaves: what each member has sent, and what it gets.

    Every call has a number. So a message that comes after its call has failed is never mistaken
    for a message of the next call.

    Attributes:
        calls: by member, master first: how many it has begun.
        bells: by member; it waits until something is put into its own, and then looks again.
        messages: of the members in a call, each with the thread it came from.
        replies: that slaves have yet to take.
        failures: by call: a text, and the error that caused it.
        left: members that make no more calls.
        ended: as in `failures`, for all later calls; None while the round goes on.
    """

    def __init__(self, name: str, timeout: float | None, member: str = "") -> None:
        self.name: str = name
        self.member: str = member
        self.timeout: float | None = timeout
        # Plain locks and queues are C: Ctrl-C may come between any two calls of Python code.
        self.lock: threading.Lock = threading.Lock()
        self.calls: dict[Hashable, int] = {MASTER: 0}
        self.bells: dict[Hashable, SimpleQueue[None]] = {MASTER: SimpleQueue()}
        self.messages: dict[Hashable, tuple[int, Any]] = {}
        self.replies: dict[Hashable, Any] = {}
        self.failures: dict[int, tuple[str, BaseException | None]] = {}
        self.left: set[Hashable] = set()
        self.ended: tuple[str, BaseException | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.name, self.timeout, self.member)

    def named(self, *members: Hashable) -> str:
        """The members as text, such as "the master, slave 2" or "replica 0, replica 2"."""
        texts = [f"{self.member or 'slave'} {_shown(member)}" for member in members]
        if MASTER in members and not self.member:
            texts[members.index(MASTER)] = "the master"
        return ", ".join(texts)

    @property
    def used(self) -> bool:
        """Whether it is too late to register another slave."""
        return any(self.calls.values()) or bool(self.left) or self.ended is not None

    def send(self, member: Hashable, message: Any) -> int:
        """Begin the next call of a member; returns its number."""
        with self.lock:
            here = threading.get_ident()
            # one of this thread was left by Ctrl-C
            if self.messages.get(member, (here,))[0] != here:
                raise ProtocolError(
                    f"expected one thread for {self.named(member)} of {self.name}, got two at the "
                    "same time; make all calls of a member from one thread"
                )
            self.replies.pop(member, None)  # an interrupted call may have left one
            self.messages[member] = here, message
            self.calls[member] += 1
            call = self.calls[member]
            if not self.missing(call):  # waking the master for each message would double the cost
                self.bells[MASTER].put(None)
            return call

    def finish(self, member: Hashable, call: int, error: BaseException | None) -> None:
        """End the call of a member, with its error for the others; then it may send again."""
        if error is not None:
            self.fail(call, _text_of(error), error)
        self.messages.pop(member, None)

    def missing(self, call: int) -> list[Hashable]:
        """Members that have not yet sent their message for `call`."""
        return [member for member, calls in self.calls.items() if calls < call]

    def wait(self, member: Hashable, call: int, take: Callable[[], T | None]) -> T:
        """What `take()` returns under the lock, once that is not None; raises if the call fails."""
        seconds = seconds_of(self.timeout)
        deadline, stood = time.monotonic() + seconds, clock.stood()
        while True:
            with self.lock:
                taken = take()
                if taken is not None:
                    return taken
                self.check(call)
                absent = [other for other in self.missing(call) if other != member]
            left = clock.left(deadline, stood)
            if not left:
                raise CommTimeout(
                    f"{self.named(member)} waited {seconds:g} s{clock.stood_since(stood)} "
                    f"in call {call} of {self.name}; "
                    + (f"missing: {self.named(*absent)}" if absent else "its callback still runs")
                    + f"; to wait longer, {remedy_for(self.timeout)}"
                )
            with suppress(Empty):
                self.bells[member].get(timeout=left)

    def collect(self, call: int) -> Messages | None:
        """The messages of all members, master first, once all have come; holds the lock."""
        if self.missing(call):
            return None
        self.check(call)
        return [(member, self.messages[member][1]) for member in self.calls]

    def deliver(self, call: int, replies: Messages) -> None:
        """Give the slaves their replies; raises if one has given up meanwhile."""
        with self.lock:
            self.check(call)
            for member, reply in replies:
                self.replies[member] = (reply,)
                self.bells[member].put(None)

    def check(self, call: int) -> None:
        """Raise `CommAborted` if the call has failed, or can't succeed."""
        gone = [member for member in self.missing(call) if member in self.left]
        found = self.ended or self.failures.get(call)
        if found is None and gone:
            found = (
                f"{self.named(*gone)} left without taking part; every member has to make the same "
                "number of calls; one without data passes an empty input (x[:0])",
                None,
            )
        if found is not None:
            raise CommAborted(f"call {call} of {self.name} has failed: {found[0]}") from found[1]

    def fail(self, call: int, text: str, error: BaseException | None) -> None:
        """Let a call fail for all members."""
        with self.lock:
            self.failures.setdefault(call, (text, error))
            slowest = min(self.calls.values())
            self.failures = {n: found for n, found in self.failures.items() if n >= slowest}
            self._wake()

    def end(self, text: str, error: BaseException | None = None) -> None:
        """Let this call and all later ones fail."""
        with self.lock:
            self.ended = self.ended or (text, error)
            self._wake()

    def close(self) -> None:
        """End the round, and drop earlier errors, which hold the frames of the members."""
        with self.lock:
            self.failures = {}
            self.ended = "a new round has begun; register the slaves again", None
            self._wake()

    def leave(self, member: Hashable) -> None:
        """Release the members that wait for this one."""
        with self.lock:
            self.left.add(member)
            self._wake()

    def _wake(self) -> None:
        for bell in self.bells.values():
            bell.put(None)


class SlavePipe(NamedTuple):
    """The slave's end of an exchange; made by `SyncMaster.register_slave`.

    A copy or an unpickled pipe is not connected: its `run_slave` raises `CommError`.
    """

    identifier: Hashable
    queue: Any
    result: FutureResult[Any]

    def run_slave(self, msg: Any) -> Any:
        """Send `msg` for the next call and wait for the reply.

        Raises `CommTimeout` at the deadline, with the call and the missing members; `CommAborted`
        if the call failed elsewhere, or a new round has begun; `ProtocolError` if another thread is
        in `run_slave` of this pipe; `CommError` if the pipe is a copy.
        """
        current: Round = self.queue
        member = self.identifier
        if member not in current.calls:
            raise CommError(
                f"the pipe of {current.named(member)} is not connected: it is a copy; get a new "
                "pipe from register_slave"
            )
        call = current.send(member, msg)
        failure: BaseException | None = None
        try:
            return current.wait(member, call, lambda: current.replies.pop(member, None))[0]
        except BaseException as error:  # Ctrl-C too: the others must not wait for this slave
            failure = error
            raise
        finally:
            current.finish(member, call, failure)
            del failure  # breaks the cycle between the error and its traceback's frame

    def abort(self, error: BaseException) -> None:
        """Release every member now, because this slave can't continue.

        Present and later calls raise `CommAborted`, caused by `error`.
        """
        self.queue.end(_text_of(error), error)

    def leave(self) -> None:
        """Declare that this slave makes no more calls; members that wait for it are released."""
        self.queue.leave(self.identifier)


class SyncMaster:
    """The master's end of an exchange.

    Args:
        master_callback: gets `[(0, master_msg), (identifier, msg), ...]`, master first, then
            slaves in the order of registration; returns `[(0, reply), (identifier, reply),
            ...]`, master first, one reply per member.
        name: the name of this exchange in error messages.
        member: what these call a member, such as "replica"; "" for "the master" and "slave".
        timeout: the most seconds that a member waits; None for the default
            (`set_default_timeout`, else the environment variable `SYNCBN_TIMEOUT`, else 60).

    A copy or an unpickled master has the callback and the settings, but no slaves. Raises
    `ArgumentError` for a timeout that is not a finite number > 0.
    """

    def __init__(
        self,
        master_callback: MasterCallback,
        *,
        name: str = "SyncMaster",
        timeout: float | None = None,
        member: str = "",
    ) -> None:
        self._callback = master_callback
        self._name = name
        self._timeout = None if timeout is None else check_timeout(timeout)
        self._member = member
        self._round = Round(name, self._timeout, member)
        self._in_callback: int | None = None  # the thread that runs the callback

    def __getstate__(self) -> dict[str, Any]:
        # the first key is that of other projects with a class of this name
        settings = {"name": self._name, "timeout": self._timeout, "member": self._member}
        return {"master_callback": self._callback, **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = {name: state[name] for name in ("name", "timeout", "member") if name in state}
        self.__init__(state["master_callback"], **settings)  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """The number of slaves registered in the present round."""
        return len(self._round.calls) - 1

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """A new pipe for a slave. `identifier`: any hashable object except 0, which is the master.

        The first registration after a call, a `leave` or an `abort` starts a new round. Raises
        `ArgumentError` if the identifier is taken.
        """
        if self._round.used:
            self.clear_slaves()
        current = self._round
        with current.lock:
            if identifier in current.calls:
                raise ArgumentError(
                    f"expected a slave identifier that is not taken, got {_shown(identifier)}; "
                    f"taken are {_shown([*current.calls])}, 0 by the master; choose another"
                )
            current.calls[identifier] = 0
            current.bells[identifier] = SimpleQueue()
        return SlavePipe(identifier, current, FutureResult(self._timeout))

    def clear_slaves(self) -> None:
        """Remove all slaves and start a new round; releases those that wait in the old one."""
        old, self._round = self._round, Round(self._name, self._timeout, self._member)
        old.close()

    def run_master(self, master_msg: Any) -> Any:
        """Collect a message from every slave, run the callback, send the replies; returns its own.

        Raises what the callback raised; `ProtocolError` if its replies have the wrong form, or if
        another thread is in `run_master`; `StateError` within the callback; `CommTimeout` at the
        deadline, with the call and the missing members; `CommAborted` if the call failed elsewhere.
        Each error also releases the slaves in this call.
        """
        if self._in_callback == threading.get_ident():
            raise StateError(
                f"expected no run_master of {self._name} in its own callback, which it would wait "
                "for; use another SyncMaster there"
            )
        current = self._round
        call = current.send(MASTER, master_msg)
        failure: BaseException | None = None
        try:
            messages = current.wait(MASTER, call, lambda: current.collect(call))
            replies = self._replies(messages)
            current.deliver(call, replies[1:])
            return replies[0][1]
        except BaseException as error:
            failure = error
            raise
        finally:
            current.finish(MASTER, call, failure)
            del failure

    def _replies(self, messages: Messages) -> Messages:
        """The replies of the callback to `messages`, after checking that there is one for each."""
        members = [identifier for identifier, _ in messages]
        form = f"expected the master callback of {self._name} to return [(identifier, reply), ...]"
        try:
            self._in_callback = threading.get_ident()
            returned = self._callback(messages)
            if not isinstance(returned, Iterable):
                raise ProtocolError(f"{form}, got {_shown(returned)}")
            returned = list(returned)  # a generator may raise here: an error of the callback
        finally:
            self._in_callback = None
        try:
            replies = [(identifier, reply) for identifier, reply in returned]
            found = [identifier for identifier, _ in replies]
            complete = len(found) == len(members) and set(found) == set(members)
        except (TypeError, ValueError):
            raise ProtocolError(f"{form}, got {_shown(returned)}") from None
        if not complete or found[0] != MASTER:
            raise ProtocolError(
                f"{form} with one reply per member, master first: identifiers {_shown(members)}, "
                f"got {_shown(found)}"
            )
        return replies

    def abort(self, error: BaseException) -> None:
        """Release every member now, because a member can't continue.

        Present and later calls of this round raise `CommAborted`, caused by `error`.
        """
        self._round.end(_text_of(error), error)

    def leave(self, identifier: Hashable = MASTER) -> None:
        """Declare that a member makes no more calls; members that wait for it are released."""
        self._round.leave(identifier)


class FutureResult(Generic[T]):
    """Holds one value that one thread puts in and another takes out.

    `timeout`: the most seconds that `get` waits; None for the default at the time of `get`. A copy
    or an unpickled object is empty.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = None if timeout is None else check_timeout(timeout)
        self._values: SimpleQueue[T] = SimpleQueue()

    def __reduce__(self) -> tuple[Any, ...]:
        return FutureResult, (self._timeout,)

    def put(self, result: T) -> None:
        """Store `result`, which may be any object.

        Raises `ProtocolError` if the previous result was not taken.
        """
        if not self._values.empty():
            raise ProtocolError(
                "expected an empty FutureResult, got one whose last result was not taken with "
                "get(); use one FutureResult per exchange"
            )
        self._values.put(result)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value, remove it and return it.

        `timeout`: seconds; None for the object's own timeout, else the default. Raises
        `CommTimeout` when they have passed.
        """
        seconds = seconds_of(self._timeout if timeout is None else timeout)
        try:
            return self._values.get(timeout=seconds)
        except Empty:
            raise CommTimeout(f"expected a result within {seconds:g} s, got none") from None


def _shown(thing: Any) -> str:
    """`repr`, cut short; that of a user's class may fail."""
    try:
        return f"{thing!r:.200}"
    except Exception:
        return f"<{type(thing).__name__}>"


def _text_of(error: BaseException) -> str:
    """Class and message; `__str__` is code of the user's, and may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
