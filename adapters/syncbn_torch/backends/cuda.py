"""`OPERATIONS` for CUDA tensors: passes raw pointers to the steps of `syncbn_core.backends.cuda`.

Torch allocates all memory. Pointers need no CuPy; DLPack would take longer than a kernel launch.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from syncbn_core.backends.cuda import kernels
from syncbn_core.backends.cuda.operations import CudaOperations
from syncbn_core.backends.cuda.usable import setting, usable
from syncbn_core.disk_cache import on_rank
from syncbn_torch.arrays import FLOATS, PLAIN_CLASSES
from syncbn_torch.backends.tensors import ARRAYS


def supports(tensor: Tensor) -> bool:
    """Whether the kernels support this tensor; warns once if the kernels can't run here.

    False with SYNCBN_KERNELS=off.
    """
    return (
        tensor.device.type == "cuda"
        and type(tensor) in PLAIN_CLASSES
        and tensor.dtype in FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and _ready(tensor.device.index, tensor.dtype)
    )


@cache
def _ready(device: int, dtype: torch.dtype) -> bool:
    if setting() == "off":
        return False
    # the instruction that rounds to bfloat16 needs compute capability 8.0
    oldest = (8, 0) if dtype is torch.bfloat16 else kernels.OLDEST
    capability = kernels.compute_capability(device) if not _missing() else (0, 0)
    return capability >= oldest and not _fails(capability) and usable(OPERATIONS, device)


@cache
def _missing() -> tuple[str, ...]:
    missing = tuple(kernels.missing())
    if missing:
        _warn("CUDA tensors", "; ".join(missing))
    return missing


@cache
def _fails(capability: tuple[int, int]) -> bool:
    failure = kernels.compile_failure(capability)
    if failure is not None:
        _warn("tensors on GPUs of compute capability {}.{}".format(*capability), failure)
    return failure is not None


def _warn(tensors: str, reason: str) -> None:
    what = f"{tensors}{on_rank()}"
    text = f"syncbn uses plain torch operations for {what}, which is slow, because {reason}"
    warnings.warn(text, stacklevel=3)


OPERATIONS = CudaOperations(ARRAYS)
