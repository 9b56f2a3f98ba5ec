"""What a user hears of compilation: one line when it starts, one warning if it can't be kept."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Function = Callable[..., Any]

# `strict` functions compile in a tenth of a second each
COMPILE = """
import logging, sys
{setup}
logging.getLogger("numba").setLevel(logging.WARNING)
import numpy as np
from syncbn_core.kernels.cpu.channels import fill_invstd
from syncbn_core.kernels.cpu.numerics import share

print("share", share(10, 1, 2))
table = np.ones((3, 3))
for eps in (1.0, 1):
    fill_invstd(table, 1, eps, True)
    print("invstd", table[2])
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
    assert line == "syncbn WARNING syncbn compiles CPU kernels: some seconds, once per machine"
    again = outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    assert "share (5, 10)" in again
    assert "syncbn" not in again, "nothing was compiled"


def test_first_compilation_is_said_without_logging_too(
    fresh_python: Function, tmp_path: Path
) -> None:
    printed = outcome(fresh_python, "", NUMBA_CACHE_DIR=str(tmp_path))
    assert len(re.findall("^syncbn compiles CPU kernels", printed, re.MULTILINE)) == 1


def one_warning(printed: str, folder: Path) -> None:
    (line,) = re.findall(".*RuntimeWarning: (.*)", printed)
    assert "compiles its CPU kernels in every process" in line
    assert f"can't be kept in {folder} (" in line
    assert line.endswith("set NUMBA_CACHE_DIR to a folder that can be written")
    assert "share (5, 10)\n" in printed
    assert "invstd [1. 1. 1.]\n" in printed


def test_given_folder_that_cannot_be_written_is_said_once(
    fresh_python: Function, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(file / "cache"))
    one_warning(printed, file / "cache")


def test_home_that_cannot_be_written_is_said_once(fresh_python: Function, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"), str(file))
    printed = outcome(fresh_python, NUMBA_CACHE_DIR="", **places)
    one_warning(printed, file / "numba")


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
def test_rank_that_can_keep_nothing_is_named(
    variable: str, fresh_python: Function, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(folder), **{variable: "3"})
    assert f"they can't be kept on rank 3 in {folder} (" in printed


FULL = """
import errno, os
def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")
os.replace = full
"""


def test_full_disk_is_said_once_and_computing_goes_on(
    fresh_python: Function, tmp_path: Path
) -> None:
    printed = outcome(fresh_python, setup=FULL, NUMBA_CACHE_DIR=str(tmp_path))
    one_warning(printed, tmp_path)
    assert "No space left on device" in printed


READ_ONLY = """
import os, tempfile
def forbidden(*arguments, **named):
    raise PermissionError(13, "Permission denied")
tempfile.TemporaryFile = os.replace = os.makedirs = forbidden
"""


def test_folder_that_can_only_be_read_is_used(fresh_python: Function, tmp_path: Path) -> None:
    """A container whose kernels were compiled as it was built, and whose user is another one."""
    outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    printed = outcome(fresh_python, setup=READ_ONLY, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed.splitlines() == ["share (5, 10)", *["invstd [1. 1. 1.]"] * 2]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "something else": lambda content: b"\x80",
}


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])  # Numba's index of a function, and its builds
@pytest.mark.parametrize(
    "damage",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "cut short")) for one in DAMAGES],
)
def test_damaged_files_are_compiled_anew_once(
    damage: str, suffix: str, fresh_python: Function, tmp_path: Path
) -> None:
    outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    files = list(tmp_path.rglob(f"*.{suffix}"))
    assert len(files) >= 2
    for file in files:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed.count("syncbn compiles CPU kernels") == 1
    assert "Warning" not in printed
    assert "invstd [1. 1. 1.]\n" in printed
    assert "syncbn" not in outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))


def test_build_of_other_types_is_not_taken(fresh_python: Function, tmp_path: Path) -> None:
    """Two processes that save at once can leave an index with the file of another build."""
    outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    of_float, of_int = sorted(tmp_path.rglob("*fill_invstd*.nbc"))
    of_float.write_bytes(of_int.read_bytes())
    printed = outcome(fresh_python, NUMBA_CACHE_DIR=str(tmp_path))
    assert printed.count("syncbn compiles CPU kernels") == 1
    assert "invstd [1. 1. 1.]\ninvstd [1. 1. 1.]\n" in printed


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_frozen_program_without_sources_compiles(fresh_python: Function, tmp_path: Path) -> None:
    """Numba finds no place for the cache of a function whose file does not exist."""
    shutil.rmtree(tmp_path)
    setup = """
import inspect
inspect.getfile = lambda function: "/no/such/file.py"
"""
    one_warning(outcome(fresh_python, setup=setup, NUMBA_CACHE_DIR=str(tmp_path)), tmp_path)
