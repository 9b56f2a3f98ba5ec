"""CPU tensors reach the kernels as they lie in memory, whatever lies there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncbn_core.errors import DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm
from syncbn_torch import SyncBatchNorm
from syncbn_torch.backends import cpu
from syncbn_torch.forward import always_ours

RULE = NormRule()


def negated(x: Tensor) -> Tensor:
    """The same numbers, by torch's lazy negation."""
    made = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert made.is_neg()
    return made


def gaps(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def zeros_without_memory(x: Tensor) -> Tensor:
    made = torch._efficientzerotensor(x.shape, dtype=x.dtype)  # type: ignore[no-untyped-call]
    assert made.data_ptr() == 0
    return made


def later_zeros(x: Tensor) -> Tensor:
    """Zeros that have no memory, beyond the first of them: their address is not 0."""
    return zeros_without_memory(torch.cat([x, x]))[x.shape[0] :]


def misaligned(x: Tensor) -> Tensor:
    buffer = bytearray(x.numel() * x.element_size() + 1)
    made = torch.frombuffer(buffer, dtype=x.dtype, offset=1).reshape(x.shape)
    assert made.data_ptr() % x.element_size()
    return made.copy_(x)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": gaps,
    "negated": negated,
    "negated with gaps": lambda x: gaps(negated(x)),
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "no memory": zeros_without_memory,
    "no memory, with an offset": later_zeros,
    "misaligned": misaligned,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["x", "dy", "weight"])
def test_any_memory_gives_what_dense_memory_gives(which: str, kind: str) -> None:
    weight = torch.randn(5).double()
    x, dy = torch.randn(2, 6, 5, 4).double()
    given = {"x": x, "dy": dy, "weight": weight}
    given[which] = KINDS[kind](given[which])
    dense = {name: tensor.resolve_neg().clone().contiguous() for name, tensor in given.items()}
    results = []
    for operands in (given, dense):
        x, dy, weight = operands["x"], operands["dy"], operands["weight"]
        ours = cpu.TensorSteps(x, Affine(weight, weight), None, masked=False)
        own, affine, _ = ours.take(x, Affine(weight, weight), None)
        pair = ours.take_pair(x, dy, affine)
        statistics = ours.statistics(ours.moments(own), RULE)
        norm = Norm(statistics, affine, RULE)
        y = ours.forward(own, norm)
        alone = ours.backward_reduce(*pair, norm)
        sums = ours.serial.backward_reduce(*pair, norm)
        exchanged = np.array(sums.exchange)
        dx = ours.serial.backward_input(*pair, norm, exchanged)
        again = ours.serial.forward(own, norm)
        np.testing.assert_array_equal(alone.exchange, sums.exchange)
        torch.testing.assert_close(again, y)
        np.testing.assert_allclose(ours.serial.moments(own).mean, statistics.mean)
        results.append([y, dx, torch.from_numpy(exchanged), alone.grad_weight, alone.grad_bias])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def state_of(layer: SyncBatchNorm) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in layer.named_buffers()}


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("offset", [0, 1])
def test_freed_memory_is_not_read(offset: int) -> None:
    layer = SyncBatchNorm(3)
    before = state_of(layer)
    with always_ours(), pytest.raises(StateError, match="storage was freed"):
        layer(freed(torch.randn(8, 3, 5)[offset:]))
    layer.weight.data = freed(torch.ones(3 + offset)[offset:])
    with always_ours(), pytest.raises(StateError, match="storage was freed"):
        layer(torch.randn(8, 3, 5))
    assert state_of(layer) == before


@pytest.mark.parametrize("name", ["bias", "running_var"])
def test_what_lies_elsewhere_is_refused(name: str) -> None:
    layer = SyncBatchNorm(3)
    other = torch.ones(3, device="meta")
    setattr(layer, name, torch.nn.Parameter(other) if name == "bias" else other)
    with always_ours(), pytest.raises(DeviceError, match=f"expected {name} on cpu.*got meta"):
        layer(torch.randn(8, 3, 5))
    assert layer.num_batches_tracked == 0


def test_parameters_that_are_no_plain_tensors_are_refused() -> None:
    class Wrapped(Tensor):
        pass

    layer = SyncBatchNorm(3)
    layer.bias = torch.nn.Parameter(torch.ones(3).as_subclass(Wrapped))
    with always_ours(), pytest.raises(DTypeError, match="expected bias to be a plain tensor"):
        layer(torch.randn(8, 3, 5))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_parameters_of_no_supported_dtype_are_refused_by_name(
    name: str, dtype: torch.dtype
) -> None:
    layer = SyncBatchNorm(3)
    setattr(layer, name, None)
    if name in ("weight", "bias"):
        setattr(layer, name, torch.nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    else:
        setattr(layer, name, torch.ones(3, dtype=dtype))
    words = f"expected {name} of float16, bfloat16, float32 or float64, got {dtype}; "
    with always_ours(), pytest.raises(DTypeError, match=words):
        layer(torch.randn(8, 3, 5))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
def test_parameters_and_buffers_of_other_sizes_are_refused(
    name: str, shape: tuple[int, ...]
) -> None:
    """A kernel would read and write past their end."""
    layer = SyncBatchNorm(3)
    other = torch.zeros(shape)
    setattr(layer, name, nn.Parameter(other) if name in ("weight", "bias") else other)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with always_ours(), pytest.raises(ShapeError, match=f"expected {name} of shape"):
        layer(torch.randn(4, 3, 50))
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
