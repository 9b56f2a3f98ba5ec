"""`verify_sync` on models of other libraries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_detection
import test_smp
import test_timm
import test_transformers
import torch
from harness import record
from torch import nn

from syncbn_torch import SyncReport, convert_model, verify_sync

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")


def note(library: str, subject: str, report: SyncReport) -> None:
    figures = (report.output, report.gradient, report.buffer)
    record(
        library,
        subject,
        over=report.parts,
        layers=len(report.layers),
        difference=max(figure for figure in figures if figure is not None),
        note="by `verify_sync`",
    )


def test_a_resnet_is_right_once_it_is_converted_and_a_plain_layer_in_it_is_named() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    x = torch.randn(4, 3, 32, 32)
    model = convert_model(model)
    report = verify_sync(model, x)
    assert report.ok, report
    assert len(report.layers) == 20
    note("torchvision", "resnet18 (verify_sync)", report)
    model.layer2[0].downsample[1] = nn.BatchNorm2d(128)
    assert [x.name for x in verify_sync(model, x).faulty] == ["layer2.0.downsample.1"]


def test_drop_path_and_dropout_of_timm_are_switched_off() -> None:
    model = timm.create_model("resnet18", num_classes=10, drop_rate=0.3, drop_path_rate=0.3)
    report = verify_sync(convert_model(model), torch.randn(4, 3, 32, 32))
    assert report.ok, report
    assert not report.not_compared
    note("timm", "resnet18, drop_path (verify_sync)", report)


Made = tuple[nn.Module, Any]  # a model and its batch


def made_by_timm(name: str) -> Made:
    return test_timm.built(name), test_timm.images(test_timm.FAMILIES[name])


def made_by_smp(decoder: str, encoder: str, side: int) -> Made:
    return test_smp.built(decoder, encoder), torch.randn(4, 3, side, side)


MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(made_by_timm, name) for name in test_timm.FAMILIES},
    **{f"{model[0]} on {model[1]}": partial(made_by_smp, *model) for model in test_smp.MODELS},
    **{make.__name__: make for make in test_transformers.MODELS},
    "fasterrcnn": lambda: (test_detection.model(), test_detection.samples(4)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_converted_model_is_right_and_each_layer_of_one_that_is_not_is_named(
    make: Callable[[], Made],
) -> None:
    model, batch = make()
    sizes: Any = "even" if isinstance(batch, tuple) else None  # lists of images and targets
    report = verify_sync(model, batch, batch_sizes=sizes)
    assert all(x.verdict in ("not synchronized", "not called") for x in report.layers), report
    assert report.faulty
    report = verify_sync(convert_model(model), batch, batch_sizes=sizes)
    assert report.ok, report


def test_stochastic_depth_of_torchvision_is_switched_off() -> None:
    model = torchvision.models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.3)
    report = verify_sync(convert_model(model), torch.randn(4, 3, 32, 32))
    assert report.ok, report
    assert not report.not_compared
