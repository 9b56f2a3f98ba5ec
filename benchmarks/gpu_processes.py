"""`nn.SyncBatchNorm` beside our layer in a process group on a GPU: eager forward + backward.

One rank over NCCL, where the function of nn.SyncBatchNorm is called, since it would not communicate
alone; then two, over NCCL on two GPUs or from 2.30 on, else over gloo. Wall time per step of
rank 0, the layers in turns; ranks that share a GPU take turns, so theirs are no times of two GPUs.

    python benchmarks/gpu_processes.py --seconds 90 --json FILE
    python benchmarks/gpu_processes.py --dry-run  # gloo on the CPU, where torch has no layer
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_nets import ours_in_group, resnet, torch_in_group
from gpu_ranks import backend_for, nccl_version, run_ranks
from gpu_timers import describe
from torch import nn

LAYERS = [(32, 64, 56, 56), (32, 512, 7, 7), (2, 256, 14, 14)]
NETS = [(8, 3, 64, 64), (32, 3, 224, 224)]  # of ResNet-50
DTYPES = ("float32", "bfloat16")
ROUNDS = 5

Row = dict[str, Any]


def cases(dry: bool) -> list[tuple[str, tuple[int, ...], str]]:
    """Net or layer, shape of x, dtype."""
    layers, nets = ([(2, 8, 6, 6)], []) if dry else (LAYERS, NETS)
    named = [("layer", shape) for shape in layers] + [("ResNet-50", shape) for shape in nets]
    return [(what, shape, dtype) for what, shape in named for dtype in DTYPES]


def step_of(make: Callable[[int], nn.Module], case: Any, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of a layer, or of a net under autocast; returns results."""
    what, shape, name = case
    dtype, net = getattr(torch, name), what == "ResNet-50"
    torch.manual_seed(dist.get_rank())
    model = (resnet(make) if net else make(shape[1])).to(device)
    x = torch.randn(shape, device=device)
    x = (x.contiguous(memory_format=torch.channels_last) if net else x.to(dtype)).requires_grad_()
    like = torch.randn(shape[0], 10, device=device) if net else torch.randn_like(x)
    leaves = [x, *model.parameters()]

    def step() -> Any:
        with torch.autocast(device.type, dtype, enabled=net and dtype is not torch.float32):
            y = model(x)
        return y.detach(), *torch.autograd.grad(y, leaves, like.to(y.dtype))

    return step


def measure(case: Any, device: torch.device, size: int, dry: bool) -> Row:
    """Seconds per step of each layer, in turns; how far the results of layers are apart."""
    torch_name = "nn.SyncBatchNorm" if size > 1 else "function of nn.SyncBatchNorm"
    made = {"ours": ours_in_group, torch_name: torch_in_group}
    steps = {name: step_of(make, case, device) for name, make in made.items()}
    found: dict[str, Row] = {name: {} for name in steps}
    results: dict[str, Any] = {}
    calls = 2 if dry else 20 if case[0] == "layer" else 5
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for number in range((2 if dry else ROUNDS) + 1):
        for name, row in found.items():
            if "error" in row:
                continue
            dist.barrier()
            wait()
            start = time.perf_counter()
            try:
                for _ in range(calls):
                    results[name] = steps[name]()
                wait()
            except (RuntimeError, ValueError) as error:  # each rank gets the same one
                row["error"] = describe(error)
                continue
            if number > 0:  # the first warmed up
                spent = (time.perf_counter() - start) / calls
                row.setdefault("wall_samples", []).append(spent)
    for row in found.values():
        if "error" not in row:
            row["wall"] = statistics.median(row["wall_samples"])
    what, shape, dtype = case
    whole: Row = {"net": what, "shape": shape, "dtype": dtype, "found": found}
    if len(results) == 2 and what == "layer":
        pairs = zip(*results.values(), strict=True)
        apart = [(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs]
        whole["difference"] = max(apart).item()
    return whole


def be_rank(rank: int, size: int, device: torch.device, dry: bool, path: Path) -> None:
    rows = []
    for case in cases(dry):
        rows.append(measure(case, device, size, dry))
        if rank == 0:
            path.write_text(json.dumps(rows), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything")
    parser.add_argument("--json", type=Path, default=Path("processes.json"))
    parser.add_argument("--dry-run", action="store_true", help="tiny, gloo on the CPU")
    options = parser.parse_args()
    kind = "cpu" if options.dry_run else "cuda"
    groups, part = [], options.json.with_suffix(".part")
    for size in (2,) if options.dry_run else (1, 2):
        group: Row = {"backend": backend_for(size, kind), "ranks": size}
        part.write_text("[]", encoding="utf-8")
        try:
            run_ranks(be_rank, size, kind, options.seconds / 2, options.dry_run, part)
        except Exception as error:
            group["error"] = describe(error)
        rows = json.loads(part.read_text(encoding="utf-8"))
        groups.append(group | {"nccl": nccl_version(), "rows": rows})
        options.json.write_text(json.dumps(groups) + "\n", encoding="utf-8")
        for row in rows:
            times = {
                n: f.get("error") or f"{1e6 * f['wall']:.0f} us" for n, f in row["found"].items()
            }
            print(group["backend"], size, row["net"], row["shape"], row["dtype"], times)
    part.unlink()
    walls = ["wall" in row["found"]["ours"] for group in groups for row in group["rows"]]
    failed = [group["error"] for group in groups if "error" in group]
    print(f"{len(walls)} cases in {len(groups)} groups; failed: {failed or 'none'}")
    return int(bool(failed) or not walls or not all(walls))


if __name__ == "__main__":
    sys.exit(main())
