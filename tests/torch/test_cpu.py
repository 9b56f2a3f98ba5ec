"""CPU tensors reach the kernels as they lie in memory, whatever lies there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from syncbn_core.errors import StateError
from syncbn_torch import SyncBatchNorm, cpu
from syncbn_torch.batchnorm import always_ours
from syncbn_torch.statistics import RunningStatistics


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


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": gaps,
    "negated": negated,
    "negated with gaps": lambda x: gaps(negated(x)),
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "no memory": zeros_without_memory,
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
        y, total, invstd = cpu.forward_alone(x, weight, weight, None, 1e-5, "plus")
        statistics = cpu.CpuStatistics(total, invstd, 1e-5, "plus")
        alone = statistics.backward_alone(x, dy, weight)
        assert alone is not None
        sums = statistics.backward_reduce(x, dy, weight, parallel=False)
        exchanged = np.array(sums.exchange)
        dx = statistics.backward_input(x, dy, weight, exchanged, parallel=False)
        again = statistics.normalize(x, weight, weight, None, parallel=False)
        parts = cpu.moments(x, parallel=False)
        torch.testing.assert_close(alone[1], dx)
        torch.testing.assert_close(again, y)
        np.testing.assert_allclose(parts.mean, total.mean)
        results.append([y, dx, torch.from_numpy(exchanged), alone[0].by_weight, alone[0].by_bias])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_copied_wide(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -2.25, 3.0]).to(dtype)
    for tensor in (
        values,
        negated(values.float()).to(dtype),
        gaps(values),
        torch.nn.Parameter(values),
    ):
        copied = cpu.wide(tensor)
        np.testing.assert_array_equal(copied, [1.5, -2.25, 3.0])
        assert copied.dtype == np.float64
        copied[0] = 7
        assert tensor[0] == 1.5
    assert cpu.wide(None).size == 0


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.ones(3),
    "float64": lambda: torch.ones(3).double(),
    "float16": lambda: torch.ones(3).half(),
    "gaps": lambda: torch.ones(6)[::2],
    "negated": lambda: negated(torch.ones(3)),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("count", [2, 1])
def test_running_statistics_of_any_kind_are_updated(kind: str, count: int) -> None:
    mean, var = BUFFERS[kind](), BUFFERS[kind]()
    counter = torch.tensor(0)
    total = cpu.moments(torch.arange(6.0).reshape(2, 3), parallel=False)
    version = mean._version
    if count == 1:
        total = cpu.moments(torch.arange(3.0).reshape(1, 3), parallel=False)
        with pytest.raises(ValueError, match="more than 1 value"):
            cpu.update(RunningStatistics(mean, var, counter, 0.5), total)
        assert mean.tolist() == [1.0] * 3
        return
    cpu.update(RunningStatistics(mean, var, counter, 0.5), total)
    assert mean.tolist() == [1.25, 1.75, 2.25]
    assert var.tolist() == [2.75] * 3
    assert counter == 1
    assert mean._version > version


def test_a_layer_built_in_inference_mode_trains_there_and_nowhere_else() -> None:
    with torch.inference_mode():
        layer = SyncBatchNorm(3)
    x = torch.randn(8, 3, 5)
    before = layer.running_mean.clone(), layer.running_var.clone()  # type: ignore[union-attr]
    with always_ours():
        with pytest.raises(StateError, match="inference_mode"):
            layer(x)
        assert torch.equal(layer.running_mean, before[0])  # type: ignore[arg-type]
        assert torch.equal(layer.running_var, before[1])  # type: ignore[arg-type]
        assert layer.num_batches_tracked == 0
        with torch.inference_mode():
            layer(x)
        assert layer.num_batches_tracked == 1
        torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2)))
