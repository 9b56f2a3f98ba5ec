"""Training steps of whole networks: timm's, converted, over timm's own with torch's layers.

    python benchmarks/nets.py                      # six networks, some five minutes
    python benchmarks/nets.py --nets resnet18 --rounds 5

A loop over one layer finds its code and its data in the caches; between the convolutions of a
network they are gone. So this also measures the time per call of the layers within the steps, and
how much of it is spent in our kernels: the rest is Python and torch.

The two networks take turns, forwards in one round and backwards in the next. `cpu.py` runs this
script twice: with the usual allocator, and with one that gives no memory back, because its page
faults take up to 27 ms of a step, by chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import timm
import torch
from torch import Tensor, nn

import syncbn_torch
from syncbn_core import numpy_steps as steps

NETS = [
    "resnet18", "resnet50", "efficientnet_b0", "mobilenetv3_large_100", "densenet121",
    "regnetx_002",
]  # fmt: skip
SHAPE = (8, 3, 128, 128)
CALLS = 5  # steps in which single calls are timed


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step by round, and microseconds per call of the layers within steps."""
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=100).train()
    ours = timm.create_model(name, num_classes=100).train()
    ours.load_state_dict(theirs.state_dict())
    ours = syncbn_torch.convert_model(ours)
    x, target = torch.randn(SHAPE), torch.randint(100, SHAPE[:1])
    models = {"torch": theirs, "ours": ours}
    runs: dict[str, Callable[[], None]] = {}
    for kind, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        runs[kind] = lambda m=model, o=optimizer: step(m, o, x, target)
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for index in range(rounds + 2):
        for kind in runs if index % 2 else reversed(runs):
            begin = time.perf_counter()
            runs[kind]()
            if index >= 2:
                times[kind].append(time.perf_counter() - begin)
    ratios = [t / o for t, o in zip(times["torch"], times["ours"], strict=True)]
    return {
        "net": name,
        "faster": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "step_seconds": {kind: statistics.median(seconds) for kind, seconds in times.items()},
        "calls": per_call(runs),
    }


# ------------------------------------------------------------------- times of single calls


def per_call(runs: dict[str, Callable[[], None]]) -> dict[str, dict[str, float]]:
    """Mean microseconds per call, by which kernels computed it; the same layers of both networks.

    Torch's forward is that of `F.batch_norm` alone, without its layer's Python.
    """
    found = {"torch": Calls(nn.functional, "batch_norm")}
    found["ours"] = Calls(syncbn_torch.SynchronizedBatchNorm2d.__mro__[1], "forward")
    for _ in range(CALLS):
        for kind, run in runs.items():
            with found[kind].timed():
                run()
    sums: dict[str, dict[str, list[float]]] = {}
    for theirs, ours in zip(*(found[kind].medians() for kind in runs), strict=True):
        into = sums.setdefault("our kernels" if ours.pop("ours") else "torch's kernel", {})
        for part in ("forward", "backward"):
            into.setdefault(f"{part}, torch", []).append(theirs[part])
        for part, seconds in ours.items():
            into.setdefault(part, []).append(seconds)
    return {
        kind: {"layers": len(parts["forward"])}
        | {part: statistics.mean(seconds) * 1e6 for part, seconds in parts.items()}
        for kind, parts in sums.items()
    }


class Calls:
    """Times what is called as `owner.name`, the autograd node of its result, and our kernels."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.steps: list[list[dict[str, float]]] = []  # the calls of each step, in their order
        self.in_kernels = 0.0

    def medians(self) -> list[dict[str, float]]:
        """Of each call of a step, over the steps."""
        return [
            {part: statistics.median(call[part] for call in same) for part in same[0]}
            for same in zip(*self.steps, strict=True)
        ]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """In the block, which is a step, every call is timed."""
        original, launch = getattr(self.owner, self.name), steps.launch
        self.steps.append([])

        def counted(*arguments: Any) -> None:
            begin = time.perf_counter()
            launch(*arguments)
            self.in_kernels += time.perf_counter() - begin

        def call(*arguments: Any) -> Tensor:
            self.in_kernels = 0.0
            begin = time.perf_counter()
            y: Tensor = original(*arguments)
            self.done(y, time.perf_counter() - begin)
            return y

        try:
            steps.launch = counted
            setattr(self.owner, self.name, call)
            yield
        finally:
            steps.launch = launch
            setattr(self.owner, self.name, original)

    def done(self, y: Tensor, seconds: float) -> None:
        node = y.grad_fn
        assert node is not None
        ours = type(node).__name__.startswith(("BatchNormFunction", "BatchNormOfParts"))
        row = {"ours": ours, "forward": seconds}
        if ours:
            row["forward, kernels"] = self.in_kernels
        self.steps[-1].append(row)
        begin = 0.0

        def before(_: Any) -> None:
            nonlocal begin
            self.in_kernels, begin = 0.0, time.perf_counter()

        def after(_: Any, __: Any) -> None:
            row["backward"] = time.perf_counter() - begin
            if ours:
                row["backward, kernels"] = self.in_kernels

        node.register_prehook(before)
        node.register_hook(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print only JSON, for cpu.py")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numba.set_num_threads(min(args.threads, numba.config.NUMBA_NUM_THREADS))
    rows = []
    for name in args.nets:
        rows.append(measure(name, args.rounds))
        if not args.json:
            print_row(rows[-1])
    if args.json:
        print(json.dumps(rows))
    else:
        ratios = [row["faster"] for row in rows]
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}x, worst {min(ratios):.3f}x")
    return 0


def print_row(row: dict[str, Any]) -> None:
    low, high = row["quartiles"]
    seconds = row["step_seconds"]["torch"]
    print(f"{row['net']}: {row['faster']:.3f}x ({low:.3f} to {high:.3f}) of {seconds * 1e3:.0f} ms")
    for kind, parts in row["calls"].items():
        cells = ", ".join(f"{part} {us:.0f}" for part, us in parts.items() if part != "layers")
        print(f"    {parts['layers']} layers on {kind}, us per call: {cells}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
