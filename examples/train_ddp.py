"""Several processes with a few handwritten digits each, trained as one device with all of them.

    torchrun --nproc-per-node 4 examples/train_ddp.py                  # gloo on CPU, NCCL on GPUs
    python examples/train_ddp.py --layers BatchNorm2d --save start.pt  # one device, plain torch
    torchrun --nproc-per-node 4 examples/train_ddp.py --resume start.pt --save more.pt

Every process takes its share of each batch, uneven and sometimes empty. Afterwards the first one
trains a copy with `nn.BatchNorm2d` alone on the whole batches, from the same start, and the script
ends with status 1 if the two differ by more than rounding. Checkpoints are the same whichever
layers wrote them: `syncbn`, `nn.BatchNorm2d`, `nn.SyncBatchNorm`.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import TOLERANCE, difference, load, network
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from syncbn_torch import convert_model, revert_model

LAYERS = ("syncbn", "BatchNorm2d", "SyncBatchNorm")


def build(layers: str, dtype: torch.dtype) -> nn.Module:
    """The network with layers of that kind."""
    model = network(dtype)
    if layers == "syncbn":
        return convert_model(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if layers == "SyncBatchNorm" else model


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, ...],
    args: argparse.Namespace,
    rank: int,
    size: int,
) -> dict[str, Tensor]:
    """Train on the share of `rank` among `size`; the state after the first step."""
    images, labels = data[:2]
    order = torch.Generator().manual_seed(args.seed)
    first: dict[str, Tensor] = {}
    steps = args.epochs * -(-len(images) // args.batch_size)
    hidden = None if rank == 0 else True
    model.train()
    with tqdm(total=steps, desc=f"{size} processes", unit="step", disable=hidden) as bar:
        for _ in range(args.epochs):
            for rows in torch.randperm(len(images), generator=order).split(args.batch_size):
                mine = rows.tensor_split(size)[rank]  # empty ones take part all the same
                logits = model(images[mine])
                # The mean over the whole batch: DistributedDataParallel averages over ranks.
                loss = nn.functional.cross_entropy(logits, labels[mine], reduction="sum")
                optimizer.zero_grad()
                (loss * (size / len(rows))).backward()
                optimizer.step()
                first = first or copy.deepcopy(plain(model).state_dict())
                bar.update()
    return first


def plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=30, help="over all processes")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--layers", choices=LAYERS, default="syncbn")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--save", type=Path, help="where to write one at the end")
    args = parser.parse_args()

    size = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun says so
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size > 1:
        if device.type == "cpu" and args.layers != "syncbn":
            parser.error("expected --layers syncbn: torch's layers don't synchronize on CPU")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)  # processes are parallel already, and the model is tiny

    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    data = tuple(part.to(device) for part in load(dtype))
    model = build(args.layers, dtype).to(device)
    optimizer = optimizer_of(model, args.rate)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    alone = revert_model(copy.deepcopy(model))
    if args.layers == "SyncBatchNorm":
        alone = build("BatchNorm2d", dtype).to(device)
        alone.load_state_dict(model.state_dict())
    alone_optimizer = optimizer_of(alone, args.rate)
    alone_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    begin = time.perf_counter()
    # no variable holds DistributedDataParallel: torch can hang if it outlives the process group
    first = train(
        DistributedDataParallel(model) if size > 1 else model, optimizer, data, args, rank, size
    )
    seconds = time.perf_counter() - begin
    status = 0
    if rank == 0:
        if args.save:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.save)
        first_alone = train(alone, alone_optimizer, data, args, 0, 1)
        status = report(model, alone, first, first_alone, data, args, size, seconds)
    if size > 1:
        results: list[Any] = [status]
        dist.broadcast_object_list(results, src=0)  # also: the others wait for the first
        status = results[0]
        dist.destroy_process_group()
    return status


def report(
    model: nn.Module,
    alone: nn.Module,
    first: dict[str, Tensor],
    first_alone: dict[str, Tensor],
    data: tuple[Tensor, ...],
    args: argparse.Namespace,
    size: int,
    seconds: float,
) -> int:
    """Print how far the run is from one device; 1 if that is more than rounding explains."""
    title = f"{size} process{'es' if size > 1 else ''} with {args.layers}, against one device"
    table = Table(title=title)
    table.add_column("largest difference in")
    for column in ("after one step", "at the end"):
        table.add_column(column, justify="right")
    pairs = [(first, first_alone), (model.state_dict(), alone.state_dict())]
    worst = []
    for running in (False, True):
        off = [difference(*pair, running) for pair in pairs]
        worst.append(off)
        name = "running statistics" if running else "parameters"
        table.add_row(name, *(f"{value:.1e}" for value in off))
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    reached = accuracy(model, *data[2:])
    console.print(f"validation accuracy {reached:.1%}, {seconds:.1f} s")
    bounds = TOLERANCE[getattr(torch, args.dtype)]
    faults = [
        f"expected at most {bound:.0e}, got {value:.1e}"
        for off in worst
        for value, bound in zip(off, bounds, strict=True)
        if not value <= bound
    ]
    for fault in faults:
        console.print(f"[bold red]{fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
