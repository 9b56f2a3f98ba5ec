"""CuPy on the emulated device, for all tests of a folder whose conftest.py imports this."""

from __future__ import annotations

import importlib
import sys

import fake_cupy
import numpy as np
import pytest
from cupy_arrays import ARRAYS, BACKEND
from emulated_device import emulated
from fake_cupy import DEVICES, log

import syncbn_core.backends
from ptx_emulator.machine import Schedule
from syncbn_core import arrays

__all__ = ["cupy", "gpu", "no_faults", "rng"]


@pytest.fixture(scope="module", autouse=True)
def gpu(arch):
    """One emulated device for all tests of a file, so that a kernel is loaded once."""
    with emulated(arch, devices=DEVICES) as device:
        yield device


@pytest.fixture(scope="module", autouse=True)
def cupy(gpu):
    """`fake_cupy` in the place of CuPy, and the backend imported on it."""
    with pytest.MonkeyPatch.context() as patch:
        module = fake_cupy.install(gpu)
        patch.setitem(sys.modules, "cupy", module)
        patch.setitem(sys.modules, "cupy.cuda", module.cuda)
        for name in (BACKEND, ARRAYS):
            patch.delitem(sys.modules, name, raising=False)
        arrays._arrays_of_type.cache_clear()
        backend = importlib.import_module(BACKEND)
        try:
            yield module
        finally:
            fake_cupy.install()
            backend.OPERATIONS.scratch.clear()
            del sys.modules[BACKEND], syncbn_core.backends.cuda.cupy, sys.modules[ARRAYS]
            syncbn_core.backends._operations_for_type.cache_clear()
            arrays._arrays_of_type.cache_clear()


@pytest.fixture(autouse=True)
def no_faults(cupy, gpu):
    """Each test begins without records, and ends without faults or used counters."""
    scratch = sys.modules[BACKEND].OPERATIONS.scratch
    scratch.clear()
    log.reset()
    gpu.launches.clear()
    gpu.fault, gpu.schedule = None, Schedule()
    yield
    assert gpu.fault is None
    left = [own.owner[-own.sizes[1] :]._a.any() for own in scratch.values()]
    assert not any(left), "kernels leave counters behind"


@pytest.fixture
def rng():
    return np.random.default_rng(7)
