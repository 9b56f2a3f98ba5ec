"""Which kernel computes a layer alone: torch's, or ours where it is faster or more accurate.

torch's CPU kernel keeps mean and invstd in 16 bits if the input and all tensors of the layer have
16 bits. For (2, 130), dx is then off by several times its largest value. Ours keeps float32.

Otherwise, on the CPU, our kernels are faster than torch's from these sizes on (measured forward
and backward, on one thread and on two, and within networks; docs/speed.md):

    float32, float64; contiguous, 3-D or more        50,000 elements
    16 bits; contiguous, at most 64 per channel      500,000 elements per thread
    any, where madvise gives huge pages              24 MiB in all

On a GPU of compute capability 9.0 (measured on an H100; docs/speed.md), from 192 MiB in all:

    32 or 16 bits; contiguous, 3-D or more           784 elements per sample and channel
    bfloat16; channels_last                          a multiple of 8 channels

Launching our kernels takes the host longer than launching torch's; from this size on, the device
takes even longer, which hides it. Other types of GPU were not measured: they use torch's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from syncbn_core.moments import NormRule
from syncbn_torch._torch_private import operations_are_seen, transforming
from syncbn_torch.backends import cuda, memory

__all__ = ["always_ours", "ours_is_better", "torch_is_better"]

KERNEL_SIZE = 50_000
KERNEL_SIZE_16_BITS = 500_000
HUGE_SIZE = 24 << 20
SHORT = 64
CUDA_SIZE = 192 << 20
CUDA_PLANE = 784

_ours_always: ContextVar[bool] = ContextVar("ours_always", default=False)


@contextmanager
def always_ours(on: bool = True) -> Iterator[None]:
    """For tests and benchmarks: in the block, a layer alone uses our kernels for every size."""
    token = _ours_always.set(on)
    try:
        yield
    finally:
        _ours_always.reset(token)


def torch_is_better(x: Tensor, layer_dtype: torch.dtype | None, rule: NormRule) -> bool:
    """Whether torch's kernel fits a layer alone, and is better than ours or ours can't run.

    `layer_dtype`: that of its weight or running mean; None if it has none.
    """
    if rule.extra_setting is not None:
        return False
    if transforming() or operations_are_seen():
        return True  # nobody sees into our kernels
    if _ours_always.get() or _is_inaccurate(x, layer_dtype):
        return False
    return not (ours_is_better(x, layer_dtype) and (x.is_cuda or memory.supports(x)))


def ours_is_better(x: Tensor, layer_dtype: torch.dtype | None) -> bool:
    """Whether our kernels are faster or more accurate for x, if they support it."""
    if _ours_always.get() or _is_inaccurate(x, layer_dtype):
        return True
    return _is_large_on_device(x) and cuda.measured(x) if x.is_cuda else _is_large(x)


def _is_inaccurate(x: Tensor, layer_dtype: torch.dtype | None) -> bool:
    """Whether torch's kernel would keep mean and invstd in 16 bits."""
    return x.dtype in memory.HALVES and x.is_cpu and layer_dtype in (None, *memory.HALVES)


def _is_large_on_device(x: Tensor) -> bool:
    """Whether our CUDA kernels are faster than torch's on an H100 (see the table above)."""
    if x.numel() * x.element_size() < CUDA_SIZE or x.dtype is torch.float64:
        return False
    if x.is_contiguous():
        return x.numel() >= CUDA_PLANE * x.shape[0] * x.shape[1]
    channels_innermost = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return channels_innermost and x.dtype is torch.bfloat16 and x.shape[1] % 8 == 0


def _is_large(x: Tensor) -> bool:
    """Whether x is so large that our CPU kernels are faster than torch's (see the table above)."""
    size, bytes_each = x.numel(), x.element_size()
    if size < KERNEL_SIZE:
        return False
    if size * bytes_each >= HUGE_SIZE and memory.huge_pages_on_request():
        return True
    if x.dim() < 3 or not x.is_contiguous():
        return False
    if bytes_each > 2:
        return True
    short = size <= SHORT * x.shape[0] * x.shape[1]
    return short and size >= KERNEL_SIZE_16_BITS * torch.get_num_threads()
