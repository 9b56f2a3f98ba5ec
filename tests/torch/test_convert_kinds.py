"""Conversion of lazy, parametrized and pruned layers, and of torch.ao's QAT modules."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from world import close, on_ranks, rows_of, whole_batch

from syncbn_core.comm import SingleCommunicator
from syncbn_torch import (
    ConversionReport,
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    revert_model,
)

SHAPE = (4, 3, 5, 5)


def same_step(net: nn.Module, twin: nn.Module) -> None:
    """A step of two replicas of `net` is that of `twin` over the undivided batch."""
    x, _ = whole_batch(SHAPE)
    for model in (twin, DataParallelWithCallback(net, replicas=2)):
        model.zero_grad()
        y = model(x)
        y.pow(3).sum().backward()
        if model is twin:
            expected = y
    close(y, expected)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        close(ours, theirs)


# ------------------------------------------------------------------------------ lazy layers


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_lazy_layer_becomes_a_synchronized_one_at_its_first_input(dimensions: int) -> None:
    lazy = getattr(nn, f"LazyBatchNorm{dimensions}d")(eps=1e-2)
    group = SingleCommunicator()
    net = convert_model(nn.Sequential(lazy), process_group=group)
    assert net[0] is lazy
    assert lazy.has_uninitialized_params()
    net.eval()(torch.randn(4, 3, *[2] * dimensions))
    assert type(lazy).__name__ == f"SynchronizedBatchNorm{dimensions}d"
    assert (lazy.num_features, lazy.eps, lazy.process_group) == (3, 1e-2, group)
    assert type(revert_model(net)[0]).__name__ == f"BatchNorm{dimensions}d"


@on_ranks(2)
def test_a_lazy_layer_synchronizes_from_its_first_batch_on(rank: int, size: int) -> None:
    x, _ = whole_batch(SHAPE)
    rows = rows_of(rank, [0, 1, 4])
    lazy = convert_model(nn.LazyBatchNorm2d()).double()
    close(lazy(x[rows]), nn.BatchNorm2d(3).double()(x)[rows])


# ----------------------------------------------------------------- parametrized and pruned


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def random_layer() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3).double()
    nn.init.uniform_(layer.weight)
    return nn.Sequential(nn.Conv2d(3, 3, 1).double(), layer)


@pytest.mark.parametrize("convert_first", [True, False])
def test_parametrized_layers(convert_first: bool) -> None:
    def parametrized(net: nn.Sequential) -> nn.Sequential:
        parametrize.register_parametrization(net[1], "weight", Doubled())
        return net

    twin, net = parametrized(random_layer()), random_layer()
    net = parametrized(convert_model(net)) if convert_first else convert_model(parametrized(net))
    layer = net[1]
    assert isinstance(layer, SynchronizedBatchNorm2d)
    assert list(net.state_dict()) == list(twin.state_dict())
    same_step(copy.deepcopy(net), copy.deepcopy(twin))
    same_step(net, copy.deepcopy(twin))
    if convert_first:
        parametrize.remove_parametrizations(layer, "weight")
        assert type(layer) is SynchronizedBatchNorm2d
        assert type(revert_model(layer)) is nn.BatchNorm2d
    else:
        revert_model(net)
        assert not isinstance(layer, SynchronizedBatchNorm2d)
        assert parametrize.is_parametrized(layer)
        parametrize.remove_parametrizations(layer, "weight")
        assert type(layer) is nn.BatchNorm2d
    close(layer.weight, random_layer()[1].weight)


@pytest.mark.parametrize("convert_first", [True, False])
def test_pruned_layers(convert_first: bool) -> None:
    def pruned(net: nn.Sequential) -> nn.Sequential:
        prune.l1_unstructured(net[1], "weight", amount=1)
        return net

    twin, net = pruned(random_layer()), random_layer()
    net = pruned(convert_model(net)) if convert_first else convert_model(pruned(net))
    same_step(net, twin)
    assert torch.count_nonzero(net[1].weight) == 2
    revert_model(net)
    assert type(net[1]) is nn.BatchNorm2d
    prune.remove(net[1], "weight")
    assert torch.count_nonzero(net[1].weight) == 2


# ------------------------------------------------------------------------- torch.ao, eager QAT


class Net(nn.Module):
    """Every combination that `fuse_modules_qat` knows: conv and bn with and without relu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.bn3, self.relu3 = nn.BatchNorm2d(4), nn.ReLU()
        self.linear, self.bn4 = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        x = self.relu3(self.bn3(x))
        y: Tensor = self.bn4(self.linear(x.mean((2, 3))))
        return y


FUSED = [["conv1", "bn1", "relu1"], ["conv2", "bn2"], ["bn3", "relu3"], ["linear", "bn4"]]


def fused(net: nn.Module) -> Any:
    from torch.ao.quantization import fuse_modules_qat

    return fuse_modules_qat(net.train(), FUSED)


def prepared(net: Any) -> Any:
    """`prepare_qat` with fake quantization of weights only: observers of activations see a part."""
    from torch.ao import quantization as ao

    net.qconfig = ao.QConfig(
        activation=ao.NoopObserver.with_args(dtype=torch.float16),
        weight=ao.default_weight_fake_quant,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated")
        return ao.prepare_qat(net)


def qat() -> Any:
    torch.manual_seed(0)
    return prepared(fused(Net())).double()


def test_qat_modules_are_converted_and_a_step_is_that_of_the_undivided_batch() -> None:
    net, twin, report = qat(), qat(), ConversionReport()
    kinds = [type(getattr(net, name)).__name__ for name in ("conv1", "conv2", "bn3", "linear")]
    assert kinds == ["ConvBnReLU2d", "ConvBn2d", "BNReLU2d", "LinearBn1d"]
    convert_model(net, report=report)
    assert [layer.name for layer in report.converted] == [
        "conv1.bn",
        "conv2.bn",
        "bn3.0",
        "linear.bn",
    ]
    assert report.kept == []
    same_step(net, twin)


def test_qat_modules_can_be_frozen_and_reverted() -> None:
    net = convert_model(qat())
    net.conv1.freeze_bn_stats()
    assert not net.conv1.bn.training
    assert type(revert_model(net).conv1.bn) is nn.BatchNorm2d
