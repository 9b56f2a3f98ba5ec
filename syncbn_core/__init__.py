"""syncbn_core: synchronized batch normalization for arrays, with no framework.

`functional` is the array API, `layers.BatchNorm` the layer, `comm` the communication between
members, `moments` the maths. Importing this costs NumPy; Numba loads with the first call.
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

__version__ = "0.1.0"

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
