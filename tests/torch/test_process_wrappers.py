"""Models in torch's wrappers over several processes train as on one device, to rounding."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import Net, close, on_ranks, rows_of, whole_batch

from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    convert_model,
    revert_model,
)

# DistributedDataParallel's option, under the name that this torch wants
SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"


def train(
    model: nn.Module, x: Tensor, dy: Tensor, mine: slice, scale: float, forwards: int
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        loss: Any = 0.0
        for _ in range(forwards):
            loss = loss + (model(x[mine]) * dy[mine]).sum() * (scale / len(x))
        loss.backward()
        optimizer.step()


def trains_as_one_device(
    rank: int, size: int, wrap: Any, averages: bool = True, forwards: int = 1
) -> None:
    """Four steps of `wrap(model)` on uneven ranks end in the state of a model on the whole batch.

    `averages`: the wrapper divides gradients by the number of ranks. `forwards`: per backward.
    """
    torch.manual_seed(0)
    alone = Net().double()
    model = convert_model(copy.deepcopy(alone))
    x, _ = whole_batch((7, 3, 6, 6))
    dy = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    train(alone, x, dy, slice(0, len(x)), 1.0, forwards)
    scale = float(size) if averages else 1.0
    train(wrap(model), x, dy, rows_of(rank, (0, 2, 2, 7)), scale, forwards)
    for name, value in model.state_dict().items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name)


def ddp(model: nn.Module, **settings: Any) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **settings)


@on_ranks(3)
def test_ddp_trains_as_one_device(rank: int, size: int) -> None:
    trains_as_one_device(rank, size, ddp)


@on_ranks(3)
def test_ddp_with_replica_threads_trains_as_one_device(rank: int, size: int) -> None:
    wrap = lambda model: ddp(DataParallelWithCallback(model, replicas=2))  # noqa: E731
    trains_as_one_device(rank, size, wrap)


@on_ranks(3)
def test_ddp_with_two_forwards_per_backward_trains_as_one_device(rank: int, size: int) -> None:
    trains_as_one_device(rank, size, ddp, forwards=2)


@on_ranks(3)
def test_ddp_that_does_not_broadcast_buffers_trains_as_one_device(rank: int, size: int) -> None:
    trains_as_one_device(rank, size, lambda model: ddp(model, **{SYNC_BUFFERS: False}))


@on_ranks(3)
def test_fsdp_trains_as_one_device(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (size,))
    trains_as_one_device(rank, size, lambda model: fully_shard(model, mesh=mesh))


@on_ranks(3)
def test_a_model_whose_gradients_the_user_adds_up_trains_as_one_device(
    rank: int, size: int
) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return model

    trains_as_one_device(rank, size, wrap, averages=False)


class Branches(nn.Module):
    """Layers whose backwards autograd may run in several orders."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (SynchronizedBatchNorm1d(3).double() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(self.c(x).tanh())


@on_ranks(2)
def test_branches_on_ranks_with_unlike_numbers_of_replicas(rank: int, size: int) -> None:
    model = Branches()
    alone = revert_model(copy.deepcopy(model))
    wrapper = DataParallelWithCallback(model, replicas=3)
    for rows in ((1, 2), (3, 1), (4, 3), (0, 5)):
        mine = slice(rows[0] * rank, rows[0] + rows[1] * rank)
        x, dy = whole_batch((sum(rows), 3))
        x.requires_grad_()
        y, expected = wrapper(x[mine]), alone(x)
        close(y, expected[mine])
        (dx,) = torch.autograd.grad(y, x, dy[mine])
        (expected_dx,) = torch.autograd.grad(expected, x, dy)
        close(dx[mine], expected_dx[mine])


ENDS = """
import sys, weakref
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import syncbn_torch

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
DistributedDataParallel(nn.Linear(2, 2))
dist.destroy_process_group()
assert group() is None
"""


def test_no_process_group_outlives_its_end(tmp_path: Path) -> None:
    """Else its threads may abort the process as it exits. In a new process, which has no torch."""
    store = (tmp_path / "store").as_uri()
    subprocess.run([sys.executable, "-c", ENDS, store], check=True, timeout=100)
