"""syncbn_core: synchronized batch normalization for NumPy and CuPy arrays, without a framework.

`functional` holds the functions, `layers` the layer `BatchNorm`, `comm` the communication between
members, `moments` the arithmetic of batch statistics. The import needs only NumPy; Numba is
imported in the first call.
"""

from syncbn_core import comm, errors, functional
from syncbn_core.functional import (
    Gradients,
    Saved,
    batch_norm_backward,
    batch_norm_eval,
    batch_norm_forward,
)
from syncbn_core.layers import BatchNorm
from syncbn_core.moments import Moments

__version__ = "0.3.0.dev0"

__all__ = [
    "BatchNorm",
    "Gradients",
    "Moments",
    "Saved",
    "__version__",
    "batch_norm_backward",
    "batch_norm_eval",
    "batch_norm_forward",
    "comm",
    "errors",
    "functional",
]


def __dir__() -> list[str]:
    return sorted(__all__)
