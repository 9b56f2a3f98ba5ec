"""The program for the Trainer of transformers in docs/frameworks.md."""

from pathlib import Path

import pytest
import torch
from recipes import equals_one_process, run

from syncbn_torch import convert_model

transformers = pytest.importorskip("transformers")

HEADING = "Trainer of transformers"
LAST = "average_tokens_across_devices=False,"
PLAIN = (
    "convert_model(ResNetForImageClassification(config))",
    "ResNetForImageClassification(config)",
)


@pytest.mark.timeout(280)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    equals_one_process("transformers", HEADING, tmp_path, ("batch_size=4", "batch_size=8"))


def same_training(one: Path, other: Path) -> None:
    """The first processes of two runs have equal states, up to rounding."""
    states = [torch.load(path / "rank-0.pt")["state"] for path in (one, other)]
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(280)
def test_the_factor_of_which_the_page_warns_is_that_of_the_trainer(tmp_path: Path) -> None:
    """With torch's layers: its default is the same as twice the learning rate."""
    run(HEADING, tmp_path / "default", PLAIN, (LAST, ""))
    run(HEADING, tmp_path / "twice", PLAIN, ("rate=0.1", "rate=0.2"))
    same_training(tmp_path / "default", tmp_path / "twice")


@pytest.mark.timeout(280)
def test_accumulated_steps_count_as_the_page_says(tmp_path: Path) -> None:
    """Without its advice the loss counts twice, in one process too."""
    two = (LAST, "gradient_accumulation_steps=2,")
    advice = ("arguments = ", "model.accepts_loss_kwargs = False\narguments = ")
    batch = ("batch_size=4", "batch_size=2")
    run(HEADING, tmp_path / "as advised", two, advice, batch)
    half = ("rate=0.1", "rate=0.05")
    run(HEADING, tmp_path / "half the rate", two, half, command="python train.py")
    same_training(tmp_path / "as advised", tmp_path / "half the rate")


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
