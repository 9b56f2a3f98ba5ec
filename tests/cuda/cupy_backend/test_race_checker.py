"""`fake_cupy` finds missing waits, and accesses to memory that a kernel may not touch."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cupy_arrays import BACKEND, streams, to_host, train
from fake_cupy import Device, Stream, races

from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.comm import device_message
from syncbn_core.errors import BackendError

# What is found once in `device_message`, and what it is replaced by.
MISTAKES = {
    "combiner does not wait": (r"stream\.wait_event\(message\.ready\)", "pass"),
    "member does not wait": (r"cupy\S+\.wait_event\(self\.done\)", "pass"),
    "inbox made after the event": (
        r"self\.ready: Any = self\.stream\.record\(\)",
        "self.ready = self.stream.record(); "
        "self.inbox = cupy.empty((*prefix, *array.shape), array.dtype)",
    ),
    "done before the copies": (r"done = stream\.record\(\)", "done = home.ready"),
    "members keep the combiner's memory": (
        r"else Reply\(message\.inbox, done\)",
        "else Reply(result, done)",
    ),
}


def with_mistake(pattern, replacement):
    text = Path(device_message.__file__).read_text(encoding="utf-8")
    text, count = re.subn(pattern, replacement, text)
    assert count == 1, f"{pattern} is not there any more: change this test"
    module = ModuleType("syncbn_core.comm.device_message_with_mistake")
    exec(compile(text, "message_with_mistake.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checker_finds_a_missing_wait(mistake, monkeypatch, rng):
    module = with_mistake(*MISTAKES[mistake])
    users = sys.modules["syncbn_core.comm.thread_group"]
    for name in ("DeviceMessage", "Reply", "add_messages", "gather_messages"):
        monkeypatch.setattr(users, name, getattr(module, name))
    parts = [rng.normal(size=(2, 3)) for _ in range(3)]
    train(parts, parts, streams)
    assert races.found
    assert "is not ordered after" in races.found[0]
    races.found.clear()


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
    assert to_host(merge(array.data.ptr)).tolist() == [1] * 7 + [0]
    with fault(gpu, r"out of bounds.* of float64 \(8,\) of test_race_checker"):
        merge(array.data.ptr, 2)
    address = array.data.ptr
    del array
    with fault(gpu, "out of bounds"):
        merge(address)


def test_kernels_may_read_what_somebody_has_written(cupy, gpu):
    whole = cupy.empty(8)
    whole[:7] = cupy.ones(7)
    merge(whole.data.ptr)
    with fault(gpu, "reads what nobody has written"):
        merge(whole.data.ptr + 8)
    whole.sum()
    assert "sum, test_race_checker.py" in races.found.pop()


def test_kernels_have_memory_and_streams_of_their_own_device(cupy, gpu):
    with Device(1):
        far, stream = cupy.ones(8), Stream()
        merge(far.data.ptr)
    with fault(gpu, "merge_parts on device 0 touches memory of device 1"):
        merge(far.data.ptr)
    near = cupy.ones(8)
    with fault(gpu, "runs on device 0, on a stream of device 1"):
        merge(near.data.ptr, stream=stream)


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
