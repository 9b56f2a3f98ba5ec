"""What synchronization costs: whole training steps under DistributedDataParallel, on CPU.

    python benchmarks/ddp.py                          # three networks, 2 and 4 ranks, ten minutes
    python benchmarks/ddp.py --nets resnet18 --ranks 2 --rounds 5

Processes over gloo, one thread each, eight images of 128 x 128 each. Three ways take turns: the
network of timm as it is, whose layers take the statistics of their own rank; the same, where each
layer also waits for the other ranks in both directions; and after `convert_model`.
(`torch.nn.SyncBatchNorm` does not run on CPU.) A step is that of the slowest rank.
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

import numpy as np
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
WAYS = ("unsynchronized", "waiting", "synchronized")


def step(net: str, way: str, rank: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = timm.create_model(net, num_classes=100).train()
    if way == "synchronized":
        model = syncbn_torch.convert_model(model)
    elif way == "waiting":
        waits(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    random = torch.Generator().manual_seed(rank)
    x, target = torch.randn(SHAPE, generator=random), torch.randint(100, SHAPE[:1])

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()

    return run


def waits(model: nn.Module) -> None:
    """Let the layers of torch exchange one number in each direction."""
    own = syncbn_torch.DistributedCommunicator()

    def wait(*_: Any) -> None:
        own.all_gather(np.ones(1))

    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(wait)
            layer.register_forward_hook(lambda layer, x, y: y.register_hook(wait) and None)


def measure(net: str, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each round by way, without the first two rounds."""
    runs = {way: step(net, way, rank) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 2):
        for way in WAYS if index % 2 else WAYS[::-1]:
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
        rows.append({"net": net, "ranks": size, **compared(slowest)})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and of each round the ratio of a way to the network as it is."""

    def ratios(way: str) -> list[float]:
        return [t / alone for t, alone in zip(times[way], times[WAYS[0]], strict=True)]

    cost = ratios("synchronized")
    return {
        "step": {way: statistics.median(found) for way, found in times.items()},
        "cost": statistics.median(cost),
        "quartiles": statistics.quantiles(cost, n=4)[::2] if len(cost) > 1 else cost * 2,
        "waiting": statistics.median(ratios("waiting")),
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="A step with synchronization over one without")
    for column in (
        "network",
        "ranks",
        *(f"{way}, ms" for way in WAYS),
        "ratio",
        "quartiles",
        "waiting",
    ):
        table.add_column(column, no_wrap=True)
    for row in rows:
        steps = [f"{row['step'][way] * 1e3:.0f}" for way in WAYS]
        low, high = row["quartiles"]
        ratio = f"{row['cost']:.2f}", f"{low:.2f} to {high:.2f}", f"{row['waiting']:.2f}"
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
