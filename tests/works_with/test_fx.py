"""torchvision's tools on torch.fx: feature extraction from converted models."""

import copy

import pytest
import torch
from harness import LIMIT, batch_norms, over_replicas, record
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from syncbn_torch import SynchronizedBatchNorm2d, convert_model, revert_model

torchvision = pytest.importorskip("torchvision")
extraction = pytest.importorskip("torchvision.models.feature_extraction")

NODES = ["layer1", "layer2.0.bn1", "layer2.0.downsample.1", "layer4.1.relu_1", "flatten"]


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10).double()  # type: ignore[no-any-return]


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32).double()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121"])
def test_nodes_of_a_converted_model_have_the_names_of_the_unconverted_one(name: str) -> None:
    model = torchvision.models.get_model(name, weights=None)
    expected = extraction.get_graph_node_names(model)
    assert extraction.get_graph_node_names(convert_model(model)) == expected


def test_features_of_a_converted_model_are_those_of_the_unconverted_one() -> None:
    model, x = resnet18(), images()
    features = extraction.create_feature_extractor(convert_model(copy.deepcopy(model)), NODES)
    expected = extraction.create_feature_extractor(model, NODES)
    assert isinstance(features.get_submodule("layer2.0.bn1"), SynchronizedBatchNorm2d)
    for training in (True, False):
        actual = features.train(training)(x)
        torch.testing.assert_close(actual, expected.train(training)(x))
    assert list(actual) == NODES


def test_a_step_of_a_feature_extractor_over_replicas_is_that_of_the_undivided_batch() -> None:
    """Converted before and after it was traced."""
    model, x = resnet18(), images()
    for convert in (
        lambda m: extraction.create_feature_extractor(convert_model(m), NODES),
        lambda m: convert_model(extraction.create_feature_extractor(m, NODES)),
    ):
        difference = over_replicas(
            extraction.create_feature_extractor(copy.deepcopy(model), NODES),
            x,
            convert=lambda _, convert=convert: convert(copy.deepcopy(model)),
        )
        assert difference < LIMIT
    record(
        "torchvision",
        "create_feature_extractor(resnet18)",
        over="2 replicas",
        layers=len(batch_norms(model)),
        difference=difference,
    )


def test_fusion_of_a_reverted_model() -> None:
    model, x = resnet18(), images()
    convert_model(model)(x)
    model.eval()
    fused = fuse(revert_model(copy.deepcopy(model)))
    assert not batch_norms(fused)
    torch.testing.assert_close(fused(x), model(x))
    record("torchvision", "resnet18", note="conv and batch norm fuse after `revert_model`")
