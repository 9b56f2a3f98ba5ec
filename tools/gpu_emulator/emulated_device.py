"""A CUDA driver whose devices are this CPU: the library loads and launches kernels as on a GPU.

`emulated()` puts it in the place of `Driver`; kernels are executed at once. Memory that kernels may
touch is added to `Device.memory` first. A kernel's fault is an illegal address for the caller, with
the fault in the error's text, and it stays in `Device.fault`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ptx_emulator.machine import Counts, Schedule, run
from ptx_emulator.memory import GlobalMemory
from ptx_emulator.parse import Kernel, parse
from ptx_emulator.translate import Program, translate
from syncbn_core.backends.cuda import compiler, kernels, usable
from syncbn_core.backends.cuda.compiler import Code, Source, cache_file, store, stored
from syncbn_core.backends.cuda.driver import DriverError

__all__ = ["Device", "Launch", "Refused", "emulated", "program_of", "ptx_of"]

OUT_OF_RANGE = 101
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
        self._current = threading.local()

    def version(self) -> tuple[int, int]:
        return 99, 0

    def device_count(self) -> int:
        return self.devices

    def compute_capability(self, device: int) -> tuple[int, int]:
        if not 0 <= device < self.devices:
            raise DriverError(f"CUDA_ERROR_INVALID_DEVICE ({OUT_OF_RANGE})", OUT_OF_RANGE)
        return self.capability

    def multiprocessor_count(self, device: int) -> int:
        return 132  # as an H100

    def name(self, device: int) -> str:
        return "Emulator"

    def lasting_zeros(self, device: int, size: int, stream: int) -> None:
        """None: tests have memory of their own."""

    def make_current(self, device: int) -> None:
        """As CUDA's runtime does when a thread sets its device."""
        self._current.device = device

    def load(self, image: bytes, entry: str, device: int) -> Program:
        with self._faults():
            program = program_of(image.decode().rstrip("\0"))
            assert program.kernel.name == entry
            changed = self.before(program.kernel)
            return program if changed is program.kernel else translate(changed)

    def launcher(self, program: Program, device: int, threads: int) -> Any:
        def launch(grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
            codes = ["q" if isinstance(own, int) else "d" for own in arguments]
            values = np.frombuffer(struct.pack("<" + "".join(codes), *arguments), np.uint64)
            with self._faults():
                self._launch(program, device, grid, threads, stream, arguments, values)

        return launch

    def _launch(
        self,
        program: Program,
        device: int,
        grid: tuple[int, int],
        threads: int,
        stream: int,
        arguments: tuple[int | float, ...],
        values: Any,
    ) -> None:
        (x, y), most = grid, program.kernel.threads
        if not (0 < x <= 0x7FFFFFFF and 0 < y <= 0xFFFF and 0 < threads <= most):
            raise Refused(f"grid {grid}, block {threads}")
        where = getattr(self._current, "device", device), (x, y, 1), threads, stream
        with self.memory.lock:
            counts = run(program, self.memory, list(values), (x, y, 1), threads, self.schedule)
            touched = [
                {area.start: amount for area in self.memory.ranges() if (amount := get(area))}
                for get in (lambda area: area.read_bytes, lambda area: area.stored_bytes)
            ]
        launch = Launch(program, *where, arguments, counts, *touched)
        self.launches.append(launch)
        self.after_launch(launch)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """What goes wrong is an error of the driver, with the fault in its text."""
        try:
            yield
        except Exception as error:
            self.fault = error
            refused = isinstance(error, Refused)
            name = "CUDA_ERROR_INVALID_VALUE (1)" if refused else "CUDA_ERROR_ILLEGAL_ADDRESS (700)"
            text = f"{name}: {type(error).__name__}: {error}"
            raise DriverError(text, 1 if refused else 700) from error


@contextmanager
def emulated(capability: tuple[int, int] = (9, 0), devices: int = 2) -> Iterator[Device]:
    """The library's driver is an emulated one; kernels are loaded as PTX, and not checked."""
    device = Device(capability, devices)

    def compile_source(source: Source, capability: tuple[int, int]) -> Code:
        text = ptx_of(source, capability)
        return Code(program_of(text).kernel.name, text, b"")

    def clear() -> None:
        usable._found.clear()

    with pytest.MonkeyPatch.context() as patch:
        machine: Any = kernels.Machine()
        machine.driver = device
        patch.setattr(kernels, "_machine", machine)
        patch.setenv("SYNCBN_KERNELS", "on")
        patch.setattr(kernels, "compile_source", compile_source)
        patch.setattr(kernels, "stored", lambda path: None)
        patch.setattr(kernels, "store", lambda path, code: None)
        clear()
        try:
            yield device
        finally:
            clear()
