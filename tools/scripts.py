"""Runs a script of `benchmarks` or `tools`, for the tests of these."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def path_of(script: str) -> str:
    (path,) = (path for name in ("benchmarks", "tools") for path in (ROOT / name).rglob(script))
    return str(path)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return subprocess.run(
        [sys.executable, path_of(script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": places, "PYTHONWARNINGS": "error"},
    )
