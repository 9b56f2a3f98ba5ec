"""The autograd node of a layer alone whose tensors the CPU kernels take as they are.

Each direction is a look at the tensors and one compiled call. Nothing is general here: in a network
each step of Python counts (`usual`). What is unusual in backward goes to `gradients_alone`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.backends.base import Affine
from syncbn_core.backends.cpu.launch import most_threads
from syncbn_core.backends.cpu.operations import HostStatistics, run_backward, run_forward
from syncbn_core.kernels.cpu.calls import CALL, OUT
from syncbn_core.kernels.cpu.operands import PARALLEL_SIZE
from syncbn_core.moments import NormRule
from syncbn_torch._torch_private import (
    forward_ad,
    increment_versions,
    node_of,
)
from syncbn_torch.autograd.node import gradients_alone
from syncbn_torch.backends.cpu import OPERATIONS, look_at
from syncbn_torch.backends.memory import empty_like, holds_all_values

__all__ = ["batch_norm"]


def batch_norm(
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    addresses: np.ndarray[Any, Any],
    momentum: float | None,
    rule: NormRule,
) -> Tensor | None:
    """y; updates the running statistics. None, and nothing is done, if kernels can't take x.

    `tensors`: weight, bias, running mean and variance, counter, which have passed all checks at
    these addresses.
    """
    calls = np.empty((1, CALL), np.int64)
    threads = 1 if x.numel() < PARALLEL_SIZE or torch.get_num_threads() == 1 else most_threads()
    code = look_at(calls, threads, (x, None, None, *tensors), addresses)
    if code < 0 or x.numel() == x.size(1) or not holds_all_values(x):
        return None
    weight, bias, *buffers = tensors
    y = empty_like(x)
    calls[0, OUT] = y.data_ptr()
    share = np.nan if momentum is None else float(momentum)
    return _node((y, code, calls, rule, share, threads, buffers), x, weight, bias)  # type: ignore[no-any-return]


class BatchNormFunction(Function):
    """y of x, weight and bias, given the calls that `look_at` has filled in."""

    @staticmethod
    def forward(ctx: Any, seen: Any, x: Tensor, weight: Tensor | None, bias: Any) -> Tensor:
        y: Tensor
        y, code, calls, rule, share, threads, buffers = seen
        ctx.save_for_backward(x, weight)
        increment_versions(buffers)  # a graph that has saved them must notice
        ctx.kept = rule, threads, run_forward(code, calls, rule, share)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rule, threads, table = ctx.kept
        _, by_x, by_weight, by_bias = ctx.needs_input_grad
        if (
            by_x
            and not torch.is_grad_enabled()
            and forward_ad._current_level < 0
            and type(dy) is Tensor
            and not dy.is_neg()
        ):
            dx = empty_like(x)
            if weight is None:
                like = torch.empty(table.shape[1], dtype=x.dtype)
            else:
                like = torch.empty_like(weight)
            grad_bias = torch.empty_like(like)
            calls = np.empty((1, CALL), np.int64)
            # Of tensors that a transform has wrapped or a mode has replaced: refused.
            arrays = x, dy, dx, weight, like, grad_bias, None, None
            code = look_at(calls, threads, arrays)
            if code >= 0:
                run_backward(code, calls, rule, table)
                return None, dx, like if by_weight else None, grad_bias if by_bias else None
        statistics = HostStatistics(x.numel() // table.shape[1], table)
        gradients = gradients_alone(OPERATIONS, rule, statistics, x, dy, Affine(weight), by_x)
        needs = ctx.needs_input_grad[1:]
        return None, *(one if need else None for one, need in zip(gradients, needs, strict=True))


_node = node_of(BatchNormFunction)
