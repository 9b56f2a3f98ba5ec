"""torchvision's models."""

import pytest
import torch
from harness import LIMIT, batch_norms, over_ranks, over_replicas, record
from world import on_ranks

torchvision = pytest.importorskip("torchvision")


def resnet18() -> torch.nn.Module:
    return torchvision.models.resnet18(num_classes=10).double()  # type: ignore[no-any-return]


def test_a_step_over_replicas_is_that_of_the_undivided_batch() -> None:
    model = resnet18()
    difference = over_replicas(model, torch.randn(4, 3, 64, 64).double())
    assert difference < LIMIT
    layers = len(batch_norms(model))
    record("torchvision", "resnet18", over="2 replicas", layers=layers, difference=difference)


@on_ranks(2)
def test_a_step_over_ranks_is_that_of_the_undivided_batch(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = resnet18()
    difference = over_ranks(model, torch.randn(4, 3, 64, 64).double())
    assert difference < LIMIT, difference
    layers = len(batch_norms(model))
    record("torchvision", "resnet18", over="2 ranks", layers=layers, difference=difference)
