"""Is this revision slower than another? Both measure the same cases in turns, in one run.

    python benchmarks/compare.py OTHER_CHECKOUT [--rounds 9] [--threads 1 2]
    python benchmarks/compare.py OTHER_CHECKOUT --device cuda       # device time, by CUDA graphs

`python3 dev.py compare -- REVISION` makes the other checkout by itself. Each checkout is served by
a process of its own, which says how long a forward and a backward took, the least of three, when
it is asked; who is asked first changes from round to round. Ratios are medians over rounds, with
quartiles: a change is one when 1 is not between them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parents[1]
SHAPES = {
    "32x64x56x56": (32, 64, 56, 56),
    "8x256x28x28": (8, 256, 28, 28),
    "32x2048x7x7": (32, 2048, 7, 7),
    "256x512": (256, 512),
    "4x8x8x8": (4, 8, 8, 8),
}
# On a GPU: small planes, small batches, and a large activation.
GPU_SHAPES = {
    "2x2048x7x7": (2, 2048, 7, 7),
    "2x512x7x7": (2, 512, 7, 7),
    "2x512x14x14": (2, 512, 14, 14),
    "32x512x14x14": (32, 512, 14, 14),
    "32x256x56x56": (32, 256, 56, 56),
}
KINDS = [
    ("float32", "NCHW", 1),
    ("float32", "channels_last", 1),
    ("bfloat16", "NCHW", 1),
    ("float32", "NCHW", 4),
]
GPU_KINDS = [(d, layout, 1) for layout in ("NCHW", "channels_last") for d in ("float32", "float16")]
# glibc gives memory back at times, and pages fault anew: that would be most of the difference.
KEEP = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(1 << 40))
WORKER = """
import json, sys
import numba, torch
from gpu_timers import Cpu, Cuda
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
try:
    from syncbn_torch.forward import always_ours
except ImportError:  # a revision before that module
    from syncbn_torch.forward import always_ours

timer, cases = Cuda() if sys.argv[1] == "cuda" else Cpu(), {}
steps = 20 if sys.argv[1] == "cuda" else 1

def run(shape, dtype, layout, replicas, threads):
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    key = (shape, dtype, layout, replicas, threads)
    if key not in cases:
        options = {"device": timer.device, "dtype": getattr(torch, dtype)}
        x, dy = (torch.randn(shape).to(**options) for _ in range(2))
        if layout == "channels_last" and len(shape) == 4:
            x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
        x.requires_grad_()
        layer = SyncBatchNorm(shape[1]).to(timer.device)
        if replicas > 1:
            layer = DataParallelWithCallback(layer, replicas=replicas)
        parameters = list(layer.parameters())
        def step(_):
            with always_ours():
                y = layer(x)
            return torch.autograd.grad(y, [x, *parameters], dy)
        cases[key], captured = timer.prepare(step, steps, 1)
        assert captured or steps == 1, "expected the step in a CUDA graph: see the line above"
    return min(cases[key]() for _ in range(3))

print("ready", flush=True)
for line in sys.stdin:
    shape, *rest = json.loads(line)
    print("seconds", run(tuple(shape), *rest), flush=True)
"""


class Side:
    """A checkout, and the process that measures it."""

    def __init__(self, root: Path, device: str) -> None:
        # both are timed by what stands beside this file
        places = os.pathsep.join(map(str, (root, root / "adapters", Path(__file__).parent)))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": places, **KEEP},
        )
        self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and line.partition(" ")[0].strip() not in ("ready", "seconds"):
            print(line, end="")  # what else it has to say
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a worker ended with status {self.process.wait()}; see its error above"
            )
        return line

    def seconds(self, request: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return float(self.answer().split()[1])

    def close(self) -> None:
        self.process.communicate(timeout=60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="a checkout of the other revision")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    every = SHAPES | GPU_SHAPES
    parser.add_argument("--shapes", nargs="+", choices=list(every))
    args = parser.parse_args()
    cuda = args.device == "cuda"
    kinds, shapes = (GPU_KINDS, GPU_SHAPES) if cuda else (KINDS, SHAPES)
    sides = {"other": Side(args.other, args.device), "this": Side(HERE, args.device)}
    table = Table(title="This revision over the other: times, forward and backward by our kernels")
    for column in (
        "shape",
        "dtype",
        "layout",
        "replicas",
        "threads",
        "other, ms",
        "ratio",
        "quartiles",
    ):
        table.add_column(column, justify="right")
    ratios = []
    for name in args.shapes or shapes:
        for dtype, layout, replicas in kinds:
            if layout == "channels_last" and len(every[name]) != 4:
                continue
            for threads in [1] if cuda else args.threads:
                request = json.dumps([every[name], dtype, layout, replicas, threads])
                found: dict[str, list[float]] = {"other": [], "this": []}
                for index in range(max(2, args.rounds) + 1):
                    for side in sides if index % 2 else reversed(sides):
                        found[side].append(sides[side].seconds(request))
                pairs = list(zip(found["other"], found["this"], strict=True))[
                    1:
                ]  # the first compiles
                low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
                ratios.append(middle)
                other = statistics.median(a for a, _ in pairs) * 1e3
                table.add_row(
                    name, dtype, layout, str(replicas), str(threads), f"{other:.2f}",
                    f"{middle:.2f}", f"{low:.2f} to {high:.2f}",
                )  # fmt: skip
    for side in sides.values():
        side.close()
    console = Console(width=120)
    console.print(table)
    console.print(
        f"geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
