"""Processes of a group over loopback, which end by themselves: for the scripts that measure groups.

A script starts itself once per rank with `launch`, and each of these calls `be_rank`. Two ranks may
share a GPU: over NCCL from 2.30 on, else over gloo, whose messages pass through host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

Row = dict[str, Any]

PATIENCE = 20  # seconds
NO_GROUP = "no group"  # in place of a backend
SHARES_A_GPU = (2, 30)  # NCCL, from which on two ranks may share a GPU if they ask for it
ALONE = {  # nobody outside this machine is asked
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
}

# ------------------------------------------------------------------------------- one rank


def begin(description: str, be_one: Callable[[argparse.Namespace], None]) -> argparse.Namespace:
    """The arguments of a script that launches ranks; a rank itself calls `be_one`, and ends."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--dry-run", action="store_true", help="tiny, gloo on the CPU")
    for name, kind in (("rank", int), ("size", int), ("backend", str), ("store", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_one(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks on its way
    return options


def be_rank(
    options: argparse.Namespace, work: Callable[[Any, Row], None], patience: float = PATIENCE
) -> NoReturn:
    """Join the group, call `work(device, result)`, save the result with its error if it has one.

    `patience`: seconds in which a collective must end.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    result: Row = {}
    try:
        if options.dry_run:
            torch.set_num_threads(1)
        else:
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no CUDA device")
            device = torch.device("cuda", options.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if options.backend != NO_GROUP:
            limit = timedelta(seconds=patience)
            ranks = {"rank": options.rank, "world_size": options.size, "timeout": limit}
            dist.init_process_group(options.backend, init_method=options.store, **ranks)
            dist.all_reduce(torch.ones(1, device=device))  # here NCCL looks for its GPUs
        work(device, result)
    except Exception as error:
        result["error"] = sentence_of(error)
    save(options.json, result)
    sys.stdout.flush()
    os._exit(1 if "error" in result else 0)  # a group that has failed may wait as it is destroyed


def sentence_of(error: BaseException) -> str:
    """The line that says why, which NCCL's errors have last."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    told = [line for line in lines if "GPU" in line]  # "Duplicate GPU detected : rank 0 and ..."
    return f"{type(error).__name__}: {(told[-1] if told else lines[0] if lines else '')}"[:300]


def save(path: Path, result: Row) -> None:
    """Whole or not at all, because the rank may be killed."""
    path.with_suffix(".tmp").write_text(json.dumps(result), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


# ------------------------------------------------------------------------------ all ranks


def backend_for_two(dry: bool) -> tuple[str, str]:
    """`(backend, NCCL's version)` of two ranks, which share a GPU if there is only one."""
    import torch
    import torch.distributed as dist

    if dry or not dist.is_nccl_available():
        return "gloo", "none"
    version = torch.cuda.nccl.version()
    able = torch.cuda.device_count() > 1 or version >= SHARES_A_GPU
    return "nccl" if able else "gloo", ".".join(map(str, version))


def launch(
    script: str,
    backend: str,
    size: int,
    seconds: float,
    dry: bool,
    environments: Sequence[Mapping[str, str]] = (),
) -> tuple[list[Row], str | None]:
    """What each rank of `script` has saved, and why the ranks failed, if they did.

    Waits until all ranks have ended, one has failed, or the time is over. `environments`: of each
    rank, beside `ALONE`.
    """
    start = time.monotonic()
    print(f"{name_of(backend, size)} ...", flush=True)
    with TemporaryDirectory() as folder:
        store, files = Path(folder, "store").as_uri(), []
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            files.append(Path(folder, f"{rank}.json"))
            command = [sys.executable, script, "--rank", str(rank), "--size", str(size)]
            command += ["--backend", backend, "--store", store, "--json", str(files[-1])]
            command += ["--dry-run"] * dry
            own = environments[rank] if environments else {}
            ranks.append(subprocess.Popen(command, env=os.environ | ALONE | own))
        grace = None
        try:
            while any(rank.poll() is None for rank in ranks):
                now = time.monotonic()
                if grace is None and any(rank.poll() for rank in ranks):
                    grace = now + 3  # for the others to say why
                if now > (grace or start + seconds):
                    break
                time.sleep(0.05)
        finally:
            killed = [(n, -code) for n, rank in enumerate(ranks) if (code := rank.poll() or 0) < 0]
            for rank in ranks:
                rank.kill()
                rank.wait()
        told = [json.loads(file.read_text("utf-8")) if file.exists() else {} for file in files]
    errors = [row["error"] for row in told if "error" in row]
    if killed:
        ended = [f"rank {n} was ended by signal {number}" for n, number in killed]
        return told, "; ".join(ended + errors)
    if any(rank.returncode for rank in ranks):
        codes = [rank.returncode for rank in ranks]
        spent = time.monotonic() - start
        return told, errors[0] if errors else f"ended after {spent:.0f} s, status {codes}"
    return told, None


def name_of(backend: str, size: int) -> str:
    return f"{backend}, {size} rank{'s' * (size > 1)}"
