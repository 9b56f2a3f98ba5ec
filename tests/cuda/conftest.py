from __future__ import annotations

import json
import os
import sys
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers of other tests

ON_THIS_MACHINE = find_spec("numba_cuda") is not None and not os.environ.get("NUMBA_ENABLE_CUDASIM")
collect_ignore_glob = [] if ON_THIS_MACHINE else ["*"]
if ON_THIS_MACHINE:
    from emulator_fixtures import *  # noqa: F403


def pytest_addoption(parser):
    parser.addoption("--ptx-table", help="where to keep the table of all kernels, as JSON")
    parser.addoption("--arch", default="sm_90", help="what the executed kernels are compiled for")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


_TABLE: dict = {}


@pytest.fixture(scope="session")
def table():
    return _TABLE


def pytest_terminal_summary(terminalreporter, config):
    _show_executed(terminalreporter)
    if not _TABLE:
        return
    columns = ("registers", "spilled", "stack", "shared", "wide_loads", "wide_stores")
    terminalreporter.section("CUDA kernels through ptxas")
    titles = "  ".join(f"{column:>11}" for column in columns)
    terminalreporter.write_line(f"{'kernel':48}{titles}")
    rows = []
    for (kernel, capability), result in _TABLE.items():
        name, dtype, lanes, ragged = kernel
        arch = f"sm_{capability[0]}{capability[1]}"
        label = f"{name} {dtype} x{lanes}{' ragged' if ragged else ''} {arch}"
        numbers = {column: getattr(result, column) for column in columns}
        line = "  ".join(f"{number:>11}" for number in numbers.values())
        terminalreporter.write_line(f"{label:48}{line}")
        rows.append({"kernel": name, "dtype": dtype, "lanes": lanes, "ragged": ragged})
        rows[-1] |= {"arch": arch, **numbers, "instructions": result.instructions}
    where = config.getoption("--ptx-table", None)
    if where:
        packages = ("numba-cuda", "nvidia-nvjitlink", "nvidia-cuda-nvcc")
        head = {"date": str(date.today()), **{name: _version(name) for name in packages}}
        lines = ",\n".join(map(json.dumps, [head, *rows]))
        Path(where).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _show_executed(terminalreporter):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    found = sorted(v for report in reports for name, v in report.user_properties if name == "ptx")
    if not found:
        return
    terminalreporter.section("basic blocks of compiled CUDA kernels that were executed")
    lines = [f"{key.removesuffix('-256'):42} {some:4} of {every:4}" for key, some, every in found]
    for pair in zip(lines[::2], [*lines[1::2], ""], strict=False):
        terminalreporter.write_line("     ".join(pair))
    some, every = (sum(numbers) for numbers in zip(*((s, e) for _, s, e in found), strict=True))
    terminalreporter.write_line(f"{len(found)} kernels, {some} of {every} blocks")


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
