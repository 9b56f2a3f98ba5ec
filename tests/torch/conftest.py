"""Shared by the adapter's tests: models run on given parts, and what they should equal."""

import multiprocessing
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from syncbn_torch import DataParallelWithCallback

settings.register_profile("stable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("stable")

# What the processes of a test need not import each.
PRELOADED = ["torch.distributed.fsdp", "syncbn_torch", "syncbn_core.backends.cpu.numpy"]

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


@pytest.fixture(scope="session")
def start_world() -> Callable[..., list[Any]]:
    """`start_world(folder, case, size, ...)`: `case` of members.py in `size` new processes.

    They are forked from a server that has imported torch once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = str(Path(__file__).with_name("members.py"))

    def start(folder: Path, case: str, size: int, *arguments: Any) -> list[Any]:
        given = {"CASE": case, "SIZE": size, "FOLDER": str(folder), "ARGUMENTS": arguments}
        members = [
            context.Process(
                target=runpy.run_path, args=(path, {**given, "RANK": rank}, "member"), daemon=True
            )
            for rank in range(size)
        ]
        for member in members:
            member.start()
        return members

    return start


@pytest.fixture
def run_world(tmp_path: Path, start_world: Callable[..., list[Any]]) -> Callable[[str, int], None]:
    """`run_world(case, size)`: all processes end well and print nothing."""

    def run(case: str, size: int) -> None:
        members = start_world(tmp_path, case, size)
        for member in members:
            member.join(100)
        codes = [member.exitcode for member in members]
        for member in members:
            member.kill()
        logs = [tmp_path / f"{rank}.log" for rank in range(size)]
        texts = [log.read_text() if log.exists() else "no log" for log in logs]
        assert codes == [0] * size, "".join(
            f"\nrank {rank}, exit {code}:\n{text}"
            for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
        )
        assert not any(texts), f"expected no output, got {texts}"

    return run
