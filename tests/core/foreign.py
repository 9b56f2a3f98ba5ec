"""A library of the test's own that speaks DLPack and nothing else: capsules made by ctypes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

CODES = {"i": 0, "u": 1, "f": 2}
KINDS = {code: kind for kind, code in CODES.items()}
READ_ONLY = 1

api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", api)
)
# the destructor of a capsule gets an object that nobody may hold any more: its address
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", api)
)
DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_alive: dict[int, Any] = {}  # what a deleter will release, by address


@DELETER
def _delete(address: int) -> None:
    owner, *_ = _alive.pop(address)  # KeyError, printed and counted nowhere, if it comes twice
    owner.deleted += 1


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):  # nobody has read it
            _delete(_pointer(capsule, name))


class Foreign:
    """Holds a NumPy array, and exports it as asked for.

    `made`, `deleted`: capsules, and how many of them were released.
    """

    def __init__(
        self,
        values: Any,
        *,
        read_only: bool = False,
        version: int = 1,
        device: tuple[int, int] = (1, 0),
        contiguous: bool = False,
        keep: Any = None,
    ) -> None:
        self.values = values
        self.read_only = read_only
        self.version = version
        self.device = device
        self.contiguous = contiguous  # export strides of NULL, and half of the address as an offset
        self.keep = keep
        self.made = self.deleted = 0
        self.asked: list[dict[str, Any]] = []

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=Foreign.read)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if self.version == 0 and "max_version" in options:
            raise TypeError("this library is older than max_version")
        values = self.values
        versioned = bool(self.version and options.get("max_version"))
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        steps = [stride // values.itemsize for stride in values.strides]
        strides = (ctypes.c_int64 * values.ndim)(*steps)
        managed = Versioned() if versioned else Managed()
        tensor = managed.tensor
        offset = 64 if self.contiguous else 0
        tensor.data = values.__array_interface__["data"][0] - offset
        tensor.device[:] = self.device
        tensor.ndim = values.ndim
        tensor.code = CODES[values.dtype.kind]
        tensor.bits, tensor.lanes = 8 * values.itemsize, 1
        tensor.shape = shape
        tensor.byte_offset = offset
        if not self.contiguous:
            tensor.strides = strides
        managed.deleter = _delete
        if versioned:
            managed.version[:] = (1, 0)
            managed.flags = READ_ONLY if self.read_only else 0
        address = ctypes.addressof(managed)
        _alive[address] = self, managed, shape, strides
        self.made += 1
        name = b"dltensor_versioned" if versioned else b"dltensor"
        # the name is not copied: a constant of this function lives as long as it does
        return _new(address, name, ctypes.cast(_destroy, ctypes.c_void_p))

    @staticmethod
    def read(exported: Any) -> Foreign:
        """`from_dlpack` of this library; memory is shared for as long as the capsule lives."""
        assert tuple(exported.__dlpack_device__()) == (1, 0)
        capsule = exported.__dlpack__()
        tensor = Tensor.from_address(_pointer(id(capsule), b"dltensor"))
        size = tensor.bits // 8
        shape = tensor.shape[: tensor.ndim]
        if tensor.strides:
            strides = [size * step for step in tensor.strides[: tensor.ndim]]
        else:
            strides = list(np.empty(shape, f"u{size}").strides)
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        length = 0 if 0 in shape else last + size
        memory = (ctypes.c_char * length).from_address((tensor.data or 0) + tensor.byte_offset)
        values: Any = np.ndarray(shape, f"{KINDS[tensor.code]}{size}", memory, 0, strides)
        return Foreign(values, keep=capsule)
