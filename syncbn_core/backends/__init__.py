"""Backends: one implementation of `steps.Operations` per array library and device.

`operations_for` finds the implementation by the type of an array and imports it on first use.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from syncbn_core.errors import BackendError
from syncbn_core.steps import Operations

__all__ = ["operations_for"]

Array = Any

# Root package of the array type -> module that holds `OPERATIONS` for it.
_MODULES = {"cupy": "syncbn_core.backends.cuda.cupy", "numpy": "syncbn_core.numpy_steps"}
_PLAIN = "syncbn_core.backends.plain_numpy"  # for NumPy where no kernel can be compiled
# Types of NumPy that are rejected: masks would be ignored, matrices are always 2-D, and scalars
# can't be written in place.
_UNLIKE_ARRAYS = {"MaskedArray", "matrix", "generic"}


def operations_for(array: Array) -> Operations:
    """The implementation for arrays of this type; raises `BackendError` if there is none."""
    kind: type = type(array)
    found = _operations_for_type(kind)
    return found if found.arrays is None else found.on(array)


@lru_cache(maxsize=64)
def _operations_for_type(kind: type) -> Operations:
    bases = kind.__mro__ if _UNLIKE_ARRAYS.isdisjoint(b.__name__ for b in kind.__mro__) else ()
    for base in bases:
        name = _MODULES.get(base.__module__.partition(".")[0])
        if name is not None:
            if name == _MODULES["numpy"] and import_module(_PLAIN).kernels_forbidden():
                name = _PLAIN
            found: Operations = import_module(name).OPERATIONS
            return found
    remedy = "convert it first, for example with numpy.asarray"
    if kind.__name__ == "MaskedArray":
        remedy = "fill or select its values first, because numpy.asarray drops the mask"
    raise BackendError(
        f"expected an array of {' or '.join(sorted(_MODULES))}, got {kind.__module__}."
        f"{kind.__qualname__}; {remedy}"
    )
