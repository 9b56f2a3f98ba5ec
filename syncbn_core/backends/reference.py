"""The steps in plain float64 NumPy: slow and simple; tests compare other backends with it."""

from __future__ import annotations

from syncbn_core.arrays import NUMPY
from syncbn_core.backends.plain import PlainOperations

OPERATIONS = PlainOperations(NUMPY)
