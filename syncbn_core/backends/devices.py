"""Devices by name: "cpu", "cuda:0"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from syncbn_core.errors import ArgumentError, BackendError


@contextmanager
def array_library(device: str) -> Iterator[Any]:
    """Context manager: NumPy for "cpu"; CuPy for "cuda" or "cuda:<number>".

    Inside the block that CUDA device is the current one. Raises `ArgumentError` for other names,
    and `BackendError` if the device does not exist or something is missing; its text says what to
    install.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device) if isinstance(device, str) else None
    if found is None:
        raise ArgumentError(f'expected device "cpu", "cuda" or "cuda:<number>", got {device!r}')
    if device == "cpu":
        yield np
        return
    cupy = _cupy()
    count = cupy.cuda.runtime.getDeviceCount()
    number = cupy.cuda.runtime.getDevice() if found[1] is None else int(found[1])
    if number >= count:
        raise BackendError(f"expected one of {count} CUDA devices (from number 0), got {device!r}")
    with cupy.cuda.Device(number):
        yield cupy


def _cupy() -> Any:
    """The module CuPy; raises `BackendError` if anything that the kernels need is missing."""
    from syncbn_core.backends.cuda.compiler import INSTALL
    from syncbn_core.backends.cuda.kernels import missing, not_ready
    from syncbn_core.backends.cuda.usable import setting

    lacks = [] if setting() == "off" else missing()
    try:
        import cupy
    except ImportError as error:
        absent = getattr(error, "name", None) == "cupy"
        lack = "CuPy is not installed" if absent else f"CuPy can't be imported ({error})"
        hinted = [number for number, other in enumerate(lacks) if INSTALL in other]
        if hinted:  # both have the same remedy: state it once
            lacks.insert(hinted[0], lack)
        else:
            lacks.append(f"{lack}: {INSTALL}")
    if lacks:
        raise not_ready(lacks)
    return cupy
