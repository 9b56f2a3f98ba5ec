"""Kernels of the CUDA devices of this process: compiled, loaded and started on first use.

A kernel is loaded once for all devices of one compute capability. All that others need of the
driver goes through this module, so tests replace `_machine`.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
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
from syncbn_core.backends.cuda.driver import Driver, DriverError, Launch
from syncbn_core.errors import BackendError

__all__ = [
    "KernelFailure",
    "compile_failure",
    "compute_capability",
    "description",
    "device_count",
    "failure_of",
    "lasting_zeros",
    "launch_of",
    "missing",
    "multiprocessor_count",
    "not_ready",
    "require",
]

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_KINDS: dict[str, type] = {"q": int, "d": float}  # of arguments, by their letters
OLDEST = (7, 0)  # compute capability; the kernels need its memory model

# Errors (CUresult) of a load or launch that the kernel causes, by its image, its PTX or its
# resources. Others have other causes, such as full memory, or an illegal address in an earlier one.
_OF_THE_KERNEL = (1, 98, 200, 209, 218, 220, 221, 222, 223, 300, 302, 303, 500, 701)

# The newest PTX of each CUDA 12; CUDA 13.m has PTX 9.m (release notes of the PTX ISA).
_PTX_VERSIONS = {(12, minor): (8, min(minor, 5)) for minor in range(7)}
_PTX_VERSIONS |= {(12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8)}


class KernelFailure(BackendError):
    """A kernel does not compile, link, load or launch here, or computes wrong results."""

    def __str__(self) -> str:
        return f"{self.args[0]}; SYNCBN_KERNELS=off computes without kernels"


def failure_of(text: str, result: int) -> BackendError:
    """The error for a load or launch that ended with the CUresult `result`."""
    return KernelFailure(text) if result in _OF_THE_KERNEL else BackendError(text)


class Machine:
    """The driver of this process, and what was asked of it or loaded."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.facts: dict[tuple[str, Any], Any] = {}  # by name and device
        self.launches: dict[tuple[str, int], Launch] = {}
        self.loaded: dict[tuple[str, tuple[int, int]], Any] = {}  # handles, by compute capability
        # for `compile_failure`, not loaded
        self.compiled: dict[tuple[str, tuple[int, int]], Code] = {}

    @cached_property
    def driver(self) -> Driver:
        return Driver()

    def fact(self, name: str, device: int) -> Any:
        found = self.facts.get((name, device))
        if found is None:
            found = self.facts[name, device] = getattr(self.driver, name)(device)
        return found


_machine = Machine()


def device_count() -> int:
    """The number of CUDA devices that this process sees; 0 without a driver."""
    try:
        return _machine.driver.device_count()
    except BackendError:
        return 0


def compute_capability(device: int) -> tuple[int, int]:
    """Such as `(9, 0)` for an H100. Devices are numbered as in CuPy and torch."""
    capability: tuple[int, int] = _machine.fact("compute_capability", device)
    return capability


def multiprocessor_count(device: int) -> int:
    """The number of multiprocessors, such as 132 for an H100."""
    count: int = _machine.fact("multiprocessor_count", device)
    return count or 1


def lasting_zeros(device: int, size: int, stream: int) -> int | None:
    """As in `Driver`."""
    return _machine.driver.lasting_zeros(device, size, stream)


def description(device: int) -> str:
    """Name of the device and version of the driver: "NVIDIA L4, driver 580.95.05 (CUDA 13.0)"."""
    release = ""
    with suppress(OSError):  # only Linux has this file
        found = re.search(r"\s(\d+(\.\d+)+)\s", _VERSION_FILE.read_text(encoding="utf-8"))
        release = f" {found[1]}" if found else ""
    major, minor = _machine.driver.version()
    return f"{_machine.fact('name', device)}, driver{release} (CUDA {major}.{minor})"


def launch_of(source: Source, device: int) -> Launch:
    """What starts the kernel of `source` on a device, see `Driver.launcher`.

    Compiled and loaded on first use. Raises `KernelFailure` if compiling or loading fails, and
    another `BackendError` if the device is too old or its memory is full. It raises `DriverError`
    itself if a launch fails.
    """
    launch = _machine.launches.get((source.key, device))
    if launch is None:
        with _machine.lock:
            launch = _machine.launches.get((source.key, device))
            if launch is None:
                launch = _machine.launches[source.key, device] = _load(source, device)
    return launch


def _load(source: Source, device: int) -> Launch:
    machine = _machine
    capability = compute_capability(device)
    if capability < OLDEST:
        raise BackendError(f"device {device}: {_too_old(capability)}")
    if capability < source.oldest:
        raise BackendError(
            "expected compute capability {}.{} or newer for kernel {}, got {}.{} (device {}); use "
            "float16 or float32 there".format(*source.oldest, source.key, *capability, device)
        )
    loaded = machine.loaded.get((source.key, capability))
    if loaded is None:
        try:
            code = machine.compiled.pop((source.key, capability), None) or _code_of(
                source, capability
            )
        except BackendError as error:
            raise KernelFailure(str(error)) from error
        refused = _refused(code)
        if refused is not None:
            raise KernelFailure(
                f"expected kernel {source.key} to load on device {device}; {refused}"
            )
        try:
            loaded = machine.driver.load(code.image, code.entry, device)
        except DriverError as error:
            raise failure_of(
                f"expected kernel {source.key} to load on device {device}, got: {error}; if the "
                "driver is older than the CUDA packages, update the driver",
                error.result,
            ) from error
        machine.loaded[source.key, capability] = loaded
    start = machine.driver.launcher(loaded, device, source.threads)
    kinds = tuple(_KINDS[code] for code in source.codes if code in _KINDS)

    def launch(grid: tuple[int, int], stream: int, *arguments: int | float) -> None:
        if tuple(map(type, arguments)) != kinds:  # bits of an int would be taken for a float
            arguments = tuple([kind(each) for kind, each in zip(kinds, arguments, strict=True)])
        try:
            start(grid, stream, *arguments)
        except DriverError as error:
            raise DriverError(
                f"expected kernel {source.key} to start on device {device}, grid {grid}, "
                f"{source.threads} threads per block, got {error}; if an earlier kernel failed, "
                "CUDA_LAUNCH_BLOCKING=1 shows which",
                error.result,
            ) from error

    return launch


def _code_of(source: Source, capability: tuple[int, int]) -> Code:
    """The compiled kernel, from the disk if it is there."""
    path = cache_file(source, capability)
    kept = stored(path)
    if kept is None:
        kept = compile_source(source, capability)
        store(path, kept)
    return kept


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


def compile_failure(capability: tuple[int, int]) -> str | None:
    """Why no kernel can be compiled for devices of this capability; None if a small one can.

    Loads nothing, so it needs no context, and may be asked while a CUDA graph is captured.
    """
    from syncbn_core._kernels.cuda.constants import THREADS
    from syncbn_core.backends.cuda.grid import source

    key = "compile_failure", capability
    if key not in _machine.facts:
        smallest = source("merge_parts", "float64", 1, False, THREADS)
        try:
            code = _machine.compiled[smallest.key, capability] = _code_of(smallest, capability)
            _machine.facts[key] = _refused(code)
        except BackendError as error:
            _machine.facts[key] = str(error)
    failure: str | None = _machine.facts[key]
    return failure


def _refused(code: Code) -> str | None:
    """Why the driver does not take `code`, which is PTX; None if it does, or for machine code."""
    needed = code.ptx_version
    if needed is None or not device_count():
        return None
    takes = _machine.driver.version()
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
        _machine.driver.version()
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
        takes = _machine.driver.version()[0]
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
