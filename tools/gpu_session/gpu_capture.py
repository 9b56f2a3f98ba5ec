"""Forward and backward in a process group, captured into a CUDA graph and replayed, against eager.

A small ResNet whose layers talk in a group of one rank, and of two if NCCL lets them share the GPU.
Before each of the replays fresh x and dy are copied into the graph's own; output, gradients and
running statistics are compared with those of the same net, run eagerly on the same numbers.

    python tools/gpu_session/gpu_capture.py --seconds 60 --json FILE
    python tools/gpu_session/gpu_capture.py --dry-run  # gloo on the CPU, nothing is captured
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable

import torch
from gpu_nets import ours_in_group, resnet
from gpu_ranks import Row, backend_for_two, be_rank, begin, launch, name_of, save
from torch import Tensor, nn

REPLAYS, DRY_REPLAYS = 100, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# relative to the largest value; cuDNN may take other kernels within a graph
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
WARM_UP = 3  # steps before the capture, which compile and check what there is to

# ------------------------------------------------------------------------------- one rank


class Step:
    """Forward and backward of a net on buffers that stay where they are."""

    def __init__(self, net: nn.Module, dtype: torch.dtype, x: Tensor, dy: Tensor) -> None:
        self.net, self.dtype = net, dtype
        self.x, self.dy = x.clone().requires_grad_(), dy.clone()
        self.results: tuple[Tensor, ...] = ()

    def fill(self, x: Tensor, dy: Tensor) -> None:
        with torch.no_grad():
            self.x.copy_(x)
        self.dy.copy_(dy)

    def run(self) -> None:
        leaves = [self.x, *self.net.parameters()]
        narrow = self.dtype != torch.float32
        # its cache of narrow weights would be of one capture only
        with torch.autocast(self.x.device.type, self.dtype, narrow, cache_enabled=False):
            y = self.net(self.x)
        self.results = y.detach(), *torch.autograd.grad(y, leaves, self.dy.to(y.dtype))

    def captured(self) -> Callable[[], None]:
        """What replays a captured `run`."""
        if self.x.device.type != "cuda":
            return self.run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph.replay

    def tensors(self) -> list[Tensor]:
        return [*self.results, *self.net.state_dict().values()]


def compare(dtype: str, device: torch.device, dry: bool) -> Row:
    replays, width, side = (DRY_REPLAYS, 4, 32) if dry else (REPLAYS, 16, 64)
    torch.manual_seed(0)
    net = resnet(ours_in_group, width, (1, 1, 1, 1), smooth=True).to(device)
    torch.manual_seed(1 + torch.distributed.get_rank())

    def fresh() -> tuple[Tensor, Tensor]:
        return torch.randn(8, 3, side, side, device=device), torch.randn(8, 10, device=device)

    first = fresh()  # the same for both, whose running statistics have to stay the same
    eager, graph = (Step(each, DTYPES[dtype], *first) for each in (net, copy.deepcopy(net)))
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    for step in (eager, graph):
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for _ in range(WARM_UP):
                step.run()
        if stream:
            torch.cuda.current_stream().wait_stream(stream)
    replay = graph.captured()
    largest, same = torch.zeros((), dtype=torch.float64, device=device), 0
    for _ in range(replays):
        x, dy = fresh()
        for step, run in ((eager, eager.run), (graph, replay)):
            step.fill(x, dy)
            run()
        pairs = list(zip(graph.tensors(), eager.tensors(), strict=True))
        same += all(torch.equal(a, b) for a, b in pairs)
        for a, b in pairs:
            difference = (a.double() - b.double()).abs().max()
            relative = difference / b.double().abs().max().clamp(min=1e-3)
            largest = torch.maximum(largest, relative)  # NaN stays
    found = {"replays": replays, "bitwise": same, "largest": largest.item()}
    return {"dtype": dtype, **found, "right": found["largest"] <= TOLERANCES[dtype]}


def be_one(options: argparse.Namespace) -> None:
    def work(device: torch.device, result: Row) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        result["rows"] = []
        for dtype in DTYPES:
            result["rows"].append(compare(dtype, device, options.dry_run))
            save(options.json, result)

    be_rank(options, work)


# ------------------------------------------------------------------------------ all ranks


def attempt(backend: str, size: int, seconds: float, dry: bool) -> Row:
    told, error = launch(__file__, backend, size, seconds, dry)
    rows = [dict(row, rank=n) for n, rank in enumerate(told) for row in rank.get("rows", [])]
    row: Row = {"backend": backend, "ranks": size, "rows": rows}
    return row if error is None else row | {"error": error}


def show(row: Row) -> None:
    where = name_of(row["backend"], row["ranks"])
    for case in row["rows"]:
        print(
            f"{where}, rank {case['rank']}, {case['dtype']}: "
            f"{'right' if case['right'] else 'WRONG'}: {case['bitwise']} of {case['replays']} "
            f"replays are bitwise eager's, largest difference {case['largest']:.1e}"
        )
    if "error" in row:
        print(f"{where}: failed: {row['error']}")


def main() -> int:
    options = begin(__doc__.split("\n")[0], be_one)
    end = time.monotonic() + options.seconds
    backend, version = backend_for_two(options.dry_run)
    result: Row = {"nccl": version, "captured": not options.dry_run, "groups": []}
    sizes = [1, 2]
    if backend == "gloo" and not options.dry_run:  # gloo's messages can't be captured
        backend, sizes = "nccl", [1]
        result["skipped"] = "two ranks: NCCL before 2.30 does not let them share a GPU"
    for size in sizes:
        seconds = (end - time.monotonic()) / (len(sizes) + 1 - size)
        result["groups"].append(attempt(backend, size, seconds, options.dry_run))
        show(result["groups"][-1])
        if options.json:
            save(options.json, result)
    groups = result["groups"]
    cases = [case for row in groups for case in row["rows"]]
    failed, wrong = sum("error" in row for row in groups), sum(not c["right"] for c in cases)
    print(
        f"{len(cases)} nets captured over {backend}, NCCL {version}: {wrong} wrong, {failed} of "
        f"{len(groups)} groups failed"
    )
    return 0 if cases and not wrong and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
