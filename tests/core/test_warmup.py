"""`python -m syncbn_core warmup`: afterwards a new process compiles nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncbn_core.__main__ import DTYPES, main
from syncbn_core.backends.cpu import warmup


def test_dtypes_are_those_of_the_kernels() -> None:
    assert list(DTYPES) == list(warmup.DTYPES)


def test_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["warmup", "float8"])
    assert status.value.code == 2
    assert "expected float32, float16, bfloat16, float64 or all, got float8" in (
        capsys.readouterr().err
    )


# What the command does, for one of two layouts and one of two builds: all take a minute.
# tests/torch/test_warmup.py compares what it launches with what layers launch.
WARM_UP = """
import sys
from syncbn_core.__main__ import main
from syncbn_core.backends.cpu import warmup

steps = warmup._run_steps
warmup._run_steps = lambda _, x: steps(warmup.OPERATIONS.serial, x[:8]) if x.shape[2] > 8 else None
sys.stderr = sys.stdout
sys.exit(main(["warmup"]))
"""
USE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
import numpy as np
from syncbn_core import batch_norm_backward, batch_norm_forward
for shape in ((4, 3, 9, 9), (1, 300, 1000)):
    x = np.ones(shape, np.float32)
    mean, var = np.zeros((2, shape[1]), np.float32)
    y, saved = batch_norm_forward(x, running_mean=mean, running_var=var, parallel=False)
    batch_norm_backward(y, saved, parallel=False)
"""


@pytest.mark.slow
def test_process_after_the_command_compiles_nothing(
    fresh_python: Callable[..., str], tmp_path: Path
) -> None:
    title, *kernels, total = fresh_python(WARM_UP, NUMBA_CACHE_DIR=str(tmp_path)).splitlines()
    assert title == f"CPU kernels for float32, kept in {tmp_path}"
    assert len(kernels) == 8
    assert any(line.startswith("  compiled planes_forward for float32 in ") for line in kernels)
    assert total.startswith("8 kernels compiled in ")
    assert "syncbn" not in fresh_python(USE, NUMBA_CACHE_DIR=str(tmp_path))
    title, total = fresh_python(WARM_UP, NUMBA_CACHE_DIR=str(tmp_path)).splitlines()
    assert total.startswith("all were there; loaded in ")


def test_command_fails_at_once_if_the_cache_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(file / "cache")}
    command = [sys.executable, "-P", "-m", "syncbn_core", "warmup"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "compiled" not in done.stdout
    assert done.stderr.startswith("syncbn compiles its CPU kernels in every process")
    assert done.stderr.endswith("set NUMBA_CACHE_DIR to a folder that can be written\n")


@pytest.mark.slow
def test_machine_with_one_core_compiles_the_parallel_builds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image is often built on a small machine, for large ones."""
    seen: list[Any] = []
    monkeypatch.setenv("NUMBA_NUM_THREADS", "")  # restored after the test
    monkeypatch.delenv("NUMBA_NUM_THREADS")
    monkeypatch.setattr(
        warmup, "warm_up", lambda dtype: seen.append(os.environ["NUMBA_NUM_THREADS"])
    )
    assert main(["warmup", "all"]) == 0
    assert seen == ["2"] * 4
    assert "all were there" in capsys.readouterr().out
