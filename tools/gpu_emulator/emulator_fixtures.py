"""The emulated device as a fixture, and the tools of CUDA."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from emulated_device import emulated
from harness import capability

__all__ = ["arch", "device", "monkeypatch_session", "tools"]


@pytest.fixture(scope="session")
def arch(request):
    """The compute capability that kernels are compiled for."""
    # where `tests/cuda` is not among the arguments, the option is not known
    return capability(request.config.getoption("--arch", "sm_90"))


@pytest.fixture
def device(arch):
    """An emulated device in the place of the driver."""
    with emulated(arch) as device:
        yield device


def _tool(name: str) -> str | None:
    for root in map(Path, sys.path):
        for folder in ("nvidia/cu13/bin", "nvidia/cuda_nvcc/bin"):
            if (root / folder / name).is_file():
                return str(root / folder / name)
    return shutil.which(name)


@pytest.fixture(scope="session")
def tools(monkeypatch_session):
    found = [_tool(name) for name in ("ptxas", "cuobjdump")]
    if None in found:
        pytest.skip("ptxas or cuobjdump is missing")
    # cuobjdump calls nvdisasm
    folders = {str(Path(tool).parent) for tool in [*found, _tool("nvdisasm")] if tool}
    monkeypatch_session.setenv("PATH", os.pathsep.join([*folders, os.environ["PATH"]]))
    return tuple(found)


@pytest.fixture(scope="session")
def monkeypatch_session():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
