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
@pytest.mark.parametrize("training", [True, False])
def test_derivatives_of_replicas(mode: str, training: bool) -> None:
    layer = make_layer(eps_mode=mode, track_running_stats=not training).train(training)
    inputs, call = operands(layer, 5, 2, 1, 1), called_with(layer, 3)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


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


def test_vectorized_jacobian_equals_the_one_by_rows(kernels: str) -> None:
    model = make_layer(track_running_stats=False)
    x = torch.randn(4, 2, 1, 2, **DOUBLE)
    rows = torch.autograd.functional.jacobian(model, x)
    close(torch.autograd.functional.jacobian(model, x, vectorize=True), rows)


def test_batched_gradients_of_replicas_are_refused_and_plain_ones_succeed(run_parts: Any) -> None:
    parts = [torch.randn(n, 2, 2, 2, **DOUBLE, requires_grad=True) for n in (2, 1, 3)]
    y = run_parts(make_layer(), parts)[1]
    dys = torch.randn(2, *y.shape, **DOUBLE)
    with pytest.raises(StateError, match=r"in SynchronizedBatchNorm2d.*is_grads_batched"):
        torch.autograd.grad(y, parts, dys, is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, parts, dys[0])


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


@pytest.mark.parametrize("kind", ["eval", "no batch norm"])
def test_tangents_go_through_replicas_that_do_not_synchronize(kind: str) -> None:
    model: Any = NoNorm() if kind == "no batch norm" else nn.Sequential(NoNorm(), make_layer())
    model.eval()
    x, direction = torch.randn(2, 5, 2, 3, 3, **DOUBLE)
    expected = tangent(copy.deepcopy(model), x, direction)
    found = tangent(DataParallelWithCallback(model, replicas=3), x, direction)
    assert found is not None
    close(found, expected)


def test_tangents_in_replicas_that_synchronize_are_refused_with_the_layers_name() -> None:
    model: Any = nn.Sequential(NoNorm(), make_layer())
    x, direction = torch.randn(2, 5, 2, 3, 3, **DOUBLE)
    with pytest.raises(StateError, match=r"in 1 \(SynchronizedBatchNorm2d\).*forward-mode AD"):
        tangent(DataParallelWithCallback(model, replicas=3), x, direction)
    assert model[1].num_batches_tracked == 0


@MODES
def test_a_tangent_at_any_size_and_running_statistics_without_one(mode: str, kernels: str) -> None:
    layer = make_layer(3, eps_mode=mode)
    twin = nn.BatchNorm2d(3, eps=layer.eps, **DOUBLE)
    twin.load_state_dict(layer.state_dict())
    once = copy.deepcopy(twin)
    x, direction = torch.randn(2, *LARGE, **DOUBLE)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction)))
        assert forward_ad.unpack_dual(layer.running_mean).tangent is None
    if mode == "clamp":
        twin.eps = 1e-30  # the variance is far from eps
    close(y.tangent, tangent(twin, x, direction))
    close(y.primal, twin(x))
    once(x)
    close(layer.running_mean, once.running_mean)
    assert layer.num_batches_tracked == 1


def test_a_tangent_of_dy_goes_through_the_backward_of_kernels() -> None:
    """The gradient is linear in dy, so its tangent is the gradient of that of dy."""
    layer = make_layer(3)
    x = torch.randn(LARGE, **DOUBLE, requires_grad=True)
    y = layer(x)
    dy, direction = torch.randn(2, *LARGE, **DOUBLE)
    (expected,) = torch.autograd.grad(y, x, direction, retain_graph=True)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, direction), retain_graph=True)
        found = forward_ad.unpack_dual(dx).tangent
    assert found is not None
    close(found, expected)


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


class TransformsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = make_layer()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.bn(x).sum())(x)


def test_function_transforms_inside_replicas_are_refused_with_the_layers_name() -> None:
    model = DataParallelWithCallback(TransformsInside(), replicas=2)
    with pytest.raises(StateError, match=r"in .*SynchronizedBatchNorm2d.*function transform"):
        model(torch.randn(4, 2, 2, 2, **DOUBLE))
    assert model.module.bn.num_batches_tracked == 0


def test_a_transform_that_can_not_write_running_statistics_leaves_them_all() -> None:
    """In the mode "clamp", which is ours."""
    layer = make_layer(eps_mode="clamp")
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(3, 4, 2, 2, 2, **DOUBLE)
    with pytest.raises(RuntimeError):
        torch.func.vmap(layer)(x)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: layer(x).sum())(x[0])
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
