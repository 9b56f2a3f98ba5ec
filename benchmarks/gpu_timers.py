"""The machine, and who times the steps of `gpu.py`: a GPU, or a CPU that only pretends.

python benchmarks/gpu_timers.py FILE [--dry-run]     # facts of the machine; status 1 without a GPU
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Sample = Callable[[], float]  # seconds per step


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def output_of(command: list[str]) -> str:
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def software() -> dict[str, Any]:
    versions = {}
    for package in ("numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        # The variable is for copies of the tree that are no repository.
        "commit": os.environ.get("SYNCBN_COMMIT") or output_of(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


class Cuda:
    """Times by events and graphs."""

    device = torch.device("cuda")
    copied = 1 << 30  # bytes that are copied for the bandwidth
    calls = 100  # of which host time is an average
    work = 1e9  # bytes of activations for which one launch of a graph is short

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        properties = torch.cuda.get_device_properties(self.device)
        self.l2 = int(getattr(properties, "L2_cache_size", 0)) or 64 << 20

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return software() | {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "gpus": torch.cuda.device_count(),
            "l2": self.l2,
            "driver": output_of(query).split("\n")[0],
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl() else "none",
        }

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Where a graph that is to be captured in part must be begun."""
        return torch.cuda.stream(self.stream)

    def prepare(self, step: Callable[[int], Any], steps: int, kept: int) -> tuple[Sample, bool]:
        """What times `steps` steps, and whether in a graph; the last `kept` outputs stay."""
        torch.cuda.synchronize()
        with self.current():
            for i in range(2):  # compiles and loads what there is to
                step(i)
            graph = torch.cuda.CUDAGraph()
            outputs: list[Any] = [None] * kept  # a graph's memory is kept by what it returned
            try:
                with torch.cuda.graph(graph, stream=self.stream):
                    for i in range(steps):
                        outputs[i % kept] = step(i)
                run, captured = graph.replay, True
            except Exception as error:
                print(f"    not captured: {describe(error)}", flush=True)
                run, captured = lambda: [step(i) for i in range(steps)], False

        def sample() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self.current():
                run()
                start.record()
                run()
                end.record()
            end.synchronize()
            assert len(outputs) == kept
            return start.elapsed_time(end) / 1e3 / steps

        return sample, captured

    def wait(self) -> None:
        """Until the device has done all it was given."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory back; raises if the device has failed."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


class Cpu(Cuda):
    """Runs everything, measures nothing: for `--dry-run`."""

    device = torch.device("cpu")
    copied = l2 = 1 << 10
    calls = 2
    work = 1.0

    def __init__(self) -> None:
        torch.set_num_threads(1)  # on a busy machine its threads wait for each other

    def facts(self) -> dict[str, Any]:
        return software() | {"device": "cpu dry run"}

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def prepare(self, step: Callable[[int], Any], steps: int, kept: int) -> tuple[Sample, bool]:
        def sample() -> float:
            start = time.perf_counter()
            for i in range(steps):
                step(i)
            return (time.perf_counter() - start) / steps

        return sample, False

    def wait(self) -> None:
        pass

    def release(self) -> None:
        gc.collect()


def main() -> int:
    dry = "--dry-run" in sys.argv
    if not dry and not torch.cuda.is_available():
        return 1
    facts = (Cpu() if dry else Cuda()).facts()
    Path(sys.argv[1]).write_text(json.dumps(facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
