"""The kernels that `warmup` compiles are those that layers launch, with the same types."""

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch

from syncbn_core import BatchNorm
from syncbn_core.backends.cpu import launch, operations
from syncbn_core.backends.cpu.warmup import DTYPES, warm_up
from syncbn_core.comm import run_in_threads, thread_group
from syncbn_core.kernels.cpu.entries import Builds
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
from syncbn_torch.forward import always_ours

Launch = tuple[str, tuple[Any, ...]]
THREADS = 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Launch]]:
    """Every step that is launched instead of being run: its build and its argument types."""
    found: set[Launch] = set()

    def recorder(name: str) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            found.add((name, tuple(numba.typeof(each) for each in arguments)))
            for each in arguments:  # tables would be uninitialized memory
                if isinstance(each, np.ndarray) and each.dtype.kind == "f" and each.flags.writeable:
                    each[...] = 1

        return record

    recorded = {
        step: [
            Builds(*(recorder(build.py_func.__qualname__) for build in builds[:2]), builds.like)
            for builds in kinds
        ]
        for step, kinds in launch.STEPS.items()
    }
    monkeypatch.setattr(launch, "STEPS", recorded)
    monkeypatch.setattr(operations, "update_running", recorder("update_running"))
    monkeypatch.setattr(numba, "get_num_threads", lambda: THREADS)
    monkeypatch.setattr(launch, "_layer", lambda: "omp")
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield found
    torch.set_num_threads(threads)


SHAPES = ((4, 3, 9, 9), (16, 4, 3, 3), (8, 3), (4, 64, 20, 20), (2048, 64), (2, 2, 300_000))


def train_layers(dtype: str) -> None:
    """Layers alone, in threads and in replicas, in every layout, with and without parameters."""
    held = getattr(torch, dtype)
    for shape in SHAPES:
        x = torch.rand(shape).to(held)
        layouts = [x, x.transpose(0, -1).contiguous().transpose(0, -1)]
        if x.dim() == 4:
            layouts.append(x.contiguous(memory_format=torch.channels_last))
        for mode in ("plus", "clamp"):
            kind: Any = mode
            layers = [SyncBatchNorm(shape[1], eps_mode=kind), SyncBatchNorm(shape[1], affine=False)]
            for layer in layers:
                layer.to(torch.float64 if held is torch.float64 else torch.float32)
            for batch in layouts:
                with always_ours():
                    for layer in layers:
                        layer(batch.clone().requires_grad_()).sum().backward()
                    parallel = DataParallelWithCallback(layers[0], replicas=2)
                    parallel(batch.clone().requires_grad_()).sum().backward()
        if held is torch.bfloat16:  # NumPy has none
            continue
        array = x.numpy()
        alone = BatchNorm(shape[1])
        alone.backward(alone(array))
        group = thread_group(2)

        def step(rank: int, array: Any = array, group: Any = group) -> None:
            member = BatchNorm(array.shape[1], communicator=group[rank])
            member.backward(member(array))

        run_in_threads([lambda: step(0), lambda: step(1)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of y and dx, which nothing fills
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_launch_nothing_that_warmup_has_not(dtype: str, launched: set[Launch]) -> None:
    warm_up(dtype)
    warmed = set(launched)
    names = {name for name, _ in warmed}
    assert len(names) == 25, names
    train_layers(dtype)
    missing = dict(launched - warmed)
    assert not missing, missing
