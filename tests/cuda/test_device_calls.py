"""What a layer over ranks asks of Python and of a GPU's driver, counted on a stand-in of a device.

Numbers hold for one Python and one torch; a change that lowers them lowers the bounds. See also
`test_walk.py`, and `benchmarks/device_host.py`, which has the stand-in.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_host.py"

pytestmark = [
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11) or not torch.__version__.startswith("2.13."),
        reason="counted with Python 3.11 and torch 2.13",
    ),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or not (shutil.which("cc") or shutil.which("gcc")),
        reason="needs a C compiler, on Linux",
    ),
]


def test_a_step_makes_no_more_calls_and_two_launches_each_way() -> None:
    command = [sys.executable, str(SCRIPT), "--count"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for what, calls, launches in (("forward", 204, 2), ("both", 423, 4)):
        assert found[what]["python"] + found[what]["c"] <= calls, found
        assert found[what]["launches"] == launches, found
