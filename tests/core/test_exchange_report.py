"""`exchange_report` over threads: who waited how long, in which exchange, and for whom."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from syncbn_core import BatchNorm
from syncbn_core.comm import (
    CollectiveCall,
    SingleCommunicator,
    exchange_report,
    run_in_threads,
    thread_group,
    waits,
)
from syncbn_core.errors import StateError

times = threading.local()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of each thread's own, so that figures are exact: `times.now = iter([...])`."""
    monkeypatch.setattr(waits, "clock", lambda: next(times.now))


def train(arrivals: list[list[float]]) -> None:
    """Each member runs a layer, forward and backward, and comes at its `arrivals`."""
    group = thread_group(len(arrivals))

    def member(rank: int) -> Callable[[], Any]:
        def step() -> None:
            times.now = iter(arrivals[rank])
            layer = BatchNorm(3, communicator=group[rank], name="stem")
            layer.backward(layer(np.ones((2, 3), np.float32)))

        return step

    run_in_threads([member(rank) for rank in range(len(arrivals))])


def test_report_says_how_long_each_member_waited_and_for_whom() -> None:
    with exchange_report() as report:
        train([[1.0, 5.0], [4.0, 5.5], [2.0, 7.0]])
    assert set(report.rows) == {
        waits.Waits("forward of stem", "thread 0", 1, 3.0, 3.0, 0, 0.0),
        waits.Waits("forward of stem", "thread 1", 1, 0.0, 0.0, 1, 5.0),
        waits.Waits("forward of stem", "thread 2", 1, 2.0, 2.0, 0, 0.0),
        waits.Waits("backward of stem", "thread 0", 1, 2.0, 2.0, 0, 0.0),
        waits.Waits("backward of stem", "thread 1", 1, 1.5, 1.5, 0, 0.0),
        waits.Waits("backward of stem", "thread 2", 1, 0.0, 0.0, 1, 3.5),
    }
    assert [row.seconds for row in report.rows] == [3.0, 2.0, 2.0, 1.5, 0.0, 0.0]
    assert str(report.over_ranks()) == str(report), "there are no other processes"


def test_table_names_the_straggler() -> None:
    with exchange_report() as report:
        train([[1.0, 5.0], [4.0, 5.5], [2.0, 7.0]])
        train([[1.0, 5.0], [1.5, 5.5]])
    assert str(report).splitlines() == [
        "9.500 s of waiting in 4 exchanges between threads",
        "",
        "  waited    longest   calls   came last            exchange",
        "   5.500 s    3.000 s       2   thread 1, 2 times    forward of stem",
        "   4.000 s    2.000 s       2   thread 2, 1 times    backward of stem",
        "",
        "  waited   came last   waited for it   member",
        "   6.000 s          0         0.000 s   thread 0",
        "   1.500 s          3         6.000 s   thread 1",
        "   2.000 s          1         3.500 s   thread 2",
        "",
        "thread 1 was the slowest: 6.000 of 9.500 s were spent waiting for it.",
    ]


def test_members_that_come_at_the_same_time_have_no_straggler() -> None:
    with exchange_report() as report:
        train([[1.0, 2.0], [1.0, 2.0]])
    assert all(row.last == 0 for row in report.rows)
    assert str(report).endswith("nobody waited.")


def test_no_clock_is_read_without_a_report() -> None:
    train([[], []])
    with exchange_report() as report:
        pass
    train([[], []])
    assert report.rows == []
    assert str(report) == "no exchanges"


def test_report_that_begins_or_ends_within_an_exchange_counts_none_of_it() -> None:
    with exchange_report() as report:
        waits.note_arrivals("thread", "forward of stem", [None, 1.0])
    waits.note_arrivals("thread", "forward of stem", [1.0, 2.0])
    assert report.rows == []


def test_second_report_is_refused_and_the_first_goes_on() -> None:
    with exchange_report() as report:
        second = exchange_report()
        with pytest.raises(StateError, match="expected one exchange_report at a time"):
            second.__enter__()
        train([[1.0, 2.0], [1.0, 2.0]])
    assert len(report.rows) == 4
    with pytest.raises(KeyError), exchange_report():
        raise KeyError
    with exchange_report():
        pass


def test_time_of_a_call_begins_and_ends_when_the_device_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over NCCL the host goes on before the members have come."""
    happened: list[Any] = []

    class Device:
        def finish(self, values: Any) -> None:
            happened.append(("finish", values))

    def tick() -> float:
        happened.append("clock")
        return len(happened)

    def collective(values: Any, call: Any) -> Any:
        happened.append("collective")
        return "total"

    monkeypatch.setattr(waits, "arrays_of", lambda values: Device())
    monkeypatch.setattr(waits, "clock", tick)
    with exchange_report() as report:
        call = CollectiveCall(lambda: "forward of stem")
        report.timed(SingleCommunicator(), collective, "sums", call, 1)
    assert happened == [
        ("finish", "sums"),
        "clock",
        "collective",
        ("finish", "total"),
        "clock",
    ]
    assert str(report).startswith("rank 0 was 3.000 s in 1 exchanges with other processes")


def test_long_table_is_cut() -> None:
    with exchange_report() as report:
        for number in range(30):
            waits.note_arrivals("replica", f"forward of bn{number}", [0.0, float(number)])
    lines = str(report).splitlines()
    assert lines[3].endswith("forward of bn29")
    assert "and 10 exchanges more, in `rows`" in lines
    assert len(report.rows) == 60


def test_report_keeps_no_layer_alive() -> None:
    def calls() -> Iterator[CollectiveCall]:
        yield CollectiveCall(lambda: "forward of stem")

    with exchange_report() as report:
        times.now = iter([0.0, 1.0])
        (call,) = calls()
        report.timed(SingleCommunicator(), lambda values, call: values, np.ones(1), call, 1)
    (own,) = report._ranks.values()
    assert list(own.names.values()) == ["forward of stem"]
