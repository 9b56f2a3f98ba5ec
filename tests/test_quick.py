"""`pytest --quick` leaves out cases, and no promise but the slow ones."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_kernel(dtype, layout):
    pass

@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [lambda: 1, lambda: 2], ids=["first", "second"])
def test_ranks(size, make):
    pass

@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_activation(dtype, activation):
    pass

@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_without_float32(dtype):
    pass

def test_plain():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


def test_quick_runs_one_dtype_and_one_world_of_each_case(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_these.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--quick"]
    command += ["-p", "no:randomly"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names == [
        "test_kernel[planes-f4]",
        "test_kernel[rows-f4]",
        "test_ranks[first-2]",
        "test_ranks[second-2]",
        "test_activation[float32-silu]",
        "test_without_float32[int8]",
        "test_plain",
    ], done.stdout + done.stderr


ROOT = Path(__file__).parents[1]


def test_dev_py_tells_what_it_runs_and_how_long_that_takes_as_the_documents_do() -> None:
    command = [sys.executable, str(ROOT / "dev.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = dict(re.findall(r"(?m)^    (\w+)    .*: (.* time.*)$", done.stdout))
    assert lines.keys() == {"demo", "quick", "check", "docs"}, done.stdout
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        told = dict(
            re.findall(r"(?m)^(?:\$ )?python3 dev\.py (demo|quick|check) .*?([\w]+ min.*)$", text)
        )
        assert told.items() <= lines.items(), name
        assert "quick" in told
