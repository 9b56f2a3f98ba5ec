"""`LocalTransport`: the ranks of a host, here threads, over real connections."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
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
    ranks[3]._timeout = lambda: LONG
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
        wrong = local.Greeting.pack(b"k" * 32, rank)
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
