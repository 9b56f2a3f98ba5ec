"""Forward-mode AD, and the transforms of `torch.func`: tensors that are more than their memory."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from syncbn_core.errors import StateError
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d
from syncbn_torch.forward import always_ours

DOUBLE: Any = {"dtype": torch.float64}
LARGE = (16, 3, 100, 100)
MODES = pytest.mark.parametrize("mode", ["plus", "clamp"])
close = torch.testing.assert_close


@pytest.fixture(params=["the faster kernel", "ours"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with always_ours(request.param == "ours"):
        yield request.param


def make_layer(channels: int = 2, **settings: Any) -> Any:
    layer = SynchronizedBatchNorm2d(channels, **{**DOUBLE, "eps": 0.3, **settings})
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    if layer.running_mean is not None:
        layer.running_mean.normal_()
    return layer


def operands(layer: Any, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, of which "clamp" clamps one channel, weight and bias."""
    x = torch.randn(*shape, **DOUBLE)
    x[:, 1] *= 0.1
    return x.requires_grad_(), layer.weight, layer.bias


def called_with(layer: Any, replicas: int = 1) -> Callable[..., Tensor]:
    """The layer as a function of x, weight and bias."""

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = copy.copy(layer)
        own._parameters = {"weight": weight, "bias": bias}
        y: Tensor = DataParallelWithCallback(own, replicas=replicas)(x)
        return y

    return call


@MODES
@pytest.mark.parametrize("training", [True, False])
def test_all_derivatives_of_a_lone_layer(mode: str, training: bool, kernels: str) -> None:
    layer = make_layer(eps_mode=mode, track_running_stats=not training).train(training)
    inputs, call = operands(layer, 4, 2, 1, 2), called_with(layer)
    assert torch.autograd.gradcheck(
        call,
        inputs,
        check_forward_ad=True,
        check_undefined_grad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@MODES
def test_batched_gradients_at_any_size(mode: str) -> None:
    """`is_grads_batched=True` over a graph of our kernels: as one gradient at a time."""
    layer = make_layer(3, eps_mode=mode)
    x = torch.randn(LARGE, **DOUBLE, requires_grad=True)
    inputs, y = [x, layer.weight, layer.bias], layer(x)
    dys = torch.randn(2, *LARGE, **DOUBLE)
    several = torch.autograd.grad(y, inputs, dys, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in dys]
    for batch, *each in zip(several, *single, strict=True):
        close(batch, torch.stack(each))


@MODES
@pytest.mark.parametrize("apart", [False, True])
def test_batched_gradients_of_replicas(mode: str, apart: bool, run_parts: Any) -> None:
    parts = [torch.randn(n, 2, 2, 2, **DOUBLE, requires_grad=True) for n in (2, 1, 3)]
    xs = [torch.cat([parts[0]] * 2, 3), *parts[1:]] if apart else parts  # then they are not joined
    y = run_parts(make_layer(eps_mode=mode), xs)[1]
    dys = torch.randn(2, *y.shape, **DOUBLE)
    several = torch.autograd.grad(y, parts, dys, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, parts, dy, retain_graph=True) for dy in dys]
    for batch, *each in zip(several, *single, strict=True):
        close(batch, torch.stack(each))


class NoNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).sin()


def tangent(model: Callable[..., Tensor], x: Tensor, direction: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        y: Tensor | None = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent
        return y


def test_tangents_in_replicas_that_synchronize_are_refused_with_the_layers_name() -> None:
    model: Any = nn.Sequential(NoNorm(), make_layer())
    x, direction = torch.randn(2, 5, 2, 3, 3, **DOUBLE)
    with pytest.raises(StateError, match=r"in 1 \(SynchronizedBatchNorm2d\).*forward-mode AD"):
        tangent(DataParallelWithCallback(model, replicas=3), x, direction)
    assert model[1].num_batches_tracked == 0


@MODES
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), LARGE])
def test_function_transforms_of_a_lone_layer(
    mode: str, shape: tuple[int, ...], kernels: str
) -> None:
    layer = make_layer(3, eps_mode=mode, track_running_stats=False)
    x, direction, dy = torch.randn(3, *shape, **DOUBLE)
    _, found = torch.func.jvp(layer, (x,), (direction,))
    close(found, tangent(layer, x, direction))
    xs = torch.stack([x, direction])
    grads = torch.func.vmap(torch.func.grad(lambda x: (layer(x) * dy).sum()))(xs)
    for own, grad in zip(xs, grads, strict=True):
        leaf = own.clone().requires_grad_()
        layer(leaf).backward(dy)
        close(grad, leaf.grad)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_function_transforms_around_replicas_are_refused(transform: str) -> None:
    layer = make_layer()
    model = DataParallelWithCallback(layer, replicas=2)
    x = torch.randn(4, 2, 2, 2, **DOUBLE)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(model)(x[None]),
    }
    with pytest.raises(StateError, match=r"in DataParallelWithCallback.*function transform"):
        calls[transform]()
    assert layer.num_batches_tracked == 0
    model(x)
