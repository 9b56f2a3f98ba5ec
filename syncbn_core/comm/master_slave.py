"""One master and its slaves exchange messages, call after call.

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

import _thread
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from syncbn_core.comm.future import NOTHING, FutureResult, Gate
from syncbn_core.comm.rounds import MASTER, Cause, Round, Siblings, Slave, named, shown
from syncbn_core.comm.timeouts import check_timeout, seconds_of
from syncbn_core.errors import ArgumentError, CommAborted, CommError, CommTimeout, ProtocolError

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]

# Seconds after which a member that waits looks whether those that are missing can come at all. The
# usual wait is over by then.
LOOKS = (0.1, 1.0, 1.2)

MasterCallback = Callable[[list[tuple[Hashable, Any]]], Iterable[tuple[Hashable, Any]]]


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
        when the call failed elsewhere; `ProtocolError` while another thread is in it, or at once
        when no other thread is there that could call the others; `CommError` for a pipe of an
        earlier round.
        """
        current: Round = self.queue
        slave = current.slaves.get(self.identifier)
        if slave is None:
            raise CommError(
                f"the pipe of slave {shown(self.identifier)} is not connected: it is a copy, or "
                "its round is over; call register_slave on the master in use"
            )
        seconds = seconds_of(current.timeout)
        entered = posted = False
        call = 0
        try:
            with current.lock:
                call = slave.calls + 1
                if slave.busy:
                    raise ProtocolError(
                        f"slave {shown(self.identifier)} sent a message for {current.where(call)} "
                        "while its last one is unanswered; use one pipe in one thread at a time"
                    )
                slave.busy = entered = True
                slave.thread = threading.get_ident()
            current.post(slave, call, msg)
            posted = True
            return self._reply(current, call, seconds)
        except CommAborted:
            raise
        except CommTimeout:
            with current.lock:
                absent = [member for member in current.missing(call) if member != self.identifier]
            late = CommTimeout(
                f"slave {shown(self.identifier)} waited {seconds:g} s for its reply in "
                f"{current.where(call)}; "
                + (f"missing: {named(absent)}" if absent else "the callback is still at work")
            )
            gave_up = current.give_up(slave, call, Cause.of(late), posted)
            try:
                if gave_up:
                    raise late from None
            finally:
                del late
            return self.result.get(seconds)
        except BaseException as error:  # Ctrl-C: the others must not wait for this slave
            if entered:
                try:
                    current.give_up(slave, call, Cause.of(error), posted)
                except BaseException:  # Ctrl-C again: a new thread gets none
                    _thread.start_new_thread(_give_up, (current, slave, call, error))
            raise
        finally:
            if entered:
                slave.busy = False

    def _reply(self, current: Round, call: int, seconds: float) -> Any:
        waited = 0.0
        seen = None
        for look in LOOKS:
            if look < seconds:
                try:
                    return self.result.get(look - waited)
                except CommTimeout:
                    seen = current.look(self.identifier, call, seen)
                waited = look
        return self.result.get(seconds - waited)

    def abort(self, error: BaseException) -> None:
        """Release every member now: this slave can't go on because of `error`."""
        self.queue.abort(Cause.of(error))

    def leave(self) -> None:
        """Say that this slave makes no more calls; who waits for one is released."""
        self.queue.leave(self.identifier)


class SyncMaster:
    """The master's end.

    Args:
        master_callback: gets `[(0, master_msg), (identifier, msg), ...]`, master first, then
            slaves in the order of registration; returns `[(0, reply), (identifier, reply),
            ...]`, master first, one reply per member.
        name: what error messages call this exchange.
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
        self._round = Round(name, self._timeout)
        self._registering = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"callback": self._callback, "name": self._name, "timeout": self._timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = {"name": "SyncMaster", "timeout": None, **state}
        callback = settings.pop("callback", None)
        # as other projects with a class of this name pickle it
        callback = settings.pop("master_callback", callback)
        self.__init__(callback, **settings)  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """Slaves registered in the present round."""
        return len(self._round.slaves)

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """A pipe for a slave called `identifier`: any hashable but 0, which is the master.

        The first registration after a member has called or left, or after an abort, begins a new
        round. Raises `ArgumentError` for an identifier that is taken.
        """
        with self._registering:
            current = self._round
            if current.used:
                self.clear_slaves()
                current = self._round
        result: FutureResult[Any] = FutureResult(self._timeout)
        with current.lock:
            taken = identifier == MASTER or identifier in current.slaves
            if not taken:
                current.slaves[identifier] = Slave(result)
        if taken:
            raise ArgumentError(
                f"expected a slave identifier that is not taken, got {shown(identifier)}; "
                f"0 is the master, in use are {shown(list(current.slaves))}"
            )
        return SlavePipe(identifier, current, result)

    def clear_slaves(self, siblings: Siblings | None = None) -> None:
        """Forget every slave and begin a new round; who still waits in the old one is released.

        `siblings`: shared by masters whose members are the same threads. When every member waits
        for another one, in different exchanges, they are then told after a second.
        """
        old, self._round = self._round, Round(self._name, self._timeout, siblings)
        old.close()

    def run_master(self, master_msg: Any) -> Any:
        """Collect one message from every slave, call the callback, hand out the replies.

        Raises what the callback raised; `ProtocolError` if its replies have the wrong form, while
        another thread is in it, or at once when no other thread is there that could call the
        others; `CommTimeout` at the deadline, naming the call and who is missing; `CommAborted`
        when the call failed elsewhere. In each case the slaves in this call are released too.
        """
        current = self._round
        entered = False
        call = 0
        try:
            with current.lock:
                if current.busy:
                    raise ProtocolError(
                        f"expected one thread of the master in {self._name}, got two at the same "
                        "time; make a member's calls from one thread"
                    )
                call = current.calls + 1
                current.busy = entered = True
                current.thread = threading.get_ident()
                current.calls = call
            messages = self._collect(current, call)
            replies = self._replies([(MASTER, master_msg), *messages], current.where(call))
            with current.lock:
                current.check(call)  # a slave may have given up while the callback was at work
                for identifier, reply in replies[1:]:
                    slave = current.slaves[identifier]
                    slave.result.put(reply)
                    slave.message = NOTHING
            return replies[0][1]
        except BaseException as error:
            if entered:
                try:
                    current.fail(call, Cause.of(error))
                except BaseException:  # Ctrl-C: a new thread gets none
                    _thread.start_new_thread(_fail, (current, call, error))
            raise
        finally:
            if entered:
                current.busy = False

    def _collect(self, current: Round, call: int) -> list[tuple[Hashable, Any]]:
        """Wait for every slave's message of `call`; in the order of registration."""
        seconds = seconds_of(self._timeout)
        begin = time.monotonic()
        looks: tuple[float, ...] = (*LOOKS, float("inf"))
        seen = None
        while True:
            with current.lock:
                current.check(call)
                missing = current.missing(call)
                if not missing:
                    return [(i, slave.message) for i, slave in current.slaves.items()]
                gate = current.gate = Gate()
            waited = time.monotonic() - begin
            if waited >= seconds:
                raise CommTimeout(
                    f"the master waited {seconds:g} s in {current.where(call)}; "
                    f"missing: {named(missing)}"
                )
            if waited >= looks[0]:
                seen = current.look(MASTER, call, seen)
                looks = looks[1:]
            else:
                gate.wait(min(looks[0], seconds) - waited)

    def _replies(
        self, messages: list[tuple[Hashable, Any]], where: str
    ) -> list[tuple[Hashable, Any]]:
        """What the callback returns for `messages`, once that is known to be a reply for each."""
        members = [identifier for identifier, _ in messages]
        returned = self._callback(messages)
        if not isinstance(returned, Iterable):
            raise ProtocolError(_expected_replies(where, returned))
        returned = list(returned)  # what a generator raises is the callback's own error
        try:
            replies = [(identifier, reply) for identifier, reply in returned]
            identifiers = [identifier for identifier, _ in replies]
            complete = len(identifiers) == len(members) and set(identifiers) == set(members)
        except (TypeError, ValueError):
            raise ProtocolError(_expected_replies(where, returned)) from None
        if not complete or identifiers[0] != MASTER:
            raise ProtocolError(
                f"expected the master callback to return one reply per member in {where}, master "
                f"first: identifiers {shown(members)}, got {shown(identifiers)}"
            )
        return replies

    def abort(self, error: BaseException) -> None:
        """Release every member now, because of `error`, in this round's present and later calls."""
        self._round.abort(Cause.of(error))

    def leave(self, identifier: Hashable = MASTER) -> None:
        """Say that a member makes no more calls in this round; who waits for one is released."""
        self._round.leave(identifier)


def _expected_replies(where: str, returned: Any) -> str:
    return (
        f"expected the master callback to return [(identifier, reply), ...] in {where}, "
        f"got {shown(returned)}"
    )


def _give_up(current: Round, slave: Slave, call: int, error: BaseException) -> None:
    current.give_up(slave, call, Cause.of(error), posted=False)


def _fail(current: Round, call: int, error: BaseException) -> None:
    current.fail(call, Cause.of(error))
