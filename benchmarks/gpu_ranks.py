"""Ranks of a process group over loopback, which end by themselves; two may share a GPU.

Over NCCL from 2.30 on, which then has to be asked, else over gloo, whose messages pass through host
memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHARES_A_GPU = (2, 30)  # NCCL, from which on two ranks may share a GPU if they ask for it
ALONE = {  # nobody outside this machine is asked
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def nccl_version() -> tuple[int, int]:
    """Of the library that is loaded, which LD_PRELOAD may have chosen: torch knows its own only."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return 0, 0
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


def backend_for(size: int, kind: str = "cuda") -> str:
    """The backend of `size` ranks on devices of that kind: nccl or gloo."""
    if kind == "cpu" or not dist.is_nccl_available():
        return "gloo"
    enough = size <= torch.cuda.device_count() or nccl_version() >= SHARES_A_GPU
    return "nccl" if enough else "gloo"


def run_ranks(
    function: Callable[..., None], size: int, kind: str, seconds: float, *arguments: Any
) -> None:
    """Call `function(rank, size, device, *arguments)` in each rank of a group; raises its error.

    `kind`: of the device, "cuda" or "cpu". After `seconds` all ranks are ended, and it raises
    TimeoutError. A collective ends after a third of that.
    """
    end = time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        own = (function, size, kind, store, seconds / 3, arguments)
        ranks = mp.spawn(_be_rank, own, size, join=False)
        try:
            while not ranks.join(max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"ranks had not ended after {seconds:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _be_rank(
    rank: int,
    function: Callable[..., None],
    size: int,
    kind: str,
    store: str,
    patience: float,
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= ALONE
    torch.set_num_threads(1)
    device = torch.device(kind, rank % torch.cuda.device_count() if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    settings = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=patience)}
    dist.init_process_group(backend_for(size, kind), init_method=store, **settings)
    function(rank, size, device, *arguments)
    dist.barrier()
    dist.destroy_process_group()
