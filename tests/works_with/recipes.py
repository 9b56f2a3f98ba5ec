"""Run the programs of docs/frameworks.md word for word, with the command shown below each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from harness import LIMIT, record
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

BEFORE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
AFTER = """
import os
import torch
import torch.distributed
from torch.nn.modules.batchnorm import _BatchNorm

layers = sum(isinstance(module, _BatchNorm) for module in model.modules())
saved = {"state": model.state_dict(), "layers": layers}
torch.save(saved, f"rank-{os.environ.get('LOCAL_RANK', '0')}.pt")
if torch.distributed.is_initialized():  # else gloo may abort the process as it exits
    torch.distributed.destroy_process_group()
"""


def section(heading: str) -> str:
    """The text of docs/frameworks.md below `## heading`."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(heading: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)


def run(heading: str, folder: Path, *changes: tuple[str, str], command: str = "") -> str:
    """Run the program of a section in `folder`; returns what it printed, or raises.

    `changes`: pieces of the program to replace. `command`: instead of the one on the page.
    """
    program = blocks(heading)[0]
    for old, new in changes:
        assert program.count(old) == 1, f"expected {old!r} once in the program of {heading}"
        program = program.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(BEFORE + program + AFTER, encoding="utf-8")
    shown = command or blocks(heading, "console")[0].strip().removeprefix("$ ")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        shlex.split(shown),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=135,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


def equals_one_process(
    library: str,
    heading: str,
    folder: Path,
    *undivided: tuple[str, str],
    limit: float = LIMIT,
    note: str = "",
) -> None:
    """The model that two processes train is that of one process with the undivided batches.

    `undivided`: what to change in the program for one process. Adds a row to "Works with".
    `limit`: of the difference; `note`: for the row.
    """
    run(heading, folder / "two")
    run(heading, folder / "one", *undivided, command="python train.py")
    (expected,) = (torch.load(path) for path in (folder / "one").glob("rank-*.pt"))
    ranks = [torch.load(folder / "two" / f"rank-{rank}.pt") for rank in (0, 1)]
    for rank in ranks:
        assert rank["state"].keys() == expected["state"].keys()
    difference = max(
        _off(rank["state"][name], wanted)
        for rank in ranks
        for name, wanted in expected["state"].items()
    )
    assert difference < limit, difference
    layers = expected["layers"]
    figures = {"layers": layers, "difference": difference, "note": note}
    record(library, heading, kind="program", over="2 ranks", **figures)


def _off(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    scale = expected.abs().max().item() or 1.0
    return (actual - expected).abs().max().item() / scale
