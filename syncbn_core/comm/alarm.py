"""`Alarm`: how a device tells the host of messages that do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from syncbn_core.arrays import DeviceArrays, arrays_of
from syncbn_core.comm.protocol import CollectiveCall

Array = Any

_words: list[Array] = []  # never freed: captured CUDA graphs keep their addresses


class Alarm:
    """A number of the host, 0 until a device writes the place of a wrong call there.

    The number is in page-locked memory, to which kernels of all devices can write; so the host
    needs no copy and no event to read it, also for calls of a captured CUDA graph.

    Attributes:
        pointer: its address, on the host and on devices.
        call_at: the call that a place stands for.
    """

    def __init__(self, like: Array, call_at: Callable[[float], CollectiveCall]) -> None:
        self.call_at = call_at
        self._arrays: DeviceArrays = arrays_of(like)
        self._word: Array = self._arrays.page_locked(like)
        self._number: np.ndarray[Any, Any] = np.asarray(self._word)
        self.pointer: int = self._number.ctypes.data
        _words.append(self._word)

    def call(self) -> CollectiveCall | None:
        """The first wrong call that a device has found, None for none."""
        place = float(self._number[0])
        return self.call_at(place) if place else None

    def sound(self, wrong: Array, place: float) -> None:
        """Write `place` where `wrong`, a bool `(1,)` of a device; the host does not wait for it."""
        self._arrays.write_where(wrong, place, self._word)
