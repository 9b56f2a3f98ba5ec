"""`pays`: how far parts differ, against formulas; verdicts; nothing changes, nothing is sent."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import on_ranks

from syncbn_core.errors import ArgumentError
from syncbn_torch import DistributedCommunicator, SyncBatchNorm, convert_model, freeze, pays
from syncbn_verify.command import main


def mixed(samples: int, count: int = 10, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        light = torch.rand(samples, 1, 1, 1, generator=generator)
        yield torch.randn(samples, 3, 6, 6, generator=generator) * light + 2 * light


def cameras(samples: int, strength: float) -> Iterator[Tensor]:
    """Four of them, each with its own brightness."""
    for x in mixed(samples):
        light = torch.arange(4.0).repeat_interleave(samples // 4)
        yield x + strength * light.view(-1, 1, 1, 1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3)]
    return nn.Sequential(*convs, SyncBatchNorm(8), nn.Dropout(0.5))


@pytest.mark.parametrize("samples", [12, 10])
def test_figures_are_those_of_the_parts(samples: int) -> None:
    batches = list(mixed(samples, 3))
    (found,) = pays(nn.BatchNorm2d(3), batches, 4).layers
    squares = torch.zeros(2, dtype=torch.float64)
    for x in batches:
        wide = x.double()
        var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        for part in wide.tensor_split(4):
            own_var, own_mean = torch.var_mean(part, (0, 2, 3), correction=0)
            squares[0] += ((own_mean - mean) ** 2 / (var + 1e-5)).mean() / 12
            squares[1] += (((own_var - var) / (var + 1e-5)) ** 2).mean() / 12
    assert found.mean == pytest.approx(squares[0].sqrt().item(), rel=1e-5)
    assert found.variance == pytest.approx(squares[1].sqrt().item(), rel=1e-4)
    chance = found.mean_by_chance**2 + found.variance_by_chance**2
    assert found.ratio == pytest.approx(squares.sum().item() / chance, rel=1e-4)
    assert found.samples == pytest.approx(samples / 4 / found.ratio)
    assert found.values == pytest.approx(36 * samples / 4)


@pytest.mark.parametrize(
    ("batches", "conclusion", "expected"),
    [
        (lambda: mixed(32), "alike", False),
        (lambda: cameras(32, 3.0), "unlike", True),
        (lambda: cameras(64, 0.5), "a little unlike", None),
        (lambda: mixed(4), "one sample", True),
    ],
)
def test_verdicts(batches: Callable[[], Any], conclusion: str, expected: bool | None) -> None:
    report = pays(model(), batches(), 4)
    assert report.conclusion == conclusion, report
    assert report.pays is expected
    said = conclusion.upper()
    assert f"\n{said}" in str(report)
    assert report.batches == 10


def test_parts_that_were_mixed_are_rarely_called_unlike(pytestconfig: pytest.Config) -> None:
    seeds = 20 if pytestconfig.getoption("--quick") else 60
    found = [pays(model(), mixed(16, 4, seed), 4).chance for seed in range(seeds)]
    assert sum(chance <= 0.02 for chance in found) <= seeds // 20
    assert 0.3 < sum(found) / len(found) < 0.7, "no chance of random parts"


def test_nothing_changes() -> None:
    own = model().train()
    own[1].eval()  # no statistics of the batch
    before, state = copy.deepcopy(own.state_dict()), torch.get_rng_state()
    report = pays(nn.DataParallel(own), [(x, "label") for x in mixed(8)], 2)
    assert [layer.name for layer in report.layers] == ["4"]
    for name, value in own.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert not own[4]._forward_pre_hooks
    assert own[5].training
    freeze(own[4])
    report = pays(own, mixed(8), 2)
    assert report.layers == ()
    assert "NO LAYER" in str(report)


@on_ranks(2)
def test_nothing_is_sent(rank: int, size: int) -> None:
    group = DistributedCommunicator()
    own = convert_model(model(), process_group=group)
    assert len(pays(own, mixed(8, 3), 2).layers) == 2
    assert group.calls == 0


def test_rows_that_are_no_samples_are_skipped() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frames, self.regions = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.named = nn.BatchNorm2d(3)

        def forward(self, x: Tensor, more: int) -> Tensor:
            y: Tensor = self.named(input=self.frames(torch.cat([x, x])))
            return self.regions(torch.cat([y, y[:more]]))

    def forward(own: nn.Module, batch: dict[str, Any]) -> Tensor:
        y: Tensor = own(batch["x"], more=batch["more"])
        return y

    batches = [{"x": x, "more": 3} for x in mixed(8)]
    report = pays(Regions(), batches, 4, forward=forward, batches=5)
    assert [layer.name for layer in report.layers] == ["frames"]
    said = ("regions: got 19 rows for 8 samples", "named: called by keyword")
    assert report.skipped == said
    assert report.batches == 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pays(model(), mixed(8), 1), "2 or more parts, got 1"),
        (lambda: pays(model(), mixed(3), 4), "tensor of 4 or more samples, got 3 samples"),
        (lambda: pays(model(), [], 4), "expected batches, got none"),
        (lambda: pays(model().eval(), mixed(8), 4), "training mode"),
    ],
)
def test_what_can_not_be_looked_at_is_an_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


def made() -> tuple[nn.Module, list[Tensor]]:
    return model(), list(mixed(16))


def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mymodels", sys.modules[__name__])
    assert main(["pays", "mymodels:made", "--parts", "2", "--batches", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 batches in 2 parts of 8 samples\n\nlayer ")
    assert "\nALIKE: " in said
    assert main(["pays", "mymodels:made", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["conclusion"], found["parts"], len(found["layers"])) == ("alike", 4, 2)
    with pytest.raises(ArgumentError, match=r"return \(model, loader\), got Sequential"):
        main(["pays", "mymodels:model"])
