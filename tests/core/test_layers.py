"""`syncbn_core.layers.BatchNorm`: the layer, alone and in a group, and a network around it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncbn_core import BatchNorm
from syncbn_core.comm import Communicator, SingleCommunicator
from syncbn_core.errors import (
    ArgumentError,
    BatchSizeError,
    DTypeError,
    ShapeError,
    StateError,
)

Array = np.ndarray
Function = Callable[..., Any]


def batch(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(1, 2, size=shape)


def layer_with_history(**options: Any) -> BatchNorm:
    """A float64 layer of 3 channels with parameters and statistics of its own."""
    layer = BatchNorm(3, dtype=np.float64, **options)
    rng = np.random.default_rng(9)
    for parameter in layer.parameters():
        parameter[...] = rng.uniform(0.5, 2, 3)
    if layer.running_mean is not None:
        layer.running_mean[...] = rng.normal(size=3)
        layer.running_var[...] = rng.uniform(0.5, 2, 3)
        layer.num_batches_tracked[...] = 11
    return layer


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_training_normalizes_by_the_batch_and_updates_the_statistics(
    shape: tuple[int, ...], eps_mode: Any, batch_norm: Function, close: Function
) -> None:
    layer = layer_with_history(eps=0.1, momentum=0.3, eps_mode=eps_mode)
    old = layer.state_dict()
    x, dy = batch(*shape), batch(*shape, seed=1)
    y = layer(x)
    dx = layer.backward(dy)
    expected = batch_norm(x, old["weight"], old["bias"], dy=dy, eps=0.1, eps_mode=eps_mode)
    close(y, expected.y)
    close(dx, expected.dx)
    close(layer.weight_grad, expected.dweight)
    close(layer.bias_grad, expected.dbias)
    close(layer.running_mean, 0.7 * old["running_mean"] + 0.3 * expected.mean)
    close(layer.running_var, 0.7 * old["running_var"] + 0.3 * expected.unbiased)
    assert layer.num_batches_tracked == 12


FUNCTIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu": lambda z: np.where(z < 0, 0.01 * z, z),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "hardswish": lambda z: z * np.clip(z + 3, 0, 6) / 6,
    "relu6": lambda z: np.clip(z, 0, 6),
}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_activation_in_a_group_and_alone(
    activation: str, dtype: Any, in_group: Function, batch_norm: Function
) -> None:
    x, dy = (batch(9, 3, 40, 50, seed=seed).astype(dtype) for seed in (0, 1))
    settings = {"dtype": np.float64, "activation": activation}
    layers = [BatchNorm(3, name=str(n), **settings) for n in range(3)]
    for layer in layers:
        layer.weight[...], layer.bias[...] = (3, -4, 2), (1, 0.5, -1)
    weight, bias = layers[0].parameters()

    def member(rank: int, communicator: Communicator) -> tuple[Array, Array]:
        layers[rank].communicator = communicator
        own = slice(0, 2) if rank == 0 else slice(2, 9)
        return layers[rank](x[own]), layers[rank].backward(dy[own])

    y, dx = map(np.concatenate, zip(*in_group(2, member), strict=True))
    f, h = FUNCTIONS[activation], 1e-6
    z = batch_norm(x.astype("f8"), weight, bias).y
    slope = (f(z + h) - f(z - h)) / (2 * h)
    expected = batch_norm(x.astype("f8"), weight, bias, dy=dy * slope)
    allowed = 1e-6 if dtype is np.float64 else 2e-4
    np.testing.assert_allclose(y, f(z), atol=allowed)
    np.testing.assert_allclose(dx, expected.dx, atol=allowed)
    total = sum(layer.weight_grad for layer in layers)
    np.testing.assert_allclose(total, expected.dweight, rtol=1e-4, atol=allowed)
    np.testing.assert_allclose(layers[2](x), y, atol=allowed)
    np.testing.assert_allclose(layers[2].backward(dy), dx, atol=allowed)
    mean, var = x.astype("f8").mean((0, 2, 3)), x.astype("f8").var((0, 2, 3))
    layers[2].running_mean[...], layers[2].running_var[...] = mean, var
    np.testing.assert_allclose(layers[2].eval()(x), y, atol=allowed)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_eval_normalizes_by_running_statistics_and_leaves_them(
    eps_mode: Any, close: Function
) -> None:
    layer = layer_with_history(eps=1.2, eps_mode=eps_mode).eval()
    state = layer.state_dict()
    x, dy = batch(1, 3, 4), batch(1, 3, 4, seed=1)
    y = layer(x)
    dx = layer.backward(dy)
    mean, var, weight, bias = (
        state[name][:, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    invstd = 1 / np.sqrt(np.maximum(var, 1.2) if eps_mode == "clamp" else var + 1.2)
    close(y, (x - mean) * invstd * weight + bias)
    close(dx, dy * invstd * weight)
    close(layer.weight_grad, (dy * (x - mean) * invstd).sum((0, 2)))
    close(layer.bias_grad, dy.sum((0, 2)))
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, state[name])


def test_layer_without_statistics_uses_those_of_the_batch_in_eval_too(
    batch_norm: Function, close: Function
) -> None:
    layer = layer_with_history(track_running_stats=False)
    assert layer.running_mean is layer.running_var is layer.num_batches_tracked is None
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    x = batch(5, 3, 2)
    expected = batch_norm(x, layer.weight, layer.bias).y
    close(layer(x), expected)
    close(layer.eval()(x), expected)
    with pytest.raises(BatchSizeError):
        layer(batch(1, 3))


def test_momentum_none_averages_over_all_batches(close: Function) -> None:
    layer = BatchNorm(3, momentum=None, dtype=np.float64)
    batches = [batch(4, 3, seed=seed) for seed in range(5)]
    for x in batches:
        layer(x)
    close(layer.running_mean, np.mean([x.mean(0) for x in batches], 0))
    close(layer.running_var, np.mean([x.var(0, ddof=1) for x in batches], 0), scale=10)
    assert layer.num_batches_tracked == 5


def test_gradients_add_up_until_they_are_set_to_zero(close: Function) -> None:
    layer = layer_with_history()
    x, dy = batch(5, 3, 2), batch(5, 3, 2, seed=1)
    layer(x)
    layer.backward(dy)
    once = [gradient.copy() for gradient in layer.gradients()]
    layer(x)
    layer.backward(dy)
    for gradient, value in zip(layer.gradients(), once, strict=True):
        close(gradient, 2 * value)
    kept = layer.gradients()
    layer.zero_grad()
    for gradient, same in zip(layer.gradients(), kept, strict=True):
        assert gradient is same, "an optimizer may hold on to it"
        np.testing.assert_array_equal(gradient, np.zeros(3))


def test_backward_needs_a_forward_of_its_own() -> None:
    layer = BatchNorm(3)
    x = batch(5, 3)
    with pytest.raises(StateError, match="expected a forward before each backward"):
        layer.backward(x)
    layer(x)
    layer.backward(x)
    with pytest.raises(StateError, match="expected a forward before each backward"):
        layer.backward(x)


def test_forwards_that_need_no_backward_are_forgotten(close: Function) -> None:
    layer = layer_with_history()
    x, dy = batch(5, 3), batch(5, 3, seed=1)
    layer(x)
    expected = layer.backward(dy)
    for _ in range(2):  # a loop of training and validation
        layer.eval()
        for seed in range(3):
            layer(batch(4, 3, seed=seed))
        layer.train()
        layer(x)
        close(layer.backward(dy), expected)
    layer(x)
    layer.discard()
    layer(x)
    with pytest.raises(ShapeError):
        layer(batch(5, 4))  # a refused forward does not count
    close(layer.backward(dy), expected)


def test_refused_forward_changes_nothing() -> None:
    layer = layer_with_history()
    before = layer.state_dict()
    for wrong, error, words in (
        (batch(5, 4), ShapeError, r"expected 3 channels on axis 1 \(num_features=3\), got .*5, 4"),
        (batch(5), ShapeError, "rank 2 or more"),
        (batch(5, 3).astype(np.int64), DTypeError, "got int64"),
        (batch(1, 3), BatchSizeError, "more than 1 value per channel"),
    ):
        with pytest.raises(error, match=words):
            layer(wrong)
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_features": 0}, ArgumentError, "num_features of 1 or more, got 0"),
        ({"num_features": "a"}, ArgumentError, "num_features of 1 or more, got 'a'"),
        ({"num_features": -3}, ArgumentError, "num_features of 1 or more, got -3"),
        ({"eps": 0}, ArgumentError, "expected eps .* got 0"),
        ({"momentum": 2}, ArgumentError, "expected momentum .* got 2"),
        ({"eps_mode": "max"}, ArgumentError, "got 'max'"),
        ({"dtype": np.int32}, DTypeError, "floating dtype, got int32"),
    ],
)
def test_constructor_refuses_settings_out_of_range(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        BatchNorm(**{"num_features": 3, **options})


# ------------------------------------------------------------------------ state dictionaries


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_state_goes_to_another_layer_and_back(affine: bool, track: bool) -> None:
    options = {"affine": affine, "track_running_stats": track}
    layer, other = layer_with_history(**options), BatchNorm(3, **options)
    state = layer.state_dict()
    names = ["weight", "bias"] * affine
    names += ["running_mean", "running_var", "num_batches_tracked"] * track
    assert list(state) == names
    held = other.parameters()
    other.load_state_dict(state)
    for name in names:
        np.testing.assert_array_equal(
            getattr(other, name), getattr(layer, name).astype(getattr(other, name).dtype)
        )
    assert all(a is b for a, b in zip(other.parameters(), held, strict=True))
    np.testing.assert_array_equal(other.eval()(batch(4, 3)), other.eval()(batch(4, 3)))


def test_state_is_converted_array_by_array_and_copies() -> None:
    layer = layer_with_history()
    state = layer.state_dict(list_of)
    assert {name: list_of(value) for name, value in layer.state_dict().items()} == state
    seen: list[Array] = []
    layer.state_dict(seen.append)
    for copy, own in zip(seen, layer.parameters(), strict=False):
        assert copy is not own
        assert not np.shares_memory(copy, own)
    other = BatchNorm(3, dtype=np.float64)
    other.load_state_dict(state)
    assert other.state_dict(list_of) == state


def list_of(array: Array) -> Any:
    return array.tolist()


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = layer_with_history()
    before = layer.state_dict()
    fitting = BatchNorm(3).state_dict()
    missing = {name: value for name, value in fitting.items() if name != "running_var"}
    for state, words in (
        (missing, "got .*running_mean.*; build the layer with the same affine"),
        ({**fitting, "extra": np.zeros(3)}, "got .*extra"),
        ({}, r"expected a state with the keys .*weight.*got \[\]"),
        (
            {**fitting, "running_var": np.zeros(4)},
            r"expected running_var of shape \(3,\), got \(4,\)",
        ),
        ({**fitting, "weight": np.zeros((1, 3))}, r"expected weight of shape \(3,\), got \(1, 3\)"),
        (
            {**fitting, "num_batches_tracked": np.zeros(1)},
            r"expected num_batches_tracked of shape \(\), got \(1,\)",
        ),
    ):
        with pytest.raises(StateError, match=words):
            layer.load_state_dict(state)
        for name, value in layer.state_dict().items():
            np.testing.assert_array_equal(value, before[name])


# ------------------------------------------------------------------- a network, in a group

SHARES = [0, 3, 3, 40, 96]  # rows of a batch of 96 per member: 3, none, 37, 56


def two_rings(seed: int) -> tuple[Array, Array]:
    """A problem of two classes that no straight line solves: is the point in the inner ring?"""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, 96)
    radius = np.where(label, 1.0, 2.5) + rng.normal(0, 0.15, 96)
    angle = rng.uniform(0, 2 * np.pi, 96)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), label


class Network:
    """`sigmoid(relu(bn(x @ first)) @ second)`, with gradient descent over a whole group."""

    def __init__(self, communicator: Communicator) -> None:
        rng = np.random.default_rng(0)
        self.communicator = communicator
        self.first = rng.normal(size=(2, 16))
        self.second = rng.normal(0, 0.25, size=(16, 1))
        self.bn = BatchNorm(16, dtype=np.float64, communicator=communicator)

    def forward(self, x: Array) -> Array:
        self.x = x
        self.hidden = np.maximum(self.bn(x @ self.first), 0)
        return 1 / (1 + np.exp(-(self.hidden @ self.second)[:, 0]))

    def step(self, x: Array, label: Array, rate: float = 2.0) -> float:
        """One step on this member's rows of a batch of 96; the loss over all of them."""
        guess = self.forward(x)
        loss = -np.log(np.where(label == 1, guess, 1 - guess)).sum() / 96
        d_logit = (guess - label)[:, None] / 96
        self.bn.zero_grad()
        d_hidden = d_logit @ self.second.T * (self.hidden > 0)
        d_first = x.T @ self.bn.backward(d_hidden)
        gradients = [d_first, self.hidden.T @ d_logit, *self.bn.gradients()]
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter -= rate * self.communicator.all_reduce(gradient)
        return float(self.communicator.all_reduce(np.array([loss]))[0])

    def parameters(self) -> list[Array]:
        return [self.first, self.second, *self.bn.parameters()]

    def state(self) -> list[Array]:
        return [self.first, self.second, *self.bn.state_dict().values()]


def train(communicator: Communicator, share: slice, steps: int) -> tuple[Network, list[float]]:
    network = Network(communicator)
    losses = []
    for step in range(steps):
        x, label = two_rings(step)
        losses.append(network.step(x[share], label[share]))
    return network, losses


def test_network_in_four_members_follows_the_undivided_one(
    in_group: Function, close: Function
) -> None:
    alone, losses_alone = train(SingleCommunicator(), slice(None), steps=20)
    members = in_group(
        4, lambda rank, group: train(group, slice(SHARES[rank], SHARES[rank + 1]), steps=20)
    )
    for network, losses in members:
        close(losses, losses_alone)
        for value, other, expected in zip(
            network.state(), members[0][0].state(), alone.state(), strict=True
        ):
            np.testing.assert_array_equal(value, other)  # the same bits in every member
            close(value.astype(np.float64), expected, scale=10)


def test_a_backward_that_fails_does_not_spoil_the_next_steps() -> None:
    x, dy = np.random.default_rng(0).normal(size=(2, 5, 3))
    layer, twin = (BatchNorm(3, dtype=np.float64) for _ in range(2))
    layer(x)
    with pytest.raises(ShapeError):
        layer.backward(dy[:2])
    twin(x)
    expected = twin.backward(dy)
    np.testing.assert_array_equal(layer.backward(dy), expected)  # again, with the right one
    layer(x)
    with pytest.raises(ShapeError):
        layer.backward(dy[:2])
    layer(x)
    np.testing.assert_array_equal(layer.backward(dy), expected)
    layer(x)
    layer(x)
    with pytest.raises(StateError, match="got 2"):
        layer.backward(dy)
    layer(x)
    np.testing.assert_array_equal(layer.backward(dy), expected)
