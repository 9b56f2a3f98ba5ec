"""`Driver`: what `kernels` needs of the CUDA driver, through ctypes.

Numba's own launcher is not used: it keeps a context per thread and takes many times as long. A
launch uses the context and the stream of the caller (CuPy, torch). Arguments of kernels are
pointers and numbers of 8 bytes each.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from struct import Struct
from typing import Any

from syncbn_core.errors import BackendError

__all__ = ["Driver", "DriverError", "Launch"]

Launch = Callable[..., None]  # (grid, stream, *arguments): starts a kernel

_INVALID_CONTEXT = 201  # CUresult
_RELAXED = 2  # CUstreamCaptureMode: this thread may allocate while another one captures a stream
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute

_START = "cuLaunchKernel"
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
    _START: (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}


class DriverError(BackendError):
    """A function of the driver returned an error, the CUresult `result`."""

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.result = result


def _open() -> ctypes.CDLL:
    # Not PyDLL: a launch waits if its queue is full, perhaps for a callback that needs the GIL.
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Driver:
    """The driver, initialized. Devices are numbered as in CuPy and torch.

    Raises `BackendError` if there is none, or it does not start. Each method raises `DriverError`
    if a function of the driver does.
    """

    def __init__(self) -> None:
        try:
            library = _open()
        except OSError as error:
            raise BackendError(
                f"the NVIDIA driver can't be loaded ({error}): install it; in a container, allow "
                "access to the GPUs (docker run --gpus all)"
            ) from error
        self._calls: dict[str, Callable[..., int]] = {}
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise BackendError(
                    f"expected an NVIDIA driver for CUDA 12 or newer, got one without {name}; "
                    "update it"
                )
            function.argtypes, function.restype = types, c_int
            self._calls[name] = function
        try:
            self._call("cuInit", 0)
        except DriverError as error:
            raise BackendError(
                f"the NVIDIA driver does not start ({error}): run nvidia-smi to see why"
            ) from error

    def version(self) -> tuple[int, int]:
        """The newest CUDA that it takes code for, such as `(13, 0)`."""
        takes = self._integer("cuDriverGetVersion")
        return takes // 1000, takes % 1000 // 10

    def device_count(self) -> int:
        return self._integer("cuDeviceGetCount")

    def compute_capability(self, device: int) -> tuple[int, int]:
        major, minor = (
            self._attribute(device, each) for each in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        )
        return major, minor

    def multiprocessor_count(self, device: int) -> int:
        return self._attribute(device, _MULTIPROCESSORS)

    def name(self, device: int) -> str:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), self._integer("cuDeviceGet", device))
        return name.value.decode()

    def load(self, image: bytes, entry: str, device: int) -> int:
        """The handle of a kernel, valid in all contexts of devices like this one."""
        self._adopt(device)
        none = (None, None, 0)
        library = self._handle("cuLibraryLoadData", image, *none, *none)
        return self._handle("cuLibraryGetKernel", library, entry.encode())

    def launcher(self, handle: int, device: int, threads: int, codes: str) -> Launch:
        """What starts the kernel on a device, without waiting for it; any thread may call it.

        Arguments must match `codes` (`Source.codes`), else it raises `struct.error`; they are
        copied.
        """
        pack, own, start = Struct("<" + codes).pack_into, _Slots(len(codes)), self._calls[_START]

        def launch(grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
            values, pointers = own.both
            pack(values, 0, *arguments)
            shape = (grid[0], grid[1], 1, threads, 1, 1, 0)
            result = start(handle, *shape, stream, pointers, None)
            if result == _INVALID_CONTEXT and self._adopt(device):
                result = start(handle, *shape, stream, pointers, None)
            if result:
                raise DriverError(self._describe(result), result)

        return launch

    def lasting_zeros(self, device: int, size: int, stream: int) -> int | None:
        """Address of `size` int32 zeros for work on `stream`; of no pool, and never freed.

        None if the device has no memory left outside the pools.
        """
        self._adopt(device)
        mode = c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))  # and what it was
        try:
            address = self._handle("cuMemAlloc_v2", 4 * size)
            self._call("cuMemsetD32Async", address, 0, size, stream)
        except DriverError:
            return None
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        return address

    def _adopt(self, device: int) -> bool:
        """Make the primary context of `device` current if the thread has no context.

        CUDA's runtime does the same. A new thread has no context while it has only taken memory
        from a pool. Returns whether a context was set.
        """
        if self._handle("cuCtxGetCurrent"):
            return False
        number = self._integer("cuDeviceGet", device)
        self._call("cuCtxSetCurrent", self._handle("cuDevicePrimaryCtxRetain", number))
        return True

    def _attribute(self, device: int, attribute: int) -> int:
        number = self._integer("cuDeviceGet", device)
        return self._integer("cuDeviceGetAttribute", attribute, number)

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._calls[name](*arguments)
        if result:
            text = f"expected {name} to succeed, got {self._describe(result)}"
            raise DriverError(text, result)

    def _integer(self, name: str, *arguments: Any) -> int:
        """The integer that a function writes through its first parameter."""
        value = c_int()
        self._call(name, byref(value), *arguments)
        return value.value

    def _handle(self, name: str, *arguments: Any) -> int:
        value = c_void_p()
        self._call(name, byref(value), *arguments)
        return value.value or 0

    def _describe(self, result: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            self._calls[name](result, byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({result}): {texts[1]}"


class _Slots(threading.local):
    """Per thread: memory for kernel arguments, and an array of the addresses of its slots."""

    def __init__(self, count: int) -> None:
        values = (ctypes.c_int64 * max(count, 1))()
        start = ctypes.addressof(values)
        self.pointers = (c_void_p * max(count, 1))(*range(start, start + 8 * count, 8))
        self.both = values, ctypes.addressof(self.pointers)
