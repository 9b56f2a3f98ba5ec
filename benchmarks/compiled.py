"""Training steps of networks on two ranks: eager, and by torch.compile with and without breaks.

    python benchmarks/compiled.py                        # three networks, half an hour
    python benchmarks/compiled.py --nets resnet18 --rounds 5

Two processes over gloo, one thread each, eight images of 128 x 128 each. The ways:

    eager             converted layers
    one graph         the same, compiled with fullgraph=True
    unsynchronized    nn.BatchNorm2d, compiled with fullgraph=True
    with breaks       converted layers, which torch.compile may not trace

The first step of each way is that of new processes with an empty cache. For the other steps the
ways take turns in the same processes. Ratios are medians over rounds of the ratios of one round; a
round's step is that of the slower rank. Writes compiled-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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

NETS = ["resnet18", "mobilenetv2_100", "efficientnet_b0"]  # the last one has SiLU
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


def first_step(net: str, way: str, rank: int, backend: str) -> dict[str, Any]:
    """Seconds of a first step, and how many graphs it compiles."""
    run = step(net, way, rank, backend)
    dist.barrier()
    begin = time.perf_counter()
    run()
    seconds, graphs = time.perf_counter() - begin, counters["stats"]["unique_graphs"]
    if way in ("one graph", "unsynchronized") and graphs != 1:
        raise RuntimeError(f"{net}, {way}: compiled to {graphs} graphs, expected 1")
    return {"first": seconds, "graphs": graphs}


def steps(net: str, rounds: int, rank: int, backend: str) -> dict[str, Any]:
    """Seconds of steps, by way."""
    runs = {way: step(net, way, rank, backend) for way in WAYS}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 1):
        for way in WAYS if index % 2 else reversed(WAYS):
            dist.barrier()
            begin = time.perf_counter()
            runs[way]()
            if index:
                times[way].append(time.perf_counter() - begin)
    return times


def in_rank(rank: int, store: str, out: str, of_rank: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    # torch reads .grad of such tensors after a graph break
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.config.recompile_limit = 100  # the parts between breaks share their code
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    net, given, backend = args
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, of_rank(net, given, rank, backend))
    if rank == 0:
        Path(out).write_text(json.dumps(of_all))
    dist.destroy_process_group()


def on_ranks(cache: Path, of_rank: Callable[..., Any], *args: Any) -> list[Any]:
    """What `of_rank` returns in two new processes, which keep what they compile in `cache`."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    with tempfile.TemporaryDirectory() as folder:
        store, out = (Path(folder) / name for name in ("store", "out.json"))
        mp.spawn(in_rank, (store.as_uri(), str(out), of_rank, args), nprocs=2)  # type: ignore[no-untyped-call]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def measured(net: str, rounds: int, backend: str, folder: Path) -> dict[str, Any]:
    """The figures of a network."""
    first = {}
    for way in WAYS:
        cache = folder / way.replace(" ", "-")  # compilers split names at blanks
        cache.mkdir()
        both = on_ranks(cache, first_step, net, way, backend)
        first[way] = max(both, key=lambda own: own["first"])
        shutil.copytree(cache, folder / "all", dirs_exist_ok=True)
    one, other = on_ranks(folder / "all", steps, net, rounds, backend)
    slower = {way: list(map(max, times, other[way])) for way, times in one.items()}
    row: dict[str, Any] = {"net": net}
    for name, base in (("over_eager", "eager"), ("over_unsynchronized", "unsynchronized")):
        row[name] = {
            way: statistics.median(t / b for t, b in zip(times, slower[base], strict=True))
            for way, times in slower.items()
        }
    row["step"] = {way: statistics.median(times) for way, times in slower.items()}
    row["first"] = {way: own["first"] for way, own in first.items()}
    row["graphs"] = {way: own["graphs"] for way, own in first.items()}
    return row


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Training steps on two ranks")
    ratios = "over eager", "over unsynchronized"
    for column in ("network", "way", "step, ms", *ratios, "first step, s", "graphs"):
        table.add_column(column)
    for row in rows:
        for way in WAYS:
            over = [f"{row[name][way]:.2f}" for name in ("over_eager", "over_unsynchronized")]
            numbers = f"{row['step'][way] * 1e3:.0f}", *over
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
    rows = []
    for net in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(net, args.rounds, args.backend, Path(folder)))
    facts = {"torch": torch.__version__, "rounds": args.rounds, "shape": SHAPE}
    path = write(args.output, "compiled-DATE", facts, nets=rows)
    console = Console()
    show(rows, console)
    console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    main()
