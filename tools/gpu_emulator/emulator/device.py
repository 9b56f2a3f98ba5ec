"""A CUDA driver whose devices are this CPU: the library loads and launches kernels as on a GPU.

`emulated()` puts it in the place of the driver's library. Arguments come as the real driver gets
them, by pointers to 8 bytes each; kernels are executed at once. Memory that kernels may touch is
added to `Device.memory` first. A kernel's fault is an illegal address for the caller, with the
fault in the error's text, and it stays in `Device.fault`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from syncbn_core.backends.cuda import compiler, driver, usable
from syncbn_core.backends.cuda.compiler import Code, Source, cache_file, store, stored

from .machine import Counts, Schedule, run
from .memory import GlobalMemory
from .parse import Kernel, parse
from .translate import Program, translate

__all__ = ["Device", "Launch", "Refused", "emulated", "program_of", "ptx_of"]

OUT_OF_RANGE, INVALID, NO_CONTEXT, ILLEGAL_ADDRESS, NOT_FOUND = 101, 1, 201, 700, 500
OUT_OF_MEMORY = 2
_CONTEXT = 1 << 40  # handles have more than 32 bits
_programs: dict[str, Program] = {}


class Refused(ValueError):
    """A load or launch that the driver refuses."""


@dataclass(frozen=True)
class Launch:
    """What ran: a kernel with its arguments, on a stream of a device."""

    program: Program
    device: int
    grid: tuple[int, int, int]
    threads: int
    stream: int
    arguments: tuple[int | float, ...]
    counts: Counts
    read_bytes: dict[int, int]  # by the first address of a range
    stored_bytes: dict[int, int]


def program_of(text: str) -> Program:
    """The translated kernel; the same one for the same text."""
    known = _programs.get(text)
    if known is None:
        known = _programs[text] = translate(parse(text))
    return known


def ptx_of(source: Source, capability: tuple[int, int]) -> str:
    """PTX of a kernel, from the disk if it is kept there."""
    path = cache_file(source, capability)
    path = None if path is None else path.with_suffix(".ptx-kernel")
    code = stored(path)
    if code is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "linker", lambda: None)
            code = compiler.compile_source(source, capability)
        store(path, code)
    return code.ptx


class Device:
    """Devices of one compute capability that run kernels; `schedule` may be changed at any time."""

    def __init__(self, capability: tuple[int, int], devices: int) -> None:
        self.capability, self.devices = capability, devices
        self.memory = GlobalMemory()
        self.schedule = Schedule()
        self.launches: list[Launch] = []
        self.fault: Exception | None = None
        self.before: Callable[[Kernel], Kernel] = lambda kernel: kernel  # to test with mutants
        # in the thread that launches; what it raises is a fault
        self.after_launch: Callable[[Launch], None] = lambda launch: None
        self._programs: list[Program] = []
        self._current = threading.local()
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """A function of the driver's library."""
        types = driver._FUNCTIONS.get(name)
        if types is None:
            raise AttributeError(name)
        method = getattr(type(self), "_" + name[2].lower() + name[3:])

        def call(*arguments: Any) -> int:
            if not name.startswith("cuGetError"):
                self._current.fault = None
            try:
                return method(self, *arguments) or 0
            except Exception as error:  # can't go through the foreign function
                self.fault = self._current.fault = error
                return INVALID if isinstance(error, Refused) else ILLEGAL_ADDRESS

        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = CFUNCTYPE(c_int, *types)(call)
        return function

    def _init(self, flags: int) -> int:
        return INVALID if flags else 0

    def _driverGetVersion(self, version: int) -> None:  # noqa: N802
        c_int.from_address(version).value = 99000

    def _getErrorName(self, result: int, text: int) -> None:  # noqa: N802
        names = {
            ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
            INVALID: b"CUDA_ERROR_INVALID_VALUE",
        }
        c_void_p.from_address(text).value = _text(names.get(result, b"CUDA_ERROR_OF_EMULATOR"))

    def _getErrorString(self, result: int, text: int) -> None:  # noqa: N802
        fault = getattr(self._current, "fault", None)  # of this thread
        said = f"{type(fault).__name__}: {fault}" if fault else "no fault"
        c_void_p.from_address(text).value = _text(said.encode())

    def _deviceGetCount(self, count: int) -> None:  # noqa: N802
        c_int.from_address(count).value = self.devices

    def _deviceGet(self, device: int, ordinal: int) -> int:  # noqa: N802
        c_int.from_address(device).value = ordinal
        return 0 if 0 <= ordinal < self.devices else OUT_OF_RANGE

    def _deviceGetAttribute(self, value: int, attribute: int, device: int) -> None:  # noqa: N802
        known = {16: 132, 75: self.capability[0], 76: self.capability[1]}  # as an H100
        c_int.from_address(value).value = known[attribute]

    def _deviceGetName(self, name: int, size: int, device: int) -> None:  # noqa: N802
        ctypes.memmove(name, b"Emulator\0", min(size, 9))

    def _devicePrimaryCtxRetain(self, context: int, device: int) -> None:  # noqa: N802
        c_void_p.from_address(context).value = _CONTEXT + device

    def _ctxGetCurrent(self, context: int) -> None:  # noqa: N802
        c_void_p.from_address(context).value = getattr(self._current, "context", None)

    def _ctxSetCurrent(self, context: int) -> None:  # noqa: N802
        self._current.context = context

    def make_current(self, ordinal: int) -> None:
        """As CUDA's runtime does when a thread sets its device."""
        self._ctxSetCurrent(_CONTEXT + ordinal)

    def _threadExchangeStreamCaptureMode(self, mode: int) -> None:  # noqa: N802
        """No stream is captured."""

    def _memAlloc_v2(self, address: int, size: int) -> int:  # noqa: N802
        return OUT_OF_MEMORY  # tests have memory of their own

    def _memsetD32Async(self, address: int, value: int, size: int, stream: int) -> int:  # noqa: N802
        return INVALID

    def _libraryLoadData(self, library: int, image: bytes, *options: Any) -> None:  # noqa: N802
        program = program_of(image.decode())
        changed = self.before(program.kernel)
        self._programs.append(program if changed is program.kernel else translate(changed))
        c_void_p.from_address(library).value = 2 * _CONTEXT + len(self._programs) - 1

    def _libraryGetKernel(self, function: int, library: int, name: bytes) -> int:  # noqa: N802
        c_void_p.from_address(function).value = library
        entry = self._programs[library - 2 * _CONTEXT].kernel.name
        return 0 if entry == name.decode() else NOT_FOUND

    def _launchKernel(self, function: int, *rest: Any) -> int:  # noqa: N802
        gx, gy, gz, bx, by, bz, shared, stream, parameters, extra = rest
        program = self._programs[function - 2 * _CONTEXT]
        limits = (gx <= 0x7FFFFFFF, gy <= 0xFFFF, gz <= 0xFFFF, bx <= program.kernel.threads)
        if not (min(gx, gy, gz, bx, by, bz) > 0 and all(limits) and by == bz == 1):
            raise Refused(f"grid {gx, gy, gz}, block {bx, by, bz}")
        if shared or extra:
            raise Refused("dynamic shared memory or extra options")
        context: int | None = getattr(self._current, "context", None)
        if context is None:
            return NO_CONTEXT
        pointers = (c_void_p * len(program.kernel.parameters)).from_address(parameters)
        kinds = [kind for _, kind in program.kernel.parameters]
        values = [np.uint64(c_uint64.from_address(place).value) for place in pointers]
        with self.memory.lock:
            counts = run(program, self.memory, values, (gx, gy, gz), bx, self.schedule)
            touched = [
                {area.start: amount for area in self.memory.ranges() if (amount := get(area))}
                for get in (lambda area: area.read_bytes, lambda area: area.stored_bytes)
            ]
        given = [
            float(value.view(np.float64)) if kind == "f64" else int(value.view(np.int64))
            for value, kind in zip(values, kinds, strict=True)
        ]
        where = context - _CONTEXT, (gx, gy, gz), bx, stream or 0
        launch = Launch(program, *where, tuple(given), counts, *touched)
        self.launches.append(launch)
        self.after_launch(launch)
        return 0


_texts: dict[bytes, Any] = {}


def _text(words: bytes) -> int:
    """Its address; it stays."""
    return ctypes.addressof(_texts.setdefault(words, ctypes.create_string_buffer(words)))


@contextmanager
def emulated(capability: tuple[int, int] = (9, 0), devices: int = 2) -> Iterator[Device]:
    """The library's driver is an emulated one; kernels are loaded as PTX, and not checked."""
    device = Device(capability, devices)

    def compile_source(source: Source, capability: tuple[int, int]) -> Code:
        text = ptx_of(source, capability)
        return Code(program_of(text).kernel.name, text, b"")

    def clear() -> None:
        driver._driver.cache_clear()
        driver.compute_capability.cache_clear()
        driver.multiprocessor_count.cache_clear()
        driver.compile_failure.cache_clear()
        driver.description.cache_clear()
        driver._compiled.clear()
        driver._kernels.clear()
        driver._loaded.clear()
        usable._passed.clear()
        usable._failed.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_open", lambda: device)
        patch.setenv("SYNCBN_KERNELS", "on")
        patch.setattr(driver, "compile_source", compile_source)
        patch.setattr(driver, "stored", lambda path: None)
        patch.setattr(driver, "store", lambda path, code: None)
        clear()
        try:
            yield device
        finally:
            clear()
