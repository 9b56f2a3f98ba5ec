"""What a user hears of compilation: one line when it starts, one warning if it can't be kept."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import syncbn_core

Function = Callable[..., Any]

# functions of numbers per channel, which compile quickly
COMPILE = """
import logging, sys
{setup}
logging.getLogger("numba").setLevel(logging.WARNING)
import numpy as np
from syncbn_core._kernels.cpu.channels import fill_table, update_running

counter = np.zeros((), int)
update_running(np.zeros(1), np.zeros(1), counter, np.ones(4), 1.0)
print("counter", counter)
table = np.empty(10)
for eps in (1.0, 1):
    fill_table(np.ones((1, 8)), table, eps, True)
    print("invstd", table[7:])
"""


CONFIGURE = 'logging.basicConfig(level="{}", format="%(name)s %(levelname)s %(message)s")\n'


def outcome(fresh_python: Function, level: str = "INFO", setup: str = "", **variables: str) -> str:
    """All that the program prints, stderr too; without a level it does not configure logging."""
    configure = CONFIGURE.format(level) if level else ""
    code = COMPILE.format(setup=f"sys.stderr = sys.stdout\n{setup}\n{configure}")
    return str(fresh_python(code, **variables))


def test_first_compilation_of_a_process_is_one_line_in_the_log(
    fresh_python: Function, tmp_path: Path
) -> None:
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    (line,) = re.findall("^syncbn .*", printed, re.MULTILINE)
    assert line == "syncbn WARNING syncbn compiles CPU kernels: some seconds, at their first use"
    again = outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    assert "counter 1\n" in again
    assert "syncbn" not in again, "nothing was compiled"


def test_first_compilation_is_said_without_logging_too(
    fresh_python: Function, tmp_path: Path
) -> None:
    for rank, count in (("0", 1), ("1", 0)):  # of the ranks of a host the first says it
        folder = str(tmp_path / rank)
        printed = outcome(fresh_python, "", NUMBA_CACHE_DIR=folder, LOCAL_RANK=rank)
        assert len(re.findall("^syncbn compiles CPU kernels", printed, re.MULTILINE)) == count


def test_a_changed_function_is_compiled_again_with_all_its_callers(
    fresh_python: Function, tmp_path: Path
) -> None:
    shutil.copytree(Path(syncbn_core.__file__).parent, tmp_path / "syncbn_core")
    numerics = tmp_path / "syncbn_core/_kernels/cpu/numerics.py"
    print_mean = """
import numpy as np
from syncbn_core._kernels.cpu.channels import update_running
mean, var = np.zeros((2, 1), np.float32)
update_running(mean, var, np.zeros((), int), np.array([2.0, 1, 1, 1]), 1.0)
print(mean)
"""
    for right, wrong, mean in (
        ("", "", "[1.]\n"),
        ("number = arguments[0]", "number = builder.fadd(*arguments[:1] * 2)", "[2.]\n"),
    ):
        numerics.write_text(numerics.read_text().replace(right, wrong))
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        printed = fresh_python(print_mean, PYTHONPATH=path, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
        assert printed == mean


def one_warning(printed: str, folder: Path) -> None:
    (line,) = re.findall(".*RuntimeWarning: (.*)", printed)
    assert "compiles its CPU kernels in every process" in line
    assert f"can't be kept in {folder} (" in line
    assert line.endswith("set NUMBA_CACHE_DIR to a folder that can be written")
    assert "counter 1\n" in printed
    assert "invstd [1. 1. 1.]\n" in printed


def test_given_folder_that_cannot_be_written_is_said_once(
    fresh_python: Function, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(file / "cache"))
    one_warning(printed, file / "cache")
