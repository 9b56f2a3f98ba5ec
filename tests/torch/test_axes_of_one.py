"""Where an axis of x is 1, strides are ambiguous, and torch's CPU batch norm gives a wrong dx.

Ours is that of the formula, whatever the strides of x and dy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import close

from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    freeze,
    verify_sync,
)
from syncbn_torch.inplace import InPlaceABN

Call = Callable[[nn.Module, Tensor], Tensor]


def formula(layer: Any, x: Tensor) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean, var = layer.running_mean, layer.running_var
    if layer.training or mean is None:
        axes = [0, *range(2, x.dim())]
        mean, var = x.mean(axes), x.var(axes, unbiased=False)
    mean, var, weight, bias = (t.view(shape) for t in (mean, var, layer.weight, layer.bias))
    clamped = layer.effective_eps_mode == "clamp"
    var = var.clamp(min=layer.eps) if clamped else var + layer.eps
    return (x - mean) / var.sqrt() * weight + bias


def layer_for(shape: list[int], **settings: Any) -> Any:
    kind = SynchronizedBatchNorm3d if len(shape) == 5 else SynchronizedBatchNorm2d
    layer = kind(shape[1], dtype=torch.float64, **settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if layer.running_var is not None:
        nn.init.uniform_(layer.running_var, 0.5, 2)
    return layer


def strided(shape: list[int], order: list[int]) -> Tensor:
    """Random numbers, whose axes lie in memory in this order."""
    values = torch.randn([shape[axis] for axis in order], dtype=torch.float64)
    return values.permute([order.index(axis) for axis in range(len(shape))])


def cases(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Shapes with axes of 1, and in which orders the axes of x and dy lie in memory."""
    drawn = random.Random(0)
    found = []
    while len(found) < count:
        shape = [drawn.choice([1, 2, 3, 4]) for _ in range(drawn.choice([4, 5]))]
        if 1 in shape and torch.Size(shape).numel() > shape[1]:
            axes = list(range(len(shape)))
            innermost = [0, *axes[2:], 1]
            given = drawn.choice([axes, innermost, drawn.sample(axes, len(axes))])
            found.append((shape, given, drawn.sample(axes, len(axes))))
    return found


CASES = cases(400)
MODES: dict[str, tuple[dict[str, Any], Call]] = {
    "training": ({}, lambda layer, x: layer(x)),
    "replicas": ({}, lambda layer, x: DataParallelWithCallback(layer, replicas=4)(x)),
    "average of all": ({"momentum": None}, lambda layer, x: layer(x)),
    "untracked": ({"track_running_stats": False}, lambda layer, x: layer(x)),
    "untracked eval": ({"track_running_stats": False}, lambda layer, x: layer.eval()(x)),
    "eval": ({}, lambda layer, x: layer.eval()(x)),
    "clamp in eval": ({"eps_mode": "clamp"}, lambda layer, x: layer.eval()(x)),
    "clamp": ({"eps_mode": "clamp"}, lambda layer, x: layer(x)),
    "frozen": ({}, lambda layer, x: freeze(layer) or layer(x)),
    "masked eval": ({}, lambda layer, x: layer.eval()(x, torch.ones(len(x), dtype=torch.bool))),
}


def gradients(call: Call, layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    own = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(layer, own)
    needed = [own, *(p for p in layer.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, needed, dy)]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_formula(mode: str) -> None:
    settings, call = MODES[mode]
    for shape, given, of_dy in CASES:
        layer = layer_for(shape, **settings)
        x, dy = strided(shape, given), strided(shape, of_dy)
        twin = copy.deepcopy(layer)
        found = gradients(call, layer, x, dy)
        twin.train(layer.training and mode != "frozen")
        for one, other in zip(found, gradients(formula, twin, x, dy), strict=True):
            close(one, other)
        if mode in ("training", "average of all"):
            reference = nn.BatchNorm1d(shape[1], momentum=layer.momentum).double()
            reference.load_state_dict(twin.state_dict())
            reference(x.reshape(shape[0], shape[1], -1))
            for key, value in reference.state_dict().items():
                close(layer.state_dict()[key], value)


def test_y_keeps_channels_innermost() -> None:
    for shape in ([4, 3, 5, 1], [1, 3, 4, 5]):
        x = strided(shape, [0, 2, 3, 1]).requires_grad_()
        for training in (True, False):
            y = layer_for(shape).train(training)(x)
            assert y.is_contiguous(memory_format=torch.channels_last)


class Audio(nn.Module):
    """Features (N, C, T, 1) to a linear layer over channels, as in audio, text and point nets."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(5, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(x).squeeze(-1).transpose(1, 2)).sin()
        return y


class ByFormula(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return formula(self.layer, x)


def audio() -> tuple[Audio, Audio, Tensor]:
    torch.manual_seed(0)
    net = Audio(layer_for([8, 5, 7, 1]))
    twin = copy.deepcopy(net)
    twin.norm = ByFormula(twin.norm)
    return net, twin, torch.randn(8, 5, 7, 1, dtype=torch.float64)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda net: torch.compile(net, backend="aot_eager", fullgraph=True),
    "exported": lambda net: torch.export.export(
        net, (torch.randn(8, 5, 7, 1, dtype=torch.float64),)
    ).module(),
    "in replicas": lambda net: DataParallelWithCallback(net, replicas=4),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_graphs_and_replicas(way: str, training: bool) -> None:
    net, twin, x = audio()
    run = WAYS[way](net.train(training))
    twin.train(training)
    found, wanted = [], []
    for model, grads in ((run, found), (twin, wanted)):
        own = x.clone().requires_grad_()
        model(own).square().sum().backward()
        grads.append(own.grad)
    close(found, wanted)


def test_second_derivatives_and_vmap() -> None:
    net, twin, x = audio()

    def penalty(model: nn.Module) -> Tensor:
        own = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(own).square().sum(), own, create_graph=True)
        (result,) = torch.autograd.grad(dx.square().sum(), own)
        return result

    close(penalty(net), penalty(twin))
    net, twin, x = audio()  # with the running statistics of the beginning

    def dx_of(model: nn.Module) -> Tensor:
        gradient = torch.func.grad(lambda x: model(x).square().sum())
        return torch.func.vmap(gradient)(torch.stack([x, 2 * x]))

    close(dx_of(net.eval()), dx_of(twin.eval()))


def test_in_place_in_eval() -> None:
    layer = InPlaceABN(5, activation="identity").double().eval()
    nn.init.uniform_(layer.running_var, 0.5, 2)
    shape = [8, 5, 7, 1]
    x, dy = strided(shape, [0, 1, 2, 3]), strided(shape, [0, 2, 3, 1])
    own = x.clone().requires_grad_()
    y = layer(own.clone())
    (dx,) = torch.autograd.grad(y, own, dy)
    scale = (layer.weight.abs() + layer.eps) / (layer.running_var + layer.eps).sqrt()
    close(dx, dy * scale.view(1, -1, 1, 1), rtol=1e-4, atol=1e-4)


def test_verify_accuses_no_right_model() -> None:
    net, _, x = audio()
    report = verify_sync(net, x)
    assert report.ok, report
