"""`syncbn_core.functional` and `BatchNorm` on torch tensors, which the core takes by DLPack."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_eval, batch_norm_forward
from syncbn_core.errors import BackendError

NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
}
DTYPES = pytest.mark.parametrize("dtype", NUMPY, ids=str)
CALL: Any = {"parallel": False}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def as_numpy(tensor: Tensor) -> Any:
    return tensor.numpy().copy(order="K")


def same(tensor: Any, array: Any) -> bool:
    """A tensor with the bits of an array."""
    assert type(tensor) is Tensor
    found = as_numpy(tensor)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    return bool(found.tobytes() == np.ascontiguousarray(array).tobytes())


@DTYPES
@pytest.mark.parametrize("channels_last", [False, True])
def test_tensors_give_the_bits_of_numpy(dtype: torch.dtype, channels_last: bool) -> None:
    x, dy = (numbers(4, 3, 5, 2, seed=seed, dtype=dtype) for seed in (0, 1))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    tensors = {
        "weight": numbers(3, seed=2, dtype=dtype),
        "bias": numbers(3, seed=3, dtype=dtype),
        "running_mean": torch.zeros(3, dtype=dtype),
        "running_var": torch.ones(3, dtype=dtype),
        "num_batches_tracked": torch.tensor(7),
    }
    arrays = {name: as_numpy(tensor) for name, tensor in tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    own_x = as_numpy(x)
    own_y, own_saved = batch_norm_forward(own_x, **arrays, **CALL)
    y, saved = batch_norm_forward(x, **tensors, **CALL)
    assert same(y, own_y)
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    for name, tensor in tensors.items():  # of which three were updated where they are
        assert same(tensor, arrays[name]), name
        assert tensor.data_ptr() == addresses[name]
    assert tensors["num_batches_tracked"] == 8
    assert same(saved.mean, own_saved.mean)
    assert saved.invstd.dtype is torch.float64
    expected = batch_norm_backward(as_numpy(dy), own_saved, **CALL)
    for tensor, array in zip(batch_norm_backward(dy, saved, **CALL), expected, strict=True):
        assert same(tensor, array)
    statistics = [tensors["running_mean"], tensors["running_var"]]
    own = [arrays["running_mean"], arrays["running_var"]]
    assert same(batch_norm_eval(x, *statistics, **CALL)[0], batch_norm_eval(own_x, *own, **CALL)[0])


@DTYPES
def test_layer_of_the_core_takes_tensors(dtype: torch.dtype) -> None:
    x, dy = (numbers(4, 3, 5, seed=seed, dtype=dtype) for seed in (0, 1))
    layer, own = BatchNorm(3), BatchNorm(3)
    assert same(layer(x), own(as_numpy(x)))
    assert same(layer.backward(dy), own.backward(as_numpy(dy)))
    np.testing.assert_array_equal(layer.weight_grad, own.weight_grad)
    np.testing.assert_array_equal(layer.running_var, own.running_var)
    assert type(layer.eval()(x)) is Tensor


def test_tensors_that_require_grad_are_refused_with_two_ways_out() -> None:
    x = numbers(4, 3, 5).requires_grad_()
    mean, var = torch.zeros(3), torch.ones(3)
    with pytest.raises(
        BackendError, match=r"x .*torch\.Tensor.*; detach\(\) it, or take syncbn_torch"
    ):
        batch_norm_forward(x, running_mean=mean, running_var=var)
    assert mean.eq(0).all()
    y, _ = batch_norm_forward(x.detach(), torch.nn.Parameter(torch.ones(3)).detach(), **CALL)
    assert not y.requires_grad


def test_bfloat16_is_refused_with_a_way_out() -> None:
    with pytest.raises(BackendError, match=r"x .*torch\.Tensor.*read no bfloat16: give float32"):
        batch_norm_forward(numbers(4, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["x", "running_mean"])
def test_tensors_that_are_negated_when_they_are_read_are_refused(name: str) -> None:
    """Torch would export their memory without the sign."""
    arrays = {"x": torch.ones(2, 3), "running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    arrays[name] = torch._neg_view(arrays[name])
    with pytest.raises(BackendError, match=rf"expected {name} .*resolve_neg\(\)"):
        batch_norm_forward(**arrays)
