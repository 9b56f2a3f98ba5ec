"""What 53 layers cost in a ResNet-50, on the host and on the device: ours and torch's, in turns.

Forward and backward of the whole net, and of its 53 layers alone, each on an input of its own of
the shape that it has in the net:

    no group          ours as it is used, ours always by our kernels, nn.BatchNorm2d
    group of one      ours, the function of nn.SyncBatchNorm, nn.BatchNorm2d
    group of two      the same, and the ranks share the GPU (NCCL from 2.30 on, else gloo)

Seconds per step: `host` until an eager step is issued, `wall` until it is done, `graph` of a
replayed CUDA graph, which is the device's alone. `profile`: the operations that take most time on
the host and on the device in an eager step. Rank 0 tells; ranks that share a GPU take turns on it.

    python tools/gpu_session/gpu_steps.py --seconds 150 --json FILE
    python tools/gpu_session/gpu_steps.py --dry-run  # a tiny net on the CPU, without graphs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_nets import Norm, ours_in_group, resnet, shapes_of, torch_in_group
from gpu_ranks import (
    NO_GROUP,
    Row,
    backend_for_two,
    be_rank,
    begin,
    launch,
    name_of,
    save,
    sentence_of,
)
from gpu_timers import Cpu, Cuda
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from syncbn_torch import SyncBatchNorm
from syncbn_torch.batchnorm import always_ours

BATCH, SIDE = 4, 224
SETTINGS = {"float32, NCHW": False, "bfloat16, channels_last": True}
ROUNDS, CALLS, ROWS = 5, 10, 15
Step = Callable[[int], Any]

# ------------------------------------------------------------------------------- one rank


def contenders(grouped: bool) -> dict[str, tuple[Norm, bool]]:
    """Layers by name, and whether ours are to compute in any size by our kernels."""
    of_torch = {"nn.BatchNorm2d": (nn.BatchNorm2d, False)}
    if not grouped:
        ours = {"ours": (SyncBatchNorm, False), "ours, our kernels": (SyncBatchNorm, True)}
        return ours | of_torch
    name = "nn.SyncBatchNorm" if dist.get_world_size() > 1 else "function of nn.SyncBatchNorm"
    return {"ours": (ours_in_group, False), name: (torch_in_group, False)} | of_torch


def step_of_net(net: nn.Module, x: Tensor, dy: Tensor, narrow: bool) -> Step:
    parameters = list(net.parameters())

    def step(_: int) -> tuple[Tensor, ...]:
        # its cache of narrow weights would be of one capture only
        with torch.autocast(x.device.type, torch.bfloat16, narrow, cache_enabled=False):
            y = net(x)
        return torch.autograd.grad(y, parameters, dy.to(y.dtype))

    return step


def step_of_layers(norm: Norm, xs: list[Tensor], dys: list[Tensor]) -> Step:
    # in a net, because a layer's name there is looked up for the profile
    layers = nn.ModuleList(norm(x.shape[1]).to(x.device) for x in xs)
    leaves = [*xs, *layers.parameters()]

    def step(_: int) -> tuple[Tensor, ...]:
        ys = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        return torch.autograd.grad(ys, leaves, dys)

    return step


def steps_of(norm: Norm, shapes: list[tuple[int, ...]], x: Tensor, narrow: bool) -> dict[str, Step]:
    """The steps that are timed: of a net of these layers, and of the layers alone."""
    form = torch.channels_last if narrow else torch.contiguous_format
    dtype = torch.bfloat16 if narrow else torch.float32

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=x.device).to(dtype).contiguous(memory_format=form)

    net = net_of(norm, x.device.type == "cpu").to(x.device, memory_format=form)
    xs = [random(shape).requires_grad_() for shape in shapes]
    return {
        "net": step_of_net(net, x, torch.randn(len(x), 10, device=x.device), narrow),
        "layers": step_of_layers(norm, xs, [random(shape) for shape in shapes]),
    }


def net_of(norm: Norm, dry: bool) -> nn.Module:
    return resnet(norm, 4, (1,)) if dry else resnet(norm)


def wait_for_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


def eager(step: Step, timer: Cuda, calls: int) -> tuple[float, float]:
    """`(host, wall)` seconds per step."""
    timer.wait()
    start = time.perf_counter()
    for i in range(calls):
        step(i)
    issued = time.perf_counter()
    timer.wait()
    return (issued - start) / calls, (time.perf_counter() - start) / calls


def most_time(step: Step, timer: Cuda, calls: int = 3) -> Row:
    """The operations with most time of their own, microseconds per step."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (timer.device.type == "cuda")
    with profile(activities=activities):
        step(0)  # names are looked up, and the profiler starts
    with profile(activities=activities) as found:
        for i in range(calls):
            step(i)
        timer.wait()
    times = {"host": "self_cpu_time_total", "device": "self_device_time_total"}
    rows = [
        {"name": event.key[:100], "calls": event.count / calls}
        | {where: getattr(event, key, 0.0) / calls for where, key in times.items()}
        for event in found.key_averages()
    ]
    return {
        where: sorted((row for row in rows if row[where] > 0), key=lambda row: -row[where])[:ROWS]
        for where in times
    } | {f"{where} in all": sum(row[where] for row in rows) for where in times}


class Measured:
    """A step of a contender and what was found out about it."""

    def __init__(self, step: Step, ours: bool) -> None:
        self.step, self.ours = step, ours
        self.row: Row = {}
        self.samples: dict[str, list[float]] = {}
        self.replay: Callable[[], float] | None = None

    def trying(self, action: Callable[[], Any]) -> None:
        """Every rank gets the same error, so that none waits for another."""
        if "error" in self.row:
            return
        way: AbstractContextManager[Any] = always_ours() if self.ours else nullcontext()
        try:
            with way:
                action()
        except (RuntimeError, ValueError) as error:
            self.row["error"] = sentence_of(error)

    def time(self, timer: Cuda, calls: int) -> None:
        wait_for_ranks()
        host, wall = eager(self.step, timer, calls)
        self.samples.setdefault("host", []).append(host)
        self.samples.setdefault("wall", []).append(wall)
        if self.replay:
            wait_for_ranks()
            self.samples.setdefault("graph", []).append(self.replay())

    def capture(self, timer: Cuda) -> None:
        sample, captured = timer.prepare(self.step, 1, 1)
        self.row["captured"] = captured
        if captured:
            self.replay = sample

    def profile(self, timer: Cuda) -> None:
        self.row["profile"] = most_time(self.step, timer)


def measure(setting: str, timer: Cuda, options: argparse.Namespace) -> Row:
    """All contenders in a setting."""
    dry, grouped, narrow = options.dry_run, options.backend != NO_GROUP, SETTINGS[setting]
    form = torch.channels_last if narrow else torch.contiguous_format
    x = torch.randn(2 if dry else BATCH, 3, *(2 * [32 if dry else SIDE]), device=timer.device)
    x = x.contiguous(memory_format=form)
    shapes = shapes_of(net_of(nn.BatchNorm2d, dry).to(timer.device), nn.BatchNorm2d, x)
    found: dict[str, dict[str, Measured]] = {"net": {}, "layers": {}}
    for name, (norm, ours) in contenders(grouped).items():
        for part, step in steps_of(norm, shapes, x, narrow).items():
            found[part][name] = Measured(step, ours)
    every = [measured for part in found.values() for measured in part.values()]
    calls = 2 if dry else CALLS
    for measured in every:
        measured.trying(lambda m=measured: [m.step(i) for i in range(2)])
        if not dry and options.backend != "gloo":  # whose messages can't be captured
            measured.trying(lambda m=measured: m.capture(timer))
    for _ in range(2 if dry else ROUNDS):
        for measured in every:
            measured.trying(lambda m=measured: m.time(timer, calls))
    for measured in every:
        measured.trying(lambda m=measured: m.profile(timer))
        for key, samples in measured.samples.items():
            measured.row |= {key: statistics.median(samples), f"{key}_samples": samples}
    return {"setting": setting, "count": len(shapes), "shapes": shapes} | {
        "found": {part: {n: m.row for n, m in of_part.items()} for part, of_part in found.items()}
    }


def be_one(options: argparse.Namespace) -> None:
    def work(device: torch.device, result: Row) -> None:
        timer = Cpu() if options.dry_run else Cuda()
        result["rows"] = []
        for setting in SETTINGS:
            torch.manual_seed(0)
            result["rows"].append(measure(setting, timer, options))
            save(options.json, result)
            timer.release()

    be_rank(options, work)


# ------------------------------------------------------------------------------ all ranks


def show(row: Row) -> None:
    where = name_of(row["backend"], row["ranks"])
    for case in row["rows"]:
        for part, found in case["found"].items():
            for name, times in found.items():
                text = times.get("error") or ", ".join(
                    f"{key} {1e3 * times[key]:.2f}"
                    for key in ("host", "wall", "graph")
                    if key in times
                )
                print(f"{where}, {case['setting']}, {part}, ms: {name}: {text}")
    if "error" in row:
        print(f"{where}: failed: {row['error']}")


def main() -> int:
    options = begin(__doc__.split("\n")[0], be_one)
    end = time.monotonic() + options.seconds
    shared, version = backend_for_two(options.dry_run)
    groups = [(NO_GROUP, 1), ("gloo" if options.dry_run else "nccl", 1), (shared, 2)]
    result: Row = {"nccl": version, "batch": BATCH, "groups": []}
    for index, (backend, size) in enumerate(groups):
        seconds = (end - time.monotonic()) / (len(groups) - index)
        told, error = launch(__file__, backend, size, seconds, options.dry_run)
        row: Row = {"backend": backend, "ranks": size, "rows": told[0].get("rows", [])}
        result["groups"].append(row if error is None else row | {"error": error})
        show(result["groups"][-1])
        if options.json:
            save(options.json, result)
    rows = [row for group in result["groups"] for row in group["rows"]]
    ours = [part["ours"] for row in rows for part in row["found"].values()]
    failed = sum("error" in group for group in result["groups"])
    wanted = len(groups) * len(SETTINGS)
    print(f"{len(rows)} of {wanted} settings measured, {failed} of {len(groups)} groups failed")
    return 0 if len(rows) == wanted and not failed and all("wall" in row for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
