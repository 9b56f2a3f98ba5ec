"""DLPack's C exchange API, by which compiled code reads the descriptions of arrays.

A type that has it (`__dlpack_c_exchange_api__`, DLPack 1.3; torch from 2.10 on) names a C function
that fills in the DLTensor of an object: address, device, dtype, shape, strides. Compiled code that
calls it needs 0.2 us for a tensor. The description is borrowed: it holds as long as the array lives
and is not resized, so it is used within one call.

SYNCBN_DLPACK=attributes: adapters read attributes of arrays instead, as without the API.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["exchange_function"]

_NAME = b"dlpack_exchange_api"
_FIELDS = 6  # of 8 bytes: version, older API, then functions; the one that is called is the last
_MAJOR = 1


def exchange_function(kind: type) -> int:
    """The address of `dltensor_from_py_object_no_sync` for objects of a type; 0 if it has none."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or os.environ.get("SYNCBN_DLPACK") == "attributes":
        return 0
    # A function object of our own: others may have set the types of that of `pythonapi`.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    place = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, _NAME)
    fields = (ctypes.c_uint64 * _FIELDS).from_address(place)
    return fields[_FIELDS - 1] if fields[0] & 0xFFFFFFFF == _MAJOR else 0
