"""Tensors of subclasses keep their class and may be changed in place, as by MONAI's networks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import needs_gloo, on_ranks

from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d


class Named(torch.Tensor):
    """Passes its name on to what is computed from it."""

    name = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Named):
            result.name = next((a.name for a in args if isinstance(a, Named)), "")
        return result


class Network(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.relu = norm, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.norm(x))
        return y


def check(norm: nn.Module, called: Callable[[nn.Module], Any], x: Tensor, whole: Tensor) -> None:
    """As torch's layer over `whole`, whose first rows are x."""
    twin = nn.BatchNorm1d(3, 1e-12, dtype=torch.float64)  # too small for the mode to matter
    named: Any = x.clone().as_subclass(Named)
    named.name = "image"
    named.requires_grad_()
    y = called(Network(norm))(named)
    assert type(y) is Named
    cotangent = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    y.backward(cotangent.to(y.dtype))
    z = whole.double().requires_grad_()
    expected = twin(z).relu()
    tolerance = {"rtol": 0.02, "atol": 0.02} if x.dtype is torch.float16 else {}
    torch.testing.assert_close(y.as_subclass(Tensor).double(), expected[: len(x)], **tolerance)
    if len(x) == len(whole):
        expected.backward(cotangent)
        torch.testing.assert_close(named.grad.as_subclass(Tensor).double(), z.grad, **tolerance)


@pytest.mark.parametrize("route", ["alone", "clamp", "float16", "replicas"])
def test_a_subclass_passes_through_and_changes_in_place(route: str) -> None:
    dtype = torch.float16 if route == "float16" else torch.float64
    eps_mode: Any = "clamp" if route == "clamp" else None
    norm = SynchronizedBatchNorm1d(3, 1e-12, dtype=dtype, eps_mode=eps_mode)
    x = torch.randn(8, 3, dtype=dtype)
    replicas = 2 if route == "replicas" else 1
    check(norm, lambda model: DataParallelWithCallback(model, replicas=replicas), x, x)


def test_a_subclass_keeps_what_its_torch_function_sets() -> None:
    x: Any = torch.randn(8, 3).as_subclass(Named)
    x.name = "image"
    assert SynchronizedBatchNorm1d(3, eps_mode="clamp")(x).name == "image"


@needs_gloo
@on_ranks(2)
def test_ranks_take_subclasses(rank: int, size: int) -> None:
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = whole.roll(4 * rank, 0)  # own rows first; the statistics are the same
    norm = SynchronizedBatchNorm1d(3, 1e-12, dtype=torch.float64)
    check(norm, lambda model: model, whole[:4], whole)
