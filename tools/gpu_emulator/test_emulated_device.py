"""The emulated driver refuses and reports as CUDA's does."""

from __future__ import annotations

import emulated_device
import numpy as np
import pytest
from emulated_device import emulated

from ptx_emulator.by_hand import THREADS, element, module
from ptx_emulator.memory import Fault, Range
from syncbn_core.backends.cuda import kernels
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.errors import BackendError


def words(count):
    return np.full(count, 1, "u4")


class Machine:
    """A device with a kernel that is loaded by the library's driver module."""

    def __init__(self, device, patch):
        self.device, self.patch, self.loaded = device, patch, 0

    def load(self, body, parameters, threads=THREADS, device=0):
        self.patch.setattr(emulated_device, "ptx_of", lambda *given: module(body, parameters))
        self.loaded += 1
        source = Source(f"by-hand-{self.loaded}", lambda: None, parameters, threads)
        return kernels.launch_of(source, device)

    def array(self, array, name="array"):
        """Its address, where it really is."""
        data = array.view(np.uint8)
        start = data.__array_interface__["data"][0]
        self.device.memory.add(Range(start, data, name=name))
        return start


@pytest.fixture
def machine(monkeypatch):
    with emulated((9, 0), devices=2) as device:
        device.make_current(0)
        yield Machine(device, monkeypatch)


@pytest.mark.parametrize(
    ("grid", "threads", "sound"),
    [
        ((1, 1), THREADS, True),
        ((0, 1), THREADS, False),
        ((1, 0), THREADS, False),
        ((1, 65536), THREADS, False),
        ((2**31, 1), THREADS, False),
        ((-1, 1), THREADS, False),
        ((1, 1), 0, False),
        ((1, 1), THREADS + 1, False),
    ],
)
def test_a_bad_geometry_is_refused(machine, grid, threads, sound):
    kernel = machine.load("mov.u32 %r1, 1;", "", threads)
    if sound:
        kernel(grid, 0)
        assert machine.device.launches[-1].grid == (*grid, 1)
    else:
        with pytest.raises(BackendError, match=r"CUDA_ERROR_INVALID_VALUE \(1\): .*grid \("):
            kernel(grid, 0)
        assert not machine.device.launches


READ_ONE = f"""
    add.s32 %r1, %i, 3;
    {element("%rd1", "%a0", "%r1")}
    ld.global.u32 %r2, [%rd1];
    {element("%rd1", "%a1", "%i")}
    st.global.u32 [%rd1], %r2;
"""


def test_a_fault_says_what_and_where(machine):
    kernel = machine.load(READ_ONE, "qq")
    line = module(READ_ONE, "qq").splitlines().index("    ld.global.u32 %r2, [%rd1];") + 1
    x, y = machine.array(words(THREADS), "x of 64"), machine.array(words(THREADS))
    said = rf"kernel by-hand-1 .*ILLEGAL_ADDRESS \(700\): Fault: .*of x of 64 .*line {line} of .*k"
    with pytest.raises(BackendError, match=said):
        kernel((1, 1), 0, x, y)
    assert isinstance(machine.device.fault, Fault)
    assert not machine.device.launches
    with pytest.raises(BackendError, match=r"\(101\)$"):  # not that of the launch
        kernels.compute_capability(7)
    x = machine.array(words(THREADS + 3))
    kernel((1, 1), 0, x, y)
    assert machine.device.launches[-1].read_bytes == {x: 4 * THREADS}
