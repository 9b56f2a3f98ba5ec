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

import ctypes
import errno
import json
import logging
import math
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
from functools import cache
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

Array = Any
Data = Any  # bytes
Greeting = struct.Struct("=32sII")  # a key, the rank, how many ranks there are
Head = struct.Struct("=16sQ")  # a tag, how many bytes follow
ASK, FAILED = b"ask".ljust(16), b"failed".ljust(16)
COMPILES, COMPILED = b"compiles".ljust(16), b"compiled".ljust(16)
SHORT = 2000  # microseconds
PIECE = 3600.0  # seconds; longer waits are cut into such, because systems do not take any number
TEXT = 1 << 20  # bytes; texts are shorter
SOON = 5.0  # seconds in which processes of one host connect, if they can
STRANGERS = 64  # connections that have not said who they are, at most
# SIGPIPE ends a program that does not ignore it
AT_ONCE = getattr(socket, "MSG_NOSIGNAL", 0) | getattr(socket, "MSG_DONTWAIT", 0)
HELLO = 512  # bytes of a message in which ranks say where they are, or why they can't connect
LOGGER = logging.getLogger("syncbn")


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
    does not make its communicator in time, `CommAborted` if one ends meanwhile, `ProtocolError`
    if two have one rank or their sizes differ, `ArgumentError` for a wrong rank, identifier or
    timeout, and `BackendError` on a system without local connections, such as Windows.
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
        seconds = lambda: seconds_of(timeout, PROCESSES)  # noqa: E731
        transport = _connected(rank, size, identifier, seconds, call)
        transport.all_gather(np.empty(0), call)  # until all have come
        super().__init__(transport)

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
        self.seconds, self._in_world = timeout, in_world
        self._peers = dict(enumerate(peers, 0 if rank else 1))
        self._ranks = {peer.fileno(): other for other, peer in self._peers.items()}
        self._ready = select.poll()
        for peer in peers:
            # a wait of `recv` ends in half the time of one of `poll`, which is for longer ones
            short = struct.pack("ll", 0, SHORT)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, short)
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
            self._compiling = 0
            raise
        return np.ndarray((self.size, *values.shape), values.dtype, frame)

    def _as_slave(self, tag: bytes, row: bytes, call: CollectiveCall) -> tuple[bytes, Data]:
        """The master's answer: its tag and its bytes."""
        try:
            with suppress(OSError):  # what the master has told this rank before can still be read
                self._send(0, _frame(tag, row))
            length = len(row) * self.size
            answer, frame = self._receive(0, length)
            if answer == ASK:
                self._send(0, _frame(ASK, str(call).encode()))
                answer, frame = self._receive(0)
            if answer != FAILED and (answer, len(frame)) != (tag, length):
                raise ConnectionResetError
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
                        theirs, rows[rank] = self._receive(rank, len(row), short=True)
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
        # less than the time by which the others wait longer
        grace = grace_after(self.seconds()) / 2
        self._end = time.monotonic() + grace - (clock.stood() - self._stood)
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
        """`failure`: "late", "unlike", "lost" of a rank, or why rank 0 could not connect.

        `calls`: of ranks, as far as known.
        """
        who = f"rank {self.rank} of {self.size}{self._in_world(self.rank)}"
        if failure not in ("late", "lost", "unlike"):
            return CommAborted(f"{who} could not connect with the others in {call}: {failure}")
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
            seconds = self.seconds()
            # slaves wait a little longer, because the master knows who is missing
            self._end = self._begin + seconds + (grace_after(seconds) if self.rank else 0.0)
        return clock.left(self._end, self._stood) * 1000

    def _wait(self) -> list[int]:
        """The ranks that have sent, or ended."""
        return [self._ranks[descriptor] for descriptor in self._poll(self._ready)]

    def _wait_for(self, rank: int, event: int) -> None:
        ready = select.poll()
        ready.register(self._peers[rank], event)
        self._poll(ready)

    def _poll(self, ready: Any) -> list[int]:
        """The descriptors that are ready; `TimeoutError` at the deadline."""
        while not (events := ready.poll(min(self._left(), PIECE * 1000))):
            if not self._left():
                raise TimeoutError
        return [descriptor for descriptor, _ in events]

    def _send(self, rank: int, frame: bytearray) -> None:
        left = memoryview(frame)
        with self._sending:
            while left:
                try:
                    left = left[self._peers[rank].send(left, AT_ONCE) :]
                except BlockingIOError:
                    self._wait_for(rank, select.POLLOUT)

    def _receive(self, rank: int, expected: int = 0, short: bool = False) -> tuple[bytes, Data]:
        """The tag and the bytes of a frame; follows what ranks say of compilations before it.

        A frame longer than `expected`, and than any text, is dropped: both are empty. `short`:
        raises `BlockingIOError` after a short wait.
        """
        while True:
            tag, length = Head.unpack(self._read(rank, Head.size, short))
            if tag not in (COMPILES, COMPILED):
                break
            more = 1 if tag == COMPILES else -min(self._compiling, 1)
            clock.stand(more)
            self._compiling += more
            if self.rank == 0:
                self.tell_compiling(more, rank)
        if length <= max(expected, TEXT):
            return tag, self._read(rank, length)
        for begin in range(0, length, TEXT):
            self._read(rank, min(TEXT, length - begin))
        return b"", b""

    def _read(self, rank: int, size: int, short: bool = False) -> Data:
        """So many bytes, and no more: those behind them are another frame's."""
        data, got = bytearray(size), 0
        while got < size:
            count = _received(self._peers[rank], data, got)
            if count > 0:
                got += count
            elif not count:
                raise ConnectionResetError
            elif short and not got:
                raise BlockingIOError
            else:
                self._wait_for(rank, select.POLLIN)
        return data

    def tell_compiling(self, more: int, source: int | None = None) -> None:
        """Tell the ranks that may wait for this one, or for `source`, of a compilation.

        `more`: 1 as it begins, -1 as it ends.
        """
        frame = _frame(COMPILES if more > 0 else COMPILED)
        for rank, peer in self._peers.items():
            if rank != source and self._process == os.getpid():
                with self._sending, suppress(OSError):  # the next call says what is wrong
                    peer.send(frame, AT_ONCE)


@cache
def _recv() -> Any:
    """C's function. Python's waits anew after each signal, so with a timer it may never end."""
    recv = ctypes.CDLL(None, use_errno=True).recv
    recv.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    recv.restype = ctypes.c_ssize_t
    return recv


def _received(peer: socket.socket, data: bytearray, at: int) -> int:
    """How many bytes have come into `data[at:]`; -1: none in a short time, or until a signal."""
    size = len(data) - at
    into = (ctypes.c_char * size).from_buffer(data, at)
    count: int = _recv()(peer.fileno(), into, size, 0)
    if count < 0 and (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
        raise OSError(number, os.strerror(number))
    return count


def _frame(tag: bytes, *data: Any) -> bytearray:
    return bytearray().join([Head.pack(tag, sum(map(len, data))), *data])


def _close(peers: Sequence[socket.socket]) -> None:
    for peer in peers:
        peer.close()


_transports: weakref.WeakSet[LocalTransport] = weakref.WeakSet()
_said: set[str] = set()  # what this process has said; each is said once


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
    """A transport for the ranks of a group; None unless all are on one host, and can connect.

    `gather`: given an array of bytes, `uint8` `(n,)`, returns those of all ranks, `(size, n)`.
    `timeout`, `in_world`: as of `LocalTransport`. The environment variable SYNCBN_LOCAL=off on any
    rank means None for all.

    Every rank has to call it, in `call`. Raises what `gather` raises. Where some rank of one host
    can't connect, a warning of the logger `syncbn` says why, once.
    """

    def told(text: str) -> list[str]:
        rows = gather(np.frombuffer(text.encode()[:HELLO].ljust(HELLO), np.uint8))
        return [bytes(row).decode(errors="replace").rstrip() for row in rows]

    identifier = secrets.token_hex(32)
    host = "" if os.environ.get("SYNCBN_LOCAL") == "off" else host_name()
    hellos = [json.loads(text) for text in told(json.dumps([host or identifier, identifier]))]
    if len({their_host for their_host, _ in hellos}) > 1 or hellos[0][0] == hellos[0][1]:
        return None
    transport, reason = None, ""
    try:
        soon = min(SOON, timeout() / 2)
        given = hellos[0][1].encode(), timeout, call, in_world, soon
        transport = _connected(rank, size, *given)
    except Exception as error:  # of any class: sandboxes refuse, programs replace `socket.socket`
        reason = f"{error}"
    reasons = [reason for reason in told(reason) if reason]
    if reasons and transport is not None:
        transport.close()
    if reasons and rank == 0 and "not local" not in _said:
        _said.add("not local")
        LOGGER.warning("syncbn exchanges by the backend of the group: %s", "; ".join(reasons))
    return None if reasons else transport


def _connected(
    rank: int,
    size: int,
    identifier: bytes,
    timeout: Callable[[], float],
    call: CollectiveCall,
    in_world: Callable[[int], str] = lambda rank: "",
    soon: float = math.inf,
) -> LocalTransport:
    """The transport of a rank, after connecting, which takes `timeout` and `soon` at most."""
    end = time.monotonic() + min(timeout(), soon)
    name, key = sha256(b"address" + identifier), sha256(b"key" + identifier)
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
                peers = [_joined(address, Greeting.pack(key.digest(), rank, size), end)]
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
            peer.settimeout(max(min(end - time.monotonic(), PIECE), 1e-3))
            peer.connect(address)
            if not _is_own(peer):
                raise PermissionError("another user listens at the address of rank 0")
            peer.sendall(greeting)
            return peer
        except BaseException as error:
            peer.close()
            not_yet = (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError)
            if not isinstance(error, not_yet):
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
    coming: dict[int, socket.socket] = {}  # by descriptor; the oldest comes first
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    try:
        while len(found) < size - 1:
            left = max(end - time.monotonic(), 0.0)
            events = ready.poll(min(left, PIECE) * 1000)
            if not events and not left:
                missing = sorted({*range(1, size)} - {*found})
                raise TimeoutError(f"no sign of rank {', '.join(map(str, missing))}")
            for descriptor, _ in events:
                if descriptor == listener.fileno():
                    peer, _ = listener.accept()
                    if _is_own(peer):
                        coming[peer.fileno()] = peer
                        ready.register(peer, select.POLLIN)
                    else:
                        peer.close()
                    if len(coming) > STRANGERS:
                        ready.unregister(oldest := coming.pop(next(iter(coming))))
                        oldest.close()
                elif descriptor in coming:
                    ready.unregister(peer := coming.pop(descriptor))
                    greeting = peer.recv(Greeting.size).ljust(Greeting.size)
                    theirs, rank, count = Greeting.unpack(greeting)
                    if not compare_digest(theirs, key):
                        peer.close()
                        continue
                    if count != size or rank in found:
                        found[-1] = peer
                        raise ProtocolError(
                            f"expected each rank of {size} once, got rank {rank} of {count}"
                            + " a second time" * (count == size)
                        )
                    found[rank] = peer
                    ready.register(peer, select.POLLHUP)
                elif ended := [n for n, peer in found.items() if peer.fileno() == descriptor]:
                    raise ConnectionResetError(f"rank {ended[0]} has ended")
    except BaseException as error:
        listener.setblocking(False)
        with suppress(OSError):  # also tell those that have connected and were not read yet
            while True:
                found[-2 - len(found)], _ = listener.accept()
        for peer in (*found.values(), *coming.values()):
            with suppress(OSError):
                peer.send(_frame(FAILED, json.dumps([str(error), 0, []]).encode()), AT_ONCE)
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
