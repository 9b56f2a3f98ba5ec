"""The CPU steps for NumPy arrays without compiled kernels, which `NUMBA_DISABLE_JIT=1` forbids.

They are many times slower, and give the same results up to rounding.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from syncbn_core.arrays import NUMPY
from syncbn_core.backends.plain import PlainOperations

Array = np.ndarray[Any, Any]


@cache
def kernels_forbidden() -> bool:
    """Whether Numba's setting DISABLE_JIT is on; then one warning says that all is slow."""
    import numba

    settings: Any = numba.config
    if settings.DISABLE_JIT:
        warnings.warn(
            "syncbn uses plain operations instead of CPU kernels, which is slow, because "
            "NUMBA_DISABLE_JIT is set; unset it",
            RuntimeWarning,
            stacklevel=2,
        )
    return bool(settings.DISABLE_JIT)


_quiet = np.errstate(invalid="ignore", over="ignore")  # kernels do not warn either


class PlainArrayOperations(PlainOperations):
    """Plain operations without warnings of NumPy's."""

    moments: Any = _quiet(PlainOperations.moments)
    statistics: Any = _quiet(PlainOperations.statistics)
    forward: Any = _quiet(PlainOperations.forward)
    backward_reduce: Any = _quiet(PlainOperations.backward_reduce)
    backward_input: Any = _quiet(PlainOperations.backward_input)
    update_running: Any = _quiet(PlainOperations.update_running)


OPERATIONS = PlainArrayOperations(NUMPY)
