"""Numbers near the ends of what their dtype holds: right as far as the results fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import Steps

from syncbn_core import batch_norm_backward, batch_norm_forward, numpy_steps
from syncbn_core.comm import SingleCommunicator

backend = Steps(numpy_steps.OPERATIONS)
Array = np.ndarray[Any, Any]
EPS = 1e-12
SHAPES = {
    "planes": (6, 3, 11, 9),
    "long planes": (2, 3, 5000),
    "short planes": (40, 3, 2, 3),
    "rows": (300, 5),
}
HELD = np.finfo(np.float32)
LIMIT = 16 * HELD.eps  # of the size of a result; the bound of ordinary numbers


def undivided(x: Array, dy: Array, weight: Array, bias: Array, eps: float) -> dict[str, Array]:
    """The formulas in float64, which holds the squares of every float32."""
    axes = (0, *range(2, x.ndim))
    column = (1, -1, *[1] * (x.ndim - 2))
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    mean = x.mean(axes)
    centred = x - mean.reshape(column)
    centred -= centred.mean(axes).reshape(column)
    var = (centred**2).mean(axes)
    invstd = 1 / np.sqrt(var + eps)
    xhat = centred * invstd.reshape(column)
    sums = dy.sum(axes), (dy * xhat).sum(axes)
    n = x.size // x.shape[1]
    inner = dy - sums[0].reshape(column) / n - xhat * sums[1].reshape(column) / n
    return {
        "y": xhat * weight.reshape(column) + bias.reshape(column),
        "dx": inner * (weight * invstd).reshape(column),
        "dweight": sums[1],
        "dbias": sums[0],
        "running_mean": mean,
        "running_var": var * n / (n - 1),
    }


def case(
    shape: tuple[int, ...], deviation: float, grad: float, mean: float
) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(3)
    x = ((mean + rng.normal(size=shape)) * deviation).astype(np.float32)
    dy = grad * (rng.normal(size=shape) + x.astype(np.float64) / deviation)
    weight, bias = rng.uniform(0.5, 2, (2, shape[1]))
    return x, dy.astype(np.float32), weight, bias


def compare(x: Array, dy: Array, weight: Array, bias: Array, eps: float, alone: bool) -> None:
    """Raise unless every result is right to `LIMIT`, of the largest of its channel's."""
    running = {name: np.zeros(x.shape[1]) for name in ("running_mean", "running_var")}
    parameters = (weight.astype(np.float32), bias.astype(np.float32))
    group: Any = {"communicator": None if alone else SingleCommunicator()}
    y, saved = batch_norm_forward(x, *parameters, momentum=1.0, eps=eps, **running, **group)
    gradients = batch_norm_backward(dy, saved, **group)
    results = {"y": y, "dx": gradients.x, "dweight": gradients.weight, "dbias": gradients.bias}
    results |= running
    wide = [p.astype(np.float64) for p in parameters]
    axes = (0, *range(2, x.ndim))
    expected = undivided(x, dy, *wide, eps)
    largest = np.abs(dy).max(axes).astype(np.float64)
    terms = {  # what was summed up may be larger than the sum
        "dbias": largest,
        "dweight": largest * np.minimum(1.0, (expected["running_var"] / eps) ** 0.5),
        "running_mean": np.abs(x).max(axes).astype(np.float64),
    }
    for name, value in expected.items():
        actual = results[name].astype(np.float64)
        size = np.abs(value).max(axes, keepdims=True) if value.ndim > 1 else np.abs(value)
        bound = LIMIT * np.maximum(size, terms.get(name, 0.0)) + 16 * HELD.smallest_subnormal
        worst = float((np.abs(actual - value) / bound).max())
        assert worst <= 1, f"{name} is off by {worst:.1f} times the bound"


DEVIATIONS = [1e-40, 1e-30, 1e-22, 1e-19, 1e-12, 1.0, 1e12, 1e17, 1e18, 5e18, 1e25, 1e37]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_float32_is_right_at_any_deviation(kind: str, deviation: float, alone: bool) -> None:
    compare(*case(SHAPES[kind], deviation, 1.0, 0.0), EPS, alone)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
def test_channels_of_one_layer_may_differ_without_limit(kind: str, alone: bool) -> None:
    scales = np.array([1e-30, 1.0, 1e18, 1e-9, 1e9])
    x, dy, weight, bias = case(SHAPES[kind], 1.0, 1.0, 0.5)
    channels = x.shape[1]
    column = (1, -1, *[1] * (x.ndim - 2))
    x = (x * scales[:channels].reshape(column)).astype(np.float32)
    compare(x, dy, weight, bias, EPS, alone)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(SHAPES)),
    deviation=st.floats(-38, 37),
    grad=st.floats(-15, 15),
    mean=st.sampled_from([0.0, 1.0, -30.0]),
    eps=st.sampled_from([1e-40, 1e-12, 1e-5]),
    alone=st.booleans(),
)
@example(kind="rows", deviation=-30.0, grad=0.0, mean=0.0, eps=1e-40, alone=True)
def test_float32_is_right_wherever_results_fit(
    kind: str, deviation: float, grad: float, mean: float, eps: float, alone: bool
) -> None:
    scale = 10.0 ** min(deviation, 36.0 if mean else 37.0)
    size = 10.0**grad / (scale**2 + eps) ** 0.5  # of dx
    if 1e-30 < size < 1e30:
        compare(*case(SHAPES[kind], scale, 10.0**grad, mean), eps, alone)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("deviation", [1e-150, 1e-60, 1e60, 1e150])
def test_float64_is_right_from_1e_150_to_1e150(kind: str, deviation: float, alone: bool) -> None:
    rng = np.random.default_rng(3)
    base, dy = rng.normal(size=(2, *SHAPES[kind]))
    group: Any = {"communicator": None if alone else SingleCommunicator()}
    eps = 5e-324  # the smallest of all
    y, saved = batch_norm_forward(base, eps=eps, **group)
    expected = batch_norm_backward(dy, saved, **group)
    scaled, saved = batch_norm_forward(base * deviation, eps=eps, **group)
    got = batch_norm_backward(dy, saved, **group)
    np.testing.assert_allclose(scaled, y, atol=1e-11)
    np.testing.assert_allclose(got.x * deviation, expected.x, atol=1e-11)
    np.testing.assert_allclose(got.weight, expected.weight, atol=1e-9)


@pytest.mark.parametrize("kind", SHAPES)
def test_infinity_in_float32_still_reaches_its_channel_only(
    kind: str, make_case: Callable[..., Any]
) -> None:
    for odd in (np.inf, -np.inf, np.nan):
        x = case(SHAPES[kind], 1.0, 1.0, 0.0)[0]
        x[1, 1] = odd
        moments = backend.moments(x)
        others = [c for c in range(x.shape[1]) if c != 1]
        assert np.isnan(moments.m2[1])
        assert np.isfinite(moments.m2[others]).all()
