"""A small ResNet in two ranks that share a GPU: eager, as one graph of torch.compile, and replayed.

Three steps of SGD under DistributedDataParallel on uneven parts of a batch are compared with those
of one process on the undivided batch in float64. Then steps are timed, the ways in turn:

    eager              converted layers
    one graph          the same, compiled with fullgraph=True
    reduce-overhead    the same as CUDA graphs, which only NCCL's messages can be part of
    unsynchronized     nn.BatchNorm2d, compiled with fullgraph=True

Over NCCL from 2.30 on, which lets ranks share a GPU, else over gloo; the JSON says which it was.

    python tools/gpu_session/gpu_compiled.py --seconds 200 --json FILE
    python tools/gpu_session/gpu_compiled.py --dry-run  # gloo, on the CPU, without Inductor
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_nets import resnet
from gpu_ranks import Row, backend_for_two, be_rank, begin, launch, name_of, save
from gpu_shared import Run, judged
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from syncbn_torch import convert_model

STEPS, ROUNDS = 3, 15
WAYS: dict[str, Row | None] = {
    "eager": None,
    "one graph": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "unsynchronized": {},
}
PARTS = (11, 5)  # samples of each rank
WIDTH, SIDE = 16, 64
DRY_WIDTH, DRY_SIDE = 4, 32

# ------------------------------------------------------------------------------- one rank


def measure(way: str, rank: int, device: torch.device, dry: bool) -> Row:
    """Graphs, seconds of the first step and of later ones; differences if layers synchronize."""
    width, side = (DRY_WIDTH, DRY_SIDE) if dry else (WIDTH, SIDE)
    torch.manual_seed(0)
    blocks = (1,) if dry else (1, 1, 1, 1)
    of_torch = resnet(nn.BatchNorm2d, width, blocks, smooth=True).to(device)
    net = copy.deepcopy(of_torch)
    if way != "unsynchronized":
        net = convert_model(net)
    options = WAYS[way]
    called: Any = net
    torch._dynamo.reset()
    counters.clear()
    if options is not None:
        called = torch.compile(
            net, fullgraph=True, **({"backend": "aot_eager"} if dry else options)
        )
    ids = [device] if device.type == "cuda" else None
    together = Run(net, DistributedDataParallel(called, device_ids=ids))
    exact = Run(copy.deepcopy(of_torch).double())
    own = Run(of_torch)
    start = sum(PARTS[:rank])
    rows = slice(start, start + PARTS[rank])
    first = 0.0
    for _ in range(STEPS):
        x = torch.randn(sum(PARTS), 3, side, side, device=device) + 1
        dy = torch.randn(sum(PARTS), 10, device=device) / sum(PARTS)
        exact.step(x.double(), dy.double())
        own.step(x, dy)
        begin = time.perf_counter()
        # gradients are averaged over ranks, whose losses are parts of a sum
        together.step(x[rows], dy[rows] * len(PARTS))
        first = first or finished(device) - begin
    found: Row = {"first": first, "graphs": counters["stats"]["unique_graphs"]}
    if way != "unsynchronized":
        found["from"] = {"float64": together.apart(exact, rows)}
        found["torch's error"] = own.apart(exact, slice(None))
        found["digests"] = together.digests()
    return found | {"times": times(together, x[rows], dy[rows], device, 2 if dry else ROUNDS)}


def times(run: Run, x: Tensor, dy: Tensor, device: torch.device, rounds: int) -> list[float]:
    """Seconds of training steps without DistributedDataParallel, whose hooks take their own."""
    found = []
    for _ in range(5 + rounds):  # the first ones warm up and record
        run.optimizer.zero_grad()
        dist.barrier()
        begin = finished(device)
        (run.called.module(x) * dy).sum().backward()
        run.optimizer.step()
        found.append(finished(device) - begin)
    return found[-rounds:]


def finished(device: torch.device) -> float:
    """The time at which all work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def be_one(options: argparse.Namespace) -> None:
    def work(device: torch.device, result: Row) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        result["ways"] = {}
        for way in WAYS:
            if way == "reduce-overhead" and options.backend == "gloo" and not options.dry_run:
                continue
            result["ways"][way] = measure(way, options.rank, device, options.dry_run)
            save(options.json, result)

    be_rank(options, work, patience=100)  # a rank that compiles makes the other one wait


# ------------------------------------------------------------------------------ all ranks


def of_ranks(way: str, ranks: list[Row]) -> Row:
    """What all ranks together have found for one way."""
    slower = list(map(max, *(rank["times"] for rank in ranks)))
    row: Row = {
        "way": way,
        "graphs": [rank["graphs"] for rank in ranks],
        "first": max(rank["first"] for rank in ranks),
        "step": statistics.median(slower),
    }
    return row | judged(ranks, True) if "from" in ranks[0] else row


def show(row: Row) -> None:
    for found in row["ways"]:
        text = f"{found['way']}: step {found['step'] * 1e3:.2f} ms, first {found['first']:.1f} s"
        text += f", graphs {found['graphs']}"
        if "right" in found:
            off = max(found["from"]["float64"].values())
            text += f"; {'right' if found['right'] else 'WRONG'}: {off:.1e} from float64"
        print(text)
    if "error" in row:
        print(f"failed: {row['error']}")


def main() -> int:
    options = begin(__doc__.split("\n")[0], be_one)
    end = time.monotonic() + options.seconds
    backend, version = backend_for_two(options.dry_run)
    result: Row = {"nccl": version, "groups": []}
    for wanted in dict.fromkeys((backend, "gloo")):  # gloo where NCCL has failed
        told, error = launch(__file__, wanted, 2, end - time.monotonic(), options.dry_run)
        known = [rank.get("ways", {}) for rank in told]
        ways = [way for way in WAYS if all(way in of_rank for of_rank in known)]
        row: Row = {"backend": wanted, "ways": [of_ranks(w, [r[w] for r in known]) for w in ways]}
        result["groups"].append(row if error is None else row | {"error": error})
        show(result["groups"][-1])
        if options.json:
            save(options.json, result)
        if error is None:
            break
    last = result["groups"][-1]
    wrong = [found["way"] for found in last["ways"] if not found.get("right", True)]
    print(
        f"{len(last['ways'])} of {len(WAYS)} ways over {name_of(last['backend'], 2)}, NCCL "
        f"{version}: {len(wrong)} wrong"
    )
    return 0 if last["ways"] and not wrong and "error" not in last else 1


if __name__ == "__main__":
    sys.exit(main())
