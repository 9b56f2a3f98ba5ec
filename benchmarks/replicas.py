"""What synchronization of replicas costs on a CPU: training steps of four networks, in four parts.

    python benchmarks/replicas.py                      # some three minutes
    python benchmarks/replicas.py --nets small resnet18 --rounds 5

Ways that take turns:

    undivided       nn.BatchNorm2d, no replicas
    per replica     nn.BatchNorm2d in four replicas, whose statistics differ
    syncbn          converted layers in the same replicas
    operations      in the manner of Synchronized-BatchNorm-PyTorch: tensor operations, of which a
                    master adds up sum(x) and sum(x * x), and autograd the rest

Seconds are medians over rounds: of the clock, and of all threads' CPU time. "adds" is the CPU time
that synchronization adds per layer, over "per replica"; "faster" is the CPU time of "operations"
over that of syncbn. Writes replicas-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from records import FOLDER, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from syncbn_core.comm import SyncMaster
from syncbn_torch import DataParallelWithCallback, convert_model

REPLICAS = 4
WAYS = ("undivided", "per replica", "operations", "syncbn")


def add_up(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The sums and counts of all replicas, for each of them."""
    totals = [sum(values) for values in zip(*(message for _, message in messages), strict=True)]
    return [(replica, totals) for replica, _ in messages]


class OfOperations(nn.BatchNorm2d):
    """A layer of tensor operations, the same on all replicas."""

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        if copy_id == 0:
            self.exchange = SyncMaster(add_up)
            context.master_of_operations = self.exchange
        else:
            self.exchange = context.master_of_operations.register_slave(copy_id)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.transpose(0, 1).reshape(self.num_features, -1)
        message = flat.sum(1), (flat * flat).sum(1), flat.shape[1]
        is_master = isinstance(self.exchange, SyncMaster)
        exchange = self.exchange.run_master if is_master else self.exchange.run_slave
        total, squares, count = exchange(message)
        mean = total / count
        m2 = squares - total * mean
        if is_master:
            with torch.no_grad():
                for buffer, value in (
                    (self.running_mean, mean),
                    (self.running_var, m2 / (count - 1)),
                ):
                    assert buffer is not None
                    buffer.lerp_(value, 0.1)
        invstd = (m2 / count + self.eps) ** -0.5
        y = (flat - mean[:, None]) * (invstd * self.weight)[:, None] + self.bias[:, None]
        return y.view(x.size(1), x.size(0), *x.shape[2:]).transpose(0, 1)


class WithActivation(OfOperations):
    """The same for timm's `BatchNormAct2d`."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


def small() -> nn.Module:
    """Three layers of few numbers: nearly all time is the way to them."""
    return nn.Sequential(*(nn.BatchNorm2d(8) for _ in range(3)))


def middle() -> nn.Module:
    blocks = [(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (small, (16, 8, 6, 6)),
    "middle": (middle, (16, 32, 16, 16)),
    "resnet18": (lambda: timm.create_model("resnet18", num_classes=10), (8, 3, 64, 64)),
    "mobilenetv2": (lambda: timm.create_model("mobilenetv2_100", num_classes=10), (8, 3, 64, 64)),
}


def step_of(net: str, way: str) -> Callable[[], None]:
    make, shape = NETS[net]
    torch.manual_seed(0)
    model = make()
    if way == "syncbn":
        model = convert_model(model)
    if way == "operations":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = WithActivation if hasattr(module, "drop") else OfOperations
    if way != "undivided":
        model = DataParallelWithCallback(model, replicas=REPLICAS)
    x = torch.randn(shape)
    cotangent = torch.randn_like(model(x))

    def run() -> None:
        model.zero_grad()
        model(x).backward(cotangent)

    return run


def measure(net: str, rounds: int) -> dict[str, Any]:
    steps = {way: step_of(net, way) for way in WAYS}
    layers = sum(isinstance(m, nn.BatchNorm2d) for m in NETS[net][0]().modules())
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 2):
        for way, step in steps.items():
            clocks = time.perf_counter(), time.process_time()
            step()
            wall[way].append(time.perf_counter() - clocks[0])
            cpu[way].append(time.process_time() - clocks[1])
    found = {
        name: {way: statistics.median(values[2:]) for way, values in seconds.items()}
        for name, seconds in (("wall", wall), ("cpu", cpu))
    }
    adds = {
        way: (found["cpu"][way] - found["cpu"]["per replica"]) / layers
        for way in ("syncbn", "operations")
    }
    faster = found["cpu"]["operations"] / found["cpu"]["syncbn"]
    return {"net": net, "layers": layers, **found, "adds": adds, "faster": faster}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    title = f"Steps of {REPLICAS} replicas on a CPU, torch with {torch.get_num_threads()} threads"
    table = Table(title=title)
    columns = ("network", "way", "wall, ms", "CPU, ms", "adds, ms", "faster")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        for way in WAYS:
            adds, faster = row["adds"].get(way), row["faster"] if way == "syncbn" else None
            table.add_row(
                row["net"],
                way,
                f"{row['wall'][way] * 1e3:.1f}",
                f"{row['cpu'][way] * 1e3:.1f}",
                "" if adds is None else f"{adds * 1e3:.2f}",
                "" if faster is None else f"{faster:.2f}",
            )
    console.print(table)
    mean = statistics.geometric_mean(row["faster"] for row in rows)
    console.print(f"operations over syncbn, CPU time: geometric mean {mean:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each replica")
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", ".*do not synchronize")
    rows = [measure(net, args.rounds) for net in args.nets]
    facts = {"torch": torch.__version__, "rounds": args.rounds, "replicas": REPLICAS}
    facts["threads"] = args.threads
    path = write(args.output, "replicas-DATE", facts, nets=rows)
    console = Console()
    show(rows, console)
    console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    main()
