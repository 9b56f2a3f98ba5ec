"""`nn.SyncBatchNorm` itself beside our layer, in a process group: eager forward + backward.

Tried in turn, each in processes of their own that end by themselves, talking over loopback:

    NCCL, 2 ranks    on two GPUs, or both on one; NCCL before 2.30 refuses to share one
    NCCL, 1 rank     nn.SyncBatchNorm would not communicate alone, so its function is called
    gloo, 2 ranks    if NCCL has refused; gloo's messages go through host memory

Wall time per step, of rank 0: ranks on one GPU share it, so these are no times of two GPUs. What
was refused is kept as the library's own sentence.

    python benchmarks/gpu_processes.py --seconds 60 --json FILE
    python benchmarks/gpu_processes.py --dry-run        # gloo on the CPU, where torch has no layer
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Row = dict[str, Any]

SHAPES = [(32, 64, 56, 56), (32, 512, 7, 7), (2, 256, 14, 14)]
DRY_SHAPES = [(2, 8, 6, 6)]
DTYPES = ("float32", "float16")
ROUNDS, CALLS = 5, 20
PATIENCE = 20  # seconds in which a collective must end
ALONE = {  # nobody outside this machine is asked, and two ranks may share a GPU if NCCL knows how
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
}

# -------------------------------------------------------------------------------- a rank


def layers_of(
    channels: int, device: Any, size: int
) -> dict[str, tuple[Callable[[Any], Any], list[Any]]]:
    """Layers over the default group by name, each with its parameters."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.modules._functions import SyncBatchNorm as Function

    from syncbn_torch import DistributedCommunicator, SyncBatchNorm

    group = dist.group.WORLD
    ours = SyncBatchNorm(channels, process_group=DistributedCommunicator()).to(device)
    theirs = nn.SyncBatchNorm(channels, process_group=group).to(device)
    layers = {"ours": (ours, list(ours.parameters()))}
    if size > 1:
        return layers | {"nn.SyncBatchNorm": (theirs, list(theirs.parameters()))}

    def function(x: Any) -> Any:
        running = theirs.running_mean, theirs.running_var
        return Function.apply(
            x, theirs.weight, theirs.bias, *running, theirs.eps, theirs.momentum, group, size
        )

    return layers | {"function of nn.SyncBatchNorm": (function, list(theirs.parameters()))}


def measure(shape: tuple[int, ...], dtype: str, device: Any, size: int, dry: bool) -> Row:
    """Seconds per step of each layer, in turns, and how far their results are apart."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    x, dy = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    x.requires_grad_()
    found: dict[str, Row] = {}
    results: dict[str, tuple[Any, ...]] = {}
    layers = layers_of(shape[1], device, size)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for number in range((2 if dry else ROUNDS) + 1):
        for name, (layer, parameters) in layers.items():
            row = found.setdefault(name, {})
            if "error" in row:
                continue
            dist.barrier()
            wait()
            try:
                start = time.perf_counter()
                for _ in range(2 if dry else CALLS):
                    y = layer(x)
                    results[name] = y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)
                wait()
            except (RuntimeError, ValueError) as error:  # each rank gets the same one
                row["error"] = sentence_of(error)
                continue
            if number > 0:  # the first warmed up
                spent = (time.perf_counter() - start) / (2 if dry else CALLS)
                row.setdefault("wall_samples", []).append(spent)
    for row in found.values():
        if "error" not in row:
            row["wall"] = statistics.median(row["wall_samples"])
    row = {"shape": shape, "dtype": dtype, "found": found}
    if len(results) == 2:
        pairs = zip(*results.values(), strict=True)
        apart = [(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs]
        row["difference"] = max(apart).item()
    return row


def sentence_of(error: BaseException) -> str:
    """The line that says why, which NCCL's errors have last."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    told = [line for line in lines if "GPU" in line]  # "Duplicate GPU detected : rank 0 and ..."
    return f"{type(error).__name__}: {(told[-1] if told else lines[0] if lines else '')}"[:300]


def be_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    dry, size = options.dry_run, options.size
    device = torch.device("cpu")
    result: Row = {"rows": []}
    try:
        if not dry:
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no CUDA device")
            device = torch.device("cuda", options.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        limit = timedelta(seconds=PATIENCE)
        ranks = {"rank": options.rank, "world_size": size, "timeout": limit}
        dist.init_process_group(options.backend, init_method=options.store, **ranks)
        dist.all_reduce(torch.ones(1, device=device))  # here NCCL looks for its GPUs
        for shape in DRY_SHAPES if dry else SHAPES:
            for dtype in DTYPES:
                result["rows"].append(measure(shape, dtype, device, size, dry))
                save(options.json, result)
    except Exception as error:
        result["error"] = sentence_of(error)
    save(options.json, result)
    sys.stdout.flush()
    os._exit(1 if "error" in result else 0)  # a group that has failed may wait as it is destroyed


def save(path: Path, result: Row) -> None:
    """Whole or not at all, because the rank may be killed."""
    path.with_suffix(".tmp").write_text(json.dumps(result), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


# ------------------------------------------------------------------------------ all ranks


def attempt(backend: str, size: int, seconds: float, dry: bool) -> Row:
    """Start the ranks and wait until all have ended, one has failed, or the time is over."""
    start = time.monotonic()
    print(f"{name_of(backend, size)} ...", flush=True)
    with TemporaryDirectory() as folder:
        store, files = Path(folder, "store").as_uri(), []
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            files.append(Path(folder, f"{rank}.json"))
            command = [sys.executable, __file__, "--rank", str(rank), "--size", str(size)]
            command += ["--backend", backend, "--store", store, "--json", str(files[-1])]
            command += ["--dry-run"] * dry
            ranks.append(subprocess.Popen(command, env=os.environ | ALONE))
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
    row: Row = {"backend": backend, "ranks": size, "rows": told[0].get("rows", [])}
    errors = [each["error"] for each in told if "error" in each]
    if killed:
        row["error"] = ", ".join(f"rank {n} was ended by signal {number}" for n, number in killed)
    elif any(rank.returncode for rank in ranks):
        codes = [rank.returncode for rank in ranks]
        spent = time.monotonic() - start
        row["error"] = errors[0] if errors else f"ended after {spent:.0f} s, status {codes}"
    return row


def attempts(seconds: float, dry: bool) -> list[Row]:
    end = time.monotonic() + seconds
    if dry:
        return [attempt("gloo", 2, seconds, dry)]
    rows = [attempt("nccl", 2, seconds / 2, dry)]
    for backend, size in (("nccl", 1), ("gloo", 2)):
        if (backend == "nccl" or "error" in rows[0]) and end - time.monotonic() > 5:
            rows.append(attempt(backend, size, end - time.monotonic(), dry))
    return rows


def name_of(backend: str, size: int) -> str:
    return f"{backend}, {size} rank{'s' * (size > 1)}"


def show(rows: list[Row]) -> None:
    """A line per case; the last one counts."""
    for row in rows:
        where = name_of(row["backend"], row["ranks"])
        for case in row["rows"]:
            times = [
                f"{name} " + (found.get("error") or f"{found['wall'] * 1e6:.0f} us")
                for name, found in case["found"].items()
            ]
            apart = f"; apart {case['difference']:.1e}" if "difference" in case else ""
            print(f"{where}: {case['shape']} {case['dtype']}: {', '.join(times)}{apart}")
        if "error" in row:
            print(f"{where}: failed: {row['error']}")
    done = [row for row in rows if "error" not in row]
    print(f"{len(done)} of {len(rows)} groups ran, {sum(len(row['rows']) for row in rows)} cases")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--dry-run", action="store_true", help="gloo on the CPU")
    for name, kind in (("rank", int), ("size", int), ("backend", str), ("store", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks on its way
    rows = attempts(options.seconds, options.dry_run)
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    show(rows)
    ours = [case["found"].get("ours", {}) for row in rows for case in row["rows"]]
    return 0 if ours and all("wall" in row for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
