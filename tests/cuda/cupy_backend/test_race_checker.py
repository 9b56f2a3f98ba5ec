"""`fake_cupy` finds missing waits, and accesses to memory that a kernel may not touch."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from cupy_arrays import BACKEND, to_host
from fake_cupy import Device, Stream, races

from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.errors import BackendError


def test_the_checker_knows_streams_events_and_memory_given_back(cupy):
    first, second = Stream(), Stream()
    with first:
        array = cupy.ones(3)
        event = first.record()
    with second:
        second.wait_event(event)
        array + 1.0
    assert not races.found
    with second:
        array += 1.0
    del array  # goes back to the pool of `first`, which has not waited
    assert races.found
    assert all("its release" in text and "add" in text for text in races.found)
    races.found.clear()


@contextlib.contextmanager
def fault(gpu, match):
    with pytest.raises(BackendError, match=match):
        yield
    assert gpu.fault is not None
    gpu.fault = None


def merge(parts, size=1, stream=None):
    """A launch with the bare address of `parts`: who calls keeps the memory."""
    into = sys.modules["cupy"].empty(8)
    run = sys.modules[BACKEND].OPERATIONS.launcher(sys.modules["cupy"].cuda.runtime.getDevice())
    run.stream = run.stream if stream is None else stream.ptr
    cuda.merge_parts(run, parts, size, 3, into.data.ptr)
    return into


def test_kernels_may_touch_memory_until_it_is_released(cupy, gpu):
    array = cupy.ones(8)
    assert to_host(merge(array.data.ptr)).tolist()[:7] == [1] * 7
    with fault(gpu, r"out of bounds.* of float64 \(8,\) of test_race_checker"):
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
