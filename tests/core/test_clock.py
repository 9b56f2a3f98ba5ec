"""Deadlines stand while a kernel is compiled, and for nothing else."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from syncbn_core import clock
from syncbn_core._kernels.cpu import builds
from syncbn_core.comm import CollectiveCall, run_in_threads, thread_group
from syncbn_core.comm.local import COMPILED, COMPILES, LocalTransport, _frame
from syncbn_core.errors import CommAborted, CommTimeout

SHORT = 0.3  # seconds
CALL = CollectiveCall(lambda: "bn1")
needs_connections = pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX"), reason="this system has no local connections"
)


def pass_time(seconds: float) -> None:
    """Wait until the clock has stood for so long."""
    end = clock.stood() + seconds
    while clock.stood() < end:
        time.sleep(0.01)


def test_threads_wait_for_one_that_compiles() -> None:
    one, two, three = thread_group(3, timeout=SHORT)
    row = np.ones(2)

    def late() -> Any:
        pass_time(3 * SHORT)
        return two.all_reduce(row)

    with clock.compiling():
        totals = run_in_threads([lambda: one.all_reduce(row), late, lambda: three.all_reduce(row)])
    assert [total.tolist() for total in totals] == [[3, 3]] * 3


def test_the_deadline_goes_on_after_a_compilation_and_its_error_says_so() -> None:
    one, _ = thread_group(2, timeout=SHORT)
    compiles = threading.Event()

    def compile_meanwhile() -> None:
        with clock.compiling():
            compiles.set()
            while not one._master._round.calls[0]:
                time.sleep(0.01)
            pass_time(2 * SHORT)

    compiler = threading.Thread(target=compile_meanwhile)
    compiler.start()
    compiles.wait()
    with pytest.raises(CommTimeout) as error:
        one.all_reduce(np.ones(1))
    compiler.join()
    text = str(error.value)
    assert text.startswith("the master waited 0.3 s (besides 0."), text
    assert "s in which kernels were compiled) in call 1 of thread group; missing: slave 1" in text


def test_a_compilation_without_an_end_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert clock.LIMIT == 600
    monkeypatch.setattr(clock, "LIMIT", SHORT)
    one, _ = thread_group(2, timeout=SHORT)
    with clock.compiling(), pytest.raises(CommTimeout):
        one.all_reduce(np.ones(1))


def test_kernels_compile_while_the_clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(clock, "listeners", [found.append])
    kernel = builds.jit()(lambda x: x + 1)
    assert kernel(1.0) == 2.0
    assert found == [1, -1]
    with pytest.raises(Exception, match="non-precise"):
        kernel(object())
    assert found == [1, -1, 1, -1]
    kernel(2.0)
    assert len(found) == 4


def pair(seconds: float = SHORT) -> tuple[LocalTransport, socket.socket]:
    """Rank 0 of two, and the connection of the other."""
    own, other = socket.socketpair()
    return LocalTransport(0, [own], 2, lambda: seconds), other


ROW = b"gather <f8".ljust(16), np.ones(1).tobytes()


@needs_connections
def test_a_process_waits_for_one_that_compiles() -> None:
    transport, other = pair()
    other.sendall(_frame(COMPILES))

    def late() -> None:
        pass_time(3 * SHORT)
        other.sendall(_frame(COMPILED) + _frame(*ROW))

    with other:
        found, _ = run_in_threads([lambda: transport.all_gather(np.zeros(1), CALL), late])
    assert found.tolist() == [[0], [1]]
    assert clock._state[1] == 0


@needs_connections
@pytest.mark.parametrize("ends", [True, False], ids=["is over", "ends with its process"])
def test_a_process_that_has_compiled_has_no_more_time_than_others(ends: bool) -> None:
    transport, other = pair(SHORT if ends else 60.0)
    begin = time.monotonic()
    with other:
        other.sendall(_frame(COMPILES) + (_frame(COMPILED) if ends else b""))
        if not ends:
            other.close()
        with pytest.raises(CommTimeout if ends else CommAborted):
            transport.all_gather(np.zeros(1), CALL)
    assert time.monotonic() - begin < 30
    assert clock._state[1] == 0


@needs_connections
def test_frames_that_come_at_once_are_read_one_by_one() -> None:
    transport, other = pair(60.0)
    with other:
        other.sendall(_frame(COMPILES) + _frame(COMPILED) + _frame(*ROW) + _frame(*ROW))
        for _ in range(2):
            assert transport.all_gather(np.zeros(1), CALL).tolist() == [[0], [1]]
        # and what others are told of this process stands before its row
        with clock.compiling():
            pass
        other.sendall(_frame(*ROW))
        transport.all_gather(np.zeros(1), CALL)
        told = other.recv(10_000)
        assert 0 <= told.find(COMPILES) < told.find(COMPILED)


@needs_connections
def test_the_master_tells_the_others_who_waits_for_whom() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    transport = LocalTransport(0, [own for own, _ in pairs], 3, lambda: 60.0)
    (_, one), (_, two) = pairs
    one.sendall(_frame(*ROW))
    two.sendall(_frame(COMPILES) + _frame(COMPILED) + _frame(*ROW))
    transport.all_gather(np.zeros(1), CALL)
    assert one.recv(10_000).startswith(_frame(COMPILES) + _frame(COMPILED) + ROW[0])
    assert two.recv(10_000).startswith(ROW[0])
    for _, other in pairs:
        other.close()
