"""Arrays of other libraries, by DLPack: as arrays of the core, and results as arrays of theirs.

    x  --numpy.from_dlpack or cupy.from_dlpack-->  array of the core  --from_dlpack-->  what x is

Memory is shared both ways and nothing is copied, unless a library copies what it is given. No
library is imported that the caller has not imported, but CuPy for arrays on a CUDA device. NumPy
and CuPy read no bfloat16 by DLPack.

NumPy knows which memory may not be written: JAX's, whose arrays are immutable, and that of
libraries that do not say so. CuPy does not know, so on a device only CuPy's own arrays are written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from syncbn_core.arrays import at_device_of
from syncbn_core.backends.devices import array_library
from syncbn_core.errors import BackendError, DeviceError, ReadOnlyError

__all__ = ["NATIVE_TYPES", "NO_CONVERSION", "Caller", "caller_of", "readable", "writable"]

Array = Any

# Types that need no conversion: NumPy's, and every type of CuPy's seen so far.
NATIVE_TYPES: set[type] = {np.ndarray, type(None)}

_HOST = (1, 3)  # DLPack's numbers of devices: CPU, and its memory pinned by CUDA
_CUDA = (2, 13)  # a device's own memory, and managed memory
_DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI"}


def readable(**arrays: Array) -> list[Array]:
    """`arrays`, of any libraries that speak DLPack, as the core's: to be read, not written.

    NumPy's where their memory is on the CPU, CuPy's on a CUDA device; both share that memory and
    keep it alive. None, NumPy's and CuPy's arrays, and what has no `__dlpack__` come back as they
    are. Any shape; any dtype that NumPy or CuPy has.

    Names are what errors call them. `DeviceError` for other devices, `BackendError` where a library
    does not export its array, as bfloat16.
    """
    for name, array in arrays.items():  # arrays so far stay alive while an error is raised
        arrays[name] = _readable(name, array)
    return list(arrays.values())


def writable(**arrays: Array) -> list[Array]:
    """`readable`, for arrays that will be written; `ReadOnlyError` where that is not allowed."""
    own = readable(**arrays)
    for (name, array), mine in zip(arrays.items(), own, strict=True):
        if mine is not array and not (isinstance(mine, np.ndarray) and mine.flags.writeable):
            raise ReadOnlyError(
                f"expected a writable {name}, which is updated in place, got {_type_name(array)}, "
                "which is not known to be writable; give a NumPy array (on a GPU CuPy's), which "
                "goes together with x of any library"
            )
    return own


def _readable(name: str, array: Array) -> Array:
    if not _is_foreign(array):
        return array
    try:
        kind, index = array.__dlpack_device__()
    except Exception as error:
        raise _not_exported(name, array, error) from error
    if kind not in _HOST + _CUDA:
        raise DeviceError(
            f"expected {name} on the CPU or a CUDA device, got {_type_name(array)} on "
            f"{_DEVICES.get(int(kind), 'another device')} (DLPack's device type {int(kind)}); move "
            "it to the CPU first"
        )
    is_negated = getattr(array, "is_neg", None)
    if is_negated is not None and is_negated():  # torch exports such a view without its sign
        raise BackendError(
            f"expected {name} with its values in memory, got {_type_name(array)} that is negated "
            "when it is read; call resolve_neg() on it first"
        )
    with array_library("cpu" if kind in _HOST else f"cuda:{index}") as library:
        try:
            return library.from_dlpack(array)  # CuPy's current stream waits for the library's
        except Exception as error:
            raise _not_exported(name, array, error) from error


def _not_exported(name: str, array: Array, error: Exception) -> BackendError:
    remedy = "convert it first, for example with numpy.asarray"
    if getattr(array, "requires_grad", False):
        remedy = "detach() it, or take syncbn_torch, whose layers differentiate"
    elif "bfloat16" in str(getattr(array, "dtype", "")):
        remedy = "NumPy and CuPy read no bfloat16: give float32, or NumPy's of ml_dtypes"
    elif type(array).__module__.startswith("jax.") and "Tracer" in type(array).__name__:
        remedy = "inside jit, grad or vmap take syncbn_jax.batch_norm"
    return BackendError(
        f"expected {name} to be exported by DLPack, got {_type_name(array)} and "
        f"{type(error).__name__}: {error}; {remedy}"
    )


@dataclass(frozen=True, slots=True)
class Caller:
    """How results go back: by `from_dlpack` of the library of x; None for NumPy's and CuPy's."""

    from_dlpack: Callable[[Any], Array] | None

    def give(self, array: Array, out: Array | None = None) -> Array:
        """A result in the kind of x, without a copy of ours; `out` if it was written there.

        On a device the library's stream waits for the result, also for `out`. What `from_dlpack`
        raises passes through.
        """
        if self.from_dlpack is None:
            return array if out is None else out
        if isinstance(array, np.ndarray) and out is not None:
            return out
        with at_device_of(array):
            given = self.from_dlpack(array)
        return given if out is None else out


NO_CONVERSION = Caller(None)  # whose x is NumPy's or CuPy's


def caller_of(x: Array) -> Caller:
    """How results in the kind of x are made; `BackendError` if its library has no `from_dlpack`.

    That of `x.__array_namespace__()`, else of the root module of its type, or of a base of it.
    """
    if not _is_foreign(x):
        return NO_CONVERSION
    kind: type = type(x)
    namespace = getattr(x, "__array_namespace__", None)
    own = () if namespace is None else (namespace(),)
    for module in (*own, *_root_modules(kind)):
        from_dlpack = getattr(module, "from_dlpack", None)
        if from_dlpack is not None:
            return Caller(from_dlpack)
    raise BackendError(
        f"expected x of a library with from_dlpack, which results are made by, got "
        f"{_type_name(x)}; convert it first, for example with numpy.from_dlpack"
    )


def _is_foreign(array: Array) -> bool:
    kind: type = type(array)
    return kind not in NATIVE_TYPES and _is_foreign_type(kind)


@lru_cache(maxsize=64)
def _is_foreign_type(kind: type) -> bool:
    """Whether arrays of this type are converted; of the others, remembers those of the core."""
    if {base.__module__.partition(".")[0] for base in kind.__mro__} & {"numpy", "cupy"}:
        NATIVE_TYPES.add(kind)
        return False
    return hasattr(kind, "__dlpack__")


@lru_cache(maxsize=64)
def _root_modules(kind: type) -> tuple[Any, ...]:
    """Root packages of a type and its bases, as far as they are imported."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return tuple(sys.modules[root] for root in roots if root in sys.modules)


def _type_name(array: Array) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__qualname__}"
