"""What a layer over ranks costs the host of a GPU, on a machine without one.

    python benchmarks/device_host.py                       # some two minutes
    python benchmarks/device_host.py --against ../before   # beside the tree of another revision
    python benchmarks/device_host.py --count               # of calls alone

A stand-in takes the place of the device: a driver whose launches do nothing, collectives that send
nothing, and tensors of the CPU for those of the device, whose values mean nothing. What is left is
Python, and torch's allocations and views. Beside it is `torch.nn.SyncBatchNorm`, whose kernels are
replaced by the allocation of their results. Forward, and forward and backward, of x (8, 64, 56, 56)
on the second of two ranks. In turns; the 5th percentile and the median of microseconds; calls of
Python and C functions, and launches, of one step. Needs a C compiler on Linux, and the
`cuda12` or `cuda13` extra. Writes device-host-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHAPE = (8, 64, 56, 56)
WHATS = ("forward", "both")
# new memory costs page faults, of which a device has none
MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
MEMORY["MALLOC_TOP_PAD_"] = "200000000"


def built(folder: Path) -> Path:
    """The folder, with a driver in it that does nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("expected a C compiler (cc or gcc), got none")
    path, source = folder / "libcuda.so.1", ROOT / "tests" / "cuda" / "stub_driver.c"
    command = [compiler, "-shared", "-fPIC", "-o", path, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return folder


# ------------------------------------------------------------------ in a process of its own


def of_syncbn() -> Any:
    """A layer whose tensors the CUDA steps take."""
    import torch
    import torch.distributed as dist

    import syncbn_torch
    from syncbn_core.backends.cuda import kernels
    from syncbn_core.backends.cuda.compiler import Code
    from syncbn_core.exchange import Exchange
    from syncbn_torch import arrays, process_group
    from syncbn_torch.backends import cuda, tensors

    kernels.missing = list
    kernels.compile_failure = lambda capability: None
    kernels.compile_source = lambda source, capability: Code("entry", "", b"\x7fELF")
    kernels.stored, kernels.store = lambda path: None, lambda path, code: None
    # what torch asks CUDA's runtime, with as many calls
    torch.cuda.current_device = tensors.current_device = lambda: operator.index(0)
    torch.cuda.is_current_stream_capturing = lambda: bool(0)
    tensors.current_raw_stream, tensors.current_stream_number = operator.index, lambda index: 1
    tensors._device = cache(lambda index: torch.device("cpu"))
    tensors.TensorArrays.device_of = lambda self, array: array.device.index or 0
    arrays.supports = lambda tensor: type(tensor) is None
    cuda.supports = lambda tensor: (
        type(tensor) in arrays.PLAIN_CLASSES
        and not tensor.is_neg()
        and cuda._ready(0, tensor.dtype)
    )
    communicator: Any = process_group.communicator_for(dist.group.WORLD)
    communicator.on_device = communicator.transport.on_device = True
    Exchange._compare = lambda *_: None  # no kernel has written a label
    return syncbn_torch.SyncBatchNorm(SHAPE[1])


def of_torch() -> Any:
    """Torch's layer, which lets tensors of the CPU pass."""
    import inspect

    import torch
    from torch.nn.modules import batchnorm

    source = inspect.getsource(batchnorm.SyncBatchNorm.forward).replace('"cuda",', '"cuda", "cpu",')
    names = dict(vars(batchnorm))
    exec(textwrap.dedent(source), names)
    batchnorm.SyncBatchNorm.forward = names["forward"]
    new, channels = torch.empty, SHAPE[1]
    results: dict[str, Callable[..., Any]] = {
        "batch_norm_stats": lambda x, eps: (new(channels), new(channels)),
        "batch_norm_gather_stats_with_counts": lambda *_: (new(channels), new(channels)),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": lambda *_: tuple(new(channels) for _ in range(4)),
        "batch_norm_backward_elemt": lambda dy, *_: torch.empty_like(dy),
    }
    for name, function in results.items():
        setattr(torch, name, function)
    return torch.nn.SyncBatchNorm(channels)


def worker(kind: str) -> None:
    """Reply a line of JSON to each "count WHAT" and "run WHAT TIMES" on the standard input."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    layer = of_torch() if kind == "torch" else of_syncbn()
    for name in ("all_gather_single", "all_gather_into_tensor", "all_reduce"):
        setattr(dist, name, lambda *_, **__: None)
    x, dy = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE)
    inputs = [x, *layer.parameters()]
    steps = {
        "forward": lambda: layer(x),
        "both": lambda: torch.autograd.grad(layer(x), inputs, dy),
    }
    for _ in range(50):
        steps["both"]()
    launched = None
    if kind != "torch":
        launched = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "stub_launched")
    for line in sys.stdin:
        what, step, *times = line.split()
        reply = (
            counted(steps[step], launched) if what == "count" else timed(steps[step], int(times[0]))
        )
        print(json.dumps(reply), flush=True)


def counted(step: Callable[[], Any], launched: Any) -> dict[str, Any]:
    """Of one step: calls of Python functions, of C functions, and launches."""
    events: list[str] = []
    before = 0 if launched is None else launched.value
    sys.setprofile(lambda frame, event, argument: events.append(event))
    step()
    sys.setprofile(None)
    launches = 0 if launched is None else launched.value - before
    # but for the call that ends it
    return {"python": events.count("call"), "c": events.count("c_call") - 1, "launches": launches}


def timed(step: Callable[[], Any], times: int) -> list[float]:
    """Microseconds of each of `times` steps."""
    found = []
    gc.collect()
    gc.disable()
    for _ in range(times):
        begin = time.perf_counter_ns()
        result = step()
        found.append((time.perf_counter_ns() - begin) / 1000)
        del result
    gc.enable()
    return found


# ------------------------------------------------------------------ all workers, in turns


class Worker:
    """A process with the layer of a tree, or with torch's."""

    def __init__(self, kind: str, tree: Path, stub: Path) -> None:
        paths = os.pathsep.join([str(tree), str(tree / "adapters")])
        own = {"PYTHONPATH": paths, "SYNCBN_KERNELS": "on", "LD_LIBRARY_PATH": str(stub), **MEMORY}
        command = [sys.executable, "-P", __file__, "--worker", kind]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | own, **pipes)

    def ask(self, question: str) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(question, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def counts(tree: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Calls and launches of a forward, and of both directions, with the package of `tree`."""
    one = Worker("syncbn", tree, built(folder))
    try:
        return {what: one.ask(f"count {what}") for what in WHATS}
    finally:
        one.process.communicate(timeout=20)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
        return
    if sys.argv[1:] == ["--count"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(counts(ROOT, Path(folder))))
        return
    from cold import revision
    from records import FOLDER, write

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="in a round")
    parser.add_argument("--against", type=Path, help="the tree of another revision")
    parser.add_argument("--output", type=Path, default=FOLDER)
    given = parser.parse_args()
    trees = {"syncbn": ROOT, "torch": ROOT}
    trees |= {"against": given.against.resolve()} if given.against else {}
    with tempfile.TemporaryDirectory() as folder:
        stub = built(Path(folder))
        workers = {name: Worker(name, tree, stub) for name, tree in trees.items()}
        cases: dict[str, Any] = {}
        for what in WHATS:
            cases[what] = {name: one.ask(f"count {what}") for name, one in workers.items()}
        for what, found in cases.items():
            times: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(given.rounds):
                for name, one in workers.items():
                    times[name] += one.ask(f"run {what} {given.steps}")
            for name, each in times.items():
                low, middle = statistics.quantiles(each, n=20)[0], statistics.median(each)
                found[name] |= {"low": low, "median": middle}
            for name, own in found.items():
                own["of_torch"] = own["low"] / found["torch"]["low"]
                print(f"{what:8} {name:8}", *[f"{key} {n:.4g} " for key, n in own.items()])
        for one in workers.values():
            one.process.communicate(timeout=20)
    of_trees = {name: revision(tree) for name, tree in trees.items() if name != "torch"}
    facts = {"rounds": given.rounds, "steps": given.steps, "shape": SHAPE, "revisions": of_trees}
    print(write(given.output, "device-host-DATE", facts, cases=cases))


if __name__ == "__main__":
    main()
