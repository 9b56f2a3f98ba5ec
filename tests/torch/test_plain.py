"""Plain operations, the fallback for CUDA tensors: their passes over memory, and their accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm, RunningStatistics
from syncbn_torch.backends import plain
from syncbn_torch.backends.plain import OPERATIONS

RULE = NormRule(1e-5)


class _AsOnCuda(plain.DifferentiableArrays):
    working = plain.TensorArrays.working  # float32; on a CPU float64


DIFFERENTIABLE = plain.PlainOperations(_AsOnCuda(torch))


class Traffic(TorchDispatchMode):
    """Counts what operations read and write, in arrays of n numbers of `size` bytes."""

    VIEWS = (
        "empty_like",
        "view",
        "_unsafe_view",
        "detach",
        "slice",
        "alias",
        "expand",
        "select",
        "unsqueeze",
    )

    def __init__(self, n: int, size: int) -> None:
        super().__init__()
        self.n, self.size = n, size
        self.read = self.written = 0.0
        self.dtypes: set[torch.dtype] = set()  # of written arrays of that size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.VIEWS:
            return result
        given = [value for value in args if isinstance(value, Tensor)]
        unique = {value.data_ptr(): value for value in given}.values()
        self.read += sum(map(self._share, unique))
        if isinstance(result, Tensor):
            self.written += self._share(result)
            if result.numel() >= self.n:
                self.dtypes.add(result.dtype)
        return result

    def _share(self, tensor: Tensor) -> float:
        # numbers per channel don't count
        return tensor.nbytes / (self.n * self.size) if tensor.numel() * 32 > self.n else 0.0


@contextmanager
def counted(x: Tensor) -> Iterator[Traffic]:
    traffic = Traffic(x.numel(), x.element_size())
    with traffic, torch.no_grad():
        yield traffic


# passes over memory, in bytes of x; docs/internals/numerics.md has this table
PASSES = {
    torch.float32: {
        "moments": 3 + 1 / 16,  # the first samples are read twice
        "forward": 4,
        "backward_reduce": 7,
        "backward_input": 7,
        "backward_input, eval": 2,
    },
    torch.float16: {
        "moments": 5 + 1 / 16,
        "forward": 8 - 2,
        "backward_reduce": 11,
        "backward_input": 11,
        "backward_input, eval": 6,
    },
}


def step(x: Tensor, dy: Tensor) -> dict[str, Traffic]:
    """The traffic of each step."""
    affine = Affine(torch.ones(x.shape[1]), torch.zeros(x.shape[1]))
    found = {}
    with counted(x) as found["moments"]:
        moments = OPERATIONS.moments(x)
    norm = Norm(OPERATIONS.statistics(moments, RULE), affine, RULE)
    with counted(x) as found["forward"]:
        OPERATIONS.forward(x, norm)
    with counted(x) as found["backward_reduce"]:
        sums = OPERATIONS.backward_reduce(x, dy, norm)
    with counted(x) as found["backward_input"]:
        OPERATIONS.backward_input(x, dy, norm, sums.exchange)
    with counted(x) as found["backward_input, eval"]:
        OPERATIONS.backward_input(x, dy, norm, None)
    return found


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", PASSES)
def test_passes_over_memory(dtype: torch.dtype, channels_last: bool) -> None:
    x, dy = (torch.randn(64, 16, 24, 24).to(dtype) for _ in range(2))
    if channels_last:
        x, dy = (value.to(memory_format=torch.channels_last) for value in (x, dy))
    for name, traffic in step(x, dy).items():
        expected = PASSES[dtype][name]
        assert traffic.read + traffic.written == pytest.approx(expected, abs=0.01), name
        assert torch.float64 not in traffic.dtypes, "no temporary in float64"


def results(operations: Any, x: Tensor, dy: Tensor, rule: NormRule = RULE) -> list[Tensor]:
    """y, dx, gradients of weight and bias, mean and variance."""
    channels = x.shape[1]
    generator = torch.Generator().manual_seed(channels)
    weight, bias = (torch.randn(channels, generator=generator) for _ in range(2))
    affine = Affine(weight, bias)
    running = RunningStatistics(
        torch.zeros(channels).double(), torch.ones(channels).double(), None, 1.0
    )
    norm = Norm(operations.statistics(operations.moments(x), rule), affine, rule)
    y = operations.forward(x, norm, running)
    sums = operations.backward_reduce(x, dy, norm)
    dx = operations.backward_input(x, dy, norm, sums.exchange)
    return [y, dx, sums.grad_weight, sums.grad_bias, running.mean, running.var]


def close(actual: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, wanted, strict=True):
        scale = 1 + other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


@given(
    seed=st.integers(0, 2**32 - 1),
    mean=st.sampled_from([0.0, 1.0, -1e3, 1e5]),
    shape=st.sampled_from([(2, 3), (40, 5), (1, 2, 9), (5, 3, 4, 4), (17, 2, 3, 1, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    differentiable=st.booleans(),
    mode=st.sampled_from(["plus", "clamp"]),
)
@settings(deadline=None, max_examples=150)
def test_results_equal_those_in_float64(
    seed: int,
    mean: float,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    differentiable: bool,
    mode: Any,
) -> None:
    """Also with a mean of 100,000 standard deviations: x is rounded, and no digit is lost after."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.float16 and abs(mean) > 1e4:
        mean = 1e3
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    dy = torch.randn(shape, generator=generator).to(dtype)
    rule = NormRule(1e-5, mode)
    own = results(DIFFERENTIABLE if differentiable else OPERATIONS, x, dy, rule)
    wanted = results(OPERATIONS, x.double(), dy.double(), rule)
    # with few values, float32's rounding of deviations weighs more in dx
    scale = float(torch.finfo(dtype if dtype.itemsize == 2 else torch.float32).eps) * 30
    tolerance = 1e-11 if dtype is torch.float64 else scale
    deviations = x.double() - x.double().mean([0, *range(2, x.dim())], keepdim=True)
    smallest = deviations.square().mean([0, *range(2, x.dim())]).sqrt().min().item()
    close(own, wanted, tolerance * max(1.0, 1 / max(smallest, 1e-2)))


class _NoWaiting(TorchDispatchMode):
    """Refuses to read a number out of a tensor, which on a GPU waits for the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("known", [True, False])
def test_the_host_does_not_wait_in_a_fallback(known: bool) -> None:
    """Also where only the device knows the count: parts that came from other processes."""
    steps = OPERATIONS
    x, dy = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    running = RunningStatistics(torch.zeros(3), torch.ones(3), torch.tensor(0), 0.1)
    with torch.no_grad(), _NoWaiting():
        parts = steps.merge([steps.moments(x[:2]), steps.moments(x[2:])])
        if not known:
            parts = parts._replace(count=None)
        norm = Norm(steps.statistics(parts, RULE), Affine(), RULE)
        steps.forward(x, norm, running)
        sums = steps.backward_reduce(x, dy, norm)
        dx = steps.backward_input(x, dy, norm, sums.exchange)
    wanted = results(OPERATIONS, x.double(), dy.double())
    close([running.var], [0.9 + 0.1 * wanted[-1]], 1e-6)
    assert dx.shape == x.shape


FORBIDDEN = """
import warnings
import torch
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
from syncbn_torch.forward import always_ours

torch.manual_seed(0)
x = torch.rand(8, 3, 5, 5, dtype=torch.float64)
ours, theirs = SyncBatchNorm(3).double(), torch.nn.BatchNorm2d(3).double()
grads = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for run in (ours, DataParallelWithCallback(ours, replicas=2), theirs, theirs):
        part = x.clone().requires_grad_()
        with always_ours():
            (run(part) ** 3).sum().backward()
        grads.append(part.grad)
for got, due in zip(grads[:2], grads[2:]):
    torch.testing.assert_close(got, due)
torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

x = torch.randn(16, 8, 40, 40)  # so large that kernels would compute it
due = torch.nn.functional.batch_norm(x, None, None, training=True)
torch.testing.assert_close(SyncBatchNorm(8)(x), due)
print(*(warning.message for warning in caught), sep="\\n")
"""


@pytest.mark.slow
def test_tensors_are_computed_where_numba_may_not_compile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("syncbn uses plain operations instead of CPU kernels")
    assert done.stdout.count("\n") == 1, "one warning"
