"""Float16 and bfloat16 arrays: every bit pattern, rounding, NaN, and processors without float16."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from steps import Steps

from syncbn_core import batch_norm_backward, batch_norm_eval, batch_norm_forward, numpy_steps
from syncbn_core.comm import SingleCommunicator

backend = Steps(numpy_steps.OPERATIONS)
Array = np.ndarray[Any, Any]
HALVES = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f2", "bf2"])
# 65536 values as planes, short planes (rows), and rows
SHAPES = pytest.mark.parametrize("shape", [(16, 2, 2048), (256, 8, 32), (4096, 16)], ids=str)


def all_values(dtype: Any, shape: tuple[int, ...]) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(shape)


def constants(channels: int, value: float) -> Array:
    return np.full(channels, value)


@HALVES
@SHAPES
@pytest.mark.parametrize("scale", [1 / 3, 1.0009765625, 257 / 256, 3e4, 1e-3])
def test_results_are_rounded_once_to_the_nearest(
    dtype: Any, shape: tuple[int, ...], scale: float
) -> None:
    x = all_values(dtype, shape)
    scale = float(np.float32(scale))
    zeros, scales = constants(shape[1], 0.0), constants(shape[1], scale)
    with np.errstate(all="ignore"):
        exact = (x.astype(np.float64) * scale).astype(np.float32)
        expected = exact.astype(dtype)
        y = backend.normalize(x, zeros, scales, None, None)
        np.testing.assert_array_equal(y.astype(np.float64), expected.astype(np.float64))
        # dx = invstd * weight * dy, where the other terms are zero
        good = np.isfinite(x.astype(np.float32))
        finite = np.where(good, x, x.dtype.type(0))
        ones = constants(shape[1], 1.0)
        dx = backend.backward_input(finite, finite, zeros, ones, scales, zeros, zeros)
    wanted = np.where(good, expected, x.dtype.type(0))
    np.testing.assert_array_equal(dx.astype(np.float64), wanted.astype(np.float64))


@HALVES
@pytest.mark.parametrize("shape", [(6, 4, 500), (40, 4, 9), (300, 4)], ids=str)
def test_forward_and_backward_are_those_of_the_same_numbers_in_float64(
    dtype: Any, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(3, 2, shape).astype(dtype) for _ in range(2))
    weight, bias = rng.normal(size=(2, shape[1])).astype(np.float32)
    running = [np.zeros(shape[1], np.float32), np.ones(shape[1], np.float32)]
    y, saved = batch_norm_forward(
        x, weight, bias, running_mean=running[0], running_var=running[1], parallel=False
    )
    gradients = batch_norm_backward(dy, saved, parallel=False)
    wide = [a.astype(np.float64) for a in (x, dy)]
    again = [np.zeros(shape[1]), np.ones(shape[1])]
    expected, kept = batch_norm_forward(
        wide[0], weight, bias, running_mean=again[0], running_var=again[1]
    )
    wanted = batch_norm_backward(wide[1], kept)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for actual, right in ((y, expected), (gradients.x, wanted.x)):
        assert actual.dtype == dtype
        error = np.abs(actual.astype(np.float64) - right)
        assert (error <= 0.51 * unit * np.abs(right) + 1e-5).all()
    np.testing.assert_allclose(gradients.weight, wanted.weight, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(gradients.bias, wanted.bias, rtol=1e-4, atol=1e-3)
    for actual, right in zip(running, again, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-6)
    constant, _ = batch_norm_eval(x, *running, weight, bias)
    assert constant.dtype == dtype


@HALVES
def test_out_and_layouts(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 5, 6, 7)).astype(dtype)
    expected, _ = batch_norm_forward(x)
    for order in ("gaps", "channels last", "foreign"):
        if order == "gaps":
            other = np.repeat(x, 2, axis=3)[..., ::2]
        elif order == "channels last":
            other = x.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
        elif dtype is np.float16:
            other = x.astype(x.dtype.newbyteorder())
        else:
            continue
        y, _ = batch_norm_forward(other)
        np.testing.assert_array_equal(y, expected)
        out = np.empty_like(other)
        assert batch_norm_forward(other, out=out)[0] is out
        np.testing.assert_array_equal(out, expected)
    own = x.copy()
    assert batch_norm_forward(own, out=own)[0] is own
    np.testing.assert_array_equal(own, expected)


@HALVES
@pytest.mark.parametrize("of_dy", ["f4", "f8", "f2", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e5, 1e-9])
def test_gradient_of_another_dtype_is_not_rounded_to_that_of_x(
    dtype: Any, of_dy: Any, scale: float
) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 4, 30)).astype(dtype)
    with np.errstate(over="ignore"):
        dy = (scale * rng.normal(size=x.shape)).astype(of_dy)
    if not np.isfinite(dy.astype(np.float64)).all():
        pytest.skip("beyond float16")
    saved = batch_norm_forward(x, parallel=False)[1]
    wanted = batch_norm_backward(
        dy.astype(np.float64), batch_norm_forward(x.astype(np.float64))[1], parallel=False
    )
    for communicator in (None, SingleCommunicator()):
        settings: dict[str, Any] = {"communicator": communicator, "parallel": False}
        with np.errstate(over="ignore"):
            gradients = batch_norm_backward(dy, saved, **settings)
        assert gradients.x.dtype == x.dtype
        for name in ("weight", "bias"):
            right = getattr(wanted, name)
            limit = 65504 if dtype is np.float16 else 3e38
            got = getattr(gradients, name).astype(np.float64)
            near = np.abs(got - right) <= 1e-2 * np.abs(wanted.weight).max() + 1e-7
            assert (near | (np.abs(right) > 0.99 * limit)).all()
