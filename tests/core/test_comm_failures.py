"""The six ways in which the well-known master-slave protocol fails, and that ours does not.

Each test runs on our classes and on `naive_*` below, a plain rendering of that protocol: one
queue for messages and acknowledgements, None for "nothing there", no deadline, no abort. The
naive one has to fail (its waits are cut off, a cut is a hang), or the test would guard nothing.
"""

import copy
import pickle
import queue
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from syncbn_core.comm import FutureResult, SyncMaster, run_in_threads

HANG = 0.5  # seconds after which a wait of the naive protocol counts as endless
DEADLINE = 30.0  # ours would fail by it, long after the naive one


class NaiveFuture:
    def __init__(self) -> None:
        self.value: Any = None
        self.condition = threading.Condition()

    def put(self, value: Any) -> None:
        with self.condition:
            assert self.value is None
            self.value = value
            self.condition.notify()

    def get(self) -> Any:
        with self.condition:
            if self.value is None and not self.condition.wait(HANG):
                raise TimeoutError("hangs")
            value, self.value = self.value, None
            return value


class NaivePipe(NamedTuple):
    identifier: int
    queue: Any
    result: NaiveFuture

    def run_slave(self, message: Any) -> Any:
        self.queue.put((self.identifier, message))
        reply = self.result.get()
        self.queue.put(True)
        return reply


class NaiveMaster:
    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.queue: Any = queue.Queue()
        self.results: dict[int, NaiveFuture] = {}
        self.activated = False

    def register_slave(self, identifier: int) -> NaivePipe:
        if self.activated:
            self.activated = False
            self.results.clear()
        future = self.results[identifier] = NaiveFuture()
        return NaivePipe(identifier, self.queue, future)

    def run_master(self, message: Any) -> Any:
        self.activated = True
        messages = [(0, message), *[self.queue.get(timeout=HANG) for _ in self.results]]
        replies = self.callback(messages)
        assert replies[0][0] == 0
        for identifier, reply in replies[1:]:
            self.results[identifier].put(reply)
        for _ in self.results:
            assert self.queue.get(timeout=HANG) is True
        return replies[0][1]


OURS = SimpleNamespace(
    future=lambda: FutureResult(timeout=DEADLINE),
    master=lambda callback: SyncMaster(callback, timeout=DEADLINE),
    begin=lambda master: master.clear_slaves(),
    abort=lambda master: master.abort,
)
NAIVE = SimpleNamespace(
    future=NaiveFuture,
    master=NaiveMaster,
    begin=lambda master: None,
    abort=lambda master: lambda error: None,
)
# It hangs, mixes messages up, says nothing, can't be copied.
FAILS = (TimeoutError, queue.Empty, AssertionError, pytest.fail.Exception, TypeError)

both = pytest.mark.parametrize(
    "api",
    [
        pytest.param(OURS, id="ours"),
        pytest.param(NAIVE, id="naive", marks=pytest.mark.xfail(strict=True, raises=FAILS)),
    ],
)


def add(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    total = sum(message for _, message in messages)
    return [(identifier, total) for identifier, _ in messages]


def run(master: Any, pipes: list[Any], messages: list[Any], abort: Any) -> list[Any]:
    """One call with the first message from the master and the others from `pipes`."""
    members = [lambda: master.run_master(messages[0])]
    members += [
        lambda pipe=pipe, message=message: pipe.run_slave(message)
        for pipe, message in zip(pipes, messages[1:], strict=True)
    ]
    return run_in_threads(members, abort=abort)


@both
def test_1_last_smaller_batch_does_not_wait(api: Any) -> None:
    master = api.master(add)
    pipes = [master.register_slave(i) for i in (1, 2, 3)]
    assert run(master, pipes, [1, 2, 3, 4], api.abort(master)) == [10] * 4
    api.begin(master)  # the next forward: its batch is enough for the master copy alone
    assert master.run_master(5) == 5


@both
@pytest.mark.parametrize("fault", ["raises", "master not first", "forgets one", "no list"])
def test_2_slaves_are_released_when_the_callback_fails(api: Any, fault: str) -> None:
    def callback(messages: list[Any]) -> Any:
        if fault == "raises":
            raise ZeroDivisionError("the callback's own error")
        if fault == "no list":
            return None
        replies = add(messages)
        return replies[::-1] if fault == "master not first" else replies[:-1]

    master = api.master(callback)
    pipes = [master.register_slave(i) for i in (1, 2)]
    seen: list[BaseException] = []

    def slave(pipe: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            pipe.run_slave(1)
        seen.append(caught.value)

    def run_master() -> None:
        with pytest.raises(ZeroDivisionError if fault == "raises" else RuntimeError):
            master.run_master(1)

    run_in_threads([run_master, lambda: slave(pipes[0]), lambda: slave(pipes[1])])
    assert len(seen) == 2
    assert all(type(error.__cause__) is not type(None) for error in seen)


@both
def test_3_many_calls_of_one_layer_keep_in_step(api: Any) -> None:
    master = api.master(add)
    pipes = [master.register_slave(i) for i in (1, 2, 3)]
    calls = 500

    def slave(pipe: Any) -> list[int]:
        return [pipe.run_slave(call) for call in range(calls)]

    members = [lambda: [master.run_master(call) for call in range(calls)]]
    members += [lambda pipe=pipe: slave(pipe) for pipe in pipes]
    replies = run_in_threads(members, abort=api.abort(master))
    assert replies == [[4 * call for call in range(calls)]] * 4


@both
@pytest.mark.parametrize("dead", [0, 2])
def test_4_a_dying_member_releases_the_others(api: Any, dead: int) -> None:
    master = api.master(add)
    pipes = [master.register_slave(i) for i in (1, 2, 3)]
    released = []

    def member(index: int) -> Any:
        if index == dead:
            raise MemoryError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            pipes[index - 1].run_slave(1) if index else master.run_master(1)
        released.append(index)

    with pytest.raises(MemoryError):
        run_in_threads([lambda i=i: member(i) for i in range(4)], abort=api.abort(master))
    assert sorted(released) == [i for i in range(4) if i != dead]


@both
def test_5_none_is_a_message_and_a_reply(api: Any) -> None:
    future = api.future()
    future.put(None)
    assert future.get() is None
    master = api.master(lambda messages: [(i, None) for i, message in messages if message is None])
    pipes = [master.register_slave(i) for i in (1, 2)]
    assert run(master, pipes, [None] * 3, api.abort(master)) == [None] * 3


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@both
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, by_pickle])
def test_6_everything_can_be_copied_and_pickled(api: Any, clone: Any) -> None:
    master = api.master(add)
    pipe = master.register_slave(1)
    run(master, [pipe], [1, 2], api.abort(master))
    fresh = clone(master)
    if api is OURS:
        assert fresh.nr_slaves == 0
    again = fresh.register_slave(1)
    assert run(fresh, [again], [1, 2], api.abort(fresh)) == [3, 3]
    copied = copy.deepcopy(pipe)  # a module that holds one can be copied
    with pytest.raises(RuntimeError, match="not connected"):
        copied.run_slave(1)
    future = clone(api.future())
    future.put(1)
    assert future.get() == 1
    assert run(master, [pipe], [1, 2], api.abort(master)) == [3, 3]  # the original goes on
