"""The steps in plain float64 NumPy: slow and simple; tests compare other backends with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncbn_core.backends.plain import PlainOperations

__all__ = ["OPERATIONS"]

Array = np.ndarray[Any, Any]


class _NumpyNamespace:
    """`Namespace` of NumPy."""

    xp = np

    @staticmethod
    def cast(values: Array, dtype: Any) -> Array:
        return values.astype(dtype)

    @staticmethod
    def widest(values: Array) -> Any:
        return np.float64

    @staticmethod
    def number(value: Any, like: Array) -> Array:
        return np.asarray(value, like.dtype)

    @staticmethod
    def constant(values: Array) -> Array:
        return values


OPERATIONS = PlainOperations(_NumpyNamespace())
