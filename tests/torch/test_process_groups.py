"""The process groups that layers take: subgroups, meshes, copies of layers, a group that ends."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from world import close, enter_world, equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_torch import (
    DistributedCommunicator,
    SynchronizedBatchNorm2d,
    convert_model,
    create_syncbn_process_group,
)


@on_ranks(4)
def test_layers_and_their_copies_synchronize_within_their_subgroup(rank: int, size: int) -> None:
    """A subgroup as a process group, as one dimension of a mesh, and as a communicator."""
    x, _ = whole_batch((8, 3, 4, 4))
    of_subgroup = x[:4] if rank < 2 else x[4:]
    rows = slice(0, 1) if rank % 2 == 0 else slice(1, 4)
    twin = nn.BatchNorm2d(3).double()
    expected = twin(of_subgroup)[rows]
    pair = create_syncbn_process_group(2)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    for group in (pair, mesh["within"], DistributedCommunicator(pair)):
        layer = SynchronizedBatchNorm2d(3, process_group=group).double()
        converted = convert_model(nn.BatchNorm2d(3), process_group=group).double()
        for each in (layer, copy.deepcopy(layer), converted):
            close(each(of_subgroup[rows]), expected)
            close(each.running_var, twin.running_var)


@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_with_the_dimension_to_name(
    rank: int, size: int
) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    call = partial(SynchronizedBatchNorm2d, 3, process_group=mesh)
    raises(ValueError, 'mesh["across"]', call=call)


@on_ranks(4)
def test_create_syncbn_process_group_takes_divisors_of_the_world_and_0_for_all_of_it(
    rank: int, size: int
) -> None:
    raises(ValueError, "divides", "4", call=lambda: create_syncbn_process_group(3))
    everybody = create_syncbn_process_group(0)
    assert everybody is None  # as in apex
    x, _ = whole_batch((8, 3, 4, 4))
    layer = SynchronizedBatchNorm2d(3, process_group=everybody).double()
    mine = slice(2 * rank, 2 * rank + 2)
    close(layer(x[mine]), nn.BatchNorm2d(3).double()(x)[mine])


@on_ranks(4)
def test_a_rank_outside_the_group_of_a_layer_is_told_so_and_the_group_goes_on(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((8, 3, 4, 4))
    layer = SynchronizedBatchNorm2d(3, process_group=dist.new_group([0, 2])).double()
    if rank in (0, 2):
        mine = rows_of(rank, (0, 3, 3, 8))
        close(layer(x[mine]), nn.BatchNorm2d(3).double()(x)[mine])
    else:
        raises(RuntimeError, "belongs to", call=lambda: layer(x))


@on_ranks(2)
def test_what_is_no_process_group_is_refused_with_what_may_be_given(rank: int, size: int) -> None:
    raises(ValueError, "DeviceMesh", "'oops'", call=lambda: DistributedCommunicator("oops"))


@on_ranks(3)
def test_a_layer_outlives_its_process_group_and_takes_the_next_one(rank: int, size: int) -> None:
    x, dy = whole_batch((6, 3, 4, 4))
    layer, twin = SynchronizedBatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    mine = rows_of(rank, range(0, 8, 2))
    equals_undivided(layer, twin, x, dy, mine)
    kept = DistributedCommunicator()
    dist.barrier()
    dist.destroy_process_group()
    close(layer(x), twin(x))  # without a group: each rank alone, on the whole batch
    enter_world(rank, size, Path(os.environ["FOLDER"], "second_store").as_uri())
    gc.collect()
    raises(RuntimeError, "destroyed", call=lambda: kept.all_reduce(torch.ones(1)))
    layer.zero_grad()
    twin.zero_grad()
    equals_undivided(layer, twin, x, dy, mine)


@on_ranks(2)
def test_input_that_is_no_dense_tensor_is_refused(rank: int, size: int) -> None:
    layer, x = SynchronizedBatchNorm2d(3), torch.ones(2, 3, 4, 4)
    names = "SynchronizedBatchNorm2d", "expected a dense tensor"
    raises(TypeError, *names, "ndarray; pass torch.as_tensor", call=lambda: layer(x.numpy()))
    raises(TypeError, *names, "torch.sparse_coo; pass", call=lambda: layer(x.to_sparse()))
    layer(x)


RANKS_IN_THREADS = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg
from syncbn_core.comm import run_in_threads
from syncbn_torch import SynchronizedBatchNorm2d

def rank(number):
    dist.init_process_group("threaded", rank=number, world_size=2, store=store)
    rows = slice(0, 2) if number == 0 else slice(2, 6)
    layer, twin = SynchronizedBatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    part, whole = x[rows].clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(layer(part), twin(whole)[rows])
    layer(part).square().sum().backward()
    twin(whole).square().sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[rows])

torch._C._distributed_c10d._set_thread_isolation_mode(True)
multi_threaded_pg._install_threaded_pg()
store, x = dist.HashStore(), torch.randn(6, 3, 4, 4, dtype=torch.float64)
run_in_threads([lambda: rank(0), lambda: rank(1)])
os._exit(0)  # torch may abort as threads of such groups end
"""


def test_threads_that_are_ranks_of_torch_synchronize() -> None:
    command = [sys.executable, "-c", RANKS_IN_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
