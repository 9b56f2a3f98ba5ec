"""`verify_sync` on models of other libraries."""

import pytest
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


def test_every_layer_of_timm_that_does_not_synchronize_is_named() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=10, drop_path_rate=0.3)
    report = verify_sync(model, torch.randn(4, 3, 32, 32))
    assert not report.not_compared
    assert len(report.layers) == len(report.faulty) == 49
    assert {layer.kind for layer in report.faulty} == {"BatchNormAct2d"}
    assert all(layer.output is not None and layer.output > 1e-3 for layer in report.faulty)


def test_stochastic_depth_of_torchvision_is_switched_off() -> None:
    model = torchvision.models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.3)
    report = verify_sync(convert_model(model), torch.randn(4, 3, 32, 32))
    assert report.ok, report
    assert not report.not_compared
