"""What messages and their labels need of each array library.

NumPy and CuPy are built in. An adapter registers the arrays of its framework:

    register_arrays(torch.Tensor, TensorArrays())
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np

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


class MessageArrays(Protocol):
    """The operations that messages need from one array library."""

    def to_host(self, values: Array) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the device if they are on one."""

    def from_host(self, values: np.ndarray[Any, Any], like: Array) -> Array:
        """The values as an array of this library, with the device and dtype of `like`."""

    def copy(self, values: Array) -> Array:
        """A copy on the same device."""


class DeviceArrays(MessageArrays, Protocol):
    """The operations that messages on a device need too."""

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """New float64 memory on the device of `like`."""

    def is_captured(self, values: Array) -> bool:
        """Whether the work on `values` is captured into a CUDA graph; the host can't wait then."""

    def page_locked(self, like: Array) -> Array:
        """A float64 0 of the host, `(1,)`, to which the device of `like` can write.

        An array of NumPy, or one whose memory `numpy.asarray` shares.
        """

    def write_where(self, wrong: Array, number: float, word: Array) -> None:
        """Write `number` to `word` on the current stream if `wrong` `(1,)` and `word` is 0."""


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


class CupyArrays:
    """`DeviceArrays` of CuPy, on the current stream; the host does not wait for labels."""

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
    def empty(shape: tuple[int, ...], like: Array) -> Array:
        import cupy

        with like.device:
            return cupy.empty(shape)

    @staticmethod
    def copy(values: Array) -> Array:
        with values.device:
            return values.copy()

    @staticmethod
    def is_captured(values: Array) -> bool:
        import cupy

        with values.device:
            return is_captured(cupy.cuda.get_current_stream())

    @staticmethod
    def page_locked(like: Array) -> Array:
        import cupy

        word = np.frombuffer(cupy.cuda.alloc_pinned_memory(8), np.float64, 1)
        word[:] = 0
        return word

    @staticmethod
    def write_where(wrong: Array, number: float, word: Array) -> None:
        import cupy

        with wrong.device:
            now = cupy.empty(1)
            now.data.copy_from_host_async(word.ctypes.data, 8)
            cupy.where(wrong & (now == 0), number, now).get(out=word, blocking=False)


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
