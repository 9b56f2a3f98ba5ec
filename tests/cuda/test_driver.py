"""`Driver`, by cuda.bindings and cuda.core, on `stub_driver.c`, which notes what it is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from syncbn_core.backends.cuda.driver import Driver
from syncbn_core.backends.cuda.kernels import device_count
from syncbn_core.errors import BackendError

FOLDER = Path(__file__).parent
PROGRAMS = re.findall(r"@program\ndef (\w+)", (FOLDER / "driver_programs.py").read_text("utf-8"))


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    """A folder with the stub as libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, on Linux")
    folder = tmp_path_factory.mktemp("driver")
    source, path = FOLDER / "stub_driver.c", folder / "libcuda.so.1"
    command = [compiler, "-Wall", "-shared", "-fPIC", "-o", path, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_stub(name, stub):
    command = [sys.executable, str(FOLDER / "driver_programs.py"), name]
    own = {"LD_LIBRARY_PATH": str(stub)}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_driver_the_error_says_what_to_do():
    if device_count() > 0:
        pytest.skip("there is a driver")
    with pytest.raises(BackendError, match=r"driver can't be loaded .*install it|does not start"):
        Driver()
