"""`pays` on ranks: each rank's batches are a part; the report is that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from world import needs_gloo, on_ranks, rows_of

from syncbn_core.errors import ArgumentError, ProtocolError
from syncbn_torch import DistributedCommunicator, PartsReport, SyncBatchNorm, convert_model, pays


class Net(nn.Module):
    """Two inputs, dropout, and layers of all kinds that use the batch."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.second = nn.Conv2d(4, 8, 3)
        self.norms = nn.ModuleList([
            SyncBatchNorm(8, activation="leaky_relu", process_group=group),
            nn.SyncBatchNorm(8),
            nn.BatchNorm2d(8, track_running_stats=False),
            SyncBatchNorm(8, eps_mode="clamp", process_group=group),
        ])  # fmt: skip

    def forward(self, x: Tensor, light: Tensor) -> Tensor:
        y: Tensor = self.second(self.drop(self.first(x * light)))
        for norm in self.norms:
            y = norm(y + y.mean((2, 3), keepdim=True).tanh())
        return y


def batches(samples: int, unlike: float, count: int = 4) -> Iterator[dict[str, Tensor]]:
    """Of both ranks, which have the same light with `unlike=0`."""
    generator = torch.Generator().manual_seed(samples)
    for _ in range(count):
        x = torch.randn(2 * samples, 3, 8, 8, generator=generator)
        light = 1 + 0.3 * torch.rand(2 * samples, 1, 1, 1, generator=generator)
        yield {"x": x + unlike * torch.arange(2.0).repeat_interleave(samples).view(-1, 1, 1, 1),
               "light": light}  # fmt: skip


def of_rank(rank: int, whole: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for batch in whole:
        half = len(batch["x"]) // 2
        yield {key: value[rank * half : (rank + 1) * half] for key, value in batch.items()}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


def same(ours: PartsReport, expected: PartsReport, rel: float = 1e-6) -> None:
    for own, other in zip(ours.layers, expected.layers, strict=True):
        assert asdict(own) == {
            key: value if key == "name" else pytest.approx(value, rel=rel)
            for key, value in asdict(other).items()
        }
    leave = {"layers": ()}
    assert asdict(ours) | leave == asdict(expected) | leave


def equal_on_ranks(report: PartsReport) -> None:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    assert all(other == report for other in reports)


def raises(words: str, call: Callable[[], Any], kind: type[Exception] = ArgumentError) -> None:
    with pytest.raises(kind, match=words):
        call()


@on_ranks(2)
def test_the_report_is_that_of_one_process_with_two_parts(rank: int, size: int) -> None:
    group = DistributedCommunicator()
    torch.manual_seed(rank)  # the parameters of rank 0 count
    model = Net(group)
    state = torch.get_rng_state()
    for samples, unlike, conclusion in ((16, 1.0, "unlike"), (64, 0.0, "alike"), (2, 0.0, "noisy")):
        report = pays(model, of_rank(rank, batches(samples, unlike)), forward=call)
        assert report.conclusion == conclusion, report
        assert len(report.layers) == 5
        equal_on_ranks(report)
        if rank == 0:
            same(report, pays(model, batches(samples, unlike), parts=2, forward=call))
    assert group.calls == 0, "layers sent something"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(layer.training for layer in model.modules())


@on_ranks(3)
def test_ranks_of_unequal_batches_are_parts_as_they_are(rank: int, size: int) -> None:
    bounds = (0, 8, 9, 14)
    x = torch.randn(14, 3, generator=torch.Generator().manual_seed(0))
    (found,) = pays(nn.BatchNorm1d(3), [x[rows_of(rank, bounds)]]).layers
    wide = x.double()
    var, mean = torch.var_mean(wide, 0, correction=0)
    parts = [wide[rows_of(part, bounds)].mean(0) for part in range(3)]
    off = sum(((own - mean) ** 2 / (var + 1e-5)).mean().item() for own in parts) / 3
    assert found.mean == pytest.approx(off**0.5)
    assert found.samples == pytest.approx(14 / 3 / found.ratio)


@on_ranks(2)
def test_iterable_data_that_end_unevenly_are_looked_at_as_long_as_all_have_some(
    rank: int, size: int
) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            generator = torch.Generator().manual_seed(rank)
            for _ in range(4 * (3 + rank)):
                yield torch.randn(3, 5, 5, generator=generator)

    torch.manual_seed(0)
    report = pays(nn.BatchNorm2d(3), DataLoader(Stream(), 4))
    assert report.batches == 3
    assert report.notes == ("Only 3 batches were looked at: then rank 0 had no more.",)
    assert str(report).endswith(report.notes[0])
    equal_on_ranks(report)
    assert pays(nn.BatchNorm2d(3), DataLoader(Stream(), 4), batches=2).notes == ()


@on_ranks(2)
def test_one_batch_is_divided_over_the_ranks(rank: int, size: int) -> None:
    (batch,) = batches(8, 1.0, 1)
    torch.manual_seed(0)
    model = convert_model(Net())
    report = pays(model, batch)
    if rank == 0:
        same(report, pays(model, batch, parts=2))
    raises("expected a batch of 2 or more samples, got 1", lambda: pays(model, batch["x"][:1]))


@on_ranks(2)
def test_parts_are_of_this_process(rank: int, size: int) -> None:
    torch.manual_seed(0)
    report = pays(Net(), batches(8, 0.0), parts=4, forward=call)
    assert report.parts == 4
    both = {"parts": 2, "process_group": dist.group.WORLD}
    raises("parts or process_group, got both", lambda: pays(Net(), [], **both))


class Data:
    """Batches, and what a rank does to them."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps:
            yield step() if callable(step) else step


@on_ranks(2)
def test_what_one_rank_does_alone_is_an_error_on_all(rank: int, size: int) -> None:
    def fail() -> None:
        raise OSError("no such folder")

    def refuse(model: nn.Module, batch: Tensor) -> None:
        if rank == 1:
            raise ValueError("not that one")
        model(batch)

    def again(model: nn.Module, batch: Tensor) -> None:
        model(model(batch) if rank == 1 else batch)

    def late(model: nn.Module, batch: Tensor) -> None:
        model(batch)
        refuse(model, batch)

    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    first = rank == 0
    kind, words = (ArgumentError, "rank 1 it raised OSError: no such folder") if first else (
        OSError, "no such folder")  # fmt: skip
    raises(words, lambda: pays(model, Data(x, x if first else fail)), kind)
    kind = ProtocolError if first else ValueError
    words = "rank 0: layer 0; rank 1: the forward failed, ValueError: not" if first else "not that"
    raises(words, lambda: pays(model, [x], forward=refuse), kind)
    words = "rank 0: the forward is over; rank 1: layer 0"
    raises(words, lambda: pays(model, [x], forward=again), ProtocolError)
    words = "rank 0: layer 0; rank 1: the forward failed, V" if first else "not that"
    raises(words, lambda: pays(model, [x], forward=late), kind)
    raises("pass forward=", lambda: pays(model, [{"x": x}]))
    raises("same on all ranks, got .*1: .*; pass the same model",
           lambda: pays(nn.Sequential(*map(nn.BatchNorm1d, [3] * (1 + rank))), [x]))  # fmt: skip
    raises("samples on each rank, got the same on all", lambda: pays(model, [torch.ones(4, 3)]))
    raises("expected batches, got none", lambda: pays(model, [x][rank:] if first else []))
    report = pays(model, [x if first else x.where(x < 9, 0) / 0])
    assert report.skipped == ("0: got NaN or inf in batch 1",)
    report = pays(model, [x, x[: 2 + rank]])
    assert report.batches == 2, "an error of one call is over with it"


@on_ranks(2)
def test_rows_that_are_no_samples_are_normalized_with_those_of_all_ranks(
    rank: int, size: int
) -> None:
    seen: list[Tensor] = []

    def regions(model: nn.Module, batch: Tensor) -> None:
        seen.append(model[1](torch.cat([model[0](batch), batch[: 1 + 2 * rank]])))

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    report = pays(model, [x[4 * rank : 4 * rank + 4]], forward=regions)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.skipped == ("1: got 5 rows for 4 samples",)
    first = nn.BatchNorm1d(3)(x)
    rows = [torch.cat([first[:4], x[:1]]), torch.cat([first[4:], x[4:7]])]
    expected = nn.BatchNorm1d(3)(torch.cat(rows)).split([5, 7])[rank]
    torch.testing.assert_close(seen[0], expected)


MODULE = """
import torch, torch.distributed as dist
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(8, 3, 6, 6) + torch.arange(2.0).repeat_interleave(4).view(-1, 1, 1, 1)
    return model, x
"""


@pytest.mark.slow
@needs_gloo
def test_the_command_prints_the_same_alone_and_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "mymodels.py").write_text(MODULE)
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = "torch.distributed.run --standalone --nproc-per-node 2 -m"
    printed = []
    for launcher, more in (("", "--parts 2"), (ranks, "")):
        command = f"-m {launcher} syncbn_torch pays mymodels:make {more}"
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith("1 batch in 2 parts of 4 samples\n")
