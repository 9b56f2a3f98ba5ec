"""What odd errors, odd replies and odd threads do to a call: nobody waits, nothing is hidden."""

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from syncbn_core.comm import SyncMaster, run_in_threads, set_default_timeout
from syncbn_core.errors import CommAborted, CommError, ProtocolError

LONG = 60.0  # seconds; nobody may wait so long


def echo(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(identifier, [m for _, m in messages]) for identifier, _ in messages]


@pytest.fixture
def short_deadline() -> Iterator[float]:
    set_default_timeout(0.2)
    yield 0.2
    set_default_timeout(None)


def one_call(master: SyncMaster, slaves: int = 2) -> list[Any]:
    """What each member gets, or the error that it raises."""
    pipes = [master.register_slave(i) for i in range(1, slaves + 1)]

    def outcome(call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    members = [lambda: outcome(lambda: master.run_master("m"))]
    members += [lambda p=p: outcome(lambda: p.run_slave(p.identifier)) for p in pipes]
    return run_in_threads(members)


@pytest.mark.parametrize("wrong", [7, [1, 2, 3], [(0, 1)], [([], 1)] * 3, iter([(0, 1), (2, 3)])])
def test_replies_of_another_form_are_named_to_everybody(wrong: Any) -> None:
    outcomes = one_call(SyncMaster(lambda m: wrong, timeout=LONG))
    assert isinstance(outcomes[0], ProtocolError)
    assert "master callback" in str(outcomes[0])
    assert all(isinstance(one, CommAborted) for one in outcomes[1:])


def test_two_threads_of_one_slave_never_take_each_others_replies() -> None:
    """Either thread is served or told so; no reply goes to another's message."""
    calls = 300
    master = SyncMaster(lambda m: [(i, message) for i, message in m], timeout=LONG)
    pipe = master.register_slave(1)
    wrong: list[Any] = []

    def ask(name: str) -> None:
        for number in range(calls):
            try:
                reply = pipe.run_slave((name, number))
            except ProtocolError:
                continue
            except CommError:
                return
            if reply != (name, number):
                wrong.append(((name, number), reply))

    def slave() -> None:
        threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.leave()

    def run_master() -> None:
        with suppress(CommAborted):  # until the slave leaves
            while True:
                master.run_master(None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a reply lies there for a while before its thread takes it
    try:
        run_in_threads([run_master, slave])
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_member_that_computes_is_waited_for_and_named_once(short_deadline: float) -> None:
    go_on = threading.Event()

    def busy() -> str:
        go_on.wait(LONG)
        return "done"

    def warned(text: str) -> None:
        go_on.set()

    with pytest.warns(RuntimeWarning) as caught:
        results = _when_warned(go_on.set, [lambda: "first", busy])
    assert results == ["first", "done"]
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "member 1 of 2" in text
    assert "in busy" in text  # its stack


def _when_warned(then: Any, members: list[Any]) -> list[Any]:
    """`run_in_threads`, with `then` called when a warning has been shown."""
    show = warnings.showwarning

    def shown(*arguments: Any, **named: Any) -> None:
        show(*arguments, **named)
        then()

    warnings.showwarning = shown
    try:
        return run_in_threads(members)
    finally:
        warnings.showwarning = show


def test_a_member_stuck_after_an_error_is_left_to_itself_and_named(short_deadline: float) -> None:
    go_on = threading.Event()

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run_in_threads([fails, lambda: go_on.wait(LONG)])
    go_on.set()
    assert "still running: member 1" in caught.value.__notes__


def test_the_state_that_other_projects_pickle_is_understood() -> None:
    master = SyncMaster.__new__(SyncMaster)
    master.__setstate__({"master_callback": echo})
    assert one_call(master) == [["m", 1, 2]] * 3
    again = pickle.loads(pickle.dumps(copy.deepcopy(SyncMaster(echo, name="bn", timeout=3))))
    assert one_call(again) == [["m", 1, 2]] * 3
    assert (again._name, again._timeout) == ("bn", 3.0)
