"""Arrays of other libraries, by DLPack: as arrays of the core, and results as arrays of theirs.

    x  --__dlpack__-->  numpy.ndarray or cupy.ndarray  --from_dlpack-->  what x is

Memory is shared both ways and nothing is copied, unless the other library copies what it is given.
No library is imported that the caller has not imported, but CuPy for arrays on a CUDA device.

The protocol (dmlc.github.io/dlpack, version 1): `__dlpack_device__` says where the memory is.
`__dlpack__` gives a capsule that describes it, whose reader calls the producer's deleter when it is
done. NumPy and CuPy are the readers here, so they own that memory, and streams are ordered as CuPy
and the producer do it. This module only looks into capsules, for two things:

- bfloat16, which neither of them reads or writes by DLPack: its bits pass as uint16, and the code
  of the dtype is exchanged in the capsule.
- Whether memory may be written. Capsules of version 1 say so. Older ones do not, so their
  memory is only read. JAX makes such capsules, of immutable arrays.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from syncbn_core.backends.devices import array_library, device_of
from syncbn_core.errors import BackendError, DeviceError, DTypeError, ReadOnlyError
from syncbn_core.layout import writable_view

__all__ = ["NATIVE_TYPES", "NO_CONVERSION", "Caller", "caller_of", "readable", "writable"]

Array = Any

# Types that need no conversion: NumPy's, and every type of CuPy's seen so far.
NATIVE_TYPES: set[type] = {np.ndarray, type(None)}

_HOST = (1, 3)  # DLPack's numbers of devices: CPU, and its memory pinned by CUDA
_CUDA = (2, 13)  # a device's own memory, and managed memory
_DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI"}
_UINT, _BFLOAT = 1, 4  # codes of dtypes
_VERSION = (1, 0)
_VERSIONED = b"dltensor_versioned"
_READ_ONLY = 1  # bit of `flags`


class _Tensor(ctypes.Structure):
    """`DLTensor`, which is all of a capsule "dltensor" that is read here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Function objects of our own: others may have set the types of those that `pythonapi` shares.
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _look_into(capsule: Any) -> tuple[_Tensor, bool]:
    """The description in a capsule, and whether the capsule allows to write that memory."""
    if not _is_named(capsule, _VERSIONED):
        return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), False
    managed = _VersionedTensor.from_address(_pointer_of(capsule, _VERSIONED))
    tensor: _Tensor = managed.tensor
    return tensor, not managed.flags & _READ_ONLY


class _BitsOf:
    """Passes an array on, bfloat16 as uint16; `__dlpack__` sets `is_bfloat16`."""

    def __init__(self, array: Array, device: tuple[int, int]) -> None:
        self.array = array
        self.device = device
        self.is_bfloat16 = False

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__(**options)
        tensor, _ = _look_into(capsule)
        if tensor.code == _BFLOAT and tensor.bits == 16:
            self.is_bfloat16 = True
            tensor.code = _UINT
        return capsule


class _BFloat16Of:
    """Passes an array of bfloat16's bits (uint16) on as bfloat16."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    def __dlpack_device__(self) -> Any:
        return self.bits.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.bits.__dlpack__(**options)
        _look_into(capsule)[0].code = _BFLOAT
        return capsule


def readable(**arrays: Array) -> list[Array]:
    """`arrays`, of any libraries that speak DLPack, as the core's: to be read, not written.

    NumPy's where their memory is on the CPU, CuPy's on a CUDA device; both share that memory and
    keep it alive. None, NumPy's and CuPy's arrays, and what has no `__dlpack__` come back as they
    are. Any shape; any dtype that NumPy or CuPy has, and bfloat16.

    Names are what errors call them. `DeviceError` for other devices, `DTypeError` for bfloat16
    without the package `ml_dtypes`, `BackendError` where a library does not export its array.
    """
    for name, array in arrays.items():
        arrays[name] = _readable(name, array)
    return list(arrays.values())


def writable(**arrays: Array) -> list[Array]:
    """`readable`, for arrays that will be written; `ReadOnlyError` where that is not allowed."""
    for name, array in arrays.items():
        arrays[name] = _writable(name, array)
    return list(arrays.values())


def _readable(name: str, array: Array) -> Array:
    if not _is_foreign(array):
        return array
    with _export_errors(name, array):
        kind, index = array.__dlpack_device__()
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
    bits = _BitsOf(array, (kind, index))
    if kind in _HOST:
        with _export_errors(name, array):
            own = np.from_dlpack(bits)
    else:
        with array_library(f"cuda:{index}") as cupy, _export_errors(name, array):
            own = cupy.from_dlpack(bits)  # its current stream waits for that of the library
    return own.view(_bfloat16(name)) if bits.is_bfloat16 else own


def _writable(name: str, array: Array) -> Array:
    own = _readable(name, array)
    if own is array:
        return own
    if isinstance(own, np.ndarray):
        if own.flags.writeable:
            return own
        allowed = _allows_writing(array)
        own = writable_view(own)  # NumPy before 2.1 marks all as read-only
    else:
        allowed = _allows_writing(array, stream=-1)  # nothing is read: no stream has to wait
    if not allowed:
        raise ReadOnlyError(
            f"expected a writable {name}, which is updated in place, got {_type_name(array)}, "
            "which its library does not export as writable; give a NumPy array (on a GPU CuPy's), "
            "which goes together with x of any library"
        )
    return own


class _export_errors:  # noqa: N801
    """Whatever a library raises while it exports `array` becomes a `BackendError`."""

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if not isinstance(error, Exception):
            return
        remedy = "convert it first, for example with numpy.asarray"
        if getattr(self.array, "requires_grad", False):
            remedy = "detach() it, or take syncbn_torch, whose layers differentiate"
        raise BackendError(
            f"expected {self.name} to be exported by DLPack, got {_type_name(self.array)} and "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error


def _allows_writing(array: Array, **options: Any) -> bool:
    try:
        capsule = array.__dlpack__(max_version=_VERSION, **options)
    except TypeError:  # of version 0: it does not say
        return False
    return _look_into(capsule)[1]


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
        if isinstance(array, np.ndarray):
            if out is not None:
                return out
            if not array.flags.writeable:  # NumPy before 2.1 exports no read-only arrays
                array = array.copy()
            return self.from_dlpack(_exportable(array))
        with device_of(array):
            given = self.from_dlpack(_exportable(array))
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


def _exportable(array: Array) -> Array:
    if array.dtype.itemsize == 2 and array.dtype.name == "bfloat16":
        return _BFloat16Of(array.view(np.uint16))
    return array


def _bfloat16(name: str) -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise DTypeError(
            f"expected {name} of a dtype that NumPy has, got bfloat16, which NumPy has by the "
            "package ml_dtypes: pip install ml_dtypes"
        ) from error
    return bfloat16


def _type_name(array: Array) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__qualname__}"
