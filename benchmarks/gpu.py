"""Speed and error of a lone layer on a GPU, beside torch's kernels and what memory allows.

    floor: forward 3 B / bandwidth, backward 5 B / bandwidth

B: bytes of the activation; bandwidth: that of a device copy, bytes read and written, in this run.
Forward reads x twice and writes y; backward reads x and dy twice and writes dx.

Device time is that of a CUDA graph over buffers that together exceed three times the L2 cache;
the replay before it is still running when the timed one is launched. Outputs are kept, so that
these rotate too. Contenders take turns within a case. Torch's counters of batches, a kernel of
its own for each layer, are left out; ours is counted.

    python benchmarks/gpu.py --seconds 240      # on a machine with a GPU
    python benchmarks/gpu.py --dry-run          # is this script in order? No figure means anything
"""

from __future__ import annotations

import argparse
import gc
import math
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gpu_report
import torch
from gpu_cases import DRY_LARGE, LARGE, Case, Selection, everything
from gpu_contenders import (
    CONTENDERS,
    MOST_BUFFERS,
    UNMASKED,
    Contender,
    Net,
    Parameters,
    by_torch,
)
from gpu_timers import Cpu, Cuda, Sample, describe
from torch import Tensor

from syncbn_torch.forward import always_ours

RESULTS = ("y", "dx", "dweight", "dbias")
ROUNDS = 5
MOST_BYTES = 20e9

# ------------------------------------------------------------------------ measurements


class Trial:
    """A contender on buffers of a case: what speed, host time and error are measured of."""

    def __init__(self, build: Callable[[Parameters], Net], sets: Sequence[tuple[Tensor, Tensor]]):
        self.p = Parameters(sets[0][0])
        self.net, self.sets = build(self.p), sets
        self.outputs: list[Tensor] = []

    def _gradients(self, y: Tensor, i: int, again: bool = False) -> tuple[Tensor, ...]:
        x, dy = self.sets[i % len(self.sets)]
        return torch.autograd.grad(y, (x, self.p.weight, self.p.bias), dy, retain_graph=again)

    def forward(self, i: int) -> Tensor:
        return self.net(self.sets[i % len(self.sets)][0]).detach()

    def both(self, i: int) -> tuple[Tensor, ...]:
        y = self.net(self.sets[i % len(self.sets)][0])
        return y.detach(), *self._gradients(y, i)

    def ready_for_backward(self) -> None:
        self.outputs = [self.net(x) for x, _ in self.sets]

    def backward(self, i: int) -> tuple[Tensor, ...]:
        return self._gradients(self.outputs[i % len(self.sets)], i, again=True)


def buffers(case: Case, count: int, timer: Cuda, mean: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Pairs of x and dy."""
    torch.manual_seed(0)
    device, make = timer.device, case.tensor
    return [(make(device, mean).requires_grad_(), make(device)) for _ in range(count)]


def contenders_for(timer: Cuda, *more: Contender) -> list[Contender]:
    """Those that run here."""
    every = (*CONTENDERS, *more)
    return [c for c in every if timer.device.type == "cuda" or not c.needs_cuda]


def with_medians(row: dict[str, Any]) -> dict[str, Any]:
    sampled = {key.removesuffix("_samples"): row[key] for key in row if key.endswith("_samples")}
    return {key: statistics.median(samples) for key, samples in sampled.items()} | row


def measure_bandwidth(timer: Cuda) -> float:
    source = torch.ones(timer.copied, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    sample, _ = timer.prepare(lambda i: target.copy_(source), 10, 1)
    return 2 * timer.copied / statistics.median(sample() for _ in range(3 * ROUNDS))


def measure_speed(case: Case, timer: Cuda, bandwidth: float, large: float) -> dict[str, Any]:
    """Device time of every contender, in seconds per call."""
    wanted = max(2, math.ceil(3 * timer.l2 / case.nbytes))
    fitting = max(2, int(MOST_BYTES // (2 * case.nbytes)))
    count = min(wanted, fitting, MOST_BUFFERS)
    sets = buffers(case, count, timer)
    found: dict[str, dict[str, Any]] = {}
    samples: dict[tuple[str, str], Sample] = {}
    for contender in contenders_for(timer):
        if not contender.times(case.shape):
            continue
        row = found[contender.name] = {}
        try:
            trial = Trial(contender.build, sets[: contender.most])
            kept = len(trial.sets)
            steps = min(contender.most, max(kept, min(64, math.ceil(timer.work / case.nbytes))))
            row.update(buffers=kept, steps=steps, graph=True)
            parts = {"forward": trial.forward, "both": trial.both}
            if case.nbytes >= large:
                with timer.current():
                    trial.ready_for_backward()
                parts["backward"] = trial.backward
            for part, step in parts.items():
                sample, captured = timer.prepare(step, steps, kept)
                samples[contender.name, part] = sample
                row["graph"] = row["graph"] and captured
        except Exception as error:
            row["error"] = describe(error)
    for _ in range(ROUNDS):
        for (name, part), sample in samples.items():
            found[name].setdefault(f"{part}_samples", []).append(sample())
    found = {name: with_medians(row) for name, row in found.items()}
    for row in found.values():
        if "both" in row:
            row["backward_difference"] = row["both"] - row["forward"]
    floor = {"forward": 3 * case.nbytes / bandwidth, "backward": 5 * case.nbytes / bandwidth}
    cold = count * case.nbytes >= 3 * timer.l2
    return {**vars(case), "nbytes": case.nbytes, "cold": cold, "floor": floor, "found": found}


def measure_host(case: Case, timer: Cuda) -> dict[str, Any]:
    """Forward + backward, eagerly: time until the last call is issued, and until all is done."""
    sets = buffers(case, 2, timer)
    found: dict[str, dict[str, Any]] = {}
    for number, contender in product(range(ROUNDS + 1), contenders_for(timer, UNMASKED)):
        row = found.setdefault(contender.name, {})
        try:
            trial = Trial(contender.build, sets)
            trial.both(0)
            timer.wait()
            start = time.perf_counter()
            for i in range(timer.calls):
                trial.both(i)
            issued = time.perf_counter()
            timer.wait()
            ended = time.perf_counter()
        except Exception as error:
            row["error"] = describe(error)
            continue
        if number > 0:  # the first warmed up
            row.setdefault("host_samples", []).append((issued - start) / timer.calls)
            row.setdefault("wall_samples", []).append((ended - start) / timer.calls)
    medians = {name: with_medians(row) for name, row in found.items()}
    return {**vars(case), "nbytes": case.nbytes, "found": medians}


def measure_error(case: Case, timer: Cuda, mean: float) -> dict[str, Any]:
    """Largest absolute error relative to the largest value, against float64."""
    sets = buffers(case, 1, timer, mean)
    wide = [(sets[0][0].detach().double().requires_grad_(), sets[0][1].double())]
    expected = Trial(lambda p: by_torch(p, False), wide).both(0)
    found: dict[str, dict[str, Any]] = {}
    for contender in contenders_for(timer):
        try:
            results = Trial(contender.build, sets).both(0)
            found[contender.name] = {
                name: ((a.double() - e).abs().max() / e.abs().max()).item()
                for name, a, e in zip(RESULTS, results, expected, strict=True)
            }
        except Exception as error:
            found[contender.name] = {"error": describe(error)}
    return {**vars(case), "mean": mean, "found": found}


# -------------------------------------------------------------------------------- runs


def measure_all(results: dict[str, Any], timer: Cuda, seconds: float, selection: Selection) -> None:
    """Fill `results`; cases for which no time is left stay in `results["skipped"]`."""
    deadline = time.monotonic() + 0.97 * seconds
    results["bandwidth"] = bandwidth = measure_bandwidth(timer)
    print(f"device copy: {bandwidth / 1e12:.3f} TB/s", flush=True)
    for case, mean in product(selection.errors, (0.0, 100.0)):
        results["errors"].append(measure_error(case, timer, mean))
    for case in selection.host:
        results["host"].append(measure_host(case, timer))
    waiting: list[Case] = results["skipped"]
    waiting += selection.speed
    longest = 0.0
    while waiting and (start := time.monotonic()) + longest < deadline:
        row = measure_speed(waiting[0], timer, bandwidth, results["large"])
        results["cases"].append(row)
        print(waiting.pop(0), gpu_report.line(row), flush=True)
        timer.release()
        longest = max(longest, time.monotonic() - start)
    results["bandwidth_after"] = measure_bandwidth(timer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    parser.add_argument("--json", type=Path, help="that file itself")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run tells whether this script is in order")

    timer = Cpu() if options.dry_run else Cuda()
    results: dict[str, Any] = {"dry_run": options.dry_run, "machine": timer.facts()}
    large = DRY_LARGE if options.dry_run else LARGE
    results.update(large=large, cases=[], errors=[], host=[], skipped=[], aborted=None)
    gc.freeze()  # a collection between cases need not look at torch's own objects,
    gc.disable()  # and none comes in between
    # Plain operations in place of the kernels would be no measurement.
    warnings.filterwarnings("error", message="syncbn uses plain")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        with always_ours():
            measure_all(results, timer, options.seconds, everything(options.dry_run))
    except BaseException as error:
        results["aborted"] = describe(error)
        traceback.print_exc()
    results["skipped"] = [str(case) for case in results["skipped"]]
    results["targets"] = gpu_report.targets(results)
    gpu_report.show(results)

    path, folder = options.json, options.output
    if path is None and (folder or not options.dry_run):
        name = gpu_report.file_name(results["machine"])
        path = (folder or Path(__file__).parent / "results") / name
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(gpu_report.as_lines(results), encoding="utf-8")
        print(f"written: {path}")
    failed = results["aborted"] or any(
        "error" in row["found"]["ours"]
        for row in results["cases"] + results["errors"] + results["host"]
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
