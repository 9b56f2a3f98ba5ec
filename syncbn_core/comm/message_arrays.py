"""How the arrays of each library are sent: copies to and from the host, and labels of sums.

NumPy and CuPy are built in. An adapter registers the arrays of its framework:

    register_arrays(torch.Tensor, TensorArrays())
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "CupyArrays",
    "HostCopy",
    "MessageArrays",
    "NumpyArrays",
    "arrays_of",
    "copy_of",
    "is_captured",
    "is_on_device",
    "register_arrays",
]

Array = Any

_LEGACY_STREAMS = (0, 1)  # CUDA can't capture them


def is_on_device(array: Array) -> bool:
    """Whether `array` is a CuPy array."""
    kind: type = type(array)
    return _is_of_cupy(kind)


@lru_cache(maxsize=64)
def _is_of_cupy(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "cupy" for base in kind.__mro__)


def is_captured(stream: Any) -> bool:
    """Whether `stream` is being captured into a CUDA graph; the host must not query it then."""
    import cupy

    return stream.ptr not in _LEGACY_STREAMS and bool(
        cupy.cuda.runtime.streamIsCapturing(stream.ptr)
    )


class HostCopy(NamedTuple):
    """A copy of an array that is on its way to the host.

    `values()` waits for it and returns it; `done()`: whether it has arrived; `may_wait()`: False
    while a CUDA graph is captured, when neither of the two may be called.
    """

    values: Callable[[], np.ndarray[Any, Any]]
    done: Callable[[], bool] = lambda: True
    may_wait: Callable[[], bool] = lambda: True


class MessageArrays(Protocol):
    """The operations that messages need from one array library; `sum_labels` explains labels."""

    def to_host(self, values: Array) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the device if they are on one."""

    def from_host(self, values: np.ndarray[Any, Any], like: Array) -> Array:
        """The values as an array of this library, with the device and dtype of `like`."""

    def copy(self, values: Array) -> Array:
        """A copy on the same device."""

    def with_label(self, values: Array, label: float) -> Array:
        """A new array `(n + 1,)`: the n values, flattened, then the label."""

    def copy_to_host(self, values: Array) -> HostCopy | None:
        """Start to copy `values`; None while a CUDA graph is captured: nothing runs then."""


class NumpyArrays:
    """`MessageArrays` of NumPy."""

    @staticmethod
    def to_host(values: Array) -> np.ndarray[Any, Any]:
        return np.asarray(values)

    @staticmethod
    def from_host(values: np.ndarray[Any, Any], like: Array) -> Array:
        return values

    @staticmethod
    def copy(values: Array) -> Array:
        return np.array(values)

    @staticmethod
    def with_label(values: Array, label: float) -> Array:
        return np.append(values, label)

    @staticmethod
    def copy_to_host(values: Array) -> HostCopy:
        copy = np.array(values)
        return HostCopy(lambda: copy)


class CupyArrays:
    """`MessageArrays` of CuPy, on the current stream; the host does not wait for labels."""

    @staticmethod
    def to_host(values: Array) -> np.ndarray[Any, Any]:
        with values.device:
            return np.asarray(values.get())

    @staticmethod
    def from_host(values: np.ndarray[Any, Any], like: Array) -> Array:
        import cupy

        with like.device:
            return cupy.asarray(values.astype(like.dtype, copy=False))

    @staticmethod
    def copy(values: Array) -> Array:
        with values.device:
            return values.copy()

    @staticmethod
    def with_label(values: Array, label: float) -> Array:
        import cupy

        with values.device:
            message = cupy.empty(values.size + 1, values.dtype)
            message[:-1] = values.reshape(-1)
            message[-1:] = label
            return message

    @staticmethod
    def copy_to_host(values: Array) -> HostCopy | None:
        import cupy

        with values.device:
            if is_captured(cupy.cuda.get_current_stream()):
                return None
            on_host, copied = _sent_to_host(cupy.ascontiguousarray(values))

        def wait() -> np.ndarray[Any, Any]:
            copied.synchronize()
            return on_host

        def may_wait() -> bool:
            return not is_captured(cupy.cuda.get_current_stream())

        return HostCopy(wait, lambda: copied.done, may_wait)


def _sent_to_host(values: Array) -> tuple[np.ndarray[Any, Any], Any]:
    """`(copy of values on the host, event that the device records once it is complete)`."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(values.nbytes)
    on_host = np.frombuffer(memory, values.dtype, values.size)
    values.get(out=on_host, blocking=False)
    return on_host, cupy.cuda.get_current_stream().record()


_CUPY = CupyArrays()
_BY_TYPE: dict[type, MessageArrays] = {np.ndarray: NumpyArrays()}


def register_arrays(kind: type, arrays: MessageArrays) -> None:
    """Use `arrays` for messages of the type `kind` and its subclasses."""
    _BY_TYPE[kind] = arrays
    _arrays_of_type.cache_clear()


def arrays_of(values: Array) -> MessageArrays | None:
    """The `MessageArrays` for the type of `values`; None for an unknown type."""
    kind: type = type(values)
    return _arrays_of_type(kind)


@lru_cache(maxsize=64)
def _arrays_of_type(kind: type) -> MessageArrays | None:
    if _is_of_cupy(kind):
        return _CUPY
    known = (_BY_TYPE[base] for base in kind.__mro__ if base in _BY_TYPE)
    return next(known, None)


def copy_of(values: Array) -> Array:
    """A copy on the device of `values`."""
    arrays = arrays_of(values)
    return values.copy() if arrays is None else arrays.copy(values)
