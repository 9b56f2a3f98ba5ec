"""How fast the layer is on CPU, beside torch's and beside the measured speed of memory.

    python benchmarks/cpu.py                       # everything, some thirty minutes
    python benchmarks/cpu.py --quick               # float32 only, few shapes
    python benchmarks/cpu.py --other package.module:BatchNorm2d
    python benchmarks/cpu.py --show benchmarks/results/cpu-....json --plot docs/speed.png

Contenders take turns within each round, so that a slow moment of the machine meets all of them;
figures are medians over rounds, ratios are medians of the ratios of a round. Writes JSON to
benchmarks/results, prints tables and what became of the targets; nothing is asserted.

A large result is new memory in each call, and glibc gives small ones back to the system at times:
then their pages fault anew, for every contender. The part "kept" measures once more with an
allocator that keeps its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from cpu_plain import PlainSynchronized
from cpu_report import show
from torch import Tensor, nn

from syncbn_core.backends import operations_for
from syncbn_core.comm import run_in_threads, thread_group
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
from syncbn_torch.arrays import huge_pages_on_request
from syncbn_torch.forward import always_ours

RESNET50 = [
    (32, 64, 112, 112), (32, 64, 56, 56), (32, 256, 56, 56), (32, 128, 56, 56),
    (32, 128, 28, 28), (32, 512, 28, 28), (32, 256, 28, 28), (32, 256, 14, 14),
    (32, 1024, 14, 14), (32, 512, 14, 14), (32, 512, 7, 7), (32, 2048, 7, 7),
]  # fmt: skip
OTHERS = [(256, 512), (8, 256, 28, 28), (2, 16, 64, 128, 128), (4, 8, 8, 8)]
TINY = (4, 8, 8, 8)
FEW = [(32, 64, 56, 56), (32, 256, 14, 14), (32, 2048, 7, 7), *OTHERS]
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
# glibc gives no memory back:
KEEP = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(1 << 40))
LONG = 8.0  # seconds a case may take; then it ends with the rounds that it has


# ------------------------------------------------------------------------- measuring


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        numba.set_num_threads(min(before, numba.config.NUMBA_NUM_THREADS))


def interleaved(
    runs: dict[str, Callable[[], dict[str, float]]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """The times that each run returns, by round; every other round goes backwards."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for run in runs.values():  # compile, load, touch
        run()
    begin = time.perf_counter()
    for index in range(rounds):
        order: Iterable[str] = runs if index % 2 == 0 else reversed(runs)
        for name in order:
            for part, seconds in runs[name]().items():
                found[name].setdefault(part, []).append(seconds)
        if index >= 4 and time.perf_counter() - begin > LONG:
            break
    return found


def summary(found: dict[str, dict[str, list[float]]], base: str) -> dict[str, Any]:
    """Medians, quartiles and worst of the times; medians of the ratios of `base` to each."""
    result: dict[str, Any] = {}
    for name, parts in found.items():
        result[name] = {}
        for part, times in parts.items():
            low, median, high = statistics.quantiles(times, n=4)
            row = {"median": median, "low": low, "high": high, "worst": max(times)}
            if part in found[base]:
                pairs = zip(found[base][part], times, strict=True)
                row["faster"] = statistics.median(theirs / ours for theirs, ours in pairs)
            result[name][part] = row
    return result


def tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=LAYOUTS[layout]) if x.dim() == 4 else x


def passes(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], dict[str, float]]:
    """A run of forward and backward, autograd included, with fresh output."""
    x = x.detach().requires_grad_()
    operands = [x, *layer.parameters()]

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        y = layer(x)
        middle = time.perf_counter()
        gradients = torch.autograd.grad(y, operands, dy)
        end = time.perf_counter()
        del y, gradients
        return {"forward": middle - begin, "backward": end - middle, "both": end - begin}

    return run


class Ours(nn.Module):
    """Our kernels also where the layer itself would take torch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = SyncBatchNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        with always_ours():
            y: Tensor = self.layer(x)
        return y


def torch_layer(shape: tuple[int, ...]) -> nn.Module:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    return kinds[len(shape)](shape[1])


# ----------------------------------------------------------------------------- cases


def chosen(args: argparse.Namespace) -> list[tuple[int, ...]]:
    shapes = FEW if args.quick else [*RESNET50, *OTHERS]
    return [s for s in shapes if not args.shapes or "x".join(map(str, s)) in args.shapes]


def whole_layers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ours, as shipped and always by our kernels, against `nn.BatchNorm`."""
    shapes = chosen(args)
    for name, dtype in DTYPES.items():
        if args.quick and name != "float32":
            continue
        for layout in LAYOUTS:
            for shape in shapes:
                if layout != "NCHW" and len(shape) != 4:
                    continue
                if name != "float32" and shape not in FEW:
                    continue
                for count in args.threads:
                    yield layer_case(shape, name, dtype, layout, count, args)


def layer_case(
    shape: tuple[int, ...],
    name: str,
    dtype: torch.dtype,
    layout: str,
    count: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    x, dy = tensor(shape, dtype, layout), tensor(shape, dtype, layout)
    layers = {"shipped": SyncBatchNorm(shape[1]), "kernels": Ours(shape[1])}
    layers["torch"] = torch_layer(shape)
    if args.other and len(shape) == 4:
        module, _, attribute = args.other.partition(":")
        layers[args.other] = getattr(importlib.import_module(module), attribute)(shape[1])
    if dtype is torch.float64:
        layers = {key: layer.double() for key, layer in layers.items()}
    with threads(count):
        runs = {key: passes(layer, x, dy) for key, layer in layers.items()}
        found = interleaved(runs, args.rounds)
    return {
        "shape": shape,
        "dtype": name,
        "layout": layout,
        "threads": count,
        "bytes": x.numel() * x.element_size(),
        "found": summary(found, "torch"),
    }


def kernels(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The kernels alone, with reused and with fresh output, over the time of a copy."""
    shapes = chosen(args)
    for shape in shapes:
        for count in args.threads:
            with threads(count):
                yield kernel_case(shape, count, args.rounds)


def kernel_dtypes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The kernels in 16 bits, over half the time of float32: what the bytes would let expect."""
    for shape in [shape for shape in chosen(args) if shape in FEW]:
        for layout in LAYOUTS if len(shape) == 4 else ["NCHW"]:
            for count in args.threads:
                with threads(count):
                    yield dtype_case(shape, layout, count, args.rounds)


Step = Callable[[Any], None]


def steps(x: Any, dy: Any, parallel: bool) -> tuple[Step, Step]:
    """Both steps of forward and of backward, given where to write y or dx."""
    channels = x.shape[1]
    operations = operations_for(x) if parallel else operations_for(x).serial
    weight, sums = np.ones(channels, np.float32), np.zeros((2, channels))
    own, affine, _ = operations.take(x, Affine(weight, weight), None)
    pair, rule = operations.take_pair(x, dy), NormRule()
    norm = Norm(operations.statistics(operations.moments(own), rule), affine, rule)

    def forward(into: Any) -> None:
        operations.moments(own)
        operations.forward(own, norm, None, into)

    def backward(into: Any) -> None:
        operations.backward_reduce(*pair, norm)
        operations.backward_input(*pair, norm, sums, into)

    return forward, backward


def dtype_case(shape: tuple[int, ...], layout: str, count: int, rounds: int) -> dict[str, Any]:
    def contender(dtype: torch.dtype) -> Callable[[], dict[str, float]]:
        bits = torch.uint16 if dtype is torch.bfloat16 else dtype  # NumPy has no bfloat16
        x, dy, out = (tensor(shape, dtype, layout).view(bits).numpy() for _ in range(3))
        forward, backward = steps(x, dy, count > 1)

        def run() -> dict[str, float]:
            begin = time.perf_counter()
            forward(out)
            middle = time.perf_counter()
            backward(out)
            return {"forward": middle - begin, "backward": time.perf_counter() - middle}

        return run

    found = interleaved({n: contender(d) for n, d in DTYPES.items() if n != "float64"}, rounds)
    over = {
        name: {
            part: statistics.median(
                2 * t / f for t, f in zip(found[name][part], found["float32"][part], strict=True)
            )
            for part in ("forward", "backward")
        }
        for name in ("float16", "bfloat16")
    }
    return {"shape": shape, "layout": layout, "threads": count, "over_float32_by_bytes": over}


def kernel_case(shape: tuple[int, ...], count: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32) for _ in range(2))
    out = np.empty_like(x)
    source, target = torch.from_numpy(x), torch.from_numpy(np.empty_like(x))
    forward, backward = steps(x, dy, count > 1)

    def timed(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def ours(into: np.ndarray | None) -> dict[str, float]:
        return {
            "forward": timed(lambda: forward(into)),
            "backward": timed(lambda: backward(into)),
        }

    runs = {
        "reused output": lambda: ours(out),
        "fresh output": lambda: ours(None),
        "copy": lambda: {"copy": timed(lambda: target.copy_(source))},
    }
    found = interleaved(runs, rounds)
    # A copy reads and writes: 2 passes. Forward is 3, backward 5.
    floor = {
        "forward": [1.5 * t for t in found["copy"]["copy"]],
        "backward": [2.5 * t for t in found["copy"]["copy"]],
    }
    over = {
        name: {
            part: statistics.median(
                t / f for t, f in zip(found[name][part], floor[part], strict=True)
            )
            for part in floor
        }
        for name in ("reused output", "fresh output")
    }
    copied = 2 * x.nbytes / statistics.median(found["copy"]["copy"])
    return {
        "shape": shape, "threads": count, "bytes": x.nbytes, "copy_bytes_per_second": copied,
        "over_floor": over, "found": summary(found, "copy"),
    }  # fmt: skip


DEPTH = 8  # layers in a row


def replicas(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Replicas that synchronize, over the unsplit layers, and in plain operations.

    One layer, where splitting the input and joining the outputs counts in full, and eight in a row,
    where it counts as in a network.
    """
    shapes = [(32, 64, 56, 56), (8, 256, 28, 28), (32, 2048, 7, 7)]
    for depth, shape, count in itertools.product((1, DEPTH), shapes, (1, 2, 4, 8)):
        if args.quick and (count in (1, 8) or shape != shapes[0]):
            continue
        x, dy = tensor(shape, torch.float32, "NCHW"), tensor(shape, torch.float32, "NCHW")

        def stack(kind: Callable[[int], nn.Module], depth: int, channels: int) -> nn.Module:
            return nn.Sequential(*[kind(channels) for _ in range(depth)])

        ours = stack(SyncBatchNorm if count > 1 else Ours, depth, shape[1])
        plain = stack(PlainSynchronized, depth, shape[1])
        layers = {
            "replicas": DataParallelWithCallback(ours, replicas=count),
            "plain replicas": DataParallelWithCallback(plain, replicas=count),
            "unsplit": stack(Ours, depth, shape[1]),
        }
        for number in args.threads:
            with threads(number):
                runs = {key: passes(layer, x, dy) for key, layer in layers.items()}
                found = interleaved(runs, args.rounds)
            yield {
                "shape": shape,
                "depth": depth,
                "replicas": count,
                "threads": number,
                "found": summary(found, "unsplit"),
            }


def exchanges() -> Iterator[dict[str, Any]]:
    """One synchronization of a layer with 256 channels, by number of threads."""
    for count in (2, 4, 8):
        group = thread_group(count)

        def member(rank: int, group: Any = group) -> list[float]:
            sums, times = np.ones((2, 256)), []
            for _ in range(400):
                begin = time.perf_counter()
                group[rank].all_reduce(sums)
                times.append(time.perf_counter() - begin)
            return times

        jobs = [lambda rank=rank, member=member: member(rank) for rank in range(count)]
        times = sorted(run_in_threads(jobs)[0][50:])
        yield {"replicas": count, "median": times[len(times) // 2], "worst": times[-1]}


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of all that a forward keeps for backward, the input too."""
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = layer(x.detach().requires_grad_())
    del y
    return sum(saved.values())


PEAK = """
import sys, torch
sys.path[:0] = {path!r}
from cpu import CONTENDERS, most_memory, tensor
layer = CONTENDERS[{name!r}](64)
x = tensor((64, 64, 112, 112), torch.float32, "NCHW").requires_grad_()
layer(x[:2]).sum().backward()
most_memory()
before = most_memory()
layer(x).backward(x.detach())
print((most_memory() - before) / (4 * x.numel()))
"""
CONTENDERS: dict[str, Callable[[int], nn.Module]] = {
    "ours": Ours,
    "torch": nn.BatchNorm2d,
    "plain": PlainSynchronized,
}


def most_memory() -> float:
    """Bytes that this process has held at most since this was last asked; NaN but on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    (line,) = (row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def memory() -> list[dict[str, Any]]:
    """Activations kept for backward, and the most that a forward and backward add to x."""
    x = torch.randn(32, 64, 56, 56)
    size = x.numel() * x.element_size()
    return [
        {
            "name": name,
            "activations": kept_bytes(kind(64), x) / size,
            "peak": in_new_process(PEAK.format(name=name, path=sys.path)),
        }
        for name, kind in CONTENDERS.items()
    ]


def in_new_process(code: str, **environment: str) -> float:
    """The number that a program prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def kept(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The layers once more, with an allocator that gives no memory back (glibc)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--quick", "--parts", "layers", "--output", folder]
        command += ["--rounds", str(args.rounds), "--threads", *map(str, args.threads)]
        env = {**os.environ, **KEEP}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        (path,) = Path(folder).iterdir()
        return list(json.loads(path.read_text(encoding="utf-8"))["layers"])


def networks(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What `nets.py` measures, with the usual allocator and with one that keeps its memory."""
    script = Path(__file__).with_name("nets.py")
    command = [sys.executable, str(script), "--json", "--threads", str(max(args.threads))]
    if args.quick:
        command += ["--nets", "resnet18", "--rounds", "3"]
    found = {}
    for name, changed in (("usual", {}), ("kept", KEEP)):
        env = {**os.environ, **changed}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        found[name] = json.loads(done.stdout)
    return found


def starts() -> dict[str, float]:
    """Seconds of imports and of the first use, in new processes."""
    first = (
        "import torch, time; b = time.perf_counter(); import syncbn_torch;"
        "from syncbn_torch.forward import always_ours;"
        "c = always_ours(); c.__enter__(); l = syncbn_torch.SyncBatchNorm(8);"
        "l(torch.randn(4, 8, 8, 8)).sum().backward(); print(time.perf_counter() - b)"
    )
    imported = "import torch, time; b = time.perf_counter(); import syncbn_torch; "
    with tempfile.TemporaryDirectory() as empty:
        cold = in_new_process(first, NUMBA_CACHE_DIR=empty)
        return {
            "first use, nothing compiled": cold,
            "first use": min(in_new_process(first, NUMBA_CACHE_DIR=empty) for _ in range(3)),
            "import syncbn_torch after torch": min(
                in_new_process(imported + "print(time.perf_counter() - b)") for _ in range(3)
            ),
        }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def facts() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "huge_pages_on_request": huge_pages_on_request(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--other", help="another layer: MODULE:CLASS, called with channels")
    parts = ["layers", "kept", "nets", "kernels", "replicas", "rest"]
    parser.add_argument("--shapes", nargs="+", help="of the layers and kernels, as 4x8x8x8")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--show", type=Path, help="only print what is in this file")
    parser.add_argument("--plot", type=Path, help="draw the speed of the layers into this PNG")
    args = parser.parse_args()
    if args.show:
        report(json.loads(args.show.read_text(encoding="utf-8")), args.plot)
        return 0
    torch.manual_seed(0)
    results: dict[str, Any] = {"facts": facts(), "rounds": args.rounds}
    if "layers" in args.parts:
        results["layers"] = list(whole_layers(args))
    if "kept" in args.parts:
        results["layers_kept"] = kept(args)
    if "nets" in args.parts:
        results["nets"] = networks(args)
    if "kernels" in args.parts:
        results["kernels"] = list(kernels(args))
        results["dtypes"] = list(kernel_dtypes(args))
    if "replicas" in args.parts:
        results["replicas"] = list(replicas(args))
    if "rest" in args.parts:
        results["exchanges"] = list(exchanges())
        results["memory"] = memory()
        results["starts"] = starts()
    args.output.mkdir(parents=True, exist_ok=True)
    kind = "-quick" if args.quick else ""
    kind += "" if args.parts == parts else "-" + "-".join(args.parts)
    path = args.output / f"cpu-{results['facts']['date']}{kind}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report(json.loads(path.read_text(encoding="utf-8")), args.plot)
    print(path)
    return 0


def report(results: dict[str, Any], picture: Path | None) -> None:
    show(results)
    if picture is not None:
        from cpu_plot import plot  # Matplotlib is not needed for the rest

        plot(results, picture)
        print(picture)


if __name__ == "__main__":
    sys.exit(main())
