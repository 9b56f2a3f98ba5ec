"""The CPU steps for NumPy arrays without compiled kernels, which `NUMBA_DISABLE_JIT=1` forbids.

They are many times slower, and give the same results up to rounding.
"""

from __future__ import annotations

import warnings
from collections import deque
from functools import cache
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from syncbn_core.backends.plain import Namespace, PlainOperations
from syncbn_core.moments import Statistics
from syncbn_core.steps import RunningStatistics

__all__ = ["OPERATIONS", "PlainArrayOperations", "kernels_forbidden"]

Array = np.ndarray[Any, Any]

_set_item: Any = setitem


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
    """Plain operations that update running statistics in place."""

    moments: Any = _quiet(PlainOperations.moments)
    statistics: Any = _quiet(PlainOperations.statistics)
    forward: Any = _quiet(PlainOperations.forward)
    backward_reduce: Any = _quiet(PlainOperations.backward_reduce)
    backward_input: Any = _quiet(PlainOperations.backward_input)

    @_quiet
    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        """Update `running` in place, and return it."""
        new = super().update_running(running, statistics)
        targets = [own for own in running[:3] if own is not None]
        values = [value for value in new[:3] if value is not None]
        # one C call writes all, so that KeyboardInterrupt can't come between two writes
        deque(map(_set_item, targets, repeat(...), values), maxlen=0)
        return running


OPERATIONS = PlainArrayOperations(Namespace(np))
