"""What synchronization costs: whole training steps under DistributedDataParallel, on CPU.

    python benchmarks/ddp.py                          # three networks, 2 and 4 ranks, ten minutes
    python benchmarks/ddp.py --nets resnet18 --ranks 2 --rounds 5

Processes over gloo, one thread each, eight images of 128 x 128 each. Two ways take turns: the
network of timm as it is, whose layers take the statistics of their own rank, and the same after
`convert_model`. (`torch.nn.SyncBatchNorm` does not run on CPU.) A step is that of the slowest rank.
Writes ddp-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import FOLDER, write
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn_torch

NETS = ["resnet18", "resnet50", "mobilenetv3_large_100"]
SHAPE = (8, 3, 128, 128)
WAYS = ("unsynchronized", "synchronized")


def step(net: str, way: str, rank: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = timm.create_model(net, num_classes=100).train()
    if way == "synchronized":
        model = syncbn_torch.convert_model(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    random = torch.Generator().manual_seed(rank)
    x, target = torch.randn(SHAPE, generator=random), torch.randint(100, SHAPE[:1])

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()

    return run


def measure(net: str, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each round by way, without the first two rounds."""
    runs = {way: step(net, way, rank) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 2):
        for way in WAYS if index % 2 else reversed(WAYS):
            dist.barrier()
            begin = time.perf_counter()
            runs[way]()
            times[way].append(time.perf_counter() - begin)
    return {way: found[2:] for way, found in times.items()}


def in_rank(rank: int, size: int, store: str, out: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    of_all: list[Any] = [None] * size
    rows = []
    for net in args.nets:
        dist.all_gather_object(of_all, measure(net, args.rounds, rank))
        slowest = {way: list(map(max, *(found[way] for found in of_all))) for way in WAYS}
        rows.append({"net": net, "ranks": size, **compared(*(slowest[way] for way in WAYS))})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def compared(apart: list[float], together: list[float]) -> dict[str, Any]:
    ratios = [t / a for t, a in zip(together, apart, strict=True)]
    return {
        "step": dict(zip(WAYS, map(statistics.median, (apart, together)), strict=True)),
        "cost": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="A step with synchronization over one without")
    for column in ("network", "ranks", *(f"{way}, ms" for way in WAYS), "ratio", "quartiles"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        steps = [f"{row['step'][way] * 1e3:.0f}" for way in WAYS]
        low, high = row["quartiles"]
        ratio = f"{row['cost']:.2f}", f"{low:.2f} to {high:.2f}"
        table.add_row(row["net"], str(row["ranks"]), *steps, *ratio)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    rows = []
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store, out = (Path(folder) / name for name in ("store", "out.json"))
            given = (size, store.as_uri(), str(out), args)
            mp.spawn(in_rank, given, nprocs=size)  # type: ignore[no-untyped-call]
            rows += json.loads(out.read_text())
    facts = {"torch": torch.__version__, "rounds": args.rounds, "shape": SHAPE}
    path = write(args.output, "ddp-DATE", facts, nets=rows)
    console = Console()
    show(rows, console)
    console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    main()
