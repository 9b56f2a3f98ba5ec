"""`fake_cupy` refuses what CuPy refuses, and kernels that touch memory which is released."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from cupy_arrays import BACKEND, to_host
from fake_cupy import Device

from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.errors import BackendError


@contextlib.contextmanager
def fault(gpu, match):
    with pytest.raises(BackendError, match=match):
        yield
    assert gpu.fault is not None
    gpu.fault = None


def merge(parts, size=1):
    """A launch with the bare address of `parts`: who calls keeps the memory."""
    into = sys.modules["cupy"].empty(8)
    run = sys.modules[BACKEND].OPERATIONS.launcher(sys.modules["cupy"].cuda.runtime.getDevice(), 0)
    cuda.merge_parts(run, parts, size, 3, into.data.ptr)
    return into


def test_kernels_may_touch_memory_until_it_is_released(cupy, gpu):
    array = cupy.ones(8)
    assert to_host(merge(array.data.ptr)).tolist()[:7] == [1] * 7
    with fault(gpu, r"out of bounds.* of float64 \(8,\)"):
        merge(array.data.ptr, 2)
    address = array.data.ptr
    del array
    with fault(gpu, "out of bounds"):
        merge(address)


def test_the_stand_in_refuses_what_cupy_refuses(cupy):
    array = cupy.ones(3)
    for refused in (
        lambda: np.asarray(array),
        lambda: array + np.ones(3),
        lambda: np.ones(3) + array,
        lambda: np.concatenate([array]),
    ):
        with pytest.raises(TypeError):
            refused()
    with Device(1), pytest.raises(ValueError, match="Array device"):
        array * 2.0
