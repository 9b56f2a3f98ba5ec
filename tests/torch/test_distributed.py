"""Several processes, each with a part of the batch: gloo on CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

# Every process makes the whole batch, trains on its own rows, and compares with all of it.
SCRIPT = """
import datetime, os, sys, torch, torch.distributed as dist
from torch import nn
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d, SyncBatchNorm

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
x, dy = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64)
bounds = [(0, 3), (3, 3), (3, 8)][rank]
mine = slice(*bounds)
twin = nn.BatchNorm2d(3).double()
x_twin = x.clone().requires_grad_()
y_twin = twin(x_twin)
y_twin.backward(dy)

for kind in (SynchronizedBatchNorm2d, SyncBatchNorm):
    for replicas in (1, 2):
        layer = kind(3).double()
        part = x[mine].clone().requires_grad_()
        y = DataParallelWithCallback(layer, replicas=replicas)(part)
        y.backward(dy[mine])
        torch.testing.assert_close(y, y_twin[mine])
        torch.testing.assert_close(part.grad, x_twin.grad[mine])
        torch.testing.assert_close(layer.running_var, twin.running_var)
        total = layer.weight.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, twin.weight.grad)
        running = [torch.empty_like(layer.running_var) for _ in range(3)]
        dist.all_gather(running, layer.running_var)
        assert all(torch.equal(r, running[0]) for r in running)  # bitwise on every rank
        before = layer.running_var.clone()
        layer.eval()
        if rank == 0:  # eval waits for nobody
            layer(part)
        assert torch.equal(layer.running_var, before)
if rank == 0:  # nor without running statistics
    SynchronizedBatchNorm2d(3, track_running_stats=False).double().eval()(x)

pair = dist.new_group([0, 2])
if rank != 1:
    layer = SynchronizedBatchNorm2d(3, process_group=pair).double()
    torch.testing.assert_close(layer(x[mine]), y_twin[mine])
else:
    try:
        SynchronizedBatchNorm2d(3, process_group=pair).double()(x)
    except RuntimeError as error:
        assert "belongs to" in str(error), error
    else:
        raise AssertionError("a group without this process was accepted")
try:
    SynchronizedBatchNorm2d(3).double()(x[:1, :, :1, :1] if rank == 0 else x[:0])
except ValueError as error:
    assert "more than 1 value" in str(error)
else:
    raise AssertionError("one value in all was accepted")
dist.barrier()
dist.destroy_process_group()
print("rank", rank, "done")
"""


def test_processes_equal_the_undivided_batch(tmp_path: Path) -> None:
    """Uneven ranks, an empty rank, threads within processes, a subgroup."""
    script = tmp_path / "member.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "3",
        "SYNCBN_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    members = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [member.communicate(timeout=100)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    for rank, (member, output) in enumerate(zip(members, outputs, strict=True)):
        assert member.returncode == 0, f"rank {rank}:\n{output}"
        assert f"rank {rank} done" in output
