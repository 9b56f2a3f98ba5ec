"""Training steps of networks on two ranks: eager, and by torch.compile with and without breaks.

    python benchmarks/compiled.py                        # two networks, some ten minutes
    python benchmarks/compiled.py --nets resnet18 --rounds 5

Two processes over gloo, one thread each, eight images of 128 x 128 each. The ways take turns:

    eager             converted layers
    one graph         the same, compiled with fullgraph=True
    unsynchronized    nn.BatchNorm2d, compiled with fullgraph=True
    with breaks       converted layers, which torch.compile may not trace

Steps are medians over rounds of the slower rank. Writes compiled-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
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
from torch._dynamo.utils import counters

import syncbn_torch

NETS = ["resnet18", "mobilenetv2_100"]
SHAPE = (8, 3, 128, 128)
# The last one breaks graphs: after it torch runs other models of the same code eagerly.
WAYS = ("eager", "one graph", "unsynchronized", "with breaks")


def build(net: str, way: str, backend: str) -> tuple[nn.Module, Any]:
    """The model, and what to call."""
    torch.manual_seed(0)
    model = timm.create_model(net, num_classes=100).train()
    if way != "unsynchronized":
        model = syncbn_torch.convert_model(model)
    if way == "eager":
        return model, model
    if way == "with breaks":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    return model, torch.compile(
        model, backend=backend, fullgraph=way != "with breaks", dynamic=False
    )


def step(net: str, way: str, rank: int, backend: str) -> Callable[[], None]:
    model, call = build(net, way, backend)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    random = torch.Generator().manual_seed(rank)
    x, target = torch.randn(SHAPE, generator=random), torch.randint(100, SHAPE[:1])

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(call(x), target).backward()
        optimizer.step()

    return run


def measure(net: str, rounds: int, rank: int, backend: str) -> dict[str, Any]:
    first, graphs, runs = {}, {}, {}
    for way in WAYS:
        torch._dynamo.utils.counters.clear()
        runs[way] = step(net, way, rank, backend)
        begin = time.perf_counter()
        runs[way]()
        first[way] = time.perf_counter() - begin
        graphs[way] = counters["stats"]["unique_graphs"]
    wanted = dict.fromkeys(("one graph", "unsynchronized"), 1)
    if wanted.items() - graphs.items():
        raise RuntimeError(f"{net} has been compiled to graphs {graphs}, expected {wanted}")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 1):
        for way in WAYS if index % 2 else reversed(WAYS):
            dist.barrier()
            begin = time.perf_counter()
            runs[way]()
            if index:
                times[way].append(time.perf_counter() - begin)
    return {"net": net, "first": first, "graphs": graphs, "times": times}


def in_rank(rank: int, store: str, out: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    # torch itself looks there, as it goes on after a break
    # torch reads .grad of such tensors after a graph break
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.config.recompile_limit = 100  # the parts between breaks share their code
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    results = [measure(net, args.rounds, rank, args.backend) for net in args.nets]
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, results)
    if rank == 0:
        Path(out).write_text(json.dumps([joined(*both) for both in zip(*of_all, strict=True)]))
    dist.destroy_process_group()


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The figures of a network, of the slower rank."""
    slower = {
        way: list(map(max, times, other["times"][way])) for way, times in one["times"].items()
    }
    over_eager = {
        way: statistics.median(t / e for t, e in zip(times, slower["eager"], strict=True))
        for way, times in slower.items()
    }
    return {
        "net": one["net"],
        "step": {way: statistics.median(times) for way, times in slower.items()},
        "over_eager": over_eager,
        "first": {way: max(one["first"][way], other["first"][way]) for way in WAYS},
        "graphs": one["graphs"],
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Training steps on two ranks")
    for column in ("network", "way", "step, ms", "over eager", "first step, s", "graphs"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        for way in WAYS:
            numbers = f"{row['step'][way] * 1e3:.0f}", f"{row['over_eager'][way]:.2f}"
            table.add_row(
                row["net"], way, *numbers, f"{row['first'][way]:.1f}", str(row["graphs"][way])
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, out = (Path(folder) / name for name in ("store", "out.json"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")  # a cold cache
        mp.spawn(in_rank, (store.as_uri(), str(out), args), nprocs=2)  # type: ignore[no-untyped-call]
        rows = json.loads(out.read_text())
    facts = {"torch": torch.__version__, "rounds": args.rounds, "shape": SHAPE}
    path = write(args.output, "compiled-DATE", facts, nets=rows)
    console = Console()
    show(rows, console)
    console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    main()
