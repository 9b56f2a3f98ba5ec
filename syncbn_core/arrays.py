"""`Arrays`: what is needed of one array library; here for NumPy, and which one an array is of.

An adapter registers the arrays of its framework:

    register_arrays(torch.Tensor, TensorArrays(torch))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from itertools import repeat
from operator import setitem
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from syncbn_core.layout import Layout

Array = Any  # of the library

LEGACY_STREAMS = (0, 1)  # handles of the default stream, which can't be captured
_set_item: Any = setitem


class Arrays:
    """One array library, whose module is `xp`. The methods are written for libraries like NumPy.

    `mean_and_m2`, `product`, `scaled` and `plus_scaled` may overwrite their first argument, a
    temporary array of the size of x. The others overwrite nothing.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    # ------------------------------------------------------------------ where arrays are

    def device_of(self, array: Array) -> int:
        """The number of the CUDA device that holds the array; -1 if none does."""
        return -1

    def at(self, array: Array) -> AbstractContextManager[Any]:
        """Context manager: the device of the array is current, as its operations need it."""
        return nullcontext()

    def near(self, values: Array, like: Array) -> Array:
        """`values`, copied to the device of `like` if they are on another one."""
        return values

    def copy(self, values: Array) -> Array:
        """A copy on the same device; row-major on a CUDA device."""
        return self.xp.array(values)

    def to_host(self, values: Array) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the device if they are on one."""
        return np.asarray(values)

    def from_host(self, values: np.ndarray[Any, Any], like: Array) -> Array:
        """The values as an array of this library, with the device and dtype of `like`."""
        return values

    # ------------------------------------------------------------------ operations

    def cast(self, values: Array, dtype: Any) -> Array:
        """`values` converted to `dtype`, a dtype of the library."""
        return values.astype(dtype)

    def widest(self, values: Array) -> Any:
        """The widest floating dtype on the device of `values`."""
        return self.xp.float64

    def working(self, values: Array) -> Any:
        """The dtype of temporary arrays of the size of `values`."""
        return self.xp.float64

    def number(self, value: Any, like: Array) -> Array:
        """A number, which may be traced, as an array `()` with the dtype and device of `like`."""
        return self.xp.asarray(value, like.dtype)

    def constant(self, values: Array) -> Array:
        """`values`, detached: no gradient flows through the result."""
        return values

    def difference(self, x: Array, values: Array) -> Array:
        """`x - values`, a new array in the dtype of `values`, the `working` one of x."""
        return self.cast(x, values.dtype) - values

    def multiple(self, x: Array, values: Array) -> Array:
        """`x * values`, a new array in the dtype of `values`."""
        return self.cast(x, values.dtype) * values

    def product(self, values: Array, other: Array) -> Array:
        """`values * other`, in the dtype of `values`."""
        return values * self.cast(other, values.dtype)

    def scaled(self, values: Array, scale: Array, shift: Array, dtype: Any) -> Array:
        """`values * scale + shift` as `dtype`: that of `values`, or a narrower one."""
        return self.cast(values * scale + shift, dtype)

    def plus_scaled(self, values: Array, other: Array, scale: Array, dtype: Any) -> Array:
        """`values + other * scale` as `dtype`: that of `values`, or a narrower one."""
        return self.cast(values + self.cast(other, values.dtype) * scale, dtype)

    def sum(self, values: Array, axes: tuple[int, ...]) -> Array:
        """The sum over `axes`, in the widest dtype."""
        return values.sum(axes, dtype=self.widest(values))

    def mean_and_m2(self, values: Array, axes: tuple[int, ...], count: int) -> tuple[Array, Array]:
        """Mean and m2 of `count` values over `axes`, in the widest dtype.

        The means must be within a few standard deviations from 0.
        """
        mean = self.sum(values, axes) / count
        m2 = self.sum(self.product(values, values), axes) - count * mean * mean
        return mean, self.xp.where(m2 < 0, 0.0, m2)

    def sigmoid(self, z: Array) -> Array:
        """The logistic function of z."""
        with np.errstate(over="ignore"):  # exp gives infinity, as wanted
            return 1 / (1 + self.xp.exp(-z))

    def select(self, mask: Array, x: Array, other: Any) -> Array:
        """x where the mask is True, else `other`: a new array with the dtype and layout of x."""
        new = x.copy(order="K")
        new[...] = self.xp.where(mask, x, other)
        return new

    def count_of(self, mask: Array) -> Any:
        """How many are True: an int, or an array `()` if the host would wait for it."""
        return int(mask.sum())

    def assign(self, targets: Sequence[Array], values: Sequence[Array]) -> None:
        """Write `values` into `targets`."""
        assign(targets, values)


class DeviceArrays(Arrays):
    """What kernels and messages on CUDA devices need too. Dtypes are given by NumPy's names."""

    def at(self, array: Array) -> AbstractContextManager[Any]:
        return self.on_device(self.device_of(array))

    def is_current(self, index: int) -> bool:
        """Whether device `index` is the current one."""

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        """Context manager: device `index` is current, as launches and allocations need it."""

    def stream(self, index: int) -> int:
        """The handle of the current stream of device `index`."""

    def is_captured(self, index: int) -> bool:
        """Whether that stream is being captured into a CUDA graph; the host can't wait then."""

    def keeps_stream(self, stream: int) -> bool:
        """Whether a stream is never destroyed: the handle of a destroyed one may be used again."""
        return False

    def pointer(self, array: Array) -> Any:
        """The address of the first element of the array: an int on a device."""

    def dtype_name(self, dtype: Any) -> str:
        """The name of a dtype, such as "float32"."""

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new uninitialized array on device `index`."""

    def zeros(self, shape: tuple[int, ...], dtype: str, index: int) -> Array:
        """A new array of zeros on device `index`."""

    def lasting_zeros(self, size: int, index: int, stream: int) -> tuple[Any, Any] | None:
        """The address of `size` int32 zeros, for `stream` of device `index`, and what owns them.

        Not from a memory pool that the user has chosen: that may end before. None if there are
        none.
        """
        zeros = self.zeros((size,), "int32", index)
        return self.pointer(zeros), zeros

    def is_contiguous(self, array: Array) -> bool:
        """Whether the array is row-major without gaps."""

    def layout(self, array: Array) -> Layout | None:
        """How an `(N, C, *spatial)` array lies in memory; None if kernels can't read it there."""

    def form(self, array: Array) -> tuple[Any, ...]:
        """Of two arrays of one device alike only if they have one shape, dtype and `layout`."""

    def empty_like(self, dense: Array, layout: Layout) -> Array:
        """A new array with the shape and dtype of `dense`, and with `layout`, its layout."""

    def mark_written(self, arrays: Sequence[Array]) -> None:
        """Tell the library that a kernel has written these arrays."""

    def page_locked(self, like: Array) -> Array:
        """A float64 0 of the host, `(1,)`, to which the device of `like` can write.

        An array of NumPy, or one whose memory `numpy.asarray` shares.
        """

    def write_where(self, wrong: Array, number: float, word: Array) -> None:
        """Write `number` to `word` on the current stream if `wrong` `(1,)` and `word` is 0."""


NUMPY = Arrays(np)
_BY_TYPE: dict[type, Arrays] = {np.ndarray: NUMPY}


def register_arrays(kind: type, arrays: Arrays) -> None:
    """`arrays` is what is needed of the library of the type `kind` and its subclasses."""
    _BY_TYPE[kind] = arrays
    _arrays_of_type.cache_clear()


def arrays_of(array: Array) -> Any:
    """The `Arrays` of the library of `array`; None for an unknown one."""
    kind: type = type(array)
    return _arrays_of_type(kind)


@lru_cache(maxsize=64)
def _arrays_of_type(kind: type) -> Arrays | None:
    if any(base.__module__.partition(".")[0] == "cupy" for base in kind.__mro__):
        return of_cupy()
    known = (_BY_TYPE[base] for base in kind.__mro__ if base in _BY_TYPE)
    return next(known, None)


def of_cupy() -> DeviceArrays:
    """Those of CuPy, which this imports."""
    found: DeviceArrays = import_module("syncbn_core.cupy_arrays").ARRAYS
    return found


def near(values: Array, like: Array) -> Array:
    """`values`, copied to the device of `like` if they are on another one."""
    return arrays_of(values).near(values, like)


def at_device_of(array: Array) -> AbstractContextManager[Any]:
    """Context manager: the device of a CuPy array is current; nothing for other arrays."""
    if type(array) is np.ndarray:  # in each step
        return nullcontext()
    return (arrays_of(array) or NUMPY).at(array)


def copy_of(values: Array) -> Array:
    """A copy on the device of `values`."""
    arrays = arrays_of(values)
    return values.copy() if arrays is None else arrays.copy(values)


def assign(targets: Sequence[Array], values: Sequence[Array]) -> None:
    """Write all in one C call, so that KeyboardInterrupt can't come between two writes."""
    deque(map(_set_item, targets, repeat(...), values), maxlen=0)
