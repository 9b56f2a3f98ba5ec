"""segmentation_models_pytorch: decoders on encoders of its own and of timm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import LIMIT, batch_norms, over_ranks, over_replicas, record
from torch import nn
from world import on_ranks

from syncbn_torch import ConversionReport, convert_model

smp = pytest.importorskip("segmentation_models_pytorch")

# Decoder, encoder, the side of the images.
MODELS = [
    ("FPN", "tu-test_efficientnet", 64),
    ("Unet", "tu-regnetx_002", 64),
    ("Unet", "resnet18", 64),
    ("DeepLabV3Plus", "tu-resnet10t", 64),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def built(decoder: str, encoder: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = smp.create_model(decoder, encoder, encoder_weights=None, classes=2)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    return model.double()  # type: ignore[no-any-return]


def checked_step(
    decoder: str, encoder: str, side: int, step: Callable[..., float], over: str
) -> None:
    model, report = built(decoder, encoder), ConversionReport()
    images = torch.randn(4, 3, side, side).double()
    layers = len(batch_norms(model))
    difference = step(model, images, convert=lambda m: convert_model(m, report=report))
    assert difference < LIMIT, f"{decoder} on {encoder}: {difference}"
    assert len(report.converted) == layers
    assert report.kept == []
    subject = f"{decoder} on {encoder}"
    record("segmentation-models-pytorch", subject, over=over, layers=layers, difference=difference)


@pytest.mark.parametrize(("decoder", "encoder", "side"), MODELS)
def test_a_step_over_replicas_is_that_of_the_undivided_batch(
    decoder: str, encoder: str, side: int
) -> None:
    checked_step(decoder, encoder, side, over_replicas, "2 replicas")


@on_ranks(2)
def test_a_step_over_ranks_is_that_of_the_undivided_batch(rank: int, size: int) -> None:
    for decoder, encoder, side in MODELS:
        checked_step(decoder, encoder, side, over_ranks, "2 ranks")
