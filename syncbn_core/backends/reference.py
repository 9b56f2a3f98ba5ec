"""The steps in plain float64 NumPy: slow and simple; tests compare other backends with it."""

from __future__ import annotations

import numpy as np

from syncbn_core.backends.plain import Namespace, PlainOperations

OPERATIONS = PlainOperations(Namespace(np))
