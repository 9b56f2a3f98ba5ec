"""Deadlines that are shorter than the compilation of kernels, and nothing compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from world import on_ranks, set_timeout

from syncbn_core._kernels.cpu import builds
from syncbn_core.comm import SingleCommunicator
from syncbn_torch import SynchronizedBatchNorm2d
from syncbn_torch.forward import always_ours

REPLICAS = """
import torch
from torch import nn
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d

for channels_last, eps_mode, masked in [(False, "clamp", False), (True, "plus", True)]:
    layer = SynchronizedBatchNorm2d(16, eps_mode=eps_mode)  # not by torch's kernel
    model = DataParallelWithCallback(layer, device_ids=["cpu"] * 4)
    x = torch.randn(8, 16, 12, 12)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    arguments = (x, torch.rand(8, 12, 12) < 0.9) if masked else (x,)
    model(*arguments).square().mean().backward()
"""

MEMBERS = """
import numpy as np
from syncbn_core import BatchNorm
from syncbn_core.comm import run_in_threads, thread_group

members = thread_group(3)

def train(rank):
    layer = BatchNorm(3, communicator=members[rank])
    # an empty part needs no kernels: its member waits from the beginning
    x = np.ones((0 if rank == 2 else 2, 3, 8), np.float32)
    layer.backward(layer(x))

run_in_threads([lambda r=r: train(r) for r in range(3)])
"""


@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("program", [REPLICAS, MEMBERS], ids=["replicas", "members"])
def test_members_in_threads_train_without_compiled_kernels(program: str, tmp_path: Path) -> None:
    settings = {"NUMBA_CACHE_DIR": str(tmp_path), "SYNCBN_TIMEOUT": "3"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | settings, check=True)
    assert list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_waits_for_one_that_compiles(rank: int, size: int) -> None:
    x = torch.randn(4, 3, 5, 5)
    for cold, dtype in enumerate((torch.bfloat16, torch.float16)):  # the master, then the other
        own = x.to(dtype)
        if rank == cold:
            builds._Cache.load_overload = lambda *_: None  # type: ignore[method-assign]
        else:
            alone = SynchronizedBatchNorm2d(3, process_group=SingleCommunicator())
            with always_ours():
                alone(own.clone().requires_grad_()).sum().backward()
        torch.distributed.barrier()
        set_timeout(1.0)
        SynchronizedBatchNorm2d(3)(own.clone().requires_grad_()).square().sum().backward()
        set_timeout(60.0)
