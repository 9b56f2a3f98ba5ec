"""Loads compiled kernels into the CUDA driver and launches them, through ctypes.

A kernel is loaded once for all devices of one compute capability. Its arguments are pointers and
numbers of 8 bytes each. A launch uses the context and the stream of the caller (CuPy, torch).
Numba's own launcher is not used: it keeps a context per thread and takes many times as long.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any

from syncbn_core.backends.cuda.compiler import (
    INSTALL,
    Code,
    Source,
    cache_file,
    compile_source,
    has_nvvm,
    linker,
    store,
    stored,
)
from syncbn_core.errors import BackendError

__all__ = [
    "DriverError",
    "Kernel",
    "KernelFailure",
    "compute_capability",
    "description",
    "device_count",
    "failure_of",
    "kernel_for",
    "lasting_zeros",
    "missing",
    "multiprocessor_count",
    "not_ready",
    "require",
]

_VERSION_FILE = Path("/proc/driver/nvidia/version")
LEGACY_STREAMS = (0, 1)  # handles of the default stream, which can't be captured
OLDEST = (7, 0)  # compute capability; the kernels need its memory model

_INVALID_CONTEXT = 201  # CUresult
# Errors of a load or launch that the kernel causes, by its image, its PTX or its resources. Others
# have other causes, such as full memory, or an illegal address in an earlier kernel.
_OF_THE_KERNEL = (1, 98, 200, 209, 218, 220, 221, 222, 223, 300, 302, 303, 500, 701)
_RELAXED = 2  # CUstreamCaptureMode: this thread may allocate while another one captures a stream
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute

# The newest PTX of each CUDA 12; CUDA 13.m has PTX 9.m (release notes of the PTX ISA).
_PTX_VERSIONS = {(12, minor): (8, min(minor, 5)) for minor in range(7)}
_PTX_VERSIONS |= {(12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8)}

# All driver functions in use. Handles have 64 bits; results are written through pointers.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemsetD32Async": (c_void_p, c_uint, c_size_t, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuLibraryLoadData": (c_void_p, c_char_p, *[c_void_p, c_void_p, c_uint] * 2),
    "cuLibraryGetKernel": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}


class KernelFailure(BackendError):
    """A kernel does not compile, link, load or launch here, or computes wrong results.

    `unexpected`: False if the text says what the user can do, as the compiler's errors do.
    """

    unexpected = True


class _OldDriver(BackendError):
    """The driver lacks a function."""


class DriverError(BackendError):
    """A function of the driver returned an error, the CUresult `result`."""

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.result = result


def _open() -> ctypes.CDLL:
    # Not PyDLL: a launch waits if its queue is full, perhaps for a callback that needs the GIL.
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def failure_of(text: str, result: int) -> BackendError:
    """The error for a load or launch that ended with the CUresult `result`."""
    return KernelFailure(text) if result in _OF_THE_KERNEL else BackendError(text)


class _Driver:
    """The functions of the initialized driver, by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.calls: dict[str, Callable[..., int]] = {}
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise _OldDriver(
                    f"expected an NVIDIA driver for CUDA 12 or newer, got one without {name}; "
                    "update it"
                )
            function.argtypes, function.restype = types, c_int
            self.calls[name] = function
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        result = self.calls[name](*arguments)
        if result:
            text = f"expected {name} to succeed, got {self.describe(result)}"
            raise DriverError(text, result)

    def integer(self, name: str, *arguments: Any) -> int:
        """The integer that a function writes through its first parameter."""
        value = c_int()
        self.call(name, byref(value), *arguments)
        return value.value

    def handle(self, name: str, *arguments: Any) -> int:
        value = c_void_p()
        self.call(name, byref(value), *arguments)
        return value.value or 0

    def describe(self, result: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            self.calls[name](result, byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({result}): {texts[1]}"

    def adopt(self, device: int) -> bool:
        """Make the primary context of `device` current if the thread has no context.

        CUDA's runtime does the same. A new thread has no context while it has only taken memory
        from a pool. Returns whether a context was set.
        """
        if self.handle("cuCtxGetCurrent"):
            return False
        number = self.integer("cuDeviceGet", device)
        self.call("cuCtxSetCurrent", self.handle("cuDevicePrimaryCtxRetain", number))
        return True

    def load(self, image: bytes, entry: str) -> int:
        """The handle of a kernel, valid in all contexts."""
        none = (None, None, 0)
        library = self.handle("cuLibraryLoadData", image, *none, *none)
        return self.handle("cuLibraryGetKernel", library, entry.encode())


@cache
def _driver() -> _Driver:
    try:
        return _Driver(_open())
    except OSError as error:
        raise BackendError(
            f"the NVIDIA driver can't be loaded ({error}): install it; in a container, allow "
            "access to the GPUs (docker run --gpus all)"
        ) from error
    except _OldDriver:
        raise
    except BackendError as error:
        raise BackendError(
            f"the NVIDIA driver does not start ({error}): run nvidia-smi to see why"
        ) from error


def device_count() -> int:
    """The number of CUDA devices that this process sees; 0 without a driver."""
    try:
        return _driver().integer("cuDeviceGetCount")
    except BackendError:
        return 0


@cache
def compute_capability(device: int) -> tuple[int, int]:
    """Such as `(9, 0)` for an H100. Devices are numbered as in CuPy and torch."""
    driver = _driver()
    number = driver.integer("cuDeviceGet", device)
    major, minor = (
        driver.integer("cuDeviceGetAttribute", attribute, number)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    )
    return major, minor


@cache
def multiprocessor_count(device: int) -> int:
    """The number of multiprocessors, such as 132 for an H100."""
    driver = _driver()
    number = driver.integer("cuDeviceGet", device)
    return max(driver.integer("cuDeviceGetAttribute", _MULTIPROCESSORS, number), 1)


@cache
def description(device: int) -> str:
    """Name of the device and version of the driver: "NVIDIA L4, driver 580.95.05 (CUDA 13.0)"."""
    driver = _driver()
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), driver.integer("cuDeviceGet", device))
    takes = driver.integer("cuDriverGetVersion")
    release = ""
    with suppress(OSError):  # only Linux has this file
        found = re.search(r"\s(\d+(\.\d+)+)\s", _VERSION_FILE.read_text(encoding="utf-8"))
        release = f" {found[1]}" if found else ""
    return f"{name.value.decode()}, driver{release} (CUDA {takes // 1000}.{takes % 1000 // 10})"


_lock = threading.Lock()
_kernels: dict[tuple[str, int], Kernel] = {}
_loaded: dict[tuple[str, tuple[int, int]], int] = {}  # handles, by compute capability
_compiled: dict[tuple[str, tuple[int, int]], Code] = {}  # for `compile_failure`, not loaded


class _Slots(threading.local):
    """Per thread: memory for kernel arguments, and an array of the addresses of its slots."""

    def __init__(self, count: int) -> None:
        values = (ctypes.c_int64 * max(count, 1))()
        start = ctypes.addressof(values)
        self.pointers = (c_void_p * max(count, 1))(*range(start, start + 8 * count, 8))
        self.both = values, ctypes.addressof(self.pointers)


class Kernel:
    """A loaded kernel of one device; any thread may launch it."""

    def __init__(self, source: Source, device: int, handle: int) -> None:
        self.source: Source = source
        self._device, self._handle, self._driver = device, handle, _driver()
        self._pack = Struct("<" + source.codes).pack_into
        self._slots = _Slots(len(source.codes))
        self._start = self._driver.calls["cuLaunchKernel"]

    def launch(self, grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
        """Start the kernel in the current context, without waiting for it.

        `arguments` must match `Source.codes`, else `struct.error`; the driver copies them. Raises
        `BackendError` if the launch fails.
        """
        values, pointers = self._slots.both
        self._pack(values, 0, *arguments)
        shape = (grid[0], grid[1], 1, self.source.threads, 1, 1, 0)
        result = self._start(self._handle, *shape, stream, pointers, None)
        if result == _INVALID_CONTEXT and self._driver.adopt(self._device):
            result = self._start(self._handle, *shape, stream, pointers, None)
        if result:
            raise DriverError(
                f"expected kernel {self.source.key} to start on device {self._device}, grid "
                f"{grid}, {self.source.threads} threads per block, got "
                f"{self._driver.describe(result)}; if an earlier kernel failed, "
                "CUDA_LAUNCH_BLOCKING=1 shows which",
                result,
            )


def kernel_for(source: Source, device: int) -> Kernel:
    """The kernel of `source` for a device; compiled and loaded on first use.

    Raises `KernelFailure` if compiling or loading fails, and another `BackendError` if the device
    is too old or its memory is full.
    """
    kernel = _kernels.get((source.key, device))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((source.key, device))
            if kernel is None:
                kernel = _kernels[source.key, device] = _load(source, device)
    return kernel


def _load(source: Source, device: int) -> Kernel:
    driver = _driver()
    capability = compute_capability(device)
    if capability < OLDEST:
        raise BackendError(f"device {device}: {_too_old(capability)}")
    if capability < source.oldest:
        raise BackendError(
            "expected compute capability {}.{} or newer for kernel {}, got {}.{} (device {}); use "
            "float16 or float32 there".format(*source.oldest, source.key, *capability, device)
        )
    driver.adopt(device)
    loaded = _loaded.get((source.key, capability))
    if loaded is None:
        try:
            code = _compiled.pop((source.key, capability), None) or _code_of(source, capability)
        except BackendError as error:
            failure = KernelFailure(str(error))
            failure.unexpected = False
            raise failure from error
        refused = _refused(code)
        if refused is not None:
            raise KernelFailure(
                f"expected kernel {source.key} to load on device {device}; {refused}"
            )
        try:
            loaded = driver.load(code.image, code.entry)
        except DriverError as error:
            raise failure_of(
                f"expected kernel {source.key} to load on device {device}, got: {error}; if the "
                "driver is older than the CUDA packages, update the driver",
                error.result,
            ) from error
        _loaded[source.key, capability] = loaded
    return Kernel(source, device, loaded)


def _code_of(source: Source, capability: tuple[int, int]) -> Code:
    """The compiled kernel, from the disk if it is there."""
    path = cache_file(source, capability)
    kept = stored(path)
    if kept is None:
        kept = compile_source(source, capability)
        store(path, kept)
    return kept


def lasting_zeros(device: int, size: int, stream: int) -> int | None:
    """Address of `size` int32 zeros for work on `stream`; they are of no pool, and never freed.

    None if the device has no memory left outside the pools.
    """
    driver = _driver()
    driver.adopt(device)
    mode = c_int(_RELAXED)
    driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))  # and what it was
    try:
        address = driver.handle("cuMemAlloc_v2", 4 * size)
        driver.call("cuMemsetD32Async", address, 0, size, stream)
    except DriverError:
        return None
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
    return address


def missing() -> list[str]:
    """What the kernels need and this machine lacks, each as a text with its remedy.

    If nothing is missing, it compiles one small kernel: versions of the packages may not fit
    together.
    """
    lacks = [*_missing_devices(), *_missing_packages()]
    if lacks:
        return lacks
    for capability in sorted({each for each in _capabilities() if each >= OLDEST}):
        failure = compile_failure(capability)
        if failure is None:
            return []
        lacks = lacks or [failure]
    return lacks


@cache
def compile_failure(capability: tuple[int, int]) -> str | None:
    """Why no kernel can be compiled for devices of this capability; None if a small one can.

    Loads nothing, so it needs no context, and may be asked while a CUDA graph is captured.
    """
    from syncbn_core._kernels.cuda.constants import THREADS
    from syncbn_core.backends.cuda.grid import source

    smallest = source("merge_parts", "float64", 1, False, THREADS)
    try:
        code = _compiled[smallest.key, capability] = _code_of(smallest, capability)
    except BackendError as error:
        return str(error)
    return _refused(code)


def _refused(code: Code) -> str | None:
    """Why the driver does not take `code`, which is PTX; None if it does, or for machine code."""
    needed = code.ptx_version
    if needed is None or not device_count():
        return None
    takes = divmod(_driver().integer("cuDriverGetVersion") // 10, 100)
    if takes[0] > 13 or needed <= _PTX_VERSIONS.get(takes, (9, takes[1])):
        return None
    return (
        "nvJitLink is older than NVVM, and the driver, for CUDA {}.{}, does not take its PTX "
        "{}.{}: install both of the same version, or update the driver".format(*takes, *needed)
    )


def require() -> None:
    """Raise `BackendError` if `missing` reports anything; the text contains all of it."""
    lacks = missing()
    if lacks:
        raise not_ready(lacks)


def not_ready(lacks: list[str]) -> BackendError:
    """The error that says what the machine lacks."""
    remedy = ""
    if device_count():
        remedy = "; or set SYNCBN_KERNELS=off: CuPy's operations then take the place of kernels"
    return BackendError(f"expected a machine ready for CUDA; {'; '.join(lacks)}{remedy}")


def _missing_devices() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        _driver()
        capabilities = _capabilities()
    except BackendError as error:
        return [f"{error}{hint}"]
    if not capabilities:
        return [f"the NVIDIA driver shows no device: run nvidia-smi to list all of them{hint}"]
    return [_too_old(max(capabilities))] if max(capabilities) < OLDEST else []


def _capabilities() -> list[tuple[int, int]]:
    return [compute_capability(device) for device in range(device_count())]


def _too_old(capability: tuple[int, int]) -> str:
    return "expected compute capability {}.{} (Volta) or newer, got {}.{}; use a newer GPU".format(
        *OLDEST, *capability
    )


def _missing_packages() -> list[str]:
    if find_spec("numba_cuda") is None:
        return [f"numba-cuda is not installed: {INSTALL}"]
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return ["NUMBA_ENABLE_CUDASIM replaces CUDA with a simulator; unset it"]
    link = linker()
    if link is None:
        return [f"nvJitLink can't be loaded: {INSTALL}"]
    if not has_nvvm():
        return [f"NVVM can't be loaded: {INSTALL}"]
    made_for = link.version()[0]
    with suppress(BackendError):
        takes = _driver().integer("cuDriverGetVersion") // 1000
        if takes < made_for:
            return [
                f"the NVIDIA driver takes code for CUDA {takes}, the installed numba-cuda makes it "
                f"for CUDA {made_for}: update the driver, or {INSTALL}"
            ]
        if made_for >= 13 and OLDEST <= max(_capabilities(), default=(7, 5)) < (7, 5):
            return [
                "CUDA 13 has no code for compute capability 7.0: in a checkout of syncbn, "
                'pip install ".[cuda12]"'
            ]
    return []
