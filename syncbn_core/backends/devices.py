"""Where arrays live: the array library of a device, and arrays moved to the kind of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from syncbn_core.errors import ArgumentError, BackendError

__all__ = ["array_library", "device_of", "place_like", "to_numpy"]

Array = Any


@contextmanager
def array_library(device: str) -> Iterator[Any]:
    """NumPy for "cpu"; CuPy, with that device the current one, for "cuda" or "cuda:<number>".

    Raises `ArgumentError` for other words, and `BackendError` that says what is missing and what
    to install where CuPy's arrays can't be computed with.
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
        raise BackendError(f"expected one of {count} CUDA devices (from 0 on), got {device!r}")
    with cupy.cuda.Device(number):
        yield cupy


def _cupy() -> Any:
    """CuPy, on a machine where everything that the kernels need is there."""
    from syncbn_core.backends.cuda.compiler import INSTALL
    from syncbn_core.backends.cuda.driver import missing

    lacks = missing()
    try:
        import cupy
    except ImportError as error:
        absent = getattr(error, "name", None) == "cupy"
        lack = "CuPy is not installed" if absent else f"CuPy can't be imported ({error})"
        hinted = [number for number, other in enumerate(lacks) if INSTALL in other]
        if hinted:  # one hint is enough
            lacks.insert(hinted[0], lack)
        else:
            lacks.append(f"{lack}: {INSTALL}")
    if lacks:
        raise BackendError("expected a machine ready for CUDA; " + "; ".join(lacks))
    return cupy


def device_of(array: Array) -> AbstractContextManager[Any]:
    """Makes the device of a CuPy array the current one, as CuPy's own operations want it."""
    device: AbstractContextManager[Any] = array.device if _is_cupy(array) else nullcontext()
    return device


def to_numpy(array: Any) -> Any:
    """A CuPy array as a NumPy array; anything else as it is."""
    return array.get() if _is_cupy(array) else array


def place_like(values: np.ndarray[Any, Any], array: Array) -> Array:
    """NumPy's `values` as an array of the kind of `array`, on its device."""
    if isinstance(array, np.ndarray):
        return values
    import cupy

    with array.device:
        return cupy.asarray(values)


def _is_cupy(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"
