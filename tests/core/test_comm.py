"""`FutureResult`, `SlavePipe`, `SyncMaster`, communicators and threads: their own promises."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_forward
from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    FutureResult,
    SlavePipe,
    SyncMaster,
    get_default_timeout,
    run_in_threads,
    set_default_timeout,
    thread_group,
)
from syncbn_core.errors import (
    ArgumentError,
    CommAborted,
    CommTimeout,
    DeviceError,
    DTypeError,
    ProtocolError,
    ShapeError,
    StateError,
)

SHORT = 0.05  # seconds; a deadline that is meant to pass
LONG = 30.0  # seconds; one that is not


@pytest.fixture(autouse=True)
def default_timeout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SYNCBN_TIMEOUT", raising=False)
    yield
    set_default_timeout(None)


def echo(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(identifier, [m for _, m in messages]) for identifier, _ in messages]


def in_thread(function: Any) -> tuple[threading.Thread, list[Any]]:
    """Start `function`; its result, or the error it raised, is put into the list."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, outcome


def wait_until(condition: Any) -> None:
    """Spin until another thread has got somewhere; the test's own timeout ends a hang."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def posted(pipe: SlavePipe, calls: int) -> Any:
    return lambda: pipe.queue.calls[pipe.identifier] >= calls


def test_messages_come_master_first_then_by_registration() -> None:
    seen = []

    def callback(messages: list[Any]) -> list[Any]:
        seen.append([identifier for identifier, _ in messages])
        return echo(messages)

    master = SyncMaster(callback, timeout=LONG)
    pipes = [master.register_slave(name) for name in ("c", "a", 7)]
    for order in ([2, 0, 1], [1, 2, 0], [0, 1, 2]):
        threads = []
        for index in order:  # they arrive in this order
            pipe = pipes[index]
            calls = pipe.queue.calls[pipe.identifier]
            threads.append(in_thread(lambda pipe=pipe: pipe.run_slave(pipe.identifier)))
            wait_until(posted(pipe, calls + 1))
        assert master.run_master("m") == ["m", "c", "a", 7]
        for thread, outcome in threads:
            thread.join()
            assert outcome == [["m", "c", "a", 7]]
    assert seen == [[0, "c", "a", 7]] * 3


def test_replies_may_come_in_any_order_behind_the_masters() -> None:
    master = SyncMaster(lambda m: [(0, "m"), *[(i, i) for i, _ in m[:0:-1]]], timeout=LONG)
    pipes = [master.register_slave(i) for i in (1, 2)]
    members = [lambda: master.run_master(None)]
    members += [lambda pipe=pipe: pipe.run_slave(None) for pipe in pipes]
    assert run_in_threads(members) == ["m", 1, 2]


def test_master_without_slaves_answers_itself() -> None:
    master = SyncMaster(echo)
    assert master.nr_slaves == 0
    assert master.run_master(3) == [3]


def test_registering_after_a_call_begins_a_new_round() -> None:
    master = SyncMaster(echo, timeout=LONG)
    old = master.register_slave(1)
    assert run_in_threads([lambda: master.run_master(0), lambda: old.run_slave(1)])
    new = master.register_slave(1)
    assert master.nr_slaves == 1
    with pytest.raises(CommAborted, match="new round"):
        old.run_slave(1)
    replies = run_in_threads([lambda: master.run_master(0), lambda: new.run_slave(2)])
    assert replies == [[0, 2]] * 2


@pytest.mark.parametrize("identifier", [0, 1])
def test_taken_identifier_is_refused(identifier: int) -> None:
    master = SyncMaster(echo)
    master.register_slave(1)
    with pytest.raises(ArgumentError, match="not taken"):
        master.register_slave(identifier)
    assert master.nr_slaves == 1


def test_master_timeout_names_layer_call_and_who_is_missing() -> None:
    master = SyncMaster(echo, name="layer1.bn", timeout=SHORT)
    master.register_slave(1)
    master.register_slave("b")
    with pytest.raises(CommTimeout, match=r"waited 0\.05 s in call 1 of layer1\.bn") as caught:
        master.run_master(None)
    assert "missing: slave 1, slave 'b'" in str(caught.value)


def test_slave_timeout_names_layer_call_and_who_is_missing() -> None:
    master = SyncMaster(echo, name="layer1.bn", timeout=SHORT)
    pipes = [master.register_slave(i) for i in (1, 2)]
    with pytest.raises(TimeoutError) as caught:
        pipes[0].run_slave(None)
    text = str(caught.value)
    assert "call 1 of layer1.bn" in text
    assert "missing: the master, slave 2" in text


def test_a_call_that_timed_out_does_not_disturb_the_next_one() -> None:
    master = SyncMaster(echo, timeout=SHORT)
    pipe = master.register_slave(1)
    with pytest.raises(CommTimeout):
        master.run_master("first")
    with pytest.raises(CommAborted, match="call 1"):
        pipe.run_slave("late for the first")
    master._timeout = pipe.queue.timeout = LONG
    replies = run_in_threads([lambda: master.run_master("m"), lambda: pipe.run_slave("s")])
    assert replies == [["m", "s"]] * 2


def test_a_callback_that_failed_can_succeed_in_the_next_call() -> None:
    faults = [True, False]

    def callback(messages: list[Any]) -> list[Any]:
        if faults.pop(0):
            raise ValueError("once")
        return echo(messages)

    master = SyncMaster(callback, timeout=LONG)
    pipe = master.register_slave(1)
    thread, outcome = in_thread(lambda: pipe.run_slave(1))
    with pytest.raises(ValueError, match="once"):
        master.run_master(0)
    thread.join()
    assert isinstance(outcome[0].__cause__, ValueError)
    assert run_in_threads([lambda: master.run_master(0), lambda: pipe.run_slave(1)]) == [[0, 1]] * 2


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_waits_for_a_member_that_left_is_released(leaver: int) -> None:
    master = SyncMaster(echo, name="bn", timeout=LONG)
    pipes = [master.register_slave(i) for i in (1, 2)]
    outcomes = []
    members = {0: lambda: master.run_master(0), 1: lambda: pipes[0].run_slave(0)}
    members[2] = lambda: pipes[1].run_slave(0)
    for index, member in members.items():
        if index != leaver:
            outcomes.append(in_thread(member))
    wait_until(posted(pipes[0], 1))
    pipes[1].leave() if leaver else master.leave()
    for thread, outcome in outcomes:
        thread.join()
        assert isinstance(outcome[0], CommAborted)
    assert "left without taking part" in str(outcomes[0][1][0])
    assert ("the master" if leaver == 0 else "slave 2") in str(outcomes[0][1][0])


def test_abort_ends_the_round_and_registration_begins_a_new_one() -> None:
    master = SyncMaster(echo, timeout=LONG)
    pipe = master.register_slave(1)
    pipe.abort(OSError("disk"))
    with pytest.raises(CommAborted, match="OSError: disk"):
        master.run_master(0)
    with pytest.raises(CommAborted, match="disk"):
        pipe.run_slave(0)
    pipe = master.register_slave(1)
    assert run_in_threads([lambda: master.run_master(0), lambda: pipe.run_slave(1)]) == [[0, 1]] * 2


def test_two_threads_in_run_master_are_refused() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def callback(messages: list[Any]) -> list[Any]:
        inside.set()
        go_on.wait(LONG)
        return echo(messages)

    master = SyncMaster(callback)
    thread, outcome = in_thread(lambda: master.run_master(1))
    inside.wait(LONG)
    with pytest.raises(ProtocolError, match="got two at the same time"):
        master.run_master(2)
    go_on.set()
    thread.join()
    assert outcome == [[1]]


def test_a_callback_that_calls_its_own_master_is_refused_at_once() -> None:
    nested = True

    def callback(messages: list[Any]) -> list[Any]:
        if nested:
            master.run_master("inner")
        return echo(messages)

    master = SyncMaster(callback, timeout=LONG)
    pipe = master.register_slave(1)
    thread, outcome = in_thread(lambda: pipe.run_slave("s"))
    with pytest.raises(StateError, match="no run_master of SyncMaster in its own callback"):
        master.run_master("m")
    thread.join()
    assert isinstance(outcome[0], CommAborted)
    nested = False
    replies = run_in_threads([lambda: master.run_master("m"), lambda: pipe.run_slave("s")])
    assert replies == [["m", "s"]] * 2


@pytest.mark.parametrize(
    "replies",
    [None, 5, [], [(1, None), (0, None)], [(0, None)], [(0, 1), (1, 1), (1, 1)], [(0, 1), (2, 1)]],
)
def test_wrong_replies_are_named(replies: Any) -> None:
    master = SyncMaster(lambda messages: replies, timeout=LONG)
    pipe = master.register_slave(1)
    thread, outcome = in_thread(lambda: pipe.run_slave(0))
    with pytest.raises(ProtocolError, match="expected the master callback of SyncMaster to return"):
        master.run_master(0)
    thread.join()
    assert isinstance(outcome[0], CommAborted)


def test_future_result_has_a_deadline() -> None:
    with pytest.raises(CommTimeout, match=r"within 0\.05 s"):
        FutureResult(timeout=SHORT).get()
    with pytest.raises(CommTimeout):
        FutureResult().get(timeout=SHORT)


def test_timeout_of_object_goes_before_process_before_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert get_default_timeout() == 60
    monkeypatch.setenv("SYNCBN_TIMEOUT", "12.5")
    assert get_default_timeout() == 12.5
    set_default_timeout(SHORT)
    assert get_default_timeout() == SHORT
    with pytest.raises(CommTimeout, match=r"waited 0\.05 s"):
        SyncMaster(echo).register_slave(1).run_slave(0)
    set_default_timeout(LONG)
    with pytest.raises(CommTimeout, match=r"waited 0\.05 s"):
        SyncMaster(echo, timeout=SHORT).register_slave(1).run_slave(0)


@pytest.mark.parametrize("text", ["", "soon", "-3", "inf"])
def test_bad_environment_value_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCBN_TIMEOUT", text)
    with pytest.raises(ArgumentError, match="SYNCBN_TIMEOUT"):
        get_default_timeout()


def test_callback_that_is_interrupted_releases_the_slaves() -> None:
    def callback(messages: list[Any]) -> list[Any]:
        raise KeyboardInterrupt

    master = SyncMaster(callback, timeout=LONG)
    pipe = master.register_slave(1)
    thread, outcome = in_thread(lambda: pipe.run_slave(0))
    with pytest.raises(KeyboardInterrupt):
        master.run_master(0)
    thread.join()
    assert isinstance(outcome[0], CommAborted)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_faults_never_hang_nor_mix_up_calls(data: st.DataObject) -> None:
    """Members raise, skip or leave at random calls; whoever gets a reply gets the right one."""
    size = data.draw(st.integers(2, 5), label="members")
    calls = data.draw(st.integers(1, 6), label="calls")
    fault = data.draw(st.sampled_from(["none", "dies", "stops", "callback"]), label="fault")
    culprit = data.draw(st.integers(0, size - 1), label="culprit")
    moment = data.draw(st.integers(0, calls - 1), label="moment")
    count = [0]

    def callback(messages: list[Any]) -> list[Any]:
        count[0] += 1
        if fault == "callback" and count[0] == moment + 1:
            raise RuntimeError("callback")
        assert len({call for _, (_, call) in messages}) == 1
        return [(i, [who for _, (who, _) in messages]) for i, _ in messages]

    master = SyncMaster(callback, timeout=LONG)
    pipes = [None, *[master.register_slave(i) for i in range(1, size)]]

    def member(index: int) -> int:
        done = 0
        for call in range(calls):
            if index == culprit and call == moment:
                if fault == "dies":
                    raise MemoryError
                if fault == "stops":
                    return done
            pipe = pipes[index]
            try:
                message = (index, call)
                reply = pipe.run_slave(message) if pipe else master.run_master(message)
            except (CommAborted, RuntimeError):
                if fault != "callback":
                    raise
                continue
            assert reply == list(range(size))
            done += 1
        return done

    members = [lambda index=index: member(index) for index in range(size)]
    if fault == "none":
        assert run_in_threads(members) == [calls] * size
    elif fault == "callback":
        assert run_in_threads(members, abort=master.abort) == [calls - 1] * size
    else:
        wanted = MemoryError if fault == "dies" else CommAborted
        with pytest.raises(wanted):
            run_in_threads(members, abort=master.abort, leave=master.leave)


def test_threads_raise_the_original_error_with_the_members_number() -> None:
    group = thread_group(3, timeout=LONG)

    class CustomError(Exception):
        def __init__(self, code: int, extra: str) -> None:
            super().__init__(code, extra)
            self.code = code

    def member(index: int) -> Any:
        if index == 1:
            raise CustomError(7, "extra")
        return group[index].all_reduce(np.zeros(2))

    with pytest.raises(CustomError) as caught:
        run_in_threads(
            [lambda i=i: member(i) for i in range(3)], abort=group[0].abort, describe="replica"
        )
    assert caught.value.code == 7
    assert caught.value.__notes__ == ["raised in replica 1 of 3"]


def test_sums_are_added_in_rank_order_into_arrays_of_their_own() -> None:
    values = [np.array([1e16, 1.0]), np.array([1.0, 2.0]), np.array([-1e16, 3.0])]
    group = thread_group(3, timeout=LONG)
    totals = run_in_threads(
        [lambda i=i: group[i].all_reduce(values[i]) for i in range(3)], abort=group[0].abort
    )
    expected = values[0] + values[1] + values[2]
    for total in totals:
        assert total.tobytes() == expected.tobytes()
    totals[0][:] = 0
    assert totals[1].tobytes() == expected.tobytes()
    assert values[0][0] == 1e16


def called(name: str, **fields: Any) -> CollectiveCall:
    return CollectiveCall(lambda: name, **fields)


def test_members_in_different_operations_are_all_told_and_can_go_on() -> None:
    group = thread_group(2, timeout=LONG)

    def member(index: int) -> Any:
        call = None if index == 0 else called("b", position="the 2nd")
        collective = group[0].all_gather if index == 0 else group[1].all_reduce
        with pytest.raises(ProtocolError, match="have to make the same calls") as caught:
            collective(np.zeros(2), call)
        assert "same operation, got {0: 'all_gather', 1: 'b, the 2nd'}" in str(caught.value)
        return group[index].all_reduce(np.ones(1)).tolist()

    members = [lambda i=i: member(i) for i in range(2)]
    assert run_in_threads(members, abort=group[0].abort) == [[2.0]] * 2


@pytest.mark.parametrize(
    ("arrays", "error", "told"),
    [
        ((np.ones(2), np.ones(3)), ShapeError, r"one shape .* \[\(2,\), \(3,\)\]"),
        ((np.ones(2), np.ones(2, "f4")), DTypeError, "float32, float64"),
        ((np.ones(2), [1.0, 2.0]), DeviceError, r"NumPy or CuPy .* builtins\.list"),
    ],
    ids=["shapes", "dtypes", "kinds"],
)
@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_unlike_arrays_are_an_error(
    operation: str, arrays: Any, error: type[Exception], told: str
) -> None:
    group = thread_group(2, timeout=LONG)
    members = [lambda i=i: getattr(group[i], operation)(arrays[i]) for i in range(2)]
    with pytest.raises(error, match=told):
        run_in_threads(members, abort=group[0].abort)


def test_backward_of_other_layers_is_told_to_all_members_who_can_go_on() -> None:
    group = thread_group(3, timeout=LONG)
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    dy = np.random.default_rng(1).normal(size=x.shape)

    def member(index: int) -> Any:
        layers = [BatchNorm(2, communicator=group[index], name=name) for name in "ab"]
        ys = [layer(x[index]) for layer in layers]
        mine = 0 if index == 0 else 1
        with pytest.raises(
            ProtocolError,
            match="0: backward of a, layer 1, forward in call 1; rank 1: backward of b",
        ):
            layers[mine].backward(ys[mine])
        y, first = batch_norm_forward(x[index], communicator=group[index])
        _, second = batch_norm_forward(x[index] * 2, communicator=group[index])
        with pytest.raises(ProtocolError, match=r"batch_norm, forward in call 3.*in call 4"):
            batch_norm_backward(y, [first, second][mine], communicator=group[index])
        with pytest.raises(ProtocolError, match=r"'all_reduce'.*backward of batch_norm"):
            one_or_other(index, group[index], y, first)
        for _ in range(2):  # twice over one forward
            dx = batch_norm_backward(dy[index], first, communicator=group[index]).x
        return dx, group[index].all_reduce(np.ones(1)).tolist()

    def one_or_other(index: int, own: Communicator, y: Any, saved: Any) -> None:
        if index == 0:
            own.all_reduce(np.zeros((2, 2)))
        else:
            batch_norm_backward(y, saved, communicator=own)

    found = run_in_threads([lambda i=i: member(i) for i in range(3)], abort=group[0].abort)
    expected = batch_norm_backward(dy.reshape(12, 2), batch_norm_forward(x.reshape(12, 2))[1]).x
    for index, (dx, total) in enumerate(found):
        np.testing.assert_allclose(dx, expected.reshape(x.shape)[index], atol=1e-13)
        assert total == [3]


class Own:
    """A user's communicator: the four things of the protocol, and no more."""

    rank, size = 0, 1

    def all_gather(self, values: Any, call: Any = None) -> Any:
        return values[None]

    def all_reduce(self, values: Any, call: Any = None) -> Any:
        assert values.shape == (2, 3)
        return values.copy()


def test_a_communicator_of_the_user_gets_the_sums_alone() -> None:
    x, dy = np.random.default_rng(0).normal(size=(2, 5, 3))
    own: Communicator = Own()
    layer, twin = BatchNorm(3, communicator=own, dtype=np.float64), BatchNorm(3, dtype=np.float64)
    np.testing.assert_array_equal(layer(x), twin(x))
    np.testing.assert_allclose(layer.backward(dy), twin.backward(dy), atol=1e-15)
