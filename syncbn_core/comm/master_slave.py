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

# A waiting member checks for a deadlock after these seconds. Most waits are shorter than the first.
DEADLOCK_CHECKS = (0.1, 1.0, 1.2)

MasterCallback = Callable[[list[tuple[Hashable, Any]]], Iterable[tuple[Hashable, Any]]]


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
        if the call failed elsewhere; `ProtocolError` if another thread is in `run_slave` of this
        pipe, or if no other thread exists that could call the others; `CommError` if the pipe is
        a copy or of an earlier round.
        """
        current: Round = self.queue
        slave = current.slaves.get(self.identifier)
        if slave is None:
            raise CommError(
                f"the pipe of slave {shown(self.identifier)} is not connected: it is a copy, or "
                "its round is over; get a new pipe from register_slave"
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
                        "before the reply to its last one; use one pipe in one thread at a time"
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
                + (f"missing: {named(absent)}" if absent else "the callback is still running")
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
                except BaseException:  # another Ctrl-C; it can't interrupt a new thread
                    _thread.start_new_thread(_give_up, (current, slave, call, error))
            raise
        finally:
            if entered:
                slave.busy = False

    def _reply(self, current: Round, call: int, seconds: float) -> Any:
        waited = 0.0
        seen = None
        for look in DEADLOCK_CHECKS:
            if look < seconds:
                try:
                    return self.result.get(look - waited)
                except CommTimeout:
                    seen = current.look(self.identifier, call, seen)
                waited = look
        return self.result.get(seconds - waited)

    def abort(self, error: BaseException) -> None:
        """Release every member now, because this slave can't continue.

        Present and later calls raise `CommAborted`, caused by `error`.
        """
        self.queue.abort(Cause.of(error))

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
        timeout: the most seconds that a member waits; None for the default
            (`set_default_timeout`, else the environment variable `SYNCBN_TIMEOUT`, else 300).

    A copy or an unpickled master has the callback and the settings, but no slaves. Raises
    `ArgumentError` for a timeout that is not a finite number > 0.
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
        # the key in pickles of other projects with a class of this name
        callback = settings.pop("master_callback", callback)
        self.__init__(callback, **settings)  # type: ignore[misc]

    @property
    def nr_slaves(self) -> int:
        """The number of slaves registered in the present round."""
        return len(self._round.slaves)

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """A new pipe for a slave. `identifier`: any hashable object except 0, which is the master.

        The first registration after a call, a `leave` or an `abort` starts a new round. Raises
        `ArgumentError` if the identifier is taken.
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
                f"0 is the master, and the slaves are {shown(list(current.slaves))}; choose another"
            )
        return SlavePipe(identifier, current, result)

    def clear_slaves(self, siblings: Siblings | None = None) -> None:
        """Remove all slaves and start a new round; members that wait in the old one are released.

        `siblings`: shared by masters whose members are the same threads. If all members then wait
        for each other in different exchanges, they get a `ProtocolError` after about a second.
        """
        old, self._round = self._round, Round(self._name, self._timeout, siblings)
        old.close()

    def run_master(self, master_msg: Any) -> Any:
        """Collect a message from every slave, run the callback, send the replies; returns its own.

        Raises what the callback raised; `ProtocolError` if its replies have the wrong form, if
        another thread is in `run_master`, or if no other thread exists that could call the others;
        `CommTimeout` at the deadline, with the call and the missing members; `CommAborted` if the
        call failed elsewhere. Each error also releases the slaves in this call.
        """
        current = self._round
        entered = False
        call = 0
        try:
            with current.lock:
                if current.busy:
                    raise ProtocolError(
                        f"expected one thread in run_master of {self._name}, got two at the same "
                        "time; make all calls of a member from one thread"
                    )
                call = current.calls + 1
                current.busy = entered = True
                current.thread = threading.get_ident()
                current.calls = call
            messages = self._collect(current, call)
            replies = self._replies([(MASTER, master_msg), *messages], current.where(call))
            with current.lock:
                current.check(call)  # a slave may have given up while the callback ran
                for identifier, reply in replies[1:]:
                    slave = current.slaves[identifier]
                    slave.result.put(reply)
                    slave.message = NOTHING
            return replies[0][1]
        except BaseException as error:
            if entered:
                try:
                    current.fail(call, Cause.of(error))
                except BaseException:  # Ctrl-C; it can't interrupt a new thread
                    _thread.start_new_thread(_fail, (current, call, error))
            raise
        finally:
            if entered:
                current.busy = False

    def _collect(self, current: Round, call: int) -> list[tuple[Hashable, Any]]:
        """Wait for the messages of all slaves; returns them in the order of registration."""
        seconds = seconds_of(self._timeout)
        begin = time.monotonic()
        looks: tuple[float, ...] = (*DEADLOCK_CHECKS, float("inf"))
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
        """The replies of the callback to `messages`, after checking that there is one for each."""
        members = [identifier for identifier, _ in messages]
        returned = self._callback(messages)
        if not isinstance(returned, Iterable):
            raise ProtocolError(_expected_replies(where, returned))
        returned = list(returned)  # a generator may raise here: an error of the callback
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
        """Release every member now, because a member can't continue.

        Present and later calls of this round raise `CommAborted`, caused by `error`.
        """
        self._round.abort(Cause.of(error))

    def leave(self, identifier: Hashable = MASTER) -> None:
        """Declare that a member makes no more calls; members that wait for it are released."""
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
