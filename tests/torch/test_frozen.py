"""Frozen layers use their running statistics in training too, and send nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import close, on_ranks

from syncbn_core.errors import StateError
from syncbn_torch import (
    DataParallelWithCallback,
    DistributedCommunicator,
    SyncBatchNorm,
    SynchronizedBatchNorm2d,
    convert_model,
    freeze,
    register_conversion,
    register_frozen,
    revert_model,
    unfreeze,
)
from syncbn_torch.inplace import ABN, InPlaceABN


def randomized(model: Any) -> Any:
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_training_is_eval(activation: str | None, eps_mode: Any) -> None:
    layer = SynchronizedBatchNorm2d(3, activation=activation, eps_mode=eps_mode)
    twin = copy.deepcopy(randomized(layer)).eval()
    freeze(layer)
    x = torch.randn(4, 3, 300, 300)
    graph = torch.compile(layer, fullgraph=True, backend="eager")
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), graph
    for model in (layer, *others, DataParallelWithCallback(layer, replicas=2)):
        model.train()
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(leaf), twin(other)
        close(y, expected)
        assert layer.weight.requires_grad
        close(*(torch.autograd.grad(v.sum(), t)[0] for v, t in ((y, leaf), (expected, other))))
    close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    assert "frozen" in repr(layer)
    unfreeze(layer)
    layer(x)
    assert layer.num_batches_tracked == twin.num_batches_tracked + 1


def test_parameters_get_no_gradient_until_they_had_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm(3), ABN(3), InPlaceABN(3))
    model[1].bias.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    freeze(model)
    assert [p.requires_grad for p in model.parameters()] == before
    freeze(model, affine=True)
    assert [p.requires_grad for p in model.parameters()] == [True, True] + [False] * 6
    twin = copy.deepcopy(model).eval()
    x = torch.randn(2, 3, 4, 4)
    close(model.train()(x), twin(x))
    unfreeze(model)
    assert [p.requires_grad for p in model.parameters()] == before
    freeze(model)
    with pytest.warns(UserWarning, match=r"kept 1 .*freeze\(\), which torch does not have"):
        revert_model(model)


@on_ranks(2)
def test_ranks_send_nothing(rank: int, size: int) -> None:
    group = DistributedCommunicator()
    layer = SyncBatchNorm(3, process_group=group)
    freeze(layer)
    layer(torch.randn(4, 3, 2, requires_grad=True)).sum().backward()
    assert group.calls == 0
    unfreeze(layer)
    layer(torch.randn(4, 3, 2)).sum().backward()
    assert group.calls == 2


def test_without_running_statistics_nothing_is_frozen() -> None:
    model = nn.Sequential(SyncBatchNorm(3), SyncBatchNorm(3, track_running_stats=False))
    with pytest.raises(StateError, match=r"running statistics in 1 \(SyncBatchNorm\)"):
        freeze(model)
    assert "frozen" not in repr(model)


def test_layers_of_torch_are_refused_before_the_conversion() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), SyncBatchNorm(3)))
    with pytest.raises(StateError, match="got 2 that are not, the first of them 0; call convert_"):
        freeze(model)
    assert "frozen" not in repr(model)
    freeze(convert_model(model))
    assert repr(model).count("frozen") == 3
    with pytest.warns(UserWarning, match="freeze found no batch norm layer in Linear"):
        freeze(nn.Linear(2, 2))


class Frozen(nn.Module):
    """As torchvision's and detectron2's."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((num_features,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        column = [t[:, None, None] for t in self.buffers()]
        weight, bias, mean, var = column
        return (x - mean) * (var + self.eps).rsqrt() * weight + bias


def test_frozen_layers_of_others_and_back() -> None:
    register_frozen(Frozen)
    try:
        model = randomized(nn.Sequential(nn.Conv2d(3, 3, 1), Frozen(3, eps=0.1))).double()
        twin, x = copy.deepcopy(model), torch.randn(2, 3, 4, 4).double()
        convert_model(model)
        assert type(model[1]) is SynchronizedBatchNorm2d
        assert not model[1].weight.requires_grad
        close(model.train()(x), twin(x))
        unfreeze(model)
        assert model[1].weight.requires_grad
        model[1].weight.data += 1
        twin[1].weight += 1
        revert_model(model)
        assert type(model[1]) is Frozen
        close(model(x), twin(x))
    finally:
        register_conversion(Frozen, None)
