"""Registers and shared memory of each kernel by ptxas, for the devices of the GPU model.

    python tools/gpu_emulator/registers.py [--output benchmarks/results/ptx-registers.json]

Takes ten minutes. Float64 is left out. `test_ptx.py` keeps more of sm_80 and sm_90.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from datetime import date
from importlib import metadata
from pathlib import Path

import nvidia
from emulator.device import ptx_of
from harness import variants

from syncbn_core.backends.cuda import grid
from syncbn_core.kernels.cuda.constants import THREADS

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "ptx-registers.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=TABLE)
    given = parser.parse_args()
    wheels = (tool for folder in nvidia.__path__ for tool in Path(folder).rglob("bin/ptxas"))
    ptxas = next(wheels, None) or shutil.which("ptxas")
    rows = [{"date": str(date.today()), "nvidia-cuda-nvcc": metadata.version("nvidia-cuda-nvcc")}]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        for capability in CAPABILITIES:
            arch = "sm_{}{}".format(*capability)
            for variant in variants():
                source = grid.source(*variant, THREADS)
                if variant[1] == "float64" or source.oldest > capability:
                    continue
                file.write_text(ptx_of(source, capability), encoding="utf-8")
                command = [ptxas, "-v", "-O3", f"-arch={arch}", file, "-o", file.with_suffix(".o")]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
                found = {
                    name: sum(map(int, re.findall(pattern, said)))
                    for name, pattern in {
                        "registers": r"Used (\d+) registers",
                        "spilled": r"(\d+) bytes spill",
                        "shared": r"(\d+) bytes smem",
                    }.items()
                }
                rows.append({"kernel": source.key, "arch": arch, **found})
                print(rows[-1], flush=True)
    lines = ",\n".join(map(json.dumps, rows))
    given.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
