"""What the first step of a layer costs on a machine that has compiled nothing.

    python benchmarks/cold.py                       # some two minutes
    python benchmarks/cold.py --against ../before   # in turns with the tree of another revision

Each first step, a forward and a backward of `BatchNorm` on NumPy arrays, is that of a new process
with an empty cache. Medians over rounds: CPU seconds of all threads, without the imports; how many
functions Numba has compiled, and how many files it has kept. Writes cold-DATE.json to results/ or
--output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from records import FOLDER, write

ROOT = Path(__file__).parents[1]
# the layout of x, its dtype, arguments of the layer, a mask, threads
CASES: dict[str, tuple[str, str, dict[str, Any], bool, int]] = {
    "planes": ("NCHW", "float32", {}, False, 1),
    "planes, ReLU": ("NCHW", "float32", {"activation": "relu"}, False, 1),
    "planes, mask": ("NCHW", "float32", {}, True, 1),
    "planes, bfloat16": ("NCHW", "bfloat16", {}, False, 1),
    "planes, two threads": ("NCHW", "float32", {}, False, 2),
    "rows": ("NHWC", "float32", {}, False, 1),
    "rows, two threads": ("NHWC", "float32", {}, False, 2),
}
STEP = """
import json, sys, time
import ml_dtypes
import numpy as np
from numba.core import event
from syncbn_core import BatchNorm, numpy_steps

layout, dtype, settings, masked, _ = json.loads(sys.argv[1])
random = np.random.default_rng(0)
x, dy = random.normal(size=(2, 8, 16, 48, 48)).astype(dtype)
if layout == "NHWC":
    x, dy = (a.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) for a in (x, dy))
mask = random.random((8, 48, 48)) < 0.9 if masked else None
layer = BatchNorm(16, **settings)
with event.install_recorder("numba:compile") as compiled:
    begin = time.process_time()
    layer(x, mask)
    layer.backward(dy)
    seconds = time.process_time() - begin
print(json.dumps([seconds, sum(event.is_start for _, event in compiled.buffer)]))
"""


def first_step(tree: Path, case: str) -> dict[str, float]:
    """That of a new process, by the package of `tree`."""
    with tempfile.TemporaryDirectory() as cache:
        own = {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": cache}
        own["NUMBA_NUM_THREADS"] = str(CASES[case][-1])
        command = [sys.executable, "-P", "-c", STEP, json.dumps(CASES[case])]
        printed = subprocess.check_output(command, env=os.environ | own, stderr=subprocess.DEVNULL)
        seconds, functions = json.loads(printed)
        files = sum(file.is_file() for file in Path(cache).rglob("*"))
    return {"seconds": seconds, "functions": functions, "files": files}


def revision(tree: Path) -> str:
    """The commit of a tree, such as "1b30a36", with "+" if files have changed since."""
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--against", type=Path, help="the tree of another revision")
    parser.add_argument("--output", type=Path, default=FOLDER)
    given = parser.parse_args()
    trees = {"syncbn": ROOT} | ({"against": given.against} if given.against else {})
    found: dict[str, Any] = {case: {name: [] for name in trees} for case in given.cases}
    for _ in range(given.rounds):
        for case, steps in found.items():
            for name, tree in trees.items():
                steps[name].append(first_step(tree.resolve(), case))
    for case, steps in found.items():
        for name, each in steps.items():
            middle = {key: statistics.median(step[key] for step in each) for key in each[0]}
            steps[name] = middle
            print(f"{case:20} {name:8}", *[f"{key} {value:.3g} " for key, value in middle.items()])
    facts = {"rounds": given.rounds, "revisions": {name: revision(t) for name, t in trees.items()}}
    print(write(given.output, "cold-DATE", facts, cases=found))


if __name__ == "__main__":
    main()
