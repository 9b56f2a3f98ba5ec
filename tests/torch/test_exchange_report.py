"""`exchange_report` of layers: over replicas, and over processes."""

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import on_ranks, raises

from syncbn_core.comm import waits
from syncbn_core.errors import CommError
from syncbn_torch import (
    DataParallelWithCallback,
    SyncBatchNorm,
    convert_model,
    exchange_report,
)

times = threading.local()


class Comes(nn.Module):
    """Sets the clock of the thread to the first number of its input."""

    def forward(self, x: Tensor) -> Tensor:
        times.now = x[0, 0].item()
        return x


def net() -> Any:
    return convert_model(nn.Sequential(Comes(), nn.BatchNorm1d(2), nn.BatchNorm1d(2)))


def test_report_names_the_replica_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "clock", lambda: times.now)
    model = DataParallelWithCallback(net(), replicas=3)
    x = torch.tensor([1.0, 8.0, 2.0]).repeat_interleave(2)[:, None].repeat(1, 2).requires_grad_()
    with exchange_report() as report:
        for _ in range(2):
            model(x).sum().backward()
    seconds = {(row.exchange, row.member): row.seconds for row in report.rows}
    assert seconds == {
        (f"forward of {name}", f"replica {index}"): 2 * waited
        for name in "12"
        for index, waited in enumerate([7.0, 0.0, 6.0])
    }
    assert str(report).endswith(
        "replica 1 was the slowest: 52.000 of 52.000 s were spent waiting for it."
    )


def test_fewer_replicas_for_a_smaller_batch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "clock", lambda: times.now)
    model = DataParallelWithCallback(net(), replicas=3)
    with exchange_report() as report:
        for size in (2, 3):
            model(torch.arange(size).float()[:, None].repeat(1, 2))
    calls = {row.member: row.calls for row in report.rows}
    assert calls == {"replica 0": 2, "replica 1": 2, "replica 2": 1}


def test_nothing_is_noted_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> float:
        raise AssertionError("read the clock")

    monkeypatch.setattr(waits, "clock", forbidden)
    DataParallelWithCallback(net(), replicas=2)(torch.randn(4, 2)).sum().backward()


def calls_take(*seconds: float) -> None:
    """The next calls between processes take so long on this rank's clock."""
    ticks = iter([tick for each in seconds for tick in (0.0, each)])
    waits.clock = lambda: next(ticks)


@pytest.mark.slow
@on_ranks(3)
def test_ranks_learn_who_made_the_others_wait(rank: int, size: int) -> None:
    model, x = net(), torch.randn(4, 2, requires_grad=True)
    # forward 1, forward 2, backward 2, backward 1; rank 1 comes last except to the second
    calls_take(*[[1.5, 0.5, 2.5, 0.5], [0.5, 1.5, 0.5, 0.25], [1.0, 0.75, 0.5, 0.5]][rank])
    with exchange_report() as report:
        model(x).sum().backward()
    assert report.rows == []
    spent = [5.0, 2.75, 2.75][rank]
    assert str(report).startswith(
        f"rank {rank} was {spent:.3f} s in 4 exchanges with other processes"
    )
    whole = report.over_ranks()
    waited = {(row.exchange.partition(" (")[0], row.member): row.seconds for row in whole.rows}
    assert waited == {
        ("forward of 1", "rank 0"): 1.0,
        ("forward of 1", "rank 1"): 0.0,
        ("forward of 1", "rank 2"): 0.5,
        ("forward of 2", "rank 0"): 0.0,
        ("forward of 2", "rank 1"): 1.0,
        ("forward of 2", "rank 2"): 0.25,
        ("backward of 2", "rank 0"): 2.0,
        ("backward of 2", "rank 1"): 0.0,
        ("backward of 2", "rank 2"): 0.0,
        ("backward of 1", "rank 0"): 0.25,
        ("backward of 1", "rank 1"): 0.0,
        ("backward of 1", "rank 2"): 0.25,
    }
    end = "rank 1 was the slowest: 4.000 of 5.250 s were spent waiting for it."
    assert str(whole).endswith(end), str(whole)
    same: list[Any] = [None] * size
    dist.all_gather_object(same, str(whole))
    assert len(set(same)) == 1, "all ranks see the same table"


@on_ranks(2)
def test_only_calls_that_all_ranks_have_timed_are_compared(rank: int, size: int) -> None:
    layer, x = SyncBatchNorm(2), torch.randn(4, 2)
    if rank == 0:  # this rank's report begins one call later
        layer(x)
    calls_take(*([2.0] if rank == 0 else [100.0, 1.0]))
    with exchange_report() as report:
        layer(x)
        if rank == 1:
            layer(x)
    rows = {row.member: (row.calls, row.seconds) for row in report.over_ranks().rows}
    assert rows == {"rank 0": (1, 1.0), "rank 1": (1, 0.0)}


@on_ranks(2)
def test_each_group_of_processes_has_its_own_table(rank: int, size: int) -> None:
    other = dist.new_group([0, 1])
    x = torch.randn(4, 2)
    calls_take(*([3.0, 1.0] if rank == 0 else [1.0, 2.0]))
    with exchange_report() as report:
        SyncBatchNorm(2)(x)
        SyncBatchNorm(2, process_group=other)(x)
    text = str(report.over_ranks())
    assert "\nrank 1 was the slowest: 2.000 of 2.000 s" in text
    assert "\ngroup 2, rank 0 was the slowest: 1.000 of 1.000 s" in text


@on_ranks(2)
def test_rank_that_does_not_come_to_over_ranks_ends_in_an_error(rank: int, size: int) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    layer = SyncBatchNorm(2, process_group=group)
    with exchange_report() as report:
        layer(torch.randn(4, 2))
    if rank == 0:
        raises(CommError, "exchange_report", call=report.over_ranks)


@on_ranks(2)
def test_replicas_within_processes_appear_beside_the_ranks(rank: int, size: int) -> None:
    model = DataParallelWithCallback(net(), replicas=2)
    with exchange_report() as report:
        model(torch.randn(4, 2)).sum().backward()
    members = {row.member for row in report.over_ranks().rows}
    assert members == {"replica 0", "replica 1", "rank 0", "rank 1"}
