"""Compiled kernels in the CUDA driver: loaded once, launched with plain numbers.

The driver loads a kernel once for all devices of one compute capability; arguments are 8-byte
numbers, pointers among them, and a launch is in the context and on the stream that the caller
(CuPy, torch) has current. Numba's own dispatcher would keep a context per thread and take many
times as long per launch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from importlib.util import find_spec
from struct import Struct
from typing import Any

from syncbn_core.backends.cuda.compiler import (
    INSTALL,
    Source,
    cache_file,
    compile_source,
    has_nvvm,
    linker,
    store,
    stored,
)
from syncbn_core.errors import BackendError

__all__ = ["Kernel", "compute_capability", "device_count", "kernel_for", "missing", "require"]

OLDEST = (7, 0)  # compute capability: the kernels need its memory model

_INVALID_CONTEXT = 201
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute

# All of the driver that is used; handles are 64 bits wide, a result goes through a pointer.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}
_LIBRARY_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # since CUDA 12
    "cuLibraryLoadData": (c_void_p, c_char_p, *[c_void_p, c_void_p, c_uint] * 2),
    "cuLibraryGetKernel": (c_void_p, c_void_p, c_char_p),
}


def _open() -> ctypes.CDLL:
    # Not PyDLL: a full launch queue waits, perhaps for a callback that needs the interpreter.
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class _Driver:
    """The functions of the driver by their names, initialized."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.calls: dict[str, Callable[..., int]] = {}
        for name, types in {**_FUNCTIONS, **_LIBRARY_FUNCTIONS}.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = types, c_int
                self.calls[name] = function
            elif name in _FUNCTIONS:
                raise BackendError(f"expected a driver with {name}, got one without; update it")
        self.has_libraries = all(name in self.calls for name in _LIBRARY_FUNCTIONS)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        result = self.calls[name](*arguments)
        if result:
            raise BackendError(f"expected {name} to succeed, got {self.describe(result)}")

    def integer(self, name: str, *arguments: Any) -> int:
        """What a function writes through its first parameter."""
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
        """Make the primary context of `device` current if none is, as CUDA's runtime would.

        A new thread that so far only took memory from a pool has none.
        """
        if self.handle("cuCtxGetCurrent"):
            return False
        number = self.integer("cuDeviceGet", device)
        self.call("cuCtxSetCurrent", self.handle("cuDevicePrimaryCtxRetain", number))
        return True

    def load(self, image: bytes, entry: str) -> int:
        """The kernel, good in every context if `has_libraries`, else in the current one."""
        name = entry.encode()
        if self.has_libraries:
            none = (None, None, 0)
            library = self.handle("cuLibraryLoadData", image, *none, *none)
            return self.handle("cuLibraryGetKernel", library, name)
        return self.handle("cuModuleGetFunction", self.handle("cuModuleLoadData", image), name)


@cache
def _driver() -> _Driver:
    try:
        return _Driver(_open())
    except OSError as error:
        raise BackendError(
            f"the NVIDIA driver can't be loaded ({error}): install it; in a container, give "
            "access to it (docker run --gpus all)"
        ) from error
    except BackendError as error:
        raise BackendError(
            f"the NVIDIA driver does not start ({error}): nvidia-smi shows more"
        ) from error


def device_count() -> int:
    """How many CUDA devices this process sees; 0 without a driver."""
    try:
        return _driver().integer("cuDeviceGetCount")
    except BackendError:
        return 0


@cache
def compute_capability(device: int) -> tuple[int, int]:
    """`(9, 0)` for an H100; devices are numbered as in CuPy and torch."""
    driver = _driver()
    number = driver.integer("cuDeviceGet", device)
    major, minor = (
        driver.integer("cuDeviceGetAttribute", attribute, number)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    )
    return major, minor


_lock = threading.Lock()
_kernels: dict[tuple[str, int], Kernel] = {}
_loaded: dict[tuple[str, tuple[int, int]], _Loaded] = {}


class _Loaded:
    """A kernel in the driver."""

    def __init__(self, driver: _Driver, entry: str, image: bytes) -> None:
        self.driver, self.entry, self.image = driver, entry, image
        self.of_context: dict[int, int] = {}
        self.everywhere = driver.load(image, entry) if driver.has_libraries else 0

    def here(self, device: int) -> int:
        """Its handle in the current context, which is made that of `device` if there is none."""
        if self.everywhere:
            return self.everywhere
        self.driver.adopt(device)
        context = self.driver.handle("cuCtxGetCurrent")
        if context not in self.of_context:  # two threads may both load it: no harm
            self.of_context[context] = self.driver.load(self.image, self.entry)
        return self.of_context[context]


class _Slots(threading.local):
    """A thread's memory for arguments, and the address of the array of their addresses."""

    def __init__(self, count: int) -> None:
        values = (ctypes.c_int64 * max(count, 1))()
        start = ctypes.addressof(values)
        self.pointers = (c_void_p * max(count, 1))(*range(start, start + 8 * count, 8))
        self.both = values, ctypes.addressof(self.pointers)


class Kernel:
    """A kernel that is loaded; any thread may launch it."""

    def __init__(self, source: Source, device: int, loaded: _Loaded) -> None:
        self._source, self._device, self._loaded = source, device, loaded
        self._pack = Struct("<" + source.codes).pack_into
        self._slots = _Slots(len(source.codes))
        self._start = loaded.driver.calls["cuLaunchKernel"]

    def launch(self, grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
        """Start it in the current context; does not wait. The driver copies the arguments."""
        values, pointers = self._slots.both
        self._pack(values, 0, *arguments)
        handle = self._loaded.everywhere or self._loaded.here(self._device)
        shape = (grid[0], grid[1], 1, self._source.threads, 1, 1, 0)
        result = self._start(handle, *shape, stream, pointers, None)
        if result == _INVALID_CONTEXT and self._loaded.driver.adopt(self._device):
            result = self._start(handle, *shape, stream, pointers, None)
        if result:
            raise BackendError(
                f"expected kernel {self._source.key} to start on device {self._device}, grid "
                f"{grid}, {self._source.threads} threads per block, got "
                f"{self._loaded.driver.describe(result)}; if an earlier kernel failed, "
                "CUDA_LAUNCH_BLOCKING=1 shows which"
            )


def kernel_for(source: Source, device: int) -> Kernel:
    """`source` for that device, compiled and loaded if it has not been."""
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
        path = cache_file(source, capability)
        kept = stored(path)
        code = kept or compile_source(source, capability)
        try:
            loaded = _Loaded(driver, code.entry, code.image)
            loaded.here(device)
        except BackendError as error:
            raise BackendError(
                f"expected kernel {source.key} to load on device {device}, got: {error}; if the "
                "driver is older than the CUDA packages, update it"
            ) from error
        if kept is None:  # and the driver takes it
            store(path, code)
        _loaded[source.key, capability] = loaded
    return Kernel(source, device, loaded)


def missing() -> list[str]:
    """What stands between this machine and the kernels, each with its remedy."""
    return [*_missing_devices(), *_missing_packages()]


def require() -> None:
    """Raise `BackendError` that says what is missing, if anything is."""
    lacks = missing()
    if lacks:
        raise BackendError("expected a machine ready for CUDA; " + "; ".join(lacks))


def _missing_devices() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        _driver()
        capabilities = _capabilities()
    except BackendError as error:
        return [f"{error}{hint}"]
    if not capabilities:
        return [f"the NVIDIA driver shows no device: nvidia-smi lists those of the machine{hint}"]
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
        return ["NUMBA_ENABLE_CUDASIM replaces CUDA by a simulator; unset it"]
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
            return ['CUDA 13 has no code for compute capability 7.0: pip install "syncbn[cuda12]"']
    return []
