"""The program for accelerate in docs/frameworks.md."""

from pathlib import Path

import pytest
import torch
from recipes import equals_one_process
from torch import nn

from syncbn_torch import SynchronizedBatchNorm2d, convert_model

accelerate = pytest.importorskip("accelerate")


@pytest.mark.timeout(280)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    equals_one_process("accelerate", "accelerate", tmp_path, ("batch_size=4", "batch_size=8"))


def test_a_state_that_converted_layers_saved_loads_into_those_of_torch(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(convert_model(nn.Sequential(nn.BatchNorm2d(3))))
    model(torch.randn(4, 3, 2, 2))
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    other = accelerator.prepare(nn.Sequential(nn.BatchNorm2d(3)))
    accelerator.load_state(str(tmp_path))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_layer_with_a_hook_of_accelerate_is_kept_and_converted_after_its_removal() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.BatchNorm2d(3))
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    with pytest.warns(UserWarning, match="its forward was replaced on the object"):
        convert_model(model)
    hooks.remove_hook_from_module(model[0])
    convert_model(model)
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    x, twin = torch.randn(4, 3, 2, 2), nn.BatchNorm2d(3)
    assert type(model[0]) is SynchronizedBatchNorm2d
    torch.testing.assert_close(model(x), twin(x))
