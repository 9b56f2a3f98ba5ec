"""`syncbn_core.functional` on JAX arrays: immutable, on the CPU, without torch."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_forward
from syncbn_core.errors import ReadOnlyError

CALL: Any = {"parallel": False}
Array = np.ndarray


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(1, 2, size=shape).astype(dtype)


def same(actual: Any, expected: Array) -> bool:
    assert isinstance(actual, jax.Array)
    assert actual.dtype == expected.dtype
    return np.asarray(actual).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_jax_arrays_give_the_bits_of_numpy(dtype: Any) -> None:
    x, dy = numbers(4, 3, 5, dtype=dtype), numbers(4, 3, 5, seed=1, dtype=dtype)
    weight, bias = numbers(3, seed=2, dtype=dtype), numbers(3, seed=3, dtype=dtype)
    mean, var = np.zeros(3, np.float32), np.ones(3, np.float32)
    own_y, own_saved = batch_norm_forward(x, weight, bias, **CALL)
    y, saved = batch_norm_forward(
        *map(jnp.asarray, (x, weight, bias)), running_mean=mean, running_var=var, **CALL
    )
    assert same(y, own_y)
    assert mean.any()  # NumPy's, which go together with JAX's x
    gradients = batch_norm_backward(jnp.asarray(dy), saved, **CALL)
    own = batch_norm_backward(dy, own_saved, **CALL)
    for gradient, expected in zip(gradients, own, strict=True):
        assert same(gradient, expected)
    # JAX without x64 has no float64
    np.testing.assert_allclose(saved.mean, own_saved.mean, rtol=1e-6)
    assert isinstance(saved.mean, jax.Array)


def test_running_statistics_of_jax_are_refused() -> None:
    x, mean, var = jnp.asarray(numbers(4, 3)), jnp.zeros(3), jnp.ones(3)
    with pytest.raises(ReadOnlyError, match=r"writable running_mean.*ArrayImpl.*a NumPy array"):
        batch_norm_forward(x, running_mean=mean, running_var=var, **CALL)
    assert not mean.any()


def test_layer_of_the_core_takes_jax_arrays() -> None:
    x, dy = numbers(4, 3, 5), numbers(4, 3, 5, seed=1)
    layer, own = BatchNorm(3), BatchNorm(3)
    assert same(layer(jnp.asarray(x)), own(x))
    assert same(layer.backward(jnp.asarray(dy)), own.backward(dy))
    np.testing.assert_array_equal(layer.running_mean, own.running_mean)
