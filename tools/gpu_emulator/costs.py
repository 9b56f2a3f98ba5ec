"""What the compiled kernels execute and move, per byte of the activation: a table of all of them.

    python tools/gpu_emulator/costs.py [--arch sm_90] [--output benchmarks/results/ptx-costs.json]

`instructions`: of all threads; a warp that executes for one thread counts as 32, as it does on a
device. `float64` and `conversions` (to and from float64 and 16 bits) are the instructions among
them that most devices execute at a fraction of the rate; `conversions64` are the conversions to and
from float64. `bytes`: all that is loaded and stored. All are divided by the bytes of x. `blocks`:
thread blocks of the launch.

A block also executes instructions that do not depend on how much it reads, such as the sum over its
threads. So each kernel has a second set of figures, `large`: an activation four times as large,
in as few blocks as the kernel allows.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import suppress
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from emulator.device import Device, Launch, emulated
from harness import DTYPES, FORMS, Bench, Case, Setting, Steps, capability

from syncbn_core.kernels.cuda.constants import SIZES, lanes_of

__all__ = ["TABLE", "figures", "made_by", "read_table"]

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "ptx-costs.json"
# A layer in training with float32 parameters, which autocast keeps for any dtype of x.
USUAL = Setting()


def case_of(form: str, dtype: str) -> Case:
    """An activation of a usual layer, large enough to keep all blocks busy."""
    if form == "rows":
        return Case(form, 12544, 64)  # channels_last
    if form == "single rows":
        return Case(form, 4096, 63)
    if form == "single planes":
        return Case(form, 2048, 64, min(3, 2 * lanes_of(dtype) - 1))
    return Case(form, 8, 32, 3136) if form == "planes" else Case(form, 128, 32, 49)


def figures(
    device: Device, form: str, dtype: str, *, large: bool = False
) -> dict[str, dict[str, float]]:
    """The figures of each kernel of a form, by its key; `large`: with much work for each block."""
    case = case_of(form, dtype)
    if large:
        case = replace(case, outer=4 * case.outer, splits=(1, 1), tall=True)
    with Bench(device) as bench, case.planned():
        step = Steps(bench, case, dtype, USUAL, np.random.default_rng(1))
        step.all()
        nbytes = step.x.values().size * SIZES[dtype]
        launches = device.launches[-len(bench.keys) :]
        return {
            key: _figures(launch, nbytes) for key, launch in zip(bench.keys, launches, strict=True)
        }


def _figures(launch: Launch, nbytes: int) -> dict[str, float]:
    kinds: dict[str, int] = {}
    for step, warps in zip(launch.program.steps, launch.counts.warps, strict=True):
        for kind, count in step.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + 32 * warps * count
    moved = sum(launch.read_bytes.values()) + sum(launch.stored_bytes.values())
    found = {
        "instructions": sum(kinds.values()),
        "float64": kinds.get("f64", 0),
        "conversions": kinds.get("convert16", 0) + kinds.get("convert64", 0),
        "conversions64": kinds.get("convert64", 0),
        "bytes": moved,
    }
    rounded = {name: float(f"{number / nbytes:.4g}") for name, number in found.items()}
    return rounded | {"blocks": math.prod(launch.grid)}


def made_by(arch: str) -> dict[str, str]:
    """What the figures depend on: compilers and architecture."""
    found = {"arch": arch}
    for package in ("numba-cuda", "numba", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--output", type=Path, default=TABLE)
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    with emulated(capability(given.arch)) as device:
        for form in FORMS:
            for dtype in DTYPES:
                large = figures(device, form, dtype, large=True)
                for key, found in figures(device, form, dtype).items():
                    rows[key] = {"shape": case_of(form, dtype).shape, **found}
                    rows[key]["large"] = large[key]
                    numbers = "  ".join(f"{name} {n:7.3f}" for name, n in found.items())
                    print(f"{key:44} {numbers}", flush=True)
    head = {"date": str(date.today()), **made_by(given.arch)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
    text = f'{{\n"made": {json.dumps(head)},\n"kernels": {{\n{lines}\n}}}}\n'
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
