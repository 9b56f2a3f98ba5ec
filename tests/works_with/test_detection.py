"""torchvision's detection models: lists of images and targets, split by sample."""

import copy
from typing import Any

import pytest
import torch
from harness import LIMIT, batch_norms, record
from torch import Tensor, nn

from syncbn_torch import DataParallelWithCallback, convert_model

torchvision = pytest.importorskip("torchvision")
detection = pytest.importorskip("torchvision.models.detection")


def model() -> nn.Module:
    """Its backbone has plain batch norm when it is built without weights."""
    sizes = {"min_size": 64, "max_size": 64, "box_detections_per_img": 5}
    sizes |= {"rpn_post_nms_top_n_train": 8, "rpn_post_nms_top_n_test": 8}
    made = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, **sizes
    )
    return made.double()  # type: ignore[no-any-return]


def samples(count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of the same size after padding, so that parts are padded as the whole batch is."""
    box = torch.tensor([[5.0, 5.0, 40.0, 50.0]]).double()
    targets = [{"boxes": box + i, "labels": torch.tensor([1 + i % 2])} for i in range(count)]
    return [torch.rand(3, 64, 64).double() for _ in range(count)], targets


def test_lists_of_images_train_and_evaluate_over_replicas() -> None:
    """The features of the backbone, and so its statistics, are those of the undivided batch."""
    alone = model()
    converted = convert_model(copy.deepcopy(alone))
    wrapper = DataParallelWithCallback(converted, replicas=2, batch_sizes="even")
    images, targets = samples(3)
    losses: dict[str, Tensor] = wrapper(images, targets)
    alone(images, targets)
    assert {name: tuple(loss.shape) for name, loss in losses.items()} == {
        "loss_classifier": (2,), "loss_box_reg": (2,), "loss_objectness": (2,),
        "loss_rpn_box_reg": (2,),
    }  # fmt: skip
    sum(loss.sum() for loss in losses.values()).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for p in converted.get_submodule("backbone").parameters())
    difference = 0.0
    for ours, theirs in zip(converted.buffers(), alone.buffers(), strict=True):
        scale = max(theirs.abs().max().item(), 1e-3)  # some means are rounding errors alone
        difference = max(difference, (ours - theirs).abs().max().item() / scale)
    assert difference < LIMIT
    results: list[dict[str, Any]] = wrapper.eval()(images)
    expected = alone.eval()(images)
    assert len(results) == 3
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    record(
        "torchvision",
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        over="2 replicas",
        layers=len(batch_norms(alone)),
        difference=difference,
        note='lists of images and targets, with `batch_sizes="even"`; compared are the buffers '
        "and the detections in eval, because training samples boxes at random",
    )
