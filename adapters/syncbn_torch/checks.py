"""The checks of a layer's input and state, before anything is computed, sent or written.

They raise what would otherwise give wrong numbers, or let the other members wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from syncbn_core.errors import DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.steps import Affine, RunningStatistics
from syncbn_torch._torch_private import (
    function_transforms_active,
    has_tangent_or_wrapper,
)
from syncbn_torch.arrays import FLOATS, HALVES, PLAIN_CLASSES
from syncbn_torch.layer_state import LayerState

_COUNTERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NAMES = ("weight", "bias", "running_mean", "running_var")


def check_operands(
    layer: LayerState,
    x: Tensor,
    affine: Affine,
    running: RunningStatistics | None,
    by_address: bool = False,
    sends: bool = False,
) -> None:
    """Raise an error for tensors that do not fit each other or the layer.

    `by_address`: whether kernels read their memory. `sends`: whether processes wait for this one.
    Raises `ShapeError`, `DTypeError`, `DeviceError`, and `StateError` for tensors without memory,
    or that torch would later refuse to save for backward.
    """
    named = zip(_NAMES, (*affine, *(running or ())), strict=False)
    tensors = [(name, tensor) for name, tensor in named if tensor is not None]
    _check_input(layer, x, [tensor for _, tensor in tensors])
    half = x.dtype in HALVES
    for name, tensor in tensors:
        if tensor.shape != x.shape[1:2]:
            raise ShapeError(
                f"expected {name} of shape ({layer.num_features},), which is num_features, got "
                f"{tuple(tensor.shape)}; change num_features and the tensors together"
            )
        if tensor.device != x.device:
            raise DeviceError(
                f"expected {name} on {x.device}, the input's device, got {tensor.device}; move the "
                "layer or the input with .to(device)"
            )
        if tensor.dtype not in FLOATS:
            raise DTypeError(
                f"expected {name} of float16, bfloat16, float32 or float64, got {tensor.dtype}; "
                "convert the layer with .to(torch.float32), or replace the tensor"
            )
        if by_address and type(tensor) not in PLAIN_CLASSES:
            raise DTypeError(
                f"expected {name} to be a plain tensor like the input, got "
                f"{type(tensor).__name__}; convert one of them"
            )
    dtype = tensors[0][1].dtype if tensors else x.dtype
    if dtype != x.dtype and not (half and dtype == torch.float32):
        raise DTypeError(
            f"expected input of dtype {dtype}, the layer's dtype, got {x.dtype}; convert one with "
            f"input.to({dtype}) or layer.to({x.dtype})"
        )
    if sends and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        remedy = "pass a plain tensor"
        if hasattr(x, "to_local"):
            remedy = "pass x.to_local(), or distribute input and layer over all of its processes"
        raise DTypeError(
            "expected a tensor with values of its own, because the layer synchronizes over "
            f"processes, got {type(x).__name__}; {remedy}"
        )
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    inference = x.is_inference() or (affine.weight is not None and affine.weight.is_inference())
    if inference and any(t is not None and t.requires_grad for t in (x, *affine)):
        raise StateError(
            "expected tensors that can be saved for backward, got one made in "
            "torch.inference_mode(); clone() it outside, or run the layer in torch.no_grad()"
        )


def _check_input(layer: LayerState, x: Tensor, tensors: list[Tensor]) -> None:
    if x.is_nested:
        raise DTypeError(
            "expected a dense tensor, got a nested one; for parts of shape (length, C) normalize "
            "all their rows at once, layer(torch.cat(input.unbind()))"
        )
    try:
        layer._check_input_dim(x)
    except ValueError as error:
        raise ShapeError(f"{error}; the shape is {tuple(x.shape)}") from None
    if x.shape[1] != layer.num_features and not (
        tensors and all(tensor.shape == x.shape[1:2] for tensor in tensors)
    ):  # which `torch.func.functional_call` may pass, for a slice of all channels
        raise ShapeError(
            f"expected {layer.num_features} channels on axis 1 (num_features="
            f"{layer.num_features}), got shape {tuple(x.shape)}; check the layer before"
        )
    if x.dtype not in FLOATS:
        remedy = "convert it first with input.float()"
        if x.is_complex():  # float() would drop the imaginary part
            remedy = "normalize input.real and input.imag, with a layer each"
        raise DTypeError(
            f"expected an input of float16, bfloat16, float32 or float64, got {x.dtype}; {remedy}"
        )


def checked_running(layer: LayerState) -> RunningStatistics | None:
    """The running statistics that a training batch updates; None if the layer tracks none.

    Raises `StateError` if one of them can't be written.
    """
    if not (layer.training and layer.track_running_stats):
        return None
    mean, var, counter = layer.running_mean, layer.running_var, layer.num_batches_tracked
    running = RunningStatistics(mean, var, counter, layer.momentum)
    if torch.compiler.is_compiling():
        return running
    if (mean is None) != (var is None):
        raise StateError(
            "expected running_mean and running_var together or neither, got only "
            + ("running_var" if mean is None else "running_mean")
        )
    if counter is not None and (counter.dtype not in _COUNTERS or counter.numel() != 1):
        raise StateError(
            "expected num_batches_tracked to be a single integer, got dtype "
            f"{counter.dtype} and shape {tuple(counter.shape)}; set it to torch.tensor(0)"
        )
    for tensor in (mean, var, counter):
        if tensor is None:
            continue
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise StateError(
                "expected running statistics that can be updated, got those of a layer built "
                "in torch.inference_mode(); build it outside of that mode, or train it inside too"
            )
        if tensor.requires_grad:
            raise StateError(
                "expected running statistics without gradients, got some with "
                "requires_grad=True; detach them and register them as buffers"
            )
        if not tensor.is_contiguous() and 0 in tensor.stride():
            raise StateError(
                "expected running statistics with memory for each value, got some of strides "
                f"{tensor.stride()}; clone() the result of expand()"
            )
    return running


def refuse_transforms(name: Callable[[], str], *tensors: Tensor | None) -> None:
    """Raise `StateError` in a function transform, or if a tensor has a tangent or is wrapped.

    For what synchronizes, which errors call `name()`: messages and threads don't take such tensors.
    """
    if function_transforms_active() or has_tangent_or_wrapper(*tensors):
        raise StateError(
            f"expected plain tensors in {name()}, which synchronizes over replicas or processes, "
            "got a function transform (torch.func), batched gradients (is_grads_batched, "
            "vectorize=True) or forward-mode AD; compute these derivatives in one process without "
            "replicas, or higher ones by create_graph=True"
        )


def check_unchanged(x: Tensor, dy: Tensor) -> None:
    """Raise `StateError` if the x of backward, given dy, can't be the x of the forward."""
    if x.shape != dy.shape or x.dtype is not dy.dtype:
        raise StateError(
            f"expected in backward the input that the layer had in forward, of shape "
            f"{tuple(dy.shape)} and {dy.dtype}, got one of shape {tuple(x.shape)} and {x.dtype}: "
            "it was replaced in between, for example by input.data = ...; do that after backward"
        )
