"""What messages ask of the arrays of each library: to carry a label, to reach the host and return.

NumPy and CuPy are known here. An adapter registers the arrays of its framework:

    register_arrays(torch.Tensor, TensorArrays())
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from syncbn_core.comm.device_message import is_captured, is_on_device

__all__ = ["CupyArrays", "MessageArrays", "NumpyArrays", "Verdict", "arrays_of", "register_arrays"]

Array = Any

# Whether a total has the right label: at once, or by a function that returns None for "not yet".
Verdict = bool | Callable[[], bool | None]


class MessageArrays(Protocol):
    """The arrays of one library."""

    def to_host(self, values: Array) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for a device."""

    def from_host(self, values: np.ndarray[Any, Any], like: Array) -> Array:
        """The values as an array of the library, with the device and dtype of `like`."""

    def with_label(self, values: Array, label: int) -> Array:
        """The values in a row and the label behind them, `(n + 1,)`."""

    def without_label(
        self, total: Array, shape: tuple[int, ...], label: int
    ) -> tuple[Array, Verdict]:
        """The values of a total, in their shape, and whether it has this label.

        On a device the values are NaN where it has another one.
        """


class NumpyArrays:
    """NumPy's arrays."""

    @staticmethod
    def to_host(values: Array) -> np.ndarray[Any, Any]:
        return np.asarray(values)

    @staticmethod
    def from_host(values: np.ndarray[Any, Any], like: Array) -> Array:
        return values

    @staticmethod
    def with_label(values: Array, label: int) -> Array:
        message = np.empty(values.size + 1, values.dtype)
        message[:-1] = values.reshape(-1)
        message[-1] = label
        return message

    @staticmethod
    def without_label(total: Array, shape: tuple[int, ...], label: int) -> tuple[Array, Verdict]:
        return total[:-1].reshape(shape), bool(total.item(-1) == label)


class CupyArrays:
    """CuPy's arrays, on the current stream; for a label the host waits for nothing."""

    @staticmethod
    def to_host(values: Array) -> np.ndarray[Any, Any]:
        return np.asarray(values.get())

    @staticmethod
    def from_host(values: np.ndarray[Any, Any], like: Array) -> Array:
        import cupy

        with like.device:
            return cupy.asarray(values.astype(like.dtype, copy=False))

    @staticmethod
    def with_label(values: Array, label: int) -> Array:
        import cupy

        message = cupy.empty(values.size + 1, values.dtype)
        message[:-1] = values.reshape(-1)
        message[-1:] = label
        return message

    @staticmethod
    def without_label(total: Array, shape: tuple[int, ...], label: int) -> tuple[Array, Verdict]:
        import cupy

        values, found = total[:-1].reshape(shape), total[-1:]
        if values.dtype.kind == "f":
            values = cupy.where(found == label, values, np.nan)
        if is_captured(cupy.cuda.get_current_stream()):
            return values, True
        memory = cupy.cuda.alloc_pinned_memory(found.nbytes)
        on_host = np.frombuffer(memory, found.dtype, 1)
        found.get(out=on_host, blocking=False)
        copied = cupy.cuda.get_current_stream().record()

        def verdict() -> bool | None:
            if is_captured(cupy.cuda.get_current_stream()) or not copied.done:
                return None
            return bool(on_host[0] == label)

        return values, verdict


_CUPY = CupyArrays()
_BY_TYPE: dict[type, MessageArrays] = {np.ndarray: NumpyArrays()}


def register_arrays(kind: type, arrays: MessageArrays) -> None:
    """Tell how messages carry arrays of the type `kind` and of its subclasses."""
    _BY_TYPE[kind] = arrays
    _arrays_of_type.cache_clear()


def arrays_of(values: Array) -> MessageArrays | None:
    """How messages carry arrays of this type; None for a library that is not known here."""
    if is_on_device(values):
        return _CUPY
    kind: type = type(values)
    return _arrays_of_type(kind)


@lru_cache(maxsize=64)
def _arrays_of_type(kind: type) -> MessageArrays | None:
    known = (_BY_TYPE[base] for base in kind.__mro__ if base in _BY_TYPE)
    return next(known, None)
