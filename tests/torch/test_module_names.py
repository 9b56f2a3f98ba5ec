"""The names by which errors tell layers apart."""

import copy

from torch import nn

from syncbn_torch import SynchronizedBatchNorm2d
from syncbn_torch.module_names import name_of


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_layer_has_its_path_in_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ModuleDict({"bn": SynchronizedBatchNorm2d(2)}))
    assert name_of(model[1]["bn"]) == "1.bn (SynchronizedBatchNorm2d)"


def test_wrappers_are_left_out() -> None:
    wrapped = Wrapper(nn.Sequential(SynchronizedBatchNorm2d(2)))
    assert name_of(wrapped.module[0]) == "0 (SynchronizedBatchNorm2d)"


def test_a_layer_alone_is_its_class() -> None:
    assert name_of(SynchronizedBatchNorm2d(2)) == "SynchronizedBatchNorm2d"


def test_of_two_names_the_same_one_is_taken_everywhere() -> None:
    layer = SynchronizedBatchNorm2d(2)
    model = nn.ModuleDict({"b": layer, "a": layer})
    twin = copy.deepcopy(model)
    assert name_of(layer) == name_of(twin["a"]) == "a (SynchronizedBatchNorm2d)"


def test_modules_that_hold_each_other() -> None:
    layer, model = SynchronizedBatchNorm2d(2), nn.Module()
    model.layer, layer.owner = layer, model
    assert name_of(layer).endswith("layer (SynchronizedBatchNorm2d)")
