"""Training steps of whole networks: timm's, converted, over timm's own with torch's layers.

    python benchmarks/nets.py                      # the networks, some ten minutes
    python benchmarks/nets.py --nets resnet18 --rounds 5
    python benchmarks/nets.py --nets --activations # layers with an activation by themselves

The two networks take turns, forwards in one round and backwards in the next. "kept" is the memory
that a forward keeps for backward, without parameters. `--activations` compares layers alone with
`nn.BatchNorm2d` and torch's activation in place. Writes nets-DATE-THREADS.json to results/ or
--output.

`cpu.py` runs this script twice: with the usual allocator, and with one that gives no memory back,
because its page faults take up to 27 ms of a step, by chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import timm
import torch
from records import FOLDER, write
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import syncbn_torch
from syncbn_torch.inplace import InPlaceABN

NETS = [
    "resnet18", "resnet50", "efficientnet_b0", "mobilenetv3_large_100", "mobilenetv2_100",
    "densenet121", "regnetx_002",
]  # fmt: skip
SHAPE = (8, 3, 128, 128)
LAYERS = [
    (32, 64, 56, 56), (16, 96, 56, 56), (8, 256, 28, 28), (32, 512, 14, 14), (32, 1024, 7, 7),
    (8, 64, 16, 16),
]  # fmt: skip
ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.01, inplace=True),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
}


def in_turns(runs: Sequence[Callable[[], Any]], rounds: int) -> tuple[list[float], list[float]]:
    """`(seconds of torch by round, of ours)`, without the first two."""
    times: tuple[list[float], list[float]] = [], []
    for index in range(rounds + 2):
        for kind in (0, 1) if index % 2 else (1, 0):
            begin = time.perf_counter()
            runs[kind]()
            times[kind].append(time.perf_counter() - begin)
    return times[0][2:], times[1][2:]


def compared(times: tuple[list[float], list[float]]) -> dict[str, Any]:
    ratios = [t / o for t, o in zip(*times, strict=True)]
    return {
        "faster": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
        "step_seconds": dict(zip(("torch", "ours"), map(statistics.median, times), strict=True)),
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()


def kept(model: nn.Module, x: Tensor) -> float:
    """MiB that a forward keeps for backward, without parameters."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    del y
    return sum(found.values()) / 2**20


def network(name: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=100).train()
    ours = timm.create_model(name, num_classes=100).train()
    ours.load_state_dict(theirs.state_dict())
    ours = syncbn_torch.convert_model(ours)
    x, target = torch.randn(SHAPE), torch.randint(100, SHAPE[:1])
    runs = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        runs.append(lambda m=model, o=optimizer: step(m, o, x, target))
    row = {"net": name, **compared(in_turns(runs, rounds))}
    return row | {"kept_mib": {"torch": kept(theirs, x), "ours": kept(ours, x)}}


def layer(
    name: str, shape: tuple[int, ...], channels_last: bool, in_place: bool, rounds: int
) -> dict[str, Any]:
    """Forward and backward of a layer with its activation; in place after a multiplication."""
    torch.manual_seed(0)
    ours: nn.Module = syncbn_torch.SynchronizedBatchNorm2d(shape[1], activation=name)
    if in_place:
        ours = InPlaceABN(shape[1], activation=name)
    theirs = nn.Sequential(nn.BatchNorm2d(shape[1]), ACTIVATIONS[name])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.randn(shape).to(memory_format=layout) for _ in range(2))
    x.requires_grad_()

    def run(model: nn.Module) -> None:
        torch.autograd.grad(model(x * 1 if in_place else x), [x, *model.parameters()], dy)

    row = compared(in_turns([lambda: run(theirs), lambda: run(ours)], rounds))
    kind = "NHWC" if channels_last else "NCHW"
    return {"activation": name, "shape": shape, "layout": kind, "in place": in_place, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", nargs="*", default=NETS)
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print only JSON, for cpu.py")
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numba.set_num_threads(min(args.threads, numba.config.NUMBA_NUM_THREADS))
    rows, layers = [], []
    for name in args.nets:
        rows.append(network(name, args.rounds))
        if not args.json:
            print_row(name, rows[-1])
    cases = [(n, s, c, False) for n in ACTIVATIONS for c in (False, True) for s in LAYERS]
    cases += [("leaky_relu", s, c, True) for c in (False, True) for s in LAYERS]
    for case in cases if args.activations else ():
        layers.append(layer(*case, args.rounds))
        place = " in place" if case[3] else ""
        print_row(f"{layers[-1]['layout']} {case[1]} {case[0]}{place}", layers[-1])
    if args.json:
        print(json.dumps(rows))
        return 0
    apart = [row for row in layers if not row["in place"]]
    within = [row for row in layers if row["in place"]]
    for kind, found in (("nets", rows), ("layers", apart), ("layers in place", within)):
        ratios = [row["faster"] for row in found]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{kind}: geometric mean {mean:.3f}x, worst {min(ratios):.3f}x")
    facts = {"torch": torch.__version__, "threads": args.threads, "rounds": args.rounds}
    print(write(args.output, f"nets-DATE-{args.threads}", facts, nets=rows, layers=layers))
    return 0


def print_row(name: str, row: dict[str, Any]) -> None:
    low, high = row["quartiles"]
    seconds = row["step_seconds"]["torch"]
    text = f"{name}: {row['faster']:.3f}x ({low:.3f} to {high:.3f}) of {seconds * 1e3:.1f} ms"
    if "kept_mib" in row:
        text += ", kept {torch:.0f} MiB by torch, {ours:.0f} by ours".format(**row["kept_mib"])
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
