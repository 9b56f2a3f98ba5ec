"""Several processes, each with its model in one graph of torch.compile, trained as one device.

    torchrun --nproc-per-node 2 examples/train_compiled.py

Each process takes its share of each batch of handwritten digits; the shares differ in size.
Afterwards the first process trains a copy with `nn.BatchNorm2d` on the whole batches, without
torch.compile, from the same start. The script ends with status 1 if the two differ by more than
rounding, or if a process needed more than one graph.
"""

import argparse
import copy
import os
import sys
import time
from itertools import chain

import torch
import torch.distributed as dist
from digits import TOLERANCE, difference, load, network
from rich.console import Console
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from syncbn_torch import convert_model


def train(
    call: nn.Module,
    model: nn.Module,
    data: tuple[Tensor, ...],
    args: argparse.Namespace,
    rank: int,
    size: int,
) -> dict[str, Tensor]:
    """Train `model` by `call` on the share of `rank` among `size`; its state at the end."""
    images, labels = data[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(images), generator=order)[: args.steps * args.batch_size]
    for batch in tqdm(
        rows.split(args.batch_size), unit="step", disable=None if rank == 0 else True
    ):
        mine = batch.tensor_split(size)[rank]
        x = images[mine]
        torch._dynamo.mark_dynamic(x, 0)  # one graph for all sizes from 2 on
        loss = nn.functional.cross_entropy(call(x), labels[mine], reduction="sum")
        optimizer.zero_grad()
        # DistributedDataParallel averages over the processes: this is the mean over the batch
        (loss * (size / len(batch))).backward()
        optimizer.step()
    return model.state_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=31, help="over all processes")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # processes are parallel already, and the model is tiny

    torch.manual_seed(0)
    data = load(torch.float64)
    alone = network(torch.float64)
    model = convert_model(copy.deepcopy(alone))
    graph = torch.compile(model, backend=args.backend, fullgraph=True)
    begin = time.perf_counter()
    # compile first, then wrap; torch can hang if the wrapper outlives the process group
    state = train(DistributedDataParallel(graph), model, data, args, rank, size)
    seconds = time.perf_counter() - begin

    faults = []
    graphs = counters["stats"]["unique_graphs"]
    if graphs != 1:
        faults.append(f"rank {rank}: expected 1 graph, got {graphs}")
    if rank == 0:
        expected = train(alone, alone, data, args, 0, 1)
        off = max(difference(state, expected, running) for running in (False, True))
        text = f"{size} processes, {graphs} graph each, {seconds:.1f} s with the compilation"
        Console(soft_wrap=True).print(f"{text}; largest difference from one device {off:.1e}")
        bound = TOLERANCE[torch.float64][1]
        if not off <= bound:
            faults.append(f"expected a difference of at most {bound:.0e}, got {off:.1e}")
    of_all: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(of_all, faults)
    dist.destroy_process_group()
    if rank == 0:
        for fault in chain.from_iterable(of_all):
            Console().print(f"[bold red]{fault}")
    return 1 if any(of_all) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # not sys.exit: the graph keeps the group, whose threads may abort Python as it ends
    os._exit(status)
