"""Models of transformers with batch norm: keyword arguments in, a ModelOutput out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import LIMIT, batch_norms, over_ranks, over_replicas, record
from torch import Tensor, nn
from world import on_ranks

from syncbn_torch import DataParallelWithCallback, convert_model

transformers = pytest.importorskip("transformers")

Case = tuple[nn.Module, dict[str, Tensor]]


def images(size: int, count: int = 4) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size).double()}


def built(name: str, **settings: Any) -> nn.Module:
    """The model `name` from a small configuration, with random weights, in float64."""
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**settings))
    return model.double()


def resnet() -> Case:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    settings = {**sizes, "layer_type": "basic", "num_labels": 3, "output_hidden_states": True}
    return built("ResNetForImageClassification", **settings), images(32)


def regnet() -> Case:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}
    return built("RegNetForImageClassification", **sizes, output_hidden_states=True), images(32)


def mobilenet_v1() -> Case:
    settings = {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.0}
    return built("MobileNetV1ForImageClassification", **settings), images(64)


def mobilenet_v2() -> Case:
    settings = {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.0}
    return built("MobileNetV2ForSemanticSegmentation", **settings), images(64)


def efficientnet() -> Case:
    blocks = {"in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "kernel_sizes": [3, 3, 5]}
    strides = {"strides": [1, 2, 2], "num_block_repeats": [1, 1, 1], "expand_ratios": [1, 6, 6]}
    width = {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320}
    rates = {"dropout_rate": 0.0, "drop_connect_rate": 0.0}
    settings = {**blocks, **strides, **width, **rates}
    return built("EfficientNetForImageClassification", **settings), images(32)


def mobilevit() -> Case:
    sizes = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 8]}
    rates = {"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    settings = {**sizes, **rates, "num_attention_heads": 2, "aspp_out_channels": 8}
    return built("MobileViTForSemanticSegmentation", **settings, aspp_dropout_prob=0.0), images(64)


def levit() -> Case:
    sizes = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]}
    keys = {"key_dim": [8, 8, 8], "drop_path_rate": 0, "image_size": 64}
    keys["down_ops"] = [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 2, 2, 2, 2]]
    return built("LevitForImageClassification", **sizes, **keys), images(64)


def segformer() -> Case:
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}
    rates = {"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    heads = {"num_attention_heads": [1, 1, 1, 1], "output_hidden_states": True}
    return built("SegformerForSemanticSegmentation", **sizes, **rates, **heads), images(64)


def patchtst() -> Case:
    sizes = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4}
    widths = {"d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8}
    rates = {"attention_dropout": 0.0, "head_dropout": 0.0, "prediction_length": 4}
    settings = {**sizes, **widths, **rates, "norm_type": "batchnorm", "loss": "mse"}
    return built("PatchTSTForPrediction", **settings), {
        "past_values": torch.randn(4, 16, 2).double()
    }


MODELS: list[Callable[[], Case]] = [
    resnet, regnet, mobilenet_v1, mobilenet_v2, efficientnet, mobilevit, levit, segformer, patchtst,
]  # fmt: skip


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_step_over_replicas_is_that_of_the_undivided_batch(make: Callable[[], Case]) -> None:
    model, batch = make()
    names = tuple(batch)
    difference = over_replicas(model, tuple(batch.values()), names=names)
    assert difference < LIMIT
    layers = len(batch_norms(model))
    assert layers > 0
    subject = type(model).__name__
    record("transformers", subject, over="2 replicas", layers=layers, difference=difference)


@pytest.mark.parametrize("make", [resnet, segformer], ids=lambda make: make.__name__)
def test_results_are_outputs_of_the_model(make: Callable[[], Case]) -> None:
    """With the loss of each replica, fields that are None, and tuples of hidden states."""
    model, batch = make()
    wrapper = DataParallelWithCallback(convert_model(model), replicas=2)
    shape = (4, 16, 16) if make is segformer else (4,)
    labels = torch.zeros(shape, dtype=torch.long)
    out = wrapper(**batch, labels=labels)
    expected = model(**batch, labels=labels)
    assert type(out) is type(expected)
    assert list(out.keys()) == list(expected.keys())
    torch.testing.assert_close(out.logits, expected.logits)
    assert [h.shape for h in out.hidden_states] == [h.shape for h in expected.hidden_states]
    torch.testing.assert_close(out.loss.mean(), expected.loss)
    assert out.loss.shape == (2,)
    assert wrapper(**batch, return_dict=False)[0].shape == expected.logits.shape


def test_a_batch_encoding_splits() -> None:
    class Model(nn.Module):
        def forward(self, batch: Any) -> Any:
            return type(batch)({key: value + 1 for key, value in batch.items()})

    made = transformers.BatchEncoding({"input_ids": torch.arange(8).view(4, 2)})
    out = DataParallelWithCallback(Model(), replicas=2)(made)
    assert type(out) is transformers.BatchEncoding
    assert torch.equal(out["input_ids"], made["input_ids"] + 1)


def test_a_cache_in_a_result_is_named_with_its_path() -> None:
    settings = {"vocab_size": 9, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 4}
    model = built("GPT2Model", **settings)
    wrapper = DataParallelWithCallback(model, replicas=2)
    tokens = torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="DynamicCache with tensors at output"):
        wrapper(input_ids=tokens)
    assert wrapper(input_ids=tokens, use_cache=False).last_hidden_state.shape == (4, 3, 4)


@on_ranks(2)
def test_a_step_over_ranks_is_that_of_the_undivided_batch(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, batch = resnet()
    difference = over_ranks(model, tuple(batch.values()), names=tuple(batch))
    assert difference < LIMIT, difference
    layers = len(batch_norms(model))
    subject = type(model).__name__
    record("transformers", subject, over="2 ranks", layers=layers, difference=difference)
