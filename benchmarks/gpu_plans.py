"""Plans of calls on a GPU: are results and launches those of new decisions, and the host's time.

One rank over NCCL, then two, as in `gpu_processes.py`; each result is written as it comes:

    bits      y, gradients and running statistics by a plan beside a new decision, equal to the bit;
              and how far they are from those of plain operations
    launches  kernels, grids and arguments but for addresses, by a plan beside a new decision
    streams   on a side stream, in two threads on one stream, in a captured graph: the same bits
    told      two ranks whose layers change places: what each of them raises
    host      microseconds of Python until all is launched, beside torch's layer, in turns

    python benchmarks/gpu_plans.py --seconds 350 --json FILE
    python benchmarks/gpu_plans.py --dry-run          # gloo on the CPU
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_nets import ours_in_group, torch_in_group
from gpu_processes import step_of
from gpu_ranks import backend_for, nccl_version, run_ranks
from gpu_timers import describe
from torch import nn

from syncbn_core.backends.cuda import kernels
from syncbn_core.errors import ProtocolError
from syncbn_torch import SyncBatchNorm
from syncbn_torch.backends import plain

SHAPES = [(8, 64, 64, 64), (32, 64, 56, 56), (32, 512, 7, 7)]
NETS = [(8, 3, 64, 64), (32, 3, 224, 224)]  # of ResNet-50
DTYPES = ("float32", "bfloat16")
Row = dict[str, Any]


@contextmanager
def decided_anew() -> Iterator[None]:
    with patch("syncbn_torch.forward.planned", lambda *_: None):
        yield


@contextmanager
def by_plain_operations() -> Iterator[None]:
    with decided_anew(), patch("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS):
        yield


@contextmanager
def noting(launches: list[Any]) -> Iterator[None]:
    """Note what is launched; of addresses, which are large, only where they are within 16 bytes."""
    launch_of = kernels.launch_of

    def noted(source: Any, device: int) -> Any:
        start = launch_of(source, device)

        def launch(grid: Any, stream: int, *arguments: Any) -> None:
            own = [n % 16 if type(n) is int and n > 1 << 32 else n for n in arguments]
            launches.append([source.key, grid, stream, *own])
            start(grid, stream, *arguments)

        return launch

    with patch("syncbn_core.backends.cuda.launcher.launch_of", noted):
        yield


def results(layer: Any, xs: Any, dy: Any) -> list[torch.Tensor]:
    """All that some steps give, and the running statistics after them."""
    found = []
    for x in xs:
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        found += [y.detach(), *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)]
    return found + [own.clone() for own in layer.buffers()]


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def made(shape: Any, dtype: str, device: torch.device) -> Any:
    """A layer with plans, inputs, and dy; the same in each call of a rank."""
    torch.manual_seed(dist.get_rank())
    xs = [torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(3)]
    return ours_in_group(shape[1]).to(device), xs, torch.randn_like(xs[0])


def bits(shape: Any, dtype: str, device: torch.device) -> Row:
    layer, xs, dy = made(shape, dtype, device)
    twin, other = copy.deepcopy(layer), copy.deepcopy(layer)
    by_plan: list[Any] = []
    anew: list[Any] = []
    with noting(by_plan):
        found = results(layer, xs, dy)
    with decided_anew(), noting(anew):
        expected = results(twin, xs, dy)
    with by_plain_operations():
        wide = results(other, xs, dy)
    pairs = [(a.double(), b.double()) for a, b in zip(found, wide, strict=True)]
    apart = max(((a - b).abs().max() / (b.abs().max() + 1)).item() for a, b in pairs)
    launches = {"launches": len(by_plan), "launches_equal": by_plan == anew}
    return {"equal": same(found, expected), "from_plain": apart, **launches}


def streams(shape: Any, dtype: str, device: torch.device) -> Row:
    layer, xs, dy = made(shape, dtype, device)
    twins = [copy.deepcopy(layer) for _ in range(2)]
    expected, found = results(layer, xs, dy), {}
    if dist.get_world_size() == 1:  # of two ranks, threads would need one order
        answers: dict[int, Any] = {}

        def run(number: int) -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            answers[number] = results(twins[number], xs, dy)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        found["threads"] = all(same(answers.get(n, ()), expected) for n in range(2))
    if device.type == "cuda":
        side, twin = torch.cuda.Stream(device), made(shape, dtype, device)[0]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = results(twin, xs, dy)
        torch.cuda.current_stream().wait_stream(side)
        found["side stream"] = same(on_side, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(layer, xs[:1], dy)
        graph.replay()
        found["captured"] = same(captured[:4], results(layer, xs[:1], dy)[:4])
    return found


class Pair(nn.Module):
    """Two layers, in an order that may change."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = SyncBatchNorm(channels), SyncBatchNorm(channels)
        self.turned = False

    def forward(self, x: torch.Tensor) -> Any:
        layers = (self.second, self.first) if self.turned else (self.first, self.second)
        return layers[1](layers[0](x))


def told(shape: Any, dtype: str, device: torch.device) -> Row:
    """Ranks whose layers change places after the first step."""
    pair, x = Pair(shape[1]).to(device), made(shape, dtype, device)[1][0]
    pair(x)
    pair.turned = dist.get_rank() == 1
    try:
        for _ in range(4):
            pair(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
    except ProtocolError as error:
        return {"told": str(error)}
    return {"told": None}


def host(case: Any, device: torch.device) -> Row:
    """Of each layer the 5th percentile and the median of microseconds, forward and both ways."""
    makers = {"ours": ours_in_group, "torch": torch_in_group}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    net = case[0] == "ResNet-50"
    row: Row = {}
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, make in makers.items():
        steps["both", name] = step_of(make, case, device)
        if not net:
            layer, (x, *_), _ = made(*case[1:], device)
            own = layer if name == "ours" else make(case[1][1]).to(device)
            steps["forward", name] = lambda own=own, x=x: own(x)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for number in range(6):
        for key, step in steps.items():
            for _ in range(2 if net or number == 0 else 20):
                wait()
                begin = time.perf_counter()
                try:
                    step()
                except (RuntimeError, ValueError) as error:  # torch has no layer on a CPU
                    row[" ".join(key)] = {"error": describe(error)}
                    break
                if number:
                    times[key].append(1e6 * (time.perf_counter() - begin))
    for key, found in times.items():
        if len(found) > 1:
            low, median = statistics.quantiles(found, n=20)[0], statistics.median(found)
            row[" ".join(key)] = {"low": low, "median": median}
    return row


def be_rank(rank: int, size: int, device: torch.device, dry: bool, path: Path) -> None:
    shapes, nets = ([(2, 8, 6, 6)], []) if dry else (SHAPES, NETS)
    layers = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    plan: list[tuple[str, Any, Callable[[], Row]]]
    plan = [("bits", own, lambda own=own: bits(*own, device)) for own in layers]
    plan += [("streams", own, lambda own=own: streams(*own, device)) for own in layers[:2]]
    cases = [("layer", *own) for own in layers]
    cases += [("ResNet-50", shape, dtype) for shape in nets for dtype in DTYPES]
    plan += [("host", own, lambda own=own: host(own, device)) for own in cases]
    if size > 1:  # last: the group is lost then
        plan.append(("told", layers[0], lambda: told(*layers[0], device)))
    rows = []
    for what, own, find in plan:
        row: Row = {"what": what, "case": own}
        try:
            row |= find()
        except Exception as error:
            row["error"] = describe(error)
        rows.append(row)
        path.with_suffix(f".{rank}").write_text(json.dumps(rows), encoding="utf-8")


def is_wrong(row: Row) -> bool:
    answers = (row.get("equal"), row.get("launches_equal"), *map(row.get, STREAMS))
    return "error" in row or False in answers or ("told" in row and not row["told"])


STREAMS = ("threads", "side stream", "captured")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=350.0, help="for everything")
    parser.add_argument("--json", type=Path, default=Path("plans.json"))
    parser.add_argument("--dry-run", action="store_true", help="tiny, gloo on the CPU")
    options = parser.parse_args()
    kind = "cpu" if options.dry_run else "cuda"
    groups: list[Row] = []
    part = options.json.with_suffix(".part")
    for size in (1, 2):
        group: Row = {"backend": backend_for(size, kind), "ranks": size, "nccl": nccl_version()}
        try:
            run_ranks(be_rank, size, kind, options.seconds / 2, options.dry_run, part)
        except Exception as error:
            group["error"] = describe(error)
        group["rows"] = []
        for rank in range(size):
            own = part.with_suffix(f".{rank}")
            if own.exists():
                rows = json.loads(own.read_text(encoding="utf-8"))
                group["rows"] += [row | {"rank": rank} for row in rows]
                own.unlink()
        groups.append(group)
        options.json.write_text(json.dumps(groups) + "\n", encoding="utf-8")
        for row in group["rows"]:
            print(group["backend"], size, row)
    rows = [row for group in groups for row in group["rows"]]
    wrong = [row for row in rows if is_wrong(row)]
    failed = [group["error"] for group in groups if "error" in group]
    print(f"{len(rows)} results, {len(wrong)} wrong; failed: {failed or 'none'}")
    return int(bool(failed or wrong) or not rows)


if __name__ == "__main__":
    sys.exit(main())
