"""Float16 and bfloat16 arrays: every bit pattern, rounding, NaN, and processors without float16."""

from collections.abc import Callable
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
def test_every_value_comes_through(dtype: Any, shape: tuple[int, ...]) -> None:
    x = all_values(dtype, shape)
    zeros, ones = constants(shape[1], 0.0), constants(shape[1], 1.0)
    y = backend.normalize(x, zeros, ones, None, None)
    assert y.dtype == x.dtype
    nan = np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), nan)
    # minus zero may become zero: 0 is added to it
    same = (y.view(np.uint16) == x.view(np.uint16)) | (x.astype(np.float32) == 0)
    assert same[~nan].all()


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


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2])
def test_eight_bits_are_computed_in_float32(dtype: Any) -> None:
    x = np.random.default_rng(5).normal(size=(4, 3, 50)).astype(dtype)
    y, _ = batch_norm_forward(x)
    expected, _ = batch_norm_forward(x.astype(np.float32))
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(dtype).astype(np.float32))


def test_bits_of_bfloat16_are_taken_as_uint16() -> None:
    """For frameworks whose bfloat16 NumPy does not know; the steps check nothing."""
    x = np.random.default_rng(3).normal(size=(6, 4, 50)).astype(ml_dtypes.bfloat16)
    moments = backend.moments(x.view(np.uint16))
    np.testing.assert_array_equal(moments.mean, backend.moments(x).mean)


GENERIC = """
import numpy as np
from syncbn_core import batch_norm_backward, batch_norm_forward
from syncbn_core.kernels.cpu.numerics import has_half

x, dy = np.random.default_rng(0).normal(size=(2, 4, 3, 50)).astype(np.float16)
y, saved = batch_norm_forward(x)
dx = batch_norm_backward(dy, saved).x
print(has_half(), y.dtype, y.tobytes().hex(), dx.tobytes().hex())
"""


@pytest.mark.slow
def test_processor_without_float16_copies(fresh_python: Callable[..., str]) -> None:
    here = fresh_python(GENERIC).split()
    generic = fresh_python(GENERIC, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="").split()
    assert generic[:2] == ["False", "float16"]
    for a, b in zip(here[2:], generic[2:], strict=True):
        a_values, b_values = (np.frombuffer(bytes.fromhex(t), np.float16) for t in (a, b))
        np.testing.assert_allclose(
            a_values.astype("f4"), b_values.astype("f4"), rtol=2e-3, atol=1e-5
        )


def test_numbers_per_channel_as_bits_of_bfloat16() -> None:
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore", over="ignore"):
        values = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32).astype(np.float64)
        bits = numpy_steps._rounded(values, np.dtype(np.uint16))
        expected = values.astype(ml_dtypes.bfloat16)
    rounded = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(rounded, expected.astype(np.float64))
    np.testing.assert_array_equal(numpy_steps._wide(bits), expected.astype(np.float64))
