"""Layers with `activation=` equal batch norm followed by torch's activation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from world import equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ArgumentError, ProtocolError
from syncbn_torch import (
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm2d,
)
from syncbn_torch.forward import always_ours
from syncbn_torch.inplace import InPlaceABNSync

MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "relu6": nn.ReLU6(),
}
NAMES = pytest.mark.parametrize("activation", MODULES)
# columns; pieces of planes, whole and short planes; many blocks of rows; five axes
SHAPES = [(40, 5), (3, 5, 70, 70)]  # rows, planes


def pair(name: str, shape: Any = (0, 5, 1, 1), **settings: Any) -> tuple[Any, nn.Sequential]:
    """A layer for inputs of `shape`, and torch's with the same parameters and the activation."""
    torch.manual_seed(0)
    kind = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][max(len(shape) - 3, 0)]
    twin = kind(shape[1], **settings).double()
    for parameter in twin.parameters():
        nn.init.normal_(parameter, std=2)
    slope = {"negative_slope": 0.1} if name == "leaky_relu" else {}
    layer = SyncBatchNorm(shape[1], activation=name, **slope, **settings).double()
    layer.load_state_dict(twin.state_dict())
    return layer, nn.Sequential(twin, copy.deepcopy(MODULES[name]))


def results(model: Any, x: Tensor, dy: Tensor, twice: bool = False) -> list[Any]:
    """y, gradients by x and the parameters, running statistics; `twice`: second derivatives too."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    dy = dy.to(x.dtype).requires_grad_()
    sources = [leaf, *model.parameters()]
    y = model(leaf)
    gradients = torch.autograd.grad(y, sources, dy, create_graph=twice)
    found = [y, *gradients, *model.buffers()]
    if twice:
        loss = sum(gradient.square().sum() for gradient in gradients)
        found += torch.autograd.grad(loss, [*sources, dy], materialize_grads=True)
    return found


@NAMES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_torch(activation: str, shape: Any) -> None:
    x, dy = whole_batch(shape)
    for settings in ({}, {"affine": False}):
        layer, twin = pair(activation, shape, **settings)
        for values in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
            for twice in (False, True):  # by kernels, by plain operations
                with always_ours():
                    ours = results(layer, values, dy, twice)
                torch.testing.assert_close(ours, results(twin, values, dy, twice))


@NAMES
@pytest.mark.parametrize("shape", [(4, 5, 3, 3), (40, 5, 70, 70)], ids=str)
def test_a_layer_alone_equals_torch(activation: str, shape: Any) -> None:
    """Small ones, which are torch's, and large ones; with each mode of training."""
    x, dy = whole_batch(shape)
    for settings in ({}, {"track_running_stats": False}, {"momentum": None}):
        layer, twin = pair(activation, shape, **settings)
        for training in (True, False):
            models = layer.train(training), twin.train(training)
            torch.testing.assert_close(*(results(model, x, dy) for model in models))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@NAMES
def test_replicas_in_other_dtypes_equal_the_undivided_batch(
    activation: str, dtype: torch.dtype
) -> None:
    x, dy = (each.to(dtype) for each in whole_batch((7, 5, 20, 20)))
    layer, twin = pair(activation)
    alone = copy.deepcopy(layer.float())
    found = results(DataParallelWithCallback(layer, replicas=3), x, dy)
    if dtype is not torch.float32:  # y is rounded before the activation, as on one device
        torch.testing.assert_close(found, results(alone, x, dy), rtol=0, atol=0)
        return
    for one, other in zip(found, results(twin, x.double(), dy.double()), strict=True):
        scale = other.detach().abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4 * scale)


class Own(Tensor):
    """A tensor that no kernel takes, so plain operations compute."""


@on_ranks(2, 3)
def test_ranks_equal_the_undivided_batch(rank: int, size: int) -> None:
    x, dy = whole_batch((7, 5, 6, 6))
    mine = rows_of(rank, (0, 5, 7) if size == 2 else (0, 5, 5, 7))
    for name in ("silu", "leaky_relu"):
        for kind in (Tensor, Own):
            equals_undivided(*pair(name), x.as_subclass(kind), dy, mine)


UNLIKE: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (SyncBatchNorm, {"activation": "relu"}, {"activation": "silu"}, "layer 1 with relu NormRule"),
    (SyncBatchNorm, {"eps": 0.3}, {}, "eps=0.3, mode='plus'"),
    (SyncBatchNorm, {"eps_mode": "clamp"}, {}, "mode='clamp'"),
    (
        SyncBatchNorm,
        {"activation": "leaky_relu", "negative_slope": 0.5},
        {"activation": "leaky_relu"},
        "negative_slope=0.5",
    ),
    (InPlaceABNSync, {"activation": "elu"}, {}, "layer 1 with elu"),
    (InPlaceABNSync, {"activation_param": 0.5}, {}, "negative_slope=0.5"),
]


@on_ranks(2)
def test_unlike_settings_are_named_on_both_ranks_and_change_nothing(rank: int, size: int) -> None:
    x = torch.randn(4, 5, 3)
    for kind, *settings, words in UNLIKE:
        layer = kind(5, **settings[rank])
        told = "expected the same settings of a layer on all members", words
        raises(ProtocolError, *told, call=lambda: layer(x.clone()))  # noqa: B023
        assert layer.running_mean.count_nonzero() == 0
    layer = SyncBatchNorm(5)
    layer(x)
    layer.eps = 1e-3 if rank else 1e-5  # a later call
    raises(ProtocolError, "eps=0.001", call=lambda: layer(x))


def test_nothing_is_kept_for_backward_beside_x() -> None:
    layer, _ = pair("silu")
    x = torch.randn(8, 5, 30, 30, dtype=torch.float64, requires_grad=True)
    kept = []
    with always_ours(), saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        layer(x)
    small = {layer.weight.data_ptr(), layer.bias.data_ptr()}
    assert set(kept) <= {x.data_ptr()} | small


def test_copies_and_a_subclass_that_holds_an_activation() -> None:
    class Acting(SynchronizedBatchNorm2d):
        def __init__(self, features: int) -> None:
            super().__init__(features)
            self.activation = nn.ReLU()

        def forward(self, input: Tensor) -> Tensor:
            return self.activation(super().forward(input))  # type: ignore[no-any-return]

    x = torch.randn(4, 5, 3, 3)
    assert Acting(5)(x).min() == 0
    layer = SynchronizedBatchNorm2d(5, activation="leaky_relu", negative_slope=0.5)
    assert "activation='leaky_relu', negative_slope=0.5" in repr(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        torch.testing.assert_close(other(x), nn.LeakyReLU(0.5)(nn.BatchNorm2d(5)(x)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"activation": nn.ReLU()}, r"got ReLU\(\); pass 'relu'"),
        ({"activation": nn.LeakyReLU}, "; pass 'leaky_relu'"),
        ({"activation": nn.ReLU6}, "; pass 'relu6'"),
        ({"activation": "gelu"}, "one of None, relu, leaky_relu, .*, got 'gelu'"),
        ({"activation": "leaky_relu", "negative_slope": -1.0}, "negative_slope >= 0, got -1.0"),
        ({"activation": "leaky_relu", "negative_slope": "0.1"}, "negative_slope >= 0, got '0.1'"),
        ({"activation": "relu", "negative_slope": 0.1}, "got 0.1 for 'relu'; leave it out"),
    ],
    ids=str,
)
def test_wrong_settings_are_told(settings: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        SyncBatchNorm(5, **settings)
