"""`LocalTransport`: the ranks of a host, here threads, over real connections."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncbn_core.comm import (
    CollectiveCall,
    LocalCommunicator,
    local,
    run_in_threads,
    thread_group,
)
from syncbn_core.comm.local import LocalTransport, local_transport
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
)

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX"), reason="this system has no local connections"
)
LONG = 60.0


def called(name: str, details: str = "") -> CollectiveCall:
    return CollectiveCall(lambda: name, details=details)


def connected(size: int, seconds: float = LONG) -> list[Any]:
    """The transports of all ranks."""
    group = thread_group(size, timeout=LONG)

    def member(rank: int) -> LocalTransport | None:
        given = rank, size, lambda: seconds, group[rank].all_gather, called("the first")
        return local_transport(*given, " (of {})".format)

    return run_in_threads([lambda r=r: member(r) for r in range(size)], abort=group[0].abort)


def errors_of(*calls: Callable[[], Any]) -> list[Any]:
    """The errors of calls that run at the same time."""

    def caught(call: Callable[[], Any]) -> Exception:
        with pytest.raises(CommError) as error:
            call()
        return error.value

    return run_in_threads([lambda call=call: caught(call) for call in calls])


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 1000)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_every_rank_gets_the_rows_of_all_and_the_same_sum(
    size: int, shape: tuple[int, ...], dtype: str
) -> None:
    values = (np.random.default_rng(0).normal(size=(size, *shape)) * 50).astype(dtype)
    values = np.moveaxis(np.moveaxis(values, 0, -1).copy(), -1, 0)  # rows are not contiguous
    ranks = connected(size)
    calls = [lambda r=r: ranks[r].all_gather(values[r, ...], called("a")) for r in range(size)]
    for rows in run_in_threads(calls):
        np.testing.assert_array_equal(rows, values)
        assert rows.dtype == dtype
    calls = [lambda r=r: ranks[r].all_reduce(values[r, ...], called("a")) for r in range(size)]
    for total in run_in_threads(calls):
        np.testing.assert_array_equal(total, values.copy("C").sum(0, dtype=dtype))
        assert (type(total), total.dtype, total.shape) == (np.ndarray, dtype, shape)


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["a", "a", "m.a"], ShapeError), (["a", "a", "b"], ProtocolError)],
    ids=["one layer", "two layers"],
)
def test_arrays_of_unlike_lengths_are_told_with_the_calls_of_all(
    names: list[str], kind: type[Exception]
) -> None:
    ranks = connected(3)

    def member(rank: int) -> str:
        call = called(names[rank], f"{4 + rank} numbers")
        with pytest.raises(kind) as error:
            ranks[rank].all_gather(np.zeros(4 + rank), call)
        return str(error.value)

    for rank, text in enumerate(run_in_threads([lambda r=r: member(r) for r in range(3)])):
        assert text.startswith(f"rank {rank} of 3 (of {rank}) sent an array in call 0 "), text
        for other in range(3):
            assert f"({names[other]}: {4 + other} numbers)" in text, text
            assert (f"rank {other} (of {other}) in call 0" in text) == (other != rank), text


def test_another_operation_or_dtype_is_told() -> None:
    one, other = connected(2)
    told = errors_of(
        lambda: one.all_gather(np.zeros(2), called("a")),
        lambda: other.all_reduce(np.zeros(2), called("b")),
    )
    assert [type(error) for error in told] == [ProtocolError] * 2
    one, other = connected(2)
    told = errors_of(
        lambda: one.all_gather(np.zeros(2), called("a")),
        lambda: other.all_gather(np.zeros(4, "f4"), called("b")),
    )
    assert [type(error) for error in told] == [ProtocolError] * 2


def test_the_missing_rank_is_named_with_the_calls_of_the_others_and_told_when_it_comes() -> None:
    ranks = connected(4, 0.3)
    zero, one, two = errors_of(
        lambda: ranks[0].all_gather(np.zeros(2), called("a")),
        lambda: ranks[1].all_gather(np.zeros(2), called("model.a")),
        lambda: ranks[2].all_gather(np.zeros(2), called("b")),
    )
    for error in (zero, one, two):
        assert type(error) is CommTimeout
        assert "no sign in this call of rank 3 (of 3); look there" in str(error)
    for error in (zero, one):
        assert "; rank 2 (of 2) waited in call 0 (b)" in str(error)
    assert "rank 0 (of 0)" in str(two)
    assert "rank 1 (of 1)" in str(two)
    begin = time.monotonic()
    ranks[3].seconds = lambda: LONG
    with pytest.raises(
        CommAborted, match=r"rank 3 of 4 \(of 3\) comes too late to call 0 \(a\); r"
    ):
        ranks[3].all_gather(np.zeros(2), called("a"))
    assert time.monotonic() - begin < LONG / 2


def test_without_rank_0_the_others_end_too() -> None:
    ranks = connected(3, 0.2)
    for error in errors_of(
        *(lambda r=r: ranks[r].all_gather(np.zeros(2), called("a")) for r in (1, 2))
    ):
        assert type(error) is CommTimeout
        assert "no sign in this call of rank 0 (of 0); look there" in str(error)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_has_ended_is_told_at_once(lost: int) -> None:
    ranks = connected(3)
    ranks[lost].close()
    others = [rank for rank in range(3) if rank != lost]
    for error in errors_of(
        *(lambda r=r: ranks[r].all_gather(np.zeros(2), called("a")) for r in others)
    ):
        assert type(error) is CommAborted
        assert f"lost rank {lost} (of {lost}) in call 0 (a)" in str(error)


def test_a_rank_that_ends_after_its_row_fails_the_next_call() -> None:
    own, other = socket.socketpair()
    transport = LocalTransport(0, [own], 2, lambda: LONG)
    with other:
        other.sendall(local.Head.pack(b"gather <f8".ljust(16), 8) + np.ones(1).tobytes())
    assert transport.all_gather(np.zeros(1), called("a")).tolist() == [[0], [1]]
    with pytest.raises(CommAborted, match=r"lost rank 1 in call 0 \(a\)"):
        transport.all_gather(np.zeros(1), called("a"))


def test_half_a_message_ends_with_the_deadline() -> None:
    own, other = socket.socketpair()
    with other:
        transport = LocalTransport(0, [own], 2, lambda: 0.2)
        other.sendall(local.Head.pack(b"gather <f8".ljust(16), 16) + b"half")
        with pytest.raises(CommTimeout, match=r"no sign in this call of rank 1"):
            transport.all_gather(np.zeros(2), called("a"))


def address_of(identifier: bytes) -> str:
    return f"\0syncbn-{sha256(b'address' + identifier).hexdigest()}"


@pytest.mark.skipif(sys.platform != "linux", reason="the address is a file there")
def test_strangers_are_refused_and_harm_nobody() -> None:
    identifier, strangers = LocalCommunicator.new_id(), []

    def after_strangers(rank: int) -> LocalCommunicator:
        wrong = local.Greeting.pack(b"k" * 32, rank, 2)
        greetings = (*[b""] * 20, b"short", b"x" * local.Greeting.size, wrong)
        end = time.monotonic() + LONG
        strangers.extend(local._joined(address_of(identifier), each, end) for each in greetings)
        return LocalCommunicator(rank, 2, identifier, timeout=LONG)

    ranks = run_in_threads(
        [
            lambda: LocalCommunicator(0, 2, identifier, timeout=LONG),
            lambda: after_strangers(1),
        ]
    )
    calls = [lambda own=own: own.all_reduce(np.ones(2)) for own in ranks]
    assert [total.tolist() for total in run_in_threads(calls)] == [[2, 2]] * 2
    for stranger in strangers:
        stranger.settimeout(LONG)
        assert stranger.recv(1) == b""  # closed
        stranger.close()


def test_ranks_of_several_hosts_are_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter("ab")
    monkeypatch.setattr(local, "host_name", lambda: next(hosts))
    assert connected(2) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_connect_is_waited_for_until_the_deadline(rank: int) -> None:
    words = f"rank {rank} of 2 could not connect with the others in call 0"
    with pytest.raises(CommTimeout, match=words):
        LocalCommunicator(rank, 2, LocalCommunicator.new_id(), timeout=0.2)


def test_elsewhere_than_on_linux_a_folder_of_this_user_holds_the_address_until_all_have_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    identifier = LocalCommunicator.new_id()

    def second() -> LocalCommunicator:
        while not (folders := list(tmp_path.iterdir())):
            pass
        assert folders[0].stat().st_mode & 0o077 == 0
        return LocalCommunicator(1, 2, identifier, timeout=LONG)

    ranks = run_in_threads([lambda: LocalCommunicator(0, 2, identifier, timeout=LONG), second])
    assert not list(tmp_path.iterdir())
    calls = [lambda own=own: own.all_reduce(np.ones(1)) for own in ranks]
    assert [total.tolist() for total in run_in_threads(calls)] == [[2], [2]]


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="from 0 to size - 1, got rank 2 of 2"):
        LocalCommunicator(2, 2, b"x")
    with pytest.raises(ArgumentError, match="the bytes of new_id"):
        LocalCommunicator(0, 1, "x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="finite and > 0"):
        LocalCommunicator(0, 1, b"x", timeout=-1)
    monkeypatch.setattr(local, "host_name", lambda: "")
    with pytest.raises(BackendError, match="use MPI"):
        LocalCommunicator(0, 1, b"x")


MEMBER = """
import sys, numpy
from syncbn_core import BatchNorm
from syncbn_core.comm import LocalCommunicator

own = LocalCommunicator(int(sys.argv[1]), 3, bytes.fromhex(sys.argv[2]), timeout=float(sys.argv[3]))
bn = BatchNorm(4, communicator=own, name="bn1")
for step in range(10**6):
    bn(numpy.ones((2, 4)) * step)
    if step == 0:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_processes_of_which_one_is(fault: str) -> None:
    identifier = LocalCommunicator.new_id().hex()
    seconds = str(LONG if fault == "killed" else 1.0)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), identifier, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        ranks[2].send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        for number, rank in enumerate(ranks[:2]):
            _, errors = rank.communicate(timeout=LONG)
            words = f"rank {number} of 3 lost rank 2 in call"
            if fault == "stopped":
                words = f"CommTimeout: rank {number} of 3 waited "
                assert "no sign in this call of rank 2; look there" in errors
            assert words in errors, errors
            assert "of bn1" in errors, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_what_is_no_array_of_numbers_is_refused_before_anything_is_sent() -> None:
    ranks = connected(2)
    with pytest.raises(DeviceError, match="expected NumPy arrays"):
        ranks[0].all_gather([1.0], called("a"))
    with pytest.raises(DTypeError, match="expected numbers"):
        ranks[0].all_gather(np.array([None]), called("a"))
    calls = [lambda r=r: ranks[r].all_reduce(np.ones(1), called("a")) for r in range(2)]
    assert [total.tolist() for total in run_in_threads(calls)] == [[2], [2]]


# ------------------------------------------------------------------ what comes, and in time


def other_end(rank: int, seconds: float = LONG) -> tuple[LocalTransport, socket.socket]:
    """Rank 0 or 1 of two, and the end of its connection."""
    own, other = socket.socketpair()
    return LocalTransport(rank, [own], 2, lambda: seconds), other


@pytest.mark.parametrize("numbers", [1, 4, 400])
def test_a_failure_that_came_with_the_question_before_it_is_told(numbers: int) -> None:
    """As a slave finds it that was stopped meanwhile."""
    transport, other = other_end(1)
    calls = ["call 2 (second: 4 numbers)", None]
    told = local._frame(local.FAILED, json.dumps(["lost", 2, calls]).encode())
    with other:
        other.sendall(local._frame(local.ASK) + told)
        with pytest.raises(CommAborted, match=r"rank 1 of 2 lost rank 2 in call 0 \(a\)"):
            transport.all_gather(np.zeros(numbers), called("a"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tag", [b"gather <f8", b"what"])
def test_frames_of_any_length_take_no_memory(rank: int, tag: bytes) -> None:
    transport, other = other_end(rank)
    with other:
        other.sendall(local.Head.pack(tag.ljust(16), 1 << 60) + b"x" * 5000)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(CommAborted, match=f"lost rank {1 - rank} in call 0"):
            transport.all_gather(np.zeros(2), called("a"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("numbers", [1, 10**7], ids=["it waits", "it sends"])
def test_a_timer_does_not_prolong_a_wait(rank: int, numbers: int) -> None:
    """As profilers and progress bars arm it."""
    transport, other = other_end(rank, 0.5)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with other, pytest.raises(CommTimeout, match="no sign in this call"):
            transport.all_gather(np.zeros(numbers), called("a"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seconds", [180_000_000.0, 1e18])
def test_timeouts_may_be_of_years(seconds: float) -> None:
    identifier = LocalCommunicator.new_id()

    def member(rank: int) -> Any:
        return LocalCommunicator(rank, 2, identifier, timeout=seconds).all_reduce(np.ones(2))

    for total in run_in_threads([lambda r=r: member(r) for r in range(2)]):
        assert total.tolist() == [2, 2]
    transport, other = other_end(1, seconds)
    with other:
        waits = threading.Thread(target=transport.all_gather, args=(np.ones(1), called("a")))
        waits.start()
        assert other.recv(local.Head.size + 8)
        while sys._current_frames()[waits.ident].f_code.co_name != "_poll":  # type: ignore[index]
            pass
        other.sendall(local._frame(b"gather <f8".ljust(16), np.ones(2).tobytes()))
        waits.join()


# ---------------------------------------------------------------------- all are connected, or none


@pytest.mark.parametrize("denied", [0, 1])
def test_if_one_rank_can_not_connect_none_does_and_the_reason_is_said_once(
    denied: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "SOON", 0.3)
    monkeypatch.setattr(local, "_said", set())

    def refuse(*_: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(local, "_joined" if denied else "_accepted", refuse)
    for _ in range(2):
        assert connected(3 if denied else 2) == [None] * (3 if denied else 2)
    (record,) = caplog.records
    assert "by the backend of the group: " in record.getMessage()
    assert f"rank {denied} of " in record.getMessage()
    assert "Operation not permitted" in record.getMessage()


def made(*ranks: tuple[int, int]) -> list[str]:
    """What making communicators with these ranks and sizes raises."""
    identifier = LocalCommunicator.new_id()

    def make(rank: int, size: int) -> str:
        try:
            LocalCommunicator(rank, size, identifier, timeout=LONG)
        except CommError as error:
            return str(error)
        return ""

    return run_in_threads([lambda given=given: make(*given) for given in ranks])


def test_two_processes_with_one_rank_or_unlike_sizes_are_named() -> None:
    begin = time.monotonic()
    for text in made((0, 3), (1, 3), (1, 3)):
        assert "expected each rank of 3 once, got rank 1 of 3 a second time" in text
    for text in made((0, 3), (1, 4)):
        assert "expected each rank of 3 once, got rank 1 of 4" in text
    assert time.monotonic() - begin < LONG


@pytest.mark.skipif(sys.platform != "linux", reason="the address is a file there")
def test_a_rank_that_ends_while_others_connect_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identifier = LocalCommunicator.new_id()
    key = sha256(b"key" + identifier).digest()

    join, has_joined = local._joined, threading.Event()

    def joined(*given: Any) -> socket.socket:
        peer = join(*given)
        has_joined.set()
        return peer

    monkeypatch.setattr(local, "_joined", joined)

    def end() -> None:
        greeting = local.Greeting.pack(key, 2, 4)
        peer = join(address_of(identifier), greeting, time.monotonic() + LONG)
        has_joined.wait()
        peer.close()

    def make(rank: int) -> str:
        with pytest.raises(CommAborted, match="rank 2 has ended") as error:
            LocalCommunicator(rank, 4, identifier, timeout=LONG)
        return str(error.value)

    zero, one, _ = run_in_threads([lambda: make(0), lambda: make(1), end])
    assert zero.startswith("rank 0 of 4 could not connect with the others in call 0 (making a")
    assert one.startswith("rank 1 of 4 could not connect with the others in call 0 (making a")


@pytest.mark.skipif(sys.platform != "linux", reason="the address is a file there")
def test_silent_strangers_and_other_users_use_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    identifier = LocalCommunicator.new_id()
    strangers: list[socket.socket] = []

    def is_own(peer: socket.socket) -> bool:
        return not peer.getsockname() or len(strangers) >= 3  # of those that rank 0 accepts

    monkeypatch.setattr(local, "_is_own", is_own)

    def is_closed(stranger: socket.socket) -> bool:
        stranger.settimeout(LONG)
        return stranger.recv(1) == b""

    def after_strangers() -> LocalCommunicator:
        end = time.monotonic() + LONG
        for _ in range(3):  # of another user
            stranger = local._joined(address_of(identifier), b"", end)
            assert is_closed(stranger)
            strangers.append(stranger)
        for _ in range(3 * local.STRANGERS):
            strangers.append(local._joined(address_of(identifier), b"", end))
            if len(strangers) > local.STRANGERS + 3:
                assert is_closed(strangers[-local.STRANGERS - 1])  # the oldest
        return LocalCommunicator(1, 2, identifier, timeout=LONG)

    try:
        ranks = [lambda: LocalCommunicator(0, 2, identifier, timeout=LONG), after_strangers]
        run_in_threads(ranks)
    finally:
        for stranger in strangers:
            stranger.close()
