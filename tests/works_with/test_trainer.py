"""The program for the Trainer of transformers in docs/frameworks.md."""

from pathlib import Path

import pytest
import torch
from recipes import equals_one_process

from syncbn_torch import convert_model

transformers = pytest.importorskip("transformers")


@pytest.mark.timeout(280)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    heading, change = "Trainer of transformers", ("batch_size=4", "batch_size=8")
    note = "AdamW divides small gradients by their own size, and so enlarges rounding errors"
    equals_one_process("transformers", heading, tmp_path, change, limit=1e-6, note=note)


def test_a_converted_model_that_was_saved_loads_with_torch_s_layers(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    model = convert_model(transformers.ResNetForImageClassification(config))
    model(torch.randn(4, 3, 32, 32))
    model.save_pretrained(tmp_path)
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path)
    assert any(type(module) is torch.nn.BatchNorm2d for module in loaded.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
