"""Decides which kernels are used: each is checked when it is first used.

    SYNCBN_KERNELS=checked    the default
    SYNCBN_KERNELS=on         kernels are used unchecked
    SYNCBN_KERNELS=off        no kernels: plain array operations

A kernel that fails (it does not compile, load or launch, or its results are wrong) is named by one
warning, and `usable_kernel` raises `KernelFailure`; plain operations then take its place. A kernel
that passes is noted in the folder of compiled kernels, for this machine code, type of device and
driver, so later processes need not check it. Failures are not noted: the next process checks again,
and warns again. Before the first kernel of a device a small one is loaded; if that fails, one
warning stands for all kernels.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.compiler import Source, cache_folder
from syncbn_core.backends.cuda.driver import (
    LEGACY_STREAMS,
    Kernel,
    KernelFailure,
    description,
    kernel_for,
)
from syncbn_core.backends.cuda.memory import DeviceMemory
from syncbn_core.backends.cuda.selfcheck import CASES, check
from syncbn_core.disk_cache import on_rank, read_own, write_atomically
from syncbn_core.errors import ArgumentError, BackendError

__all__ = ["Setting", "setting", "usable_kernel"]

Setting = Literal["checked", "on", "off"]

REPORT = ". Please report this text to syncbn's developers"

_usable: dict[tuple[str, int], Kernel] = {}
_failures: dict[tuple[str, int], str] = {}
_device_failures: dict[int, str | None] = {}  # why a device can't use any kernel; None if it can
_locks: dict[Any, threading.Lock] = {}  # one each: a check may wait for other threads


def setting() -> Setting:
    """The value of SYNCBN_KERNELS; raises `ArgumentError` if it has no meaning."""
    given: Any = os.environ.get("SYNCBN_KERNELS", "").strip().lower() or "checked"
    if given not in get_args(Setting):
        raise ArgumentError(
            "expected the environment variable SYNCBN_KERNELS to be checked, on or off, "
            f"got {given!r}; unset it to have each kernel checked"
        )
    known: Setting = given
    return known


def usable_kernel(memory: DeviceMemory, source: Source, device: int, stream: int) -> Kernel:
    """The kernel of `source`, compiled, loaded and checked on first use.

    `device` must be the current device and `stream` its current stream. Raises `KernelFailure` if
    the kernel can't be used, after one warning, and `BackendError` if it is unchecked and the
    stream is being captured into a CUDA graph.
    """
    key = source.key, device
    kernel = _usable.get(key)
    if kernel is not None:
        return kernel
    if key not in _failures:
        with _locks.setdefault(device, threading.Lock()):
            _require_device(device)
        with _locks.setdefault(key, threading.Lock()):
            if key not in _failures:
                return _usable.get(key) or _first_use(memory, source, device, stream)
    raise KernelFailure(_failures[key])


def _require_device(device: int) -> None:
    """Raise `KernelFailure` if no kernel loads on the device; one warning says so."""
    if device not in _device_failures:
        smallest = grid.source("merge_parts", "float64", 1, False, grid.THREADS)
        failure = None
        try:
            kernel_for(smallest, device)
        except KernelFailure as error:
            failure = str(error)
        _device_failures[device] = failure
        if failure is not None:
            warnings.warn(
                "syncbn uses plain operations instead of CUDA kernels, which is slower. No kernel "
                f"can be used on {description(device)}{on_rank()}: {failure}",
                stacklevel=2,
            )
    failure = _device_failures[device]
    if failure is not None:
        raise KernelFailure(failure)


def _first_use(memory: DeviceMemory, source: Source, device: int, stream: int) -> Kernel:
    try:
        kernel = kernel_for(source, device)
        if setting() == "checked":
            _check_once(memory, kernel, device, stream)
    except KernelFailure as failure:
        _failures[source.key, device] = str(failure)
        warnings.warn(
            f"syncbn uses plain operations instead of CUDA kernel {source.key}, which is slower. "
            f"On {description(device)}{on_rank()}: {failure}{REPORT if failure.unexpected else ''}",
            stacklevel=2,
        )
        raise
    _usable[source.key, device] = kernel
    return kernel


def _check_once(memory: DeviceMemory, kernel: Kernel, device: int, stream: int) -> None:
    note, passed = _note_of(kernel, device)
    with suppress(OSError):  # such as a folder that may not be read
        if note is not None and read_own(note) == passed:
            return
    if stream not in LEGACY_STREAMS and memory.is_captured(stream):
        raise BackendError(
            f"expected kernel {kernel.source.key} to be checked before a CUDA graph is captured; "
            "run forward and backward once before the capture, or set SYNCBN_KERNELS=on"
        )
    with memory.waiting_allowed():
        check(memory, kernel, device, stream)
    if note is not None:
        with suppress(OSError):
            write_atomically(note, passed)


def _note_of(kernel: Kernel, device: int) -> tuple[Path | None, bytes]:
    """The file that says that the kernel passed on this type of device, and what it then holds.

    None for no folder.
    """
    passed = f"{kernel.source.key}: passed on {description(device)}\n".encode()
    folder = cache_folder()
    if folder is None:
        return None, passed
    digest = hashlib.sha256(kernel.image)
    digest.update(f"{CASES} ".encode() + passed)
    return folder / f"{digest.hexdigest()}.checked", passed
