"""The CUDA steps for CuPy arrays.

Dtypes: float16, bfloat16, float32 and float64. Dense arrays of any layout are used in place; other
arrays are copied first. With SYNCBN_KERNELS=off the steps are CuPy's operations. Else importing
this module raises `BackendError` if the machine is not ready to compile and launch kernels; the
text says what is missing.
"""

from __future__ import annotations

from syncbn_core.arrays import of_cupy
from syncbn_core.backends.cuda.kernels import require
from syncbn_core.backends.cuda.operations import CudaOperations
from syncbn_core.backends.cuda.usable import setting
from syncbn_core.backends.plain import PlainOperations

KERNELS = setting() != "off"
if KERNELS:
    require()

OPERATIONS = (CudaOperations if KERNELS else PlainOperations)(of_cupy())
