"""`Driver`: what `kernels` needs of the CUDA driver, by `cuda.bindings` and `cuda.core`.

Numba's own launcher is not used: it keeps a context per thread and takes many times as long. A
launch uses the context and the stream of the caller (CuPy, torch). Arguments of kernels are
pointers and numbers of 8 bytes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from syncbn_core.errors import BackendError

__all__ = ["Driver", "DriverError", "Launch"]

Launch = Callable[..., None]  # (grid, stream, *arguments): starts a kernel

_OLDEST = 12000  # CUDA 12.0: kernels that are good in all contexts


class DriverError(BackendError):
    """A function of the driver returned an error, the CUresult `result`."""

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.result = result


class Driver:
    """The driver, initialized. Devices are numbered as in CuPy and torch.

    Raises `BackendError` if there is none, or it does not start. Each method raises `DriverError`
    if a function of the driver does.
    """

    def __init__(self) -> None:
        try:
            self._cu: Any = import_module("cuda.bindings.driver")
            self._core: Any = import_module("cuda.core")
            self._call("cuInit", 0)
            takes = self._call("cuDriverGetVersion")
        except DriverError as error:
            raise BackendError(
                f"the NVIDIA driver does not start ({error}): run nvidia-smi to see why"
            ) from error
        except ImportError as error:
            raise BackendError(f"the NVIDIA driver can't be asked: {error}") from error
        except Exception as error:  # of several classes
            raise BackendError(
                f"the NVIDIA driver can't be loaded ({error}): install it; in a container, allow "
                "access to the GPUs (docker run --gpus all)"
            ) from error
        if takes < _OLDEST:
            raise BackendError(
                "expected an NVIDIA driver for CUDA 12 or newer, got one for CUDA "
                f"{takes // 1000}.{takes % 1000 // 10}; update it"
            )

    def version(self) -> tuple[int, int]:
        """The newest CUDA that it takes code for, such as `(13, 0)`."""
        takes = self._call("cuDriverGetVersion")
        return takes // 1000, takes % 1000 // 10

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def compute_capability(self, device: int) -> tuple[int, int]:
        return (
            self._attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
            self._attribute(device, "COMPUTE_CAPABILITY_MINOR"),
        )

    def multiprocessor_count(self, device: int) -> int:
        return self._attribute(device, "MULTIPROCESSOR_COUNT")

    def name(self, device: int) -> str:
        name: bytes = self._call("cuDeviceGetName", 256, self._call("cuDeviceGet", device))
        return name.partition(b"\0")[0].decode()

    def load(self, image: bytes, entry: str, device: int) -> Any:
        """A kernel of `cuda.core`, good in all contexts of devices like this one."""
        self._adopt(device)
        code = self._core.ObjectCode
        made = code.from_cubin if image.startswith(b"\x7fELF") else code.from_ptx
        try:
            return made(image).get_kernel(entry)
        except Exception as error:
            raise self._error_of(error) from error

    def launcher(self, kernel: Any, device: int, threads: int) -> Launch:
        """What starts the kernel on a device, without waiting for it; any thread may call it.

        Arguments are exactly those of the kernel: an int or a float, each of 8 bytes. Streams 0 and
        1 are the legacy default stream.
        """
        core, kept = self._core, lru_cache(maxsize=256)
        start, stream_of = core.launch, kept(core.Stream.from_handle)
        config = kept(lambda grid: core.LaunchConfig(grid=grid, block=threads))

        def launch(grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
            try:
                start(stream_of(stream or 1), config(grid), kernel, *arguments)
            except Exception as error:
                failure = self._error_of(error)
                no_context = failure.result == self._cu.CUresult.CUDA_ERROR_INVALID_CONTEXT
                if not (no_context and self._adopt(device)):
                    raise failure from error
                start(stream_of(stream or 1), config(grid), kernel, *arguments)

        return launch

    def lasting_zeros(self, device: int, size: int, stream: int) -> int | None:
        """Address of `size` int32 zeros for work on `stream`; of no pool, and never freed.

        None if the device has no memory left outside the pools.
        """
        self._adopt(device)
        modes, exchange = self._cu.CUstreamCaptureMode, "cuThreadExchangeStreamCaptureMode"
        # this thread may allocate while another one captures a stream
        before = self._call(exchange, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            address = self._call("cuMemAlloc", 4 * size)
            self._call("cuMemsetD32Async", address, 0, size, stream)
        except DriverError:
            return None
        finally:
            self._call(exchange, before)
        return int(address)

    def _adopt(self, device: int) -> bool:
        """Make the primary context of `device` current if the thread has no context.

        CUDA's runtime does the same. A new thread has no context while it has only taken memory
        from a pool. Returns whether a context was set.
        """
        if int(self._call("cuCtxGetCurrent")):
            return False
        number = self._call("cuDeviceGet", device)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", number))
        return True

    def _attribute(self, device: int, name: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        number = self._call("cuDeviceGet", device)
        return int(self._call("cuDeviceGetAttribute", attribute, number))

    def _call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver gives, if it is one value."""
        result, *found = getattr(self._cu, name)(*arguments)
        if int(result):
            _, text = self._cu.cuGetErrorString(result)
            said = f"{result.name} ({int(result)}): {(text or b'unknown').decode()}"
            raise DriverError(f"expected {name} to succeed, got {said}", int(result))
        return found[0] if found else None

    def _error_of(self, error: Exception) -> DriverError:
        """The error for one of `cuda.core`, whose text begins with the name of a CUresult."""
        found = re.match(r"CUDA_ERROR_\w+", str(error))
        result = 0 if found is None else getattr(self._cu.CUresult, found[0], 0)
        return DriverError(str(error), int(result))
