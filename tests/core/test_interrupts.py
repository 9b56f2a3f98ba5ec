"""Ctrl-C at any moment: nobody waits, nothing stays locked, the next call works.

The first tests raise KeyboardInterrupt at each point where it can come in turn; the last one sends
storms of real signals.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import syncbn_core.comm
from syncbn_core.comm import SyncMaster, run_in_threads
from syncbn_core.comm.master_slave import Round
from syncbn_core.errors import CommAborted

LONG = 60.0  # seconds; nobody may wait so long
FOLDER = str(Path(syncbn_core.comm.__file__).parent)


def total(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(identifier, sum(m for _, m in messages)) for identifier, _ in messages]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LONG / 2)
    return not any(thread.is_alive() for thread in threads)


def every_point(scenario: Callable[[Any], bool], interrupt: Any, least: int) -> None:
    """Run it with an interrupt at each point until one run comes through without."""
    number = 0
    while scenario(lambda action: interrupt(action, number, FOLDER)):  # noqa: B023
        number += 1
    assert number >= least, f"only {number} points: profiling shows nothing"


def test_an_interrupt_at_any_point_releases_the_members_of_run_in_threads(interrupt: Any) -> None:
    def scenario(interrupted: Any) -> bool:
        master = SyncMaster(total, timeout=LONG)
        pipes = [master.register_slave(i) for i in (1, 2)]
        here: list[threading.Thread] = []

        def slave(pipe: Any) -> list[int]:
            here.append(threading.current_thread())
            return [pipe.run_slave(1), pipe.run_slave(2)]

        members: list[Any] = [lambda: [master.run_master(1), master.run_master(2)]]
        members += [lambda pipe=pipe: slave(pipe) for pipe in pipes]
        results: list[Any] = []
        cut = interrupted(lambda: results.append(run_in_threads(members, abort=master.abort)))
        assert cut or results == [[[3, 6]] * 3]
        assert ended(here), "a member waits"
        master.clear_slaves()  # the next forward
        again = master.register_slave(1)
        calls = [lambda: master.run_master(1), lambda: again.run_slave(1)]
        assert run_in_threads(calls, abort=master.abort) == [2, 2]
        return bool(cut)

    every_point(scenario, interrupt, least=20)


@pytest.mark.parametrize("who", ["master", "slave"])
def test_an_interrupt_of_a_wait_releases_the_others_and_the_next_call_works(who: str) -> None:
    master = SyncMaster(total, timeout=LONG)
    pipes = [master.register_slave(i) for i in (1, 2)]
    mine, other, late = master.run_master, pipes[0].run_slave, pipes[1].run_slave
    if who == "slave":
        mine, other = other, mine
    main, outcome = threading.main_thread().ident, []

    def members() -> None:
        pause = threading.Event()
        while sys._current_frames()[main].f_code is not Round.wait.__code__:  # type: ignore[index]
            pause.wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(CommAborted, match="KeyboardInterrupt"):
            other(1)
        with pytest.raises(CommAborted, match="KeyboardInterrupt"):
            late(1)
        outcome.extend(run_in_threads([lambda: other(1), lambda: late(1)]))

    thread = threading.Thread(target=members)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        mine(1)
    assert mine(1) == 3
    assert ended([thread]), "a member waits"
    assert outcome == [3, 3]


STORM = Path(__file__).with_name("interrupted.py")


@pytest.mark.slow
def test_storms_of_interrupts_leave_nobody_waiting() -> None:
    """Each ends within the run's own deadline; `dev.py soak` sends thousands."""
    done = subprocess.run(
        [sys.executable, str(STORM), "150"],
        env={**os.environ, "SYNCBN_TIMEOUT": "600", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 interrupts" in done.stdout
