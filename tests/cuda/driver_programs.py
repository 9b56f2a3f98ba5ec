"""Programs on `stub_driver.c`, which `test_driver.py` starts: `python driver_programs.py NAME`."""

from __future__ import annotations

import ctypes
import random
import re
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from syncbn_core._kernels.cuda.signatures import SIGNATURES, codes_of, signature_of
from syncbn_core.backends.cuda.driver import Driver, DriverError
from syncbn_core.errors import BackendError

LIBRARY = ctypes.CDLL("libcuda.so.1")
PROGRAMS: dict[str, Callable[[], None]] = {}
INVALID_PTX, ILLEGAL_ADDRESS, CUBIN = 218, 700, b"\x7fELF"


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


class Launch(ctypes.Structure):
    """As in stub_driver.c."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("parameters", ctypes.c_uint64 * 32),
    )


class Stub:
    """The variables `stub_*` as attributes."""

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(LIBRARY, f"stub_{name}").value

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(LIBRARY, f"stub_{name}").value = value


STUB = Stub()


def launches() -> list[Launch]:
    return list((Launch * STUB.launched).in_dll(LIBRARY, "stub_launches"))


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@program
def facts_of_devices() -> None:
    STUB.devices = 2
    driver = Driver()
    assert driver.version() == (13, 0)
    assert driver.device_count() == 2
    assert [driver.compute_capability(device) for device in range(2)] == [(9, 0), (8, 0)]
    assert driver.multiprocessor_count(1) == 132
    assert driver.name(1) == "Stub 1"


@program
def a_driver_that_does_not_start() -> None:
    STUB.init_fails = 100
    with pytest.raises(BackendError, match=r"does not start .*NO_DEVICE \(100\)"):
        Driver()


@program
def an_old_driver() -> None:
    STUB.version = 11080
    with pytest.raises(BackendError, match=r"driver for CUDA 12 or newer, got .* 11\.8; update"):
        Driver()


@program
def arguments_of_every_kernel() -> None:
    """Bit for bit, also where a value is large, negative or no number."""
    driver = Driver()
    kernel = driver.load(CUBIN, "kernel", 0)
    start, rng = driver.launcher(kernel, 0, 256), random.Random(0)
    ints = [0, 1, -1, 2**63 - 1, -(2**63), 2**32 + 5, 0x7F00_1234_5678]
    floats = [0.0, -0.0, 0.1, 1e308, 5e-324, float("inf"), float("nan"), 2.0**53]
    streams = {0: 1, 1: 1, 2: 2, 0x7F00_0000_1000: 0x7F00_0000_1000}  # 0 and 1 are one stream
    for kernel_name in SIGNATURES:
        for name in (kernel_name, f"{kernel_name}+silu"):
            codes = re.sub(r"\W", "", codes_of(signature_of(name)))
            STUB.parameters = len(codes)
            values = [rng.choice(floats if code == "d" else ints) for code in codes]
            for stream, arrived in streams.items():
                STUB.launched = 0
                start((34, 5), stream, *values)
                (launch,) = launches()
                own = bytes(launch.parameters)[: 8 * len(codes)]
                assert own == struct.pack("<" + codes, *values), (name, codes)
                assert launch.stream == arrived
                assert [*launch.grid, *launch.block, launch.shared] == [34, 5, 1, 256, 1, 1, 0]


@program
def threads_that_launch_at_once() -> None:
    threads, times, size = 6, 2000, 8
    STUB.parameters = size
    driver = Driver()
    kernels = [driver.load(CUBIN, "kernel", 0) for _ in range(2)]
    starts = [driver.launcher(kernel, 0, 256) for kernel in kernels]
    begin = threading.Barrier(threads)

    def member(rank: int) -> None:
        begin.wait()
        for i in range(times):
            first = (rank * times + i) << 8
            starts[i % 2]((1, 1), 0, *range(first, first + size))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(member, range(threads)))
    firsts = [launch.parameters[0] for launch in launches()]
    assert sorted(firsts) == [n << 8 for n in range(threads * times)]
    for launch, first in zip(launches(), firsts, strict=True):
        assert list(launch.parameters)[:size] == list(range(first, first + size))


@program
def contexts() -> None:
    """That of the caller stays; a thread without one gets the primary one of the device."""
    STUB.devices = 2
    driver = Driver()
    start = driver.launcher(driver.load(CUBIN, "kernel", 1), 1, 256)
    primary, retained = ctypes.c_void_p(), STUB.retained
    LIBRARY.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 1)
    in_a_thread(lambda: start((1, 1), 0, 1))
    assert STUB.retained == retained + 2
    assert launches()[-1].context == primary.value

    def with_own() -> None:
        LIBRARY.cuCtxSetCurrent(ctypes.c_void_p(2**40))
        start((1, 1), 0, 1)

    in_a_thread(with_own)
    assert STUB.retained == retained + 2
    assert launches()[-1].context == 2**40


@program
def failures() -> None:
    """They have the number of the CUresult, and the next launch works."""
    driver = Driver()
    start = driver.launcher(driver.load(CUBIN, "kernel", 0), 0, 256)
    STUB.launch_fails = ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        start((1, 1), 0, 1)
    assert caught.value.result == ILLEGAL_ADDRESS
    STUB.launch_fails = 0
    start((1, 1), 0, 1)
    assert STUB.launched == 1
    STUB.load_fails = INVALID_PTX
    for image in (CUBIN, b".version 8.0\n.target sm_90\n"):
        with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_PTX") as caught:
            driver.load(image, "kernel", 0)
        assert caught.value.result == INVALID_PTX


@program
def lasting_zeros() -> None:
    """Of no pool, written on the stream; the thread captures as before."""
    driver, mode = Driver(), ctypes.c_int(0)
    address = driver.lasting_zeros(0, 5000, 7)
    assert address is not None
    assert not any((ctypes.c_int32 * 5000).from_address(address))
    assert STUB.memory_stream == 7
    LIBRARY.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0
    STUB.memory_fails = 2
    assert driver.lasting_zeros(0, 5000, 7) is None
    LIBRARY.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
