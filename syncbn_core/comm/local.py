"""`LocalCommunicator`: processes of one host, a master and its slaves, over local connections.

Each slave sends its array to rank 0, the master, which answers with the arrays of all. On one host
that is many times as fast as a collective over TCP. A frame is a tag, a length, and so many bytes:

    slave   operation and dtype: its array           ASK: the text of the call in which it waits
    master  operation and dtype: the arrays of all   ASK: nothing
                                                     FAILED: JSON, what `_error` takes
    any     COMPILES, COMPILED: nothing; between them deadlines stand

If an array does not come or does not fit, the master asks those that wait for their calls, and
tells all what it knows: every rank raises the same error.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from syncbn_core import clock
from syncbn_core.comm.process_group import (
    ProcessCommunicator,
    describe_other_ranks,
    grace_after,
    same_names,
)
from syncbn_core.comm.protocol import CollectiveCall
from syncbn_core.comm.timeouts import PROCESSES, check_timeout, seconds_of
from syncbn_core.errors import (
    ArgumentError,
    BackendError,
    CommAborted,
    CommError,
    CommTimeout,
    DeviceError,
    DTypeError,
    ProtocolError,
    ShapeError,
    SyncBNError,
)

__all__ = ["LocalCommunicator", "LocalTransport", "host_name", "local_transport"]

Array = Any
Data = Any  # bytes
Greeting = struct.Struct("=32sI")  # a key, the rank
Head = struct.Struct("=16sQ")  # a tag, how many bytes follow
ASK, FAILED = b"ask".ljust(16), b"failed".ljust(16)
COMPILES, COMPILED = b"compiles".ljust(16), b"compiled".ljust(16)
SHORT = 2000  # microseconds
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # SIGPIPE ends a program that does not ignore it
HELLO = 512  # bytes of the message in which ranks say where they are


class LocalCommunicator(ProcessCommunicator):
    """A rank of a group of processes of one host and one user, for NumPy arrays.

        identifier = LocalCommunicator.new_id()  # in one process, which passes it to all others
        communicator = LocalCommunicator(rank, size, identifier)  # in each, at the same time

    Args:
        rank: this process's number, 0 to `size - 1`.
        size: the number of processes.
        identifier: what `new_id` returned; bytes that no other group has, and no stranger knows.
        timeout: seconds that a call, or the constructor, waits for the other ranks; None for
            `syncbn_core.comm.get_default_timeout` (300 unless set).

    Calls raise the errors of `LocalTransport`. The constructor raises `CommTimeout` if another rank
    does not make its communicator in time, `ArgumentError` for a wrong rank, identifier or timeout,
    and `BackendError` on a system without local connections, such as Windows.
    """

    def __init__(
        self, rank: int, size: int, identifier: bytes, *, timeout: float | None = None
    ) -> None:
        if timeout is not None:
            check_timeout(timeout)
        if not 0 <= rank < size:
            raise ArgumentError(f"expected a rank from 0 to size - 1, got rank {rank} of {size}")
        if not isinstance(identifier, bytes):
            raise ArgumentError(f"expected the bytes of new_id(), got {identifier!r}")
        if not host_name():
            raise BackendError("expected a system with local connections, such as Linux; use MPI")
        call = CollectiveCall(lambda: "making a LocalCommunicator")
        super().__init__(
            _connected(rank, size, identifier, lambda: seconds_of(timeout, PROCESSES), call)
        )

    @staticmethod
    def new_id() -> bytes:
        """A new id, with which the ranks of one group find each other."""
        return secrets.token_bytes(32)


class LocalTransport:
    """A rank that is connected with those of its host.

    Args:
        peers: the connections of rank 0 to ranks 1, 2, ...; of another rank that to rank 0.
        timeout: returns the seconds that a call waits for the other ranks.
        in_world: returns what errors add to the number of a rank.

    Takes NumPy arrays; `DTypeError` if they hold Python objects, `DeviceError` for other arrays.
    A call raises `CommTimeout` with the missing ranks, `CommAborted` as soon as a rank has ended,
    `ShapeError` or `ProtocolError` where ranks send unlike arrays. All name the call. After an
    error the connections are closed, so that no rank waits for this one.
    """

    on_device = False

    def __init__(
        self,
        rank: int,
        peers: Sequence[socket.socket],
        size: int,
        timeout: Callable[[], float],
        in_world: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout, self._in_world = timeout, in_world
        self._peers = dict(enumerate(peers, 0 if rank else 1))
        self._ranks = {peer.fileno(): other for other, peer in self._peers.items()}
        self._ready = select.poll()
        for peer in peers:
            # a wait of `recv` ends in half the time of one of `poll`, which is for longer ones
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, SHORT))
            peer.setblocking(True)
            self._ready.register(peer, select.POLLIN)
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._compiling = 0  # how many ranks have said so
        self.close = weakref.finalize(self, _close, peers)
        _transports.add(self)

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        return self._gathered("gather", values, call)

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        return np.asarray(self._gathered("reduce", values, call).sum(0, dtype=values.dtype))

    def _gathered(self, operation: str, values: Array, call: CollectiveCall) -> Array:
        if not isinstance(values, np.ndarray):
            raise DeviceError(f"expected NumPy arrays in {call}, got {type(values).__name__}")
        if values.dtype.hasobject:
            raise DTypeError(f"expected numbers in {call}, got {values.dtype}")
        if self._process != os.getpid():
            raise CommError(
                f"expected the process that has joined the group in {call}, got a fork of it; "
                "synchronize in that process alone"
            )
        try:
            tag = f"{operation} {values.dtype.str}".encode().ljust(16)
            self._begin, self._stood, self._end = time.monotonic(), clock.stood(), 0.0
            exchange = self._as_slave if self.rank else self._as_master
            answer, frame = exchange(tag, values.tobytes(), call)
            if answer == FAILED:
                told = json.loads(frame)
                raise self._error(call, time.monotonic() - self._begin, *told)
        except BaseException:
            self.close()
            clock.stand(-self._compiling)
            raise
        return np.ndarray((self.size, *values.shape), values.dtype, frame)

    def _as_slave(self, tag: bytes, row: bytes, call: CollectiveCall) -> tuple[bytes, Data]:
        """The master's answer: its tag and its bytes."""
        try:
            with suppress(OSError):  # what the master has told this rank before can still be read
                self._send(0, _frame(tag, row))
            answer, frame = self._receive(0)
            if answer == ASK:
                self._send(0, _frame(ASK, str(call).encode()))
                answer, frame = self._receive(0)
            return answer, frame
        except OSError as error:
            reason = "late" if isinstance(error, TimeoutError) else "lost"
            return FAILED, json.dumps([reason, 0, [None]]).encode()

    def _as_master(self, tag: bytes, row: bytes, call: CollectiveCall) -> tuple[bytes, Data]:
        """The answer: its tag and its bytes."""
        rows = [row] * self.size
        waiting, rank, failure, short = set(self._peers), 0, "", True
        try:
            while waiting:
                # after a short wait for one: for all at once, so that none is told late
                for rank in list(waiting) if short else self._wait():
                    try:
                        theirs, rows[rank] = self._receive(rank, short=True)
                    except BlockingIOError:
                        short = False
                        break
                    if theirs != tag or len(rows[rank]) != len(row):
                        failure = "unlike"
                    waiting.discard(rank)
        except OSError as error:
            failure = "late" if isinstance(error, TimeoutError) else "lost"
            if failure == "lost":
                waiting.add(rank)
        if failure:
            return FAILED, self._tell(failure, rank, waiting, call)
        frame = _frame(tag, *rows)
        for rank, peer in self._peers.items():
            try:
                self._send(rank, frame)
            except OSError:  # the next call tells all ranks
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        return tag, memoryview(frame)[Head.size :]

    def _tell(self, failure: str, rank: int, missing: set[int], call: CollectiveCall) -> bytes:
        """Tell all ranks of a failure, with the calls of those that are not missing."""
        calls: list[str | None] = [str(call), *[None] * (self.size - 1)]
        self._end = time.monotonic() + 1.0
        present = set(self._peers) - missing
        for each in present:
            with suppress(OSError):
                self._send(each, _frame(ASK))
        for each in present:
            with suppress(OSError):
                calls[each] = self._receive(each)[1].decode()
        told = json.dumps([failure, rank, calls]).encode()
        for each in self._peers:  # who is late reads it later
            with suppress(OSError):
                self._send(each, _frame(FAILED, told))
        return told

    def _error(
        self,
        call: CollectiveCall,
        seconds: float,
        failure: str,
        lost: int,
        calls: Sequence[str | None],
    ) -> SyncBNError:
        """`failure`: "late", "unlike", or "lost" of a rank. `calls`: of ranks, as far as known."""
        who = f"rank {self.rank} of {self.size}{self._in_world(self.rank)}"
        others = {
            f"{rank}{self._in_world(rank)}": text
            for rank, text in enumerate(calls)
            if rank != self.rank
        }
        if failure == "unlike":
            sent = ", ".join(f"rank {rank} in {text}" for rank, text in others.items())
            same = same_names([str(text).partition(": ")[0] for text in calls])
            kind = ShapeError if same else ProtocolError
            return kind(f"{who} sent an array in {call}, {sent} an unlike one; {call.remedy}")
        where = describe_other_ranks(call, others)
        if failure == "lost":
            return CommAborted(f"{who} lost rank {lost}{self._in_world(lost)} in {call}; {where}")
        if self.rank < len(calls) and calls[self.rank] is None:
            return CommAborted(f"{who} comes too late to {call}; {where}")
        stood = clock.stood_since(self._stood)
        return CommTimeout(f"{who} waited {seconds:.3g} s{stood} in {call}; {where}")

    def _left(self) -> float:
        """Milliseconds until the deadline."""
        if not self._end:
            seconds = self._timeout()
            # slaves wait a little longer, because the master knows who is missing
            self._end = self._begin + seconds + (grace_after(seconds) if self.rank else 0.0)
        left = self._end - time.monotonic()
        return max(left if left > 0 else left + clock.stood() - self._stood, 0.0) * 1000

    def _wait(self) -> list[int]:
        """The ranks that have sent, or ended."""
        return [self._ranks[descriptor] for descriptor in self._poll(self._ready)]

    def _wait_for(self, rank: int, event: int) -> None:
        ready = select.poll()
        ready.register(self._peers[rank], event)
        self._poll(ready)

    def _poll(self, ready: Any) -> list[int]:
        """The descriptors that are ready; `TimeoutError` at the deadline."""
        while True:
            left = self._left()
            events = ready.poll(left)
            if events or not left:
                break
        if not events:
            raise TimeoutError
        return [descriptor for descriptor, _ in events]

    def _send(self, rank: int, frame: bytearray) -> None:
        left = memoryview(frame)
        with self._sending:
            while left:
                try:
                    left = left[self._peers[rank].send(left, NO_SIGNAL) :]
                except BlockingIOError:
                    self._wait_for(rank, select.POLLOUT)

    def _receive(self, rank: int, short: bool = False) -> tuple[bytes, Data]:
        """The tag and the bytes of a frame; follows what ranks say of compilations before it.

        `short`: raises `BlockingIOError` after a short wait.
        """
        while True:
            tag, length = Head.unpack(self._read(rank, Head.size, short))
            if tag not in (COMPILES, COMPILED):
                return tag, self._read(rank, length)
            more = 1 if tag == COMPILES else -min(self._compiling, 1)
            clock.stand(more)
            self._compiling += more
            if self.rank == 0:
                self.tell_compiling(more, rank)

    def _read(self, rank: int, size: int, short: bool = False) -> Data:
        """So many bytes, and no more: those behind them are another frame's."""
        data, got = bytearray(size), 0
        while got < size:
            try:
                count = self._peers[rank].recv_into(memoryview(data)[got:])
            except BlockingIOError:
                if short and not got:
                    raise
                self._wait_for(rank, select.POLLIN)
                continue
            if not count:
                raise ConnectionResetError
            got += count
        return data

    def tell_compiling(self, more: int, source: int | None = None) -> None:
        """Tell the ranks that may wait for this one, or for `source`, of a compilation.

        `more`: 1 as it begins, -1 as it ends.
        """
        frame = _frame(COMPILES if more > 0 else COMPILED)
        for rank, peer in self._peers.items():
            if rank != source and self._process == os.getpid():
                with self._sending, suppress(OSError):  # the next call says what is wrong
                    peer.send(frame, NO_SIGNAL | socket.MSG_DONTWAIT)


def _frame(tag: bytes, *data: Any) -> bytearray:
    return bytearray().join([Head.pack(tag, sum(map(len, data))), *data])


def _close(peers: Sequence[socket.socket]) -> None:
    for peer in peers:
        peer.close()


_transports: weakref.WeakSet[LocalTransport] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked process, which would keep connections open after this one has been killed."""
    for transport in list(_transports):
        transport.close()


def _tell_compiling(more: int) -> None:
    for transport in list(_transports):
        transport.tell_compiling(more)


clock.listeners.append(_tell_compiling)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def local_transport(
    rank: int,
    size: int,
    timeout: Callable[[], float],
    gather: Callable[[Array], Array],
    call: CollectiveCall,
    in_world: Callable[[int], str] = lambda rank: "",
) -> LocalTransport | None:
    """A transport for the ranks of a group; None unless all are on one host, of one user.

    `gather`: given an array of bytes, `uint8` `(n,)`, returns those of all ranks, `(size, n)`.
    `timeout`, `in_world`: as of `LocalTransport`.

    Every rank has to call it, in `call`. Raises what `gather` raises, `CommTimeout` if a rank does
    not connect in time, `CommAborted` if it can't.
    """
    host, identifier = host_name(), secrets.token_hex(32)
    hello = json.dumps([host or identifier, identifier]).encode().ljust(HELLO)
    hellos = [json.loads(bytes(row)) for row in gather(np.frombuffer(hello, np.uint8))]
    if not host or len({their_host for their_host, _ in hellos}) > 1:
        return None
    return _connected(rank, size, hellos[0][1].encode(), timeout, call, in_world)


def _connected(
    rank: int,
    size: int,
    identifier: bytes,
    timeout: Callable[[], float],
    call: CollectiveCall,
    in_world: Callable[[int], str] = lambda rank: "",
) -> LocalTransport:
    """The transport of a rank, after connecting."""
    end = time.monotonic() + timeout()
    name, key = sha256(b"address" + identifier), sha256(b"key of %d" % size + identifier)
    try:
        with ExitStack() as stack:
            address = f"\0syncbn-{name.hexdigest()}"  # Linux needs no file for it
            if sys.platform != "linux":
                folder = Path(tempfile.gettempdir(), f"syncbn-{name.hexdigest()[:16]}")
                address = str(folder / "master")
                if rank == 0:
                    folder.mkdir(0o700)
                    stack.callback(rmtree, folder)
            if rank == 0:
                peers = _accepted(stack, address, size, key.digest(), end)
            else:
                peers = [_joined(address, Greeting.pack(key.digest(), rank), end)]
    except OSError as error:
        kind = CommTimeout if isinstance(error, TimeoutError) else CommAborted
        who = f"rank {rank} of {size}{in_world(rank)}"
        raise kind(f"{who} could not connect with the others in {call}: {error}") from error
    return LocalTransport(rank, peers, size, timeout, in_world)


def _joined(address: str, greeting: bytes, end: float) -> socket.socket:
    """A connection with rank 0, once that listens."""
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(max(end - time.monotonic(), 1e-3))
            peer.connect(address)
            if not _is_own(peer):
                raise PermissionError("another user listens at the address of rank 0")
            peer.sendall(greeting)
            return peer
        except BaseException as error:
            peer.close()
            not_yet = isinstance(error, (ConnectionError, FileNotFoundError, BlockingIOError))
            if not not_yet:
                raise
        if time.monotonic() > end:
            raise TimeoutError("timed out")
        time.sleep(0.005)


def _accepted(
    stack: ExitStack, address: str, size: int, key: bytes, end: float
) -> list[socket.socket]:
    """The connections of ranks 1, 2, ...; closes those of others."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(address)
    listener.listen()  # for more than all ranks, whoever else comes
    found: dict[int, socket.socket] = {}
    coming = {listener.fileno(): listener}
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    try:
        while len(found) < size - 1:
            events = ready.poll(max(end - time.monotonic(), 0.0) * 1000)
            if not events:
                raise TimeoutError("timed out")
            for descriptor, _ in events:
                if descriptor == listener.fileno():
                    peer, _ = listener.accept()
                    coming[peer.fileno()] = peer
                    ready.register(peer, select.POLLIN)
                    continue
                peer = coming[descriptor]
                ready.unregister(descriptor)
                greeting = peer.recv(Greeting.size).ljust(Greeting.size)
                if compare_digest(greeting[:32], key) and _is_own(peer):
                    found[Greeting.unpack(greeting)[1]] = coming.pop(descriptor)
    except BaseException:
        _close(list(found.values()))
        raise
    finally:
        _close(list(coming.values()))
    return [found[rank] for rank in range(1, size)]


def _is_own(peer: socket.socket) -> bool:
    """Whether the other end is of this user, where the system can tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def host_name() -> str:
    """The same text in processes that can connect with each other; "" where none can."""
    if not hasattr(socket, "AF_UNIX"):
        return ""
    try:  # containers of one host may have one name, or another network
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return f"{socket.gethostname()} {os.getuid()}"
