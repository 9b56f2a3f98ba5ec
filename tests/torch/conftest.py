"""Shared by the adapter's tests: models run on given parts, and what they should equal."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from syncbn_torch import DataParallelWithCallback

sys.path.insert(0, str(Path(__file__).parent))  # for `world`

settings.register_profile("stable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("stable")

# Largest absolute difference, at values around 1, to float64 over the undivided batch.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # it gives up on a function that other tests have compiled eight times


@pytest.fixture(scope="session")
def run_parts() -> Callable[[nn.Module, Sequence[Tensor]], list[Any]]:
    """`run_parts(module, parts)`: outputs of replicas that get exactly these parts."""

    def run(module: nn.Module, parts: Sequence[Tensor]) -> list[Any]:
        parallel = DataParallelWithCallback(module, device_ids=["cpu"] * len(parts))
        replicas = parallel.replicate(module, parallel.device_ids)
        return parallel.parallel_apply(replicas, [(p,) for p in parts], [{}] * len(parts))

    return run


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """`close(actual, expected)`: equal to rounding in the dtype of `actual`."""

    def check(actual: Tensor | None, expected: Tensor | None, scale: float = 1.0) -> None:
        assert (actual is None) == (expected is None)
        if actual is None or expected is None:
            return
        assert actual.shape == expected.shape
        if actual.numel() == 0:
            return
        error = (actual.detach().double() - expected.detach().double()).abs().max().item()
        assert error <= TOLERANCE[actual.dtype] * scale, f"off by {error:.2e}"

    return check
