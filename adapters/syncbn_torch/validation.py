"""The checks of a layer's input and state, before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from syncbn_core.errors import DeviceError, DTypeError, ShapeError, StateError
from syncbn_core.layout import shares_memory
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, RunningStatistics
from syncbn_torch._torch_private import is_jit_tracing
from syncbn_torch.arrays import FLOATS, HALVES, PLAIN, check_storage
from syncbn_torch.layer_state import LayerState

__all__ = [
    "check_floating",
    "check_for_processes",
    "check_input",
    "check_operands",
    "checked_running",
]

_COUNTERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NAMES = ("weight", "bias", "running_mean", "running_var")


def check_input(layer: LayerState, x: Tensor, weight: Tensor | None) -> None:
    """Raise `DTypeError`, `ShapeError` or `DeviceError` for input that doesn't fit the layer.

    `weight`: the layer's, looked up only once per forward because `nn.Module` is slow at it.
    """
    if x.is_nested:
        raise DTypeError(
            "expected a dense tensor, got a nested one; for parts of shape (length, C) normalize "
            "all their rows at once, layer(torch.cat(input.unbind()))"
        )
    try:
        layer._check_input_dim(x)
    except ValueError as error:
        raise ShapeError(f"{error}; the shape is {tuple(x.shape)}") from None
    if not is_jit_tracing() and x.shape[1] != layer.num_features:  # sizes would be recorded
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
    tensor = layer.running_mean if weight is None else weight
    if tensor is None:
        return
    if tensor.device != x.device:
        raise DeviceError(
            f"expected input on {tensor.device}, the layer's device, got {x.device}; "
            "move one of them with .to(device)"
        )
    half = x.dtype in HALVES
    if tensor.dtype != x.dtype and not (half and tensor.dtype == torch.float32):
        check_floating(weight, layer.bias, layer.running_mean, layer.running_var)
        raise DTypeError(
            f"expected input of dtype {tensor.dtype}, the layer's dtype, got {x.dtype}; "
            f"convert one with input.to({tensor.dtype}) or layer.to({x.dtype})"
        )


def check_for_processes(name: Callable[[], str], x: Tensor, affine: Affine) -> None:
    """Raise, before ranks exchange anything, the errors that would occur after the exchange.

    Raises `DTypeError` for tensors without values of their own, such as DTensor, and `StateError`
    for a weight or bias whose storage is too small. `name()`: the layer's name in errors.
    """
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        plain = "its local tensor, x.to_local()" if hasattr(x, "to_local") else "a plain tensor"
        raise DTypeError(
            f"expected a tensor with values of its own in {name()}, which synchronizes over "
            f"processes, got {type(x).__name__}; pass {plain}"
        )
    check_storage(*affine)


def check_operands(
    x: Tensor,
    num_features: int,
    affine: Affine,
    running: RunningStatistics | None,
    rule: NormRule,
    by_address: bool,
) -> None:
    """Raise `ShapeError`, `DeviceError` or `DTypeError` for tensors that our kernels can't use.

    `by_address`: whether the kernels accept only plain tensors.
    """
    weight, bias = affine
    size = (num_features,)
    tensors = affine if running is None else (weight, bias, running.mean, running.var)
    for name, tensor in zip(_NAMES, tensors, strict=False):
        if tensor is None:
            continue
        if tensor.shape != size:
            raise ShapeError(
                f"expected {name} of shape {size} (num_features={size[0]}), got "
                f"{tuple(tensor.shape)}; change num_features and the tensors together"
            )
        if tensor.device != x.device:
            raise DeviceError(
                f"expected {name} on {x.device}, the input's device, got {tensor.device}; "
                "move the layer with .to(device)"
            )
        if tensor.dtype not in FLOATS:
            raise _not_floating(name, tensor)
        if by_address and type(tensor) not in PLAIN:
            raise DTypeError(
                f"expected {name} to be a plain tensor like the input, got "
                f"{type(tensor).__name__}; convert one of them"
            )
    check_savable(x, affine, affine.for_backward(rule))


def checked_running(layer: LayerState) -> RunningStatistics | None:
    """The running statistics that a training batch updates; None if the layer tracks none.

    Raises `StateError` if one of them can't be written, or two share memory.
    """
    if not (layer.training and layer.track_running_stats):
        return None
    mean, var, counter = layer.running_mean, layer.running_var, layer.num_batches_tracked
    running = RunningStatistics(mean, var, counter, layer.momentum)
    if torch.compiler.is_compiling() or is_jit_tracing():
        return running
    for tensor in (mean, var, counter):
        if tensor is not None and (
            tensor.requires_grad or tensor.is_inference() or not tensor.is_contiguous()
        ):
            _check_writable(tensor)
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
    check_storage(mean, var, counter)
    if mean is not None and var is not None:
        _check_apart(mean, var)
    return running


def _check_apart(mean: Tensor, var: Tensor) -> None:
    """Raise `StateError` if running mean and variance share memory: updates would mix them."""
    if type(mean) not in PLAIN or type(var) not in PLAIN:  # such as FakeTensor
        return
    try:
        addresses = mean.data_ptr(), var.data_ptr()
    except RuntimeError:  # tensors in function transforms have no address
        return
    far = abs(addresses[0] - addresses[1]) >= max(mean.nbytes, var.nbytes)
    if far and mean.is_contiguous() and var.is_contiguous():
        return
    if 0 in addresses or mean.device != var.device:  # no memory, as on the meta device
        return
    if shares_memory(addresses[0], _Strides(mean), addresses[1], _Strides(var)):
        raise StateError(
            "expected running_mean and running_var with memory of their own, got tensors that "
            "overlap; clone() one of them"
        )


class _Strides:
    """Shape, itemsize and strides (in bytes) of a tensor, as `shares_memory` reads them."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.itemsize = tuple(tensor.shape), tensor.element_size()
        self.strides = tuple(stride * self.itemsize for stride in tensor.stride())


def check_savable(x: Tensor, affine: Affine, kept: Affine) -> None:
    """Raise `StateError` now for tensors that torch would later refuse to save for backward.

    `kept`: the part of `affine` that backward needs (`Affine.for_backward`).
    """
    if torch.compiler.is_compiling():  # which can't trace `is_inference`
        return
    for tensor in (x, *kept):
        if tensor is not None and tensor.is_inference():
            break
    else:
        return
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *affine)):
        raise StateError(
            "expected tensors that can be saved for backward, got one made in "
            "torch.inference_mode(); clone() it outside, or run the layer in torch.no_grad()"
        )


def _check_writable(tensor: Tensor) -> None:
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
    if 0 in tensor.stride() and not tensor.is_contiguous():
        raise StateError(
            "expected running statistics with memory for each value, got some of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; clone() the result of expand()"
        )


def check_floating(*tensors: Tensor | None) -> None:
    """Raise `DTypeError` unless weight, bias, running_mean, running_var are None or in `FLOATS`."""
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is not None and tensor.dtype not in FLOATS:
            raise _not_floating(name, tensor)


def _not_floating(name: str, tensor: Tensor) -> DTypeError:
    return DTypeError(
        f"expected {name} of float16, bfloat16, float32 or float64, got {tensor.dtype}; convert "
        "the layer with .to(torch.float32), or replace the tensor"
    )
