"""The number that travels with the sums of backward, and says of which call they are.

Where a loss takes other branches on some ranks, sums of one size meet that belong to different
layers. So every rank adds a label to its message: for c, the number of its forward's call,

    label = c * B + c**2,    B greater than the sum of c**2 over any P ranks

The total of the labels holds sum(c) and sum(c**2) side by side, and is exact in any order. It is P
times a rank's own label only where sum((c_i - c)**2) is zero: where all ranks are in the same call.
So every rank sees a mix-up, without a message more.

On a GPU the host does not wait for the total: the device itself puts NaN in place of sums that
don't belong together, and the host looks at the label when it has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from syncbn_core.comm.device_message import is_captured, is_on_device

__all__ = ["CupySums", "Labelled", "NumpySums", "Verdict", "label_of", "sums_of"]

Array = Any

# Whether the total has the right label, at once; or a function that says so, None for not yet.
Verdict = bool | Callable[[], bool | None]

_DIGITS = {8: 53, 4: 24}  # binary ones that a float of so many bytes has


def label_of(call: int, size: int, itemsize: int) -> int:
    """The label of `call` among `size` ranks, in numbers of `itemsize` bytes; 0 for no call.

    0 too where so many ranks are too many for so few digits.
    """
    ranks = (size - 1).bit_length()
    digits = (_DIGITS.get(itemsize, 0) - 2 * ranks) // 3
    if call == 0 or digits < 2:
        return 0
    c = 1 + (call - 1) % ((1 << digits) - 1)  # not 0; numbers come round again
    return (c << (ranks + 2 * digits)) + c * c


class Labelled(Protocol):
    """How arrays of one library carry a label."""

    def pack(self, sums: Array, label: int) -> Array:
        """`sums` and behind them the label, `(n + 1,)`."""

    def unpack(self, total: Array, shape: tuple[int, ...], label: int) -> tuple[Array, Verdict]:
        """The sums of a total, NaN if they may be of several calls; and whether they are of one."""


class NumpySums:
    """NumPy's arrays: who is in the wrong call is known at once."""

    @staticmethod
    def pack(sums: Array, label: int) -> Array:
        message = np.empty(sums.size + 1, sums.dtype)
        message[:-1] = sums.reshape(-1)
        message[-1] = label
        return message

    @staticmethod
    def unpack(total: Array, shape: tuple[int, ...], label: int) -> tuple[Array, Verdict]:
        return total[:-1].reshape(shape), bool(total.item(-1) == label)


class CupySums:
    """CuPy's arrays, on the current stream; the host waits for nothing."""

    @staticmethod
    def pack(sums: Array, label: int) -> Array:
        import cupy

        message = cupy.empty(sums.size + 1, sums.dtype)
        message[:-1] = sums.reshape(-1)
        message[-1:] = label
        return message

    @staticmethod
    def unpack(total: Array, shape: tuple[int, ...], label: int) -> tuple[Array, Verdict]:
        import cupy

        sums, found = total[:-1].reshape(shape), total[-1:]
        if sums.dtype.kind == "f":
            sums = cupy.where(found == label, sums, np.nan)
        if is_captured(cupy.cuda.get_current_stream()):
            return sums, True
        memory = cupy.cuda.alloc_pinned_memory(found.nbytes)
        on_host = np.frombuffer(memory, found.dtype, 1)
        found.get(out=on_host, blocking=False)
        come = cupy.cuda.get_current_stream().record()

        def verdict() -> bool | None:
            if is_captured(cupy.cuda.get_current_stream()) or not come.done:
                return None
            return bool(on_host[0] == label)

        return sums, verdict


_NUMPY, _CUPY = NumpySums(), CupySums()


def sums_of(array: Array) -> Labelled | None:
    """How `array` carries a label; None for arrays of a library that is not known here."""
    if isinstance(array, np.ndarray):
        return _NUMPY
    return _CUPY if is_on_device(array) else None
