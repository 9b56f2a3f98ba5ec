"""`pays` in one process: how far parts differ, against formulas; verdicts; faults; the command."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncbn_core.errors import ArgumentError
from syncbn_torch import SyncBatchNorm, freeze, mask_of_lengths, pays
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


@pytest.mark.parametrize("samples", [12, 20])
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
        (lambda: mixed(160), "alike", False),
        (lambda: mixed(16), "noisy", None),
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
    assert (report.conclusion, report.pays) == ("not judged", None)
    assert "\nNOT JUDGED: no layer" in str(report)


def test_rows_that_are_no_samples_are_skipped() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frames, self.regions = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.named = nn.BatchNorm2d(3)

        def forward(self, x: Tensor, more: int) -> Tensor:
            y: Tensor = self.named(input=self.frames.forward(torch.cat([x, x])))
            return self.regions(torch.cat([y, y[:more]]))

    def forward(own: nn.Module, batch: dict[str, Any]) -> Tensor:
        y: Tensor = own(batch["x"], more=batch["more"])
        return y

    batches = [{"x": x, "more": 3} for x in mixed(8)]
    report = pays(Regions(), batches, 4, forward=forward, batches=5)
    assert [layer.name for layer in report.layers] == ["frames", "named"]
    assert report.skipped == ("regions: got 19 rows for 8 samples",)
    assert report.batches == 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pays(model(), mixed(8), 1), "2 or more parts, got 1"),
        (lambda: pays(model(), mixed(3), 4), "in a multiple of 4, got 3;"),
        (lambda: pays(model(), mixed(10), 4), "in a multiple of 4, got 10; take"),
        (lambda: pays(model(), [[]], 4), "in a multiple of 4, got 0;"),
        (
            lambda: pays(model(), [{"x": x} for x in mixed(8)]),
            "pass forward=, .* or --forward pack",
        ),
        (lambda: pays(model(), [], 4), "expected batches, got none"),
        (lambda: pays(model().eval(), mixed(8), 4), "training mode"),
    ],
)
def test_what_can_not_be_looked_at_is_an_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


def test_layers_get_the_statistics_of_the_whole_batch() -> None:
    """As in training: what comes after a layer is what training would give it."""
    seen: dict[str, list[Tensor]] = {"pays": [], "training": []}

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen[kind].append(x)
            return x

    untracked = nn.BatchNorm2d(4, track_running_stats=False)
    own = nn.Sequential(model()[:5], nn.Conv2d(8, 4, 1), untracked, nn.BatchNorm2d(4).half())
    own[-1].register_forward_pre_hook(lambda _, args: args[0].half())
    for layer in (SyncBatchNorm(4, activation="silu"), SyncBatchNorm(4, eps_mode="clamp")):
        own.append(layer.double()).append(Last())
        layer.register_forward_pre_hook(lambda _, args: args[0].double())
    untracked_half = nn.BatchNorm2d(4, track_running_stats=False).half()
    untracked_half.register_forward_pre_hook(lambda _, args: args[0].half())
    own.append(untracked_half)
    (x,) = batches = list(mixed(8, 1))
    kind = "pays"
    pays(own, batches, 2)
    kind = "training"
    own(x)
    for ours, expected in zip(seen["pays"], seen["training"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    assert len(seen["pays"]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_layers_that_get_nan_are_left_out(value: float) -> None:
    batches = list(mixed(8, 3))
    alone = pays(model(), [batches[0], batches[2]], 4)
    batches[1] = batches[1].clone()
    batches[1][3, 0, 2, 2] = value
    report = pays(model(), batches, 4)
    assert report.skipped == ("1 and 4: got NaN or inf in batch 2; 1 of 3 calls are left out",)
    assert "\nNot looked at: 1 and 4: got NaN or inf in batch 2" in str(report)
    for ours, expected in zip(report.layers, alone.layers, strict=True):
        assert ours.mean == pytest.approx(expected.mean)
    report = pays(model(), batches[1:2], 4)
    assert report.conclusion == "not judged"
    assert report.skipped == ("1 and 4: got NaN or inf in batch 1",)


def test_a_layer_of_fixed_statistics_is_left_as_it_is() -> None:
    class FrozenBatchNorm2d(nn.Module):  # as torchvision's, detectron2's and timm's
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-5
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.rand(3) + 1)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight * (self.running_var + self.eps).rsqrt()
            shift = self.bias - self.running_mean * scale
            return x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)

    frozen = FrozenBatchNorm2d()
    (x,) = mixed(8, 1)
    report = pays(nn.Sequential(frozen, nn.BatchNorm2d(3)), [x], 2)
    assert report.skipped == ("0: its class has no momentum, so it is taken for frozen",)
    expected = pays(nn.BatchNorm2d(3), [frozen(x)], 2)
    assert report.layers[0].mean == expected.layers[0].mean


def test_parts_of_equal_samples_are_alike() -> None:
    report = pays(nn.BatchNorm1d(3), [torch.randn(2, 3).repeat(4, 1)], parts=4)
    assert (report.layers[0].ratio, report.layers[0].samples) == (0.0, 8.0)
    assert report.chance == 1.0
    report = pays(nn.BatchNorm1d(3), [torch.ones(8, 3)], parts=4)
    assert report.conclusion == "alike"
    assert report.layers[0].ratio == 1.0


def test_masked_values_do_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SyncBatchNorm(4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.norm(x, mask)
            return y

    x = torch.randn(4, 4, 9) + torch.arange(4.0).view(-1, 1, 1)
    mask = mask_of_lengths([9, 4, 6, 1], 9)
    x = x.where(mask[:, None], float("nan"))
    (found,) = pays(Masked(), (x, mask), 2).layers
    rows = [x[:2].movedim(1, -1)[mask[:2]], x[2:].movedim(1, -1)[mask[2:]]]
    var, mean = torch.var_mean(torch.cat(rows).double(), 0, correction=0)
    off = torch.stack([((own.double().mean(0) - mean) ** 2 / (var + 1e-5)).mean() for own in rows])
    assert found.mean == pytest.approx(off.mean().sqrt().item(), rel=1e-5)
    assert found.values == 10.0


def test_one_batch_is_taken_as_verify_takes_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor, light: Tensor) -> Tensor:
            y: Tensor = self.norm(x * light)
            return y

    (x,) = mixed(8, 1)
    light = torch.rand(8, 1, 1, 1)
    expected = pays(nn.BatchNorm2d(3), [x * light], 2).layers[0].mean
    for batch in ((x, light), {"light": light, "x": x}):
        assert pays(Two(), batch, 2).layers[0].mean == expected
    report = pays(nn.BatchNorm2d(3), x * light, 2)
    assert report.layers[0].mean == expected
    assert str(report).startswith("1 batch in 2 parts of 4 samples\n")


def test_samples_in_lists_are_counted_by_a_function() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, images: list[Tensor]) -> Tensor:
            y: Tensor = self.norm(torch.stack(images))
            return y

    (x,) = mixed(8, 1)
    expected = pays(nn.BatchNorm2d(3), [x], 2)
    batches = [(list(x), ["what is in them"] * 8)]
    report = pays(Detector(), batches, 2, samples=lambda batch: len(batch[0]))
    assert report.layers[0].mean == expected.layers[0].mean
    with pytest.raises(ArgumentError, match=r"got 3; .* unless samples= or --samples counts them"):
        pays(Detector(), batches, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_little_memory_is_taken_for_many_parts_of_many_samples() -> None:
    program = """
import resource, torch
from torch import nn
from syncbn_torch import pays
pays(nn.BatchNorm1d(4), [torch.randn(8, 4)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pays(nn.BatchNorm1d(4), [torch.randn(32 * 64, 4)], 32)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    run = [sys.executable, "-c", program]
    grown = subprocess.run(run, capture_output=True, text=True, check=True, timeout=200)
    assert float(grown.stdout) < 100, "MiB; a weight of each sample in each part takes 500"


def made() -> tuple[nn.Module, list[Tensor]]:
    return model(), list(mixed(160))


def camera() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    return model(), [{"x": x} for x in cameras(32, 3.0)]


def nothing() -> tuple[nn.Module, list[Tensor]]:
    return nn.Conv2d(3, 4, 1), list(mixed(8))


def images(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])


def of_dictionary(own: nn.Module, batch: dict[str, Tensor]) -> Any:
    return own(batch["x"])


def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mymodels", sys.modules[__name__])
    assert main(["pays", "mymodels:made", "--parts", "2", "--batches", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 batches in 2 parts of 80 samples\n\nlayer ")
    assert "\nALIKE: " in said
    assert main(["pays", "mymodels:made", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["conclusion"], found["parts"], len(found["layers"])) == ("alike", 4, 2)
    more = ["--forward", "mymodels:of_dictionary", "--samples", "mymodels:images"]
    assert main(["pays", "mymodels:camera", *more]) == 1
    assert "\nUNLIKE: " in capsys.readouterr().out
    assert main(["pays", "mymodels:nothing"]) == 2
    with pytest.raises(ArgumentError, match=r"return \(model, loader\), got Sequential"):
        main(["pays", "mymodels:model"])


def test_the_command_draws_a_row_for_each_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "mymodels", sys.modules[__name__])
    picture = tmp_path / "pays.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        main(["pays", "mymodels:made", "--batches", "1", "--picture", str(picture)])
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text(encoding="utf-8"))
    assert {"1", "4", "alike"} <= set(texts)


def test_a_picture_without_matplotlib_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ArgumentError, match="matplotlib for --picture, got none; pip install matplotlib"
    ):
        main(["pays", "nowhere:made", "--picture", str(tmp_path / "pays.png")])
