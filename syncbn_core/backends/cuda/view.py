"""`DeviceView`: how kernels see a dense activation."""

from __future__ import annotations

from typing import Any

from syncbn_core._kernels.cuda.constants import VECTOR
from syncbn_core.arrays import DeviceArrays
from syncbn_core.layout import Layout

Array = Any  # of the library


class DeviceView:
    """The address, dtype and sizes `[outer, channels, inner]` of a dense activation."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, arrays: DeviceArrays, array: Array, layout: Layout) -> None:
        self.pointer: Any = arrays.pointer(array)
        self.offset: int = int(self.pointer) % VECTOR
        self.dtype: str = arrays.dtype_name(array)
        self.outer: int = layout.outer
        self.channels: int = layout.channels
        self.inner: int = layout.inner

    def beside(self, arrays: DeviceArrays, array: Array) -> DeviceView:
        """The view of another array of this dtype and layout."""
        other = DeviceView.__new__(DeviceView)
        other.pointer = arrays.pointer(array)
        other.offset = int(other.pointer) % VECTOR
        other.dtype = self.dtype
        other.outer, other.channels, other.inner = self.outer, self.channels, self.inner
        return other
