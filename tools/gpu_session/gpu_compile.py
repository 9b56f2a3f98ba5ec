"""Compiles the CUDA kernels for a GPU and says in words what would fail on it; needs no device.

    python tools/gpu_session/gpu_compile.py  # for this machine's devices, else for 9.0
    python tools/gpu_session/gpu_compile.py 8.0 9.0 --cache FOLDER --json FILE

Does not import torch. With `--cache` the kernels are kept: NUMBA_CACHE_DIR=FOLDER lets later
processes load them instead of compiling. Take a folder of its own: in the user's cache a kernel is
kept only once a driver has loaded it, and these have met none.

Status: 0 if all compiled that had the time to, 1 if some failed, 3 if none can be compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Row = dict[str, Any]
Kernel = tuple[str, str, int, bool]  # name, dtype, lanes, ragged: what `grid.source` takes
Capability = tuple[int, int]

NONE_COMPILES = 3  # exit status
NO_DEVICE = (9, 0)  # what is compiled for if there is no device
STEPS = ("moments", "normalize", "backward_reduce", "backward_input")
MOST_USED = ("float32", "float16")
PACKAGES = (
    *("numpy", "numba", "numba-cuda", "llvmlite", "cuda-bindings", "nvidia-nvjitlink"),
    *("nvidia-nvjitlink-cu12", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    *("cupy-cuda12x", "cupy-cuda13x", "torch"),
)
PTXAS_FOLDERS = ("nvidia/cu13/bin", "nvidia/cuda_nvcc/bin")  # of CUDA's wheels
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHOWN = 8  # failures that are printed

# ---------------------------------------------------------------------- what is missing


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def missing(capabilities: Sequence[Capability]) -> list[str]:
    """Why no kernel can be compiled, each as a sentence with its remedy. Takes a few seconds."""
    try:
        from syncbn_core.backends.cuda import kernels
    except ImportError as error:
        return [f"syncbn_core can't be imported ({error}): pip install numpy numba, set PYTHONPATH"]
    lacks = kernels._missing_packages()
    if lacks:
        return lacks
    failures = [kernels.compile_failure(capability) for capability in capabilities]
    if None in failures:  # the others are found again, kernel by kernel
        return []
    return [failure for failure in failures[:1] if failure]


# -------------------------------------------------------------------------- one kernel


def kernels() -> Iterator[Kernel]:
    """All of them, those that most layers need first."""
    from syncbn_core._kernels.cuda.constants import SIZES, lanes_of

    rest: list[Kernel] = [("merge_parts", "float64", 1, False)]
    for dtype in sorted(SIZES, key=lambda dtype: dtype not in MOST_USED):
        most = lanes_of(dtype)
        for step in STEPS:
            wide: list[Kernel] = [
                (f"planes_{step}", dtype, most, False),
                (f"planes_{step}", dtype, most, True),
                (f"rows_{step}", dtype, most, False),
            ]
            single = [(name, dtype, 1, False) for name in (f"planes_{step}", f"rows_{step}")]
            if dtype in MOST_USED:
                yield from wide
            else:
                rest += wide
            rest += single
    yield from rest


def compile_one(kernel: Kernel, capability: Capability) -> Row:
    """In a process of the pool: compile a kernel, or find it in NUMBA_CACHE_DIR."""
    from syncbn_core.backends.cuda import compiler, grid

    source = grid.source(*kernel, grid.THREADS)
    if capability < source.oldest:
        return {"note": "{} needs compute capability {}.{}".format(source.key, *source.oldest)}
    path = compiler.cache_file(source, capability)
    if compiler.stored(path) is not None:
        return {"cached": True}
    try:
        code = compiler.compile_source(source, capability)
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        where = "{}.{}".format(*capability)
        return {"failure": f"{source.key} does not compile for {where}: {reason}"}
    compiler.store(path, code)
    if not code.cubin:
        return {"note": f"{source.key} stays PTX, which the driver compiles: nvJitLink is older"}
    spills = more_spills(kernel, capability, code.ptx)
    return {"note": f"{source.key} {spills}"} if spills else {}


def more_spills(kernel: Kernel, capability: Capability, ptx: str) -> str:
    """How many bytes of registers a kernel spills, if more than in the table of the tests.

    Says nothing where there is no ptxas, or none that takes this PTX.
    """
    tables = sorted(RESULTS.glob("ptx-2*.json"))
    places = [Path(root, folder) for root in sys.path for folder in PTXAS_FOLDERS]
    ptxas = shutil.which("ptxas", path=os.pathsep.join([*map(str, places), os.environ["PATH"]]))
    if ptxas is None or not tables:
        return ""
    arch = "sm_{}{}".format(*capability)
    asked = (*kernel, arch)
    keys = ("kernel", "dtype", "lanes", "ragged", "arch")
    rows = json.loads(tables[-1].read_text(encoding="utf-8"))
    expected = [row["spilled"] for row in rows if tuple(map(row.get, keys)) == asked]
    with TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(ptx)
        command = [ptxas, "-v", "-O3", f"-arch={arch}", text, "-o", Path(folder, "cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    if done.returncode or not expected or spilled <= expected[0]:
        return ""
    return f"spills {spilled} bytes, expected at most {expected[0]} ({tables[-1].name})"


# -------------------------------------------------------------------------------- all


def compile_all(
    jobs: Sequence[tuple[Kernel, Capability]], processes: int, seconds: float
) -> tuple[list[Row], int]:
    """The rows of those that were done in time, and how many were not."""
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    rows: list[Row] = []
    try:
        futures = [pool.submit(compile_one, *job) for job in jobs]
        finished = as_completed(futures, timeout=max(seconds, 0.1))
        rows.extend(future.result() for future in finished)  # keeps those before an exception
    except TimeoutError:
        pass
    except BrokenProcessPool:
        rows.append({"failure": "a compiler ended its process: memory may be short (dmesg)"})
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()
    return rows, len(jobs) - len(rows)


def run(
    capabilities: Sequence[Capability], processes: int, seconds: float, first: int | None
) -> Row:
    """What the JSON has; prints a line when it knows whether any kernel can be compiled."""
    start = time.monotonic()
    versions = installed()
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    lacks = missing(capabilities)
    result: Row = {"capabilities": ["{}.{}".format(*each) for each in capabilities]}
    result |= {"packages": versions, "missing": lacks, "kernels": 0, "done": 0, "cached": 0}
    result |= {"failures": [], "notes": []}
    if not lacks:
        jobs = [(kernel, each) for kernel in list(kernels())[:first] for each in capabilities]
        print(f"the smallest kernel compiles; {len(jobs)} follow", flush=True)
        left = seconds - (time.monotonic() - start)
        rows, late = compile_all(jobs, processes, left)
        result["failures"] = [row["failure"] for row in rows if "failure" in row]
        result["notes"] = [row["note"] for row in rows if "note" in row]
        result["kernels"], result["cached"] = len(jobs), sum("cached" in row for row in rows)
        result["done"] = len(jobs) - late - len(result["failures"])
        result["late"] = late
    return result | {"seconds": round(time.monotonic() - start, 1), "processes": processes}


def show(result: Row) -> None:
    if result["missing"]:
        print(f"NO KERNEL CAN BE COMPILED: {'; '.join(result['missing'])}")
        return
    for sentence in result["failures"][:SHOWN]:
        print(f"FAILS: {sentence}")
    if len(result["failures"]) > SHOWN:
        print(f"FAILS: {len(result['failures']) - SHOWN} more kernels (all are in the JSON)")
    if result["failures"]:
        print(
            "The smallest kernel compiles, these do not: versions of numba-cuda and its compilers "
            "may not fit together; docs/gpu.md names some that do"
        )
    for note in result["notes"][:SHOWN]:
        print(f"note: {note}")
    late = f"; {result['late']} had no time and compile at first use" if result.get("late") else ""
    print(
        f"{result['done']} of {result['kernels']} kernels compiled for compute capability "
        f"{', '.join(result['capabilities'])} in {result['seconds']} s, {len(result['failures'])} "
        f"failed, {result['cached']} were there already{late}"
    )


def wanted(texts: Sequence[str]) -> list[Capability]:
    """Those asked for, else those of the devices, else `NO_DEVICE`."""
    found = [tuple(map(int, text.split("."))) for text in texts]
    if not found:
        with suppress(ImportError):
            from syncbn_core.backends.cuda import kernels

            found = [each for each in kernels._capabilities() if each >= kernels.OLDEST]
    if not found:
        print("no device: kernels are compiled for compute capability {}.{}".format(*NO_DEVICE))
        return [NO_DEVICE]
    return [(major, minor) for major, minor in sorted(set(found))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("capabilities", nargs="*", help="such as 9.0")
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 32))
    parser.add_argument("--cache", type=Path, help="folder for the kernels; default: a passing one")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--first", type=int, help="only so many kernels")
    options = parser.parse_args()
    with TemporaryDirectory() as passing:
        os.environ["NUMBA_CACHE_DIR"] = str(options.cache or passing)
        result = run(
            wanted(options.capabilities), options.processes, options.seconds, options.first
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return NONE_COMPILES if result["missing"] else bool(result["failures"])


if __name__ == "__main__":
    sys.exit(main())
