"""Devices and array libraries: `base` is what each implements, `operations_for` chooses one.

Implementations are found by the type of the array and imported on first use.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from syncbn_core.backends.base import Operations
from syncbn_core.errors import BackendError

__all__ = ["operations_for"]

Array = Any

# Root package of the array type -> module with the `OPERATIONS` for it.
_MODULES = {"cupy": "syncbn_core.backends.cuda.cupy", "numpy": "syncbn_core.backends.cpu.numpy"}
# NumPy's own that are no arrays to us: masks would be ignored, matrices stay 2-D, scalars are
# not written in place.
_UNLIKE_ARRAYS = {"MaskedArray", "matrix", "generic"}


def operations_for(array: Array) -> Operations:
    """The implementation for arrays of this type, or `BackendError` when there is none."""
    kind: type = type(array)
    return _operations_for_type(kind)


@lru_cache(maxsize=64)
def _operations_for_type(kind: type) -> Operations:
    bases = kind.__mro__ if _UNLIKE_ARRAYS.isdisjoint(b.__name__ for b in kind.__mro__) else ()
    for base in bases:
        name = _MODULES.get(base.__module__.partition(".")[0])
        if name is not None:
            found: Operations = import_module(name).OPERATIONS
            return found
    raise BackendError(
        f"expected an array of {' or '.join(sorted(_MODULES))}, got {kind.__module__}."
        f"{kind.__qualname__}; convert it first, for example with numpy.asarray"
    )
