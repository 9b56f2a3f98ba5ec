"""CPU tensors reach the kernels as they lie in memory, whatever lies there."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from syncbn_core.errors import DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, RunningStatistics
from syncbn_torch import SyncBatchNorm
from syncbn_torch.backends import cpu
from syncbn_torch.forward import always_ours

OURS, RULE = cpu.OPERATIONS, NormRule()


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
        affine = Affine(weight, weight)
        statistics = OURS.statistics(OURS.moments(x), RULE)
        y = OURS.forward(x, statistics, affine, RULE).y
        alone = OURS.backward_reduce(x, dy, statistics, affine, RULE)
        sums = OURS.serial.backward_reduce(x, dy, statistics, affine, RULE)
        exchanged = np.array(sums.exchange)
        dx = OURS.serial.backward_input(x, dy, statistics, affine, RULE, exchanged)
        again = OURS.serial.forward(x, statistics, affine, RULE).y
        np.testing.assert_array_equal(alone.exchange, sums.exchange)
        torch.testing.assert_close(again, y)
        np.testing.assert_allclose(OURS.serial.moments(x).mean, statistics.mean)
        results.append([y, dx, torch.from_numpy(exchanged), alone.grad_weight, alone.grad_bias])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.ones(3),
    "float64": lambda: torch.ones(3).double(),
    "float16": lambda: torch.ones(3).half(),
    "gaps": lambda: torch.ones(6)[::2],
    "bfloat16": lambda: torch.ones(3).bfloat16(),
    "bfloat16 with gaps": lambda: torch.ones(6).bfloat16()[::2],
    "misaligned": lambda: misaligned(torch.ones(3)),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("count", [2, 1])
def test_running_statistics_of_any_kind_are_updated(kind: str, count: int) -> None:
    mean, var = BUFFERS[kind](), BUFFERS[kind]()
    counter = torch.tensor(0)
    running = RunningStatistics(mean, var, counter, 0.5)
    version = mean._version
    statistics = OURS.statistics(OURS.moments(torch.arange(3.0 * count).reshape(-1, 3)), RULE)
    if count == 1:
        with pytest.raises(ValueError, match="more than 1 value"):
            OURS.update_running(running, statistics)
        assert mean.tolist() == [1.0] * 3
        return
    OURS.update_running(running, statistics)
    assert mean.tolist() == [1.25, 1.75, 2.25]
    assert var.tolist() == [2.75] * 3
    assert counter == 1
    assert mean._version > version


def state_of(layer: SyncBatchNorm) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("which", ["running_mean", "running_var", "num_batches_tracked"])
def test_buffers_made_in_inference_mode_are_updated_there_and_nowhere_else(
    which: str, grad: bool
) -> None:
    layer = SyncBatchNorm(3)
    with torch.inference_mode():
        setattr(layer, which, getattr(layer, which).clone())
    x = torch.randn(8, 3, 5)
    before = state_of(layer)
    with always_ours(), torch.set_grad_enabled(grad):
        with pytest.raises(StateError, match="inference_mode"):
            layer(x)
        assert state_of(layer) == before
        with torch.inference_mode():
            layer(x)
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2)))


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


def cut(tensor: Tensor) -> Tensor:
    """The same tensor over a storage that is too short for it."""
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - tensor.element_size())
    return tensor


LARGE = (8, 16, 64, 64)  # so large that reading beyond it would hit foreign pages


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "which", ["x", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
)
def test_storage_shorter_than_its_tensor_is_refused_and_changes_nothing(
    which: str, ours: bool
) -> None:
    layer = SyncBatchNorm(16)
    x = torch.randn(LARGE)
    owner = x if which == "x" else getattr(layer, which)
    good = owner.detach().clone()
    cut(owner.data)
    with always_ours(ours), pytest.raises(StateError, match=r"expected a storage of|was freed"):
        layer(x)
    if which != "x":
        owner.data.untyped_storage().resize_(good.nbytes)
        owner.data.copy_(good)
    assert layer.num_batches_tracked == 0
    assert layer.running_mean.tolist() == [0.0] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["dense", "channels last", "gaps", "offset"])
def test_gradient_whose_storage_is_cut_is_refused(layout: str, dtype: torch.dtype) -> None:
    x, dy = torch.randn(LARGE), torch.randn(LARGE, dtype=dtype)
    if layout == "channels last":
        dy = dy.to(memory_format=torch.channels_last)
    elif layout == "gaps":
        dy = torch.randn(*LARGE[:3], 2 * LARGE[3], dtype=dtype)[..., 1::2]
    elif layout == "offset":
        dy = torch.randn(LARGE[0] + 1, *LARGE[1:], dtype=dtype)[1:]
    operands = (x, dy, OURS.statistics(OURS.moments(x), RULE), Affine(), RULE)
    OURS.backward_reduce(*operands)
    held = dy.untyped_storage()
    held.resize_(dy.nbytes if layout == "offset" else held.nbytes() - dy.element_size())
    with pytest.raises(StateError, match=r"expected a storage of .*undo the untyped_storage"):
        OURS.backward_reduce(*operands)


def test_layers_without_memory_train_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta = SyncBatchNorm(3, device="meta")
        assert meta(torch.ones(4, 3, 5, device="meta")).shape == (4, 3, 5)
        with FakeTensorMode():
            assert SyncBatchNorm(3)(torch.ones(4, 3, 5)).shape == (4, 3, 5)


@pytest.mark.parametrize("ours", [True, False])
def test_running_statistics_may_be_views_of_one_tensor(ours: bool) -> None:
    x, expected = torch.randn(8, 3, 5), SyncBatchNorm(3)
    with always_ours(ours):
        expected(x)
        for both in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 5)[:, 1:4]):
            layer = SyncBatchNorm(3)
            layer.running_mean, layer.running_var = both.copy_(torch.tensor([[0.0], [1.0]]))
            layer(x)
            torch.testing.assert_close(layer.state_dict(), expected.state_dict())


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e5m2])
def test_input_of_no_supported_dtype_is_refused(dtype: torch.dtype) -> None:
    words = f"expected an input of float16, bfloat16, float32 or float64, got {dtype}; "
    for layer in (SyncBatchNorm(3), SyncBatchNorm(3, affine=False)):
        with always_ours(), pytest.raises(DTypeError, match=words):
            layer(torch.ones(8, 3, 5).to(dtype))


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


def test_gradient_of_another_dtype_is_taken() -> None:
    x, dy = torch.randn(LARGE), torch.randn(LARGE, dtype=torch.float64)
    known = OURS.statistics(OURS.moments(x), RULE)
    sums = [OURS.backward_reduce(x, g, known, Affine(), RULE) for g in (dy, dy.float())]
    np.testing.assert_array_equal(sums[0].exchange, sums[1].exchange)
    total = sums[0].exchange
    dxs = [OURS.backward_input(x, g, known, Affine(), RULE, total) for g in (dy, dy.float())]
    assert torch.equal(*dxs)
