"""Tests whose body runs in every process of a world: gloo on CPU.

`@on_ranks(3)` above `def test_...(rank, size)` makes one pytest test that starts three processes.
Each process imports the test's file anew and calls the function with its own rank.
"""

from __future__ import annotations

import datetime
import importlib.util
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncbn_core import exchange
from syncbn_core.comm import local

# What the processes of a test need not import, or load, each.
PRELOADED = ["pytest", "torch.distributed.fsdp", "torch._dynamo", "syncbn_torch", "preloaded"]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

close = torch.testing.assert_close


# -------------------------------------------------------------------------------- processes


def start_world(
    function: Callable[..., None], size: int, folder: Path, *arguments: Any
) -> list[BaseProcess]:
    """Start `size` processes that call `function(rank, size, folder, *arguments)`.

    They are forked from a server that has imported torch once. `function` belongs to a module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # it gets no other path
        forkserver.ensure_running()
    path, name = function.__code__.co_filename, function.__name__
    ranks = [
        context.Process(
            target=_call, args=(path, name, rank, size, folder, *arguments), daemon=True
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _call(path: str, name: str, rank: int, size: int, folder: Path, *arguments: Any) -> None:
    """In a new process: call a function of a file. What it prints goes to the rank's own log."""
    with open(log_of(folder, rank), "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", r"`torch\.jit\.", FutureWarning)  # also by torch itself
    logging.getLogger("syncbn").setLevel(logging.ERROR)  # not that it compiles kernels
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    exchange.MANY = int(os.environ.get("SYNCBN_TEST_MANY", exchange.MANY))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    getattr(function, "in_rank", function)(rank, size, folder, *arguments)


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def enter_world(rank: int, size: int, store: str) -> None:
    """Join the process group of all ranks, which find each other by `store`."""
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)


def hosts_apart() -> None:
    """From now on each rank believes to be alone on its host: groups go by gloo alone."""
    setattr(local, "host_name", lambda: str(os.getpid()))  # noqa: B010


def set_timeout(seconds: float, group: Any = None) -> None:
    """Let calls of `group` wait for so long from now on."""
    # `set_timeout` is new in torch 2.14
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(datetime.timedelta(seconds=seconds), group)


def on_ranks(*sizes: int) -> Callable[[Callable[[int, int], None]], Callable[..., None]]:
    """Make a pytest test of `function(rank, size)`: it runs in every rank of worlds of `sizes`.

    The test passes if every rank returns and none has printed anything.
    """

    def decorate(function: Callable[[int, int], None]) -> Callable[..., None]:
        def in_rank(rank: int, size: int, folder: Path) -> None:
            os.environ["FOLDER"] = str(folder)
            enter_world(rank, size, (folder / "store").as_uri())
            try:
                function(rank, size)
                dist.barrier()
                dist.destroy_process_group()
            except BaseException:  # a failed rank must not wait for others as it ends
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

        def test(size: int, tmp_path: Path) -> None:
            ranks, end = start_world(function, size, tmp_path), time.monotonic() + 240
            for rank in ranks:
                rank.join(max(0.0, end - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
            for rank in ranks:
                rank.kill()
            logs = [log_of(tmp_path, rank) for rank in range(size)]
            texts = [log.read_text() if log.exists() else "no log" for log in logs]
            assert codes == [0] * size, "".join(
                f"\nrank {rank}, exit {code}:\n{text}"
                for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
            )
            lines = [line for text in texts for line in text.splitlines()]
            # torch for GPUs says so on a machine that has the tools of CUDA and no device; gloo up
            # to torch 2.10 says who is connected
            usual = "No CUDA runtime is found", "[Gloo] Rank "
            printed = [line for line in lines if not any(words in line for words in usual)]
            assert not printed, f"expected no output, got {printed}"

        test.__name__, test.__qualname__ = function.__name__, function.__qualname__
        test.__doc__, test.__module__ = function.__doc__, function.__module__
        test.in_rank = in_rank  # type: ignore[attr-defined]
        test = pytest.mark.timeout(270)(test)  # Inductor takes minutes on a slow machine
        return needs_gloo(pytest.mark.parametrize("size", sizes, ids="{} ranks".format)(test))

    return decorate


# ------------------------------------------------------------------ what a rank compares with


def rows_of(rank: int, bounds: Sequence[int]) -> slice:
    """The rows of the whole batch that are this rank's: from `bounds[rank]` to the next bound."""
    return slice(bounds[rank], bounds[rank + 1])


def whole_batch(shape: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """`x, dy` of all ranks together, the same on each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator) * 2 + 5
    return x, torch.randn(*shape, dtype=torch.float64, generator=generator)


def same_on_all_ranks(values: Tensor) -> None:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values.contiguous())
    assert all(torch.equal(other, every[0]) for other in every), "ranks differ"


def equals_undivided(
    layer: nn.Module, twin: nn.Module, x: Tensor, dy: Tensor, mine: slice
) -> Tensor:
    """A step of `layer` on the rank's own rows equals a step of `twin` on all rows.

    Compared are y, dx, buffers, and the gradients of parameters summed over ranks. Returns dx.
    """
    x_twin = x.clone().requires_grad_()
    y_twin = twin(x_twin)
    y_twin.backward(dy)
    part = x[mine].clone().requires_grad_()
    y = layer(part)
    y.backward(dy[mine])
    close(y, y_twin[mine])
    assert part.grad is not None
    assert x_twin.grad is not None
    close(part.grad, x_twin.grad[mine])
    for (name, buffer), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
        close(buffer, other, msg=name)
        same_on_all_ranks(buffer)
    gradients_equal(layer, twin)
    return part.grad


def gradients_equal(layer: nn.Module, twin: nn.Module) -> None:
    """The gradients of parameters, summed over ranks, are those of `twin`."""
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        total = parameter.grad.clone()
        dist.all_reduce(total)
        close(total, other.grad)


def raises(kind: type[BaseException], *words: str, call: Callable[[], Any]) -> str:
    """The message of the error that `call` raises; it has all `words` in it."""
    try:
        call()
    except kind as error:
        message = str(error)
        assert all(word in message for word in words), message
        return message
    raise AssertionError(f"expected {kind.__name__}")


class Net(nn.Module):
    """Branches, a layer that is used twice, and one that is known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn_left, self.bn_right = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.alias = self.bn_right
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        x = self.bn_left(self.left(x)) + self.bn_right(self.right(x))
        x = self.alias(x).relu()
        out: Tensor = self.head(x.mean((2, 3)))
        return out
