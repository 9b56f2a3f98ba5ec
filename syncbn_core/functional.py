"""The public array API: forward, backward and eval of synchronized batch normalization.

    mean, var = moments of x over all members of the communicator, per channel
    invstd    = 1 / sqrt(var + eps)                 (eps_mode "clamp": 1 / sqrt(max(var, eps)))
    xhat      = (x - mean) * invstd
    y         = activation(xhat * weight + bias)

The activation is None, "relu", "leaky_relu" with its `negative_slope`, "silu", "hardswish" or
"relu6". Backward computes the input of the activation again from x, so nothing more is kept.

`mask`: bool, `(N,)`, `(N, *spatial)` or `(N, 1, *spatial)`, where each axis may be 1. Statistics
are those of the elements where it is True, over all members; y and dx are 0 elsewhere, whatever x
and dy hold there (`syncbn_core.masks`). A member may have a mask or none, and no valid element.

Ioffe and Szegedy 2015, "Batch Normalization". Shapes and dtypes, the same everywhere:

    x, dy, y, dx                  (N, C, *spatial), float64, float32, float16 or bfloat16 (CuPy's,
                                  or NumPy's of the package ml_dtypes); 16 bits are computed in
                                  float32. Any memory layout; results have the layout of x.
    weight, bias, running_*       (C,), floating
    mean, invstd, sums            (C,), float64

Arrays are those of any library that speaks DLPack (NumPy, CuPy, torch, JAX), all on the CPU or all
on one CUDA device; they need not be of one library. Memory is shared, not copied. Results, and
`mean` and `invstd` of `Saved`, are of the library of x; `out` comes back as it was given. Arrays to
be written (running statistics, `out`) must be exported as writable: NumPy and torch do so;
JAX, whose arrays are immutable, does not; on a device they must be CuPy's. Autograd of other
libraries does not see what is computed here; tensors that require grad are refused.

NaN or infinity in a channel makes the statistics of that channel NaN, in the output and in the
running statistics, and leaves other channels alone.

Raised before anything is written: `ShapeError`, `DTypeError`, `DeviceError`, `ReadOnlyError`,
`ArgumentError`, `BackendError` (no array, or one that its library does not export),
`BatchSizeError` (one value per channel in all), and the communicator's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from syncbn_core import order
from syncbn_core.backends import operations_for
from syncbn_core.backends.devices import device_of
from syncbn_core.backends.plain import Namespace, column
from syncbn_core.checks import (
    check_dy,
    check_input,
    check_out,
    check_per_channel,
    check_rule,
    check_running,
    check_same_device,
)
from syncbn_core.comm import Communicator
from syncbn_core.dlpack import NATIVE_TYPES, NO_CONVERSION, Caller, caller_of, readable, writable
from syncbn_core.errors import ArgumentError
from syncbn_core.exchange import Exchange
from syncbn_core.masks import Valid, filling, mask_shape, valid_count
from syncbn_core.moments import ActivationName, EpsMode, Statistics
from syncbn_core.steps import Affine, Gradients, Norm, Operations, RunningStatistics

__all__ = [
    "Gradients",
    "Saved",
    "batch_norm_backward",
    "batch_norm_eval",
    "batch_norm_forward",
]

Array = Any
UNKNOWN = -1  # only the device knows the count; reading it would make the host wait


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What `batch_norm_backward` needs of a forward: x itself and O(C) numbers.

    `x`: NumPy's or CuPy's, over the memory that was given; with a mask a filled copy.
    `count`: values per channel over all members, -1 where only the device knows; None when the
    statistics were constants (running statistics in eval), through which no gradient flows.
    `known`: what else the steps need. `mask`: in a shape that broadcasts against x.
    `caller`: how results become arrays of the library of x. `members`: how many there were.
    """

    x: Array
    count: int | None
    known: order.Forward
    mask: Array | None = None
    caller: Caller = NO_CONVERSION
    members: int = 1

    @property
    def statistics(self) -> Statistics:
        """Those of the whole batch, NumPy's or CuPy's."""
        return self.known.norms[0].statistics

    @property
    def mean(self) -> Array:
        """`(C,)` float64."""
        return self.caller.give(self.statistics.mean)

    @property
    def invstd(self) -> Array:
        """`(C,)` float64."""
        return self.caller.give(self.statistics.invstd)


def batch_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    num_batches_tracked: Array | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    eps_mode: EpsMode = "plus",
    activation: ActivationName | None = None,
    negative_slope: float = 0.01,
    communicator: Communicator | None = None,
    out: Array | None = None,
    parallel: bool = True,
    exchange: Exchange | None = None,
) -> tuple[Array, Saved]:
    """Normalize x by the statistics of the whole batch; returns `(y, saved)`.

    `running_mean`, `running_var` (C,) and the integer counter `num_batches_tracked` () are
    updated in place: `(1 - momentum) * old + momentum * new`, with the unbiased variance;
    `momentum=None` averages over all batches, by the counter. An empty x takes part in the
    exchange; when the whole batch is empty only the counter is incremented.

    `out`: where to write y; x itself only if no backward follows. `parallel`: False
    uses the calling thread only. `exchange`: a layer's access to its `communicator`.
    """
    caller, original_out = NO_CONVERSION, out
    kinds = {type(x), type(weight), type(bias), type(mask), type(out)}
    written = {type(running_mean), type(running_var), type(num_batches_tracked)}
    if not (kinds <= NATIVE_TYPES and written <= NATIVE_TYPES):
        caller = caller_of(x)
        x, weight, bias, mask = readable(x=x, weight=weight, bias=bias, mask=mask)
        running_mean, running_var, num_batches_tracked, out = writable(
            running_mean=running_mean,
            running_var=running_var,
            num_batches_tracked=num_batches_tracked,
            out=out,
        )
    operations = operations_for(x)
    check_input(x)
    check_per_channel(x, weight=weight, bias=bias)
    check_running(x, running_mean, running_var, num_batches_tracked, momentum)
    check_out(x, out)
    rule = check_rule(eps, eps_mode, activation, negative_slope)
    if not parallel:
        operations = operations.serial
    affine = Affine(weight, bias)
    running = RunningStatistics(running_mean, running_var, num_batches_tracked, momentum)
    # Another library may refuse y. Then running statistics must not have changed.
    updated = running if caller is NO_CONVERSION else None
    valid = None
    if mask is not None:
        mask, x, valid = _masked(operations, x, mask)
    if communicator is not None:
        exchange = exchange or _without_layer(communicator, x)
    part = order.Part(x, affine, updated, valid, out)
    with device_of(x):
        (y,), known = order.forward(operations, [part], rule, exchange)
    _zero(y, mask)
    statistics = known.norms[0].statistics
    count = UNKNOWN if statistics.count is None else statistics.count
    saved = Saved(x, count, known, mask, caller, _size_of(communicator))
    if caller is not NO_CONVERSION or original_out is not out:
        y = caller.give(y, original_out)
    if caller is not NO_CONVERSION:
        operations.update_running(running, statistics)
    return y, saved


def batch_norm_eval(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    eps: float = 1e-5,
    eps_mode: EpsMode = "plus",
    activation: ActivationName | None = None,
    negative_slope: float = 0.01,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Saved]:
    """Normalize x by running statistics, which stay as they are; returns `(y, saved)`.

        y = activation((x - running_mean) / sqrt(running_var + eps) * weight + bias)

    x: `(N, C, *spatial)` of any strides; all others (C,), on its device. The other arguments are
    those of `batch_norm_forward`, and `saved` is for `batch_norm_backward`, where statistics have
    no gradient. Raises `ArgumentError`, `ShapeError`, `DTypeError` and `DeviceError` for arrays
    that do not fit each other.
    """
    caller, original_out = NO_CONVERSION, out
    kinds = {type(x), type(weight), type(bias), type(mask), type(out)}
    if not kinds | {type(running_mean), type(running_var)} <= NATIVE_TYPES:
        caller = caller_of(x)
        x, running_mean, running_var = readable(
            x=x, running_mean=running_mean, running_var=running_var
        )
        weight, bias, mask = readable(weight=weight, bias=bias, mask=mask)
        (out,) = writable(out=out)
    if running_mean is None or running_var is None:
        raise ArgumentError(
            "expected running_mean and running_var, got None; use batch_norm_forward, which takes "
            "the statistics of the batch"
        )
    operations = operations_for(x)
    check_input(x)
    check_per_channel(
        x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    check_out(x, out)
    rule = check_rule(eps, eps_mode, activation, negative_slope)
    if not parallel:
        operations = operations.serial
    running = RunningStatistics(running_mean, running_var)
    valid = None
    if mask is not None:
        mask, x, valid = _masked(operations, x, mask)
    own, affine, running = operations.take(x, Affine(weight, bias), running, valid)
    y, statistics = operations.forward_eval(own, running, affine, rule, out)
    _zero(y, mask)
    known = order.Forward(operations, [Norm(statistics, affine, rule)], constant=True)
    saved = Saved(x, None, known, mask, caller)
    if caller is not NO_CONVERSION or original_out is not out:
        y = caller.give(y, original_out)
    return y, saved


def batch_norm_backward(
    dy: Array,
    saved: Saved,
    *,
    communicator: Communicator | None = None,
    out: Array | None = None,
    parallel: bool = True,
    exchange: Exchange | None = None,
) -> Gradients:
    """Gradients by x, weight and bias, given `dy`, the gradient by y.

    With `sum_dy = sum(dy)` and `sum_dy_xhat = sum(dy * xhat)` over all members and n values:

        dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n)

    with dy times the derivative of the activation in the place of dy, and without the last term
    where eps_mode "clamp" made invstd a constant. The gradients of weight and bias are the local
    sums: add them up over members as those of any other parameter.

    `communicator` has to be the one of the forward. `out`: where to write dx, may be dy.
    """
    x, known, original_out = saved.x, saved.known, out
    if type(dy) not in NATIVE_TYPES or type(out) not in NATIVE_TYPES:
        (dy,) = readable(dy=dy)
        (out,) = writable(out=out)
    if saved.count is not None and _size_of(communicator) != saved.members:
        raise ArgumentError(
            f"expected the communicator of the forward, of {saved.members} members, got one of "
            f"{_size_of(communicator)}; pass the same one to forward and backward"
        )
    operations_for(dy)
    check_dy(x, dy)
    check_out(x, out)
    if saved.mask is not None:
        with device_of(x):
            dy = _library(x).where(saved.mask, dy, 0)
    if saved.count is None or communicator is None:  # constant statistics need no exchange
        exchange = None
    else:
        exchange = exchange or _without_layer(communicator, x)
    steps = known.steps if parallel else known.steps.serial
    known = known._replace(steps=steps, exchange=exchange)
    (dx,), (sums,) = order.backward(known, [x], [dy], out=out)
    _zero(dx, saved.mask)
    return _converted(saved.caller, Gradients(dx, sums.grad_weight, sums.grad_bias), original_out)


def _converted(caller: Caller, gradients: Gradients, out: Array | None) -> Gradients:
    """Gradients as arrays of the caller's library; `out`, if given, is the array that holds dx."""
    if caller is NO_CONVERSION:
        return gradients if out is None else gradients._replace(x=out)
    dx, dweight, dbias = gradients
    return Gradients(caller.give(dx, out), caller.give(dweight), caller.give(dbias))


def _masked(operations: Operations, x: Array, mask: Array) -> tuple[Any, Array, Any]:
    """`(mask by which y is to be zeroed, x, what the steps take as valid)`."""
    check_same_device("mask", mask, x)
    mask = mask.reshape(mask_shape(mask.shape, x.shape, str(mask.dtype)))
    if operations.takes_masks:
        return None, x, np.array(mask)  # the caller may change it before backward
    with device_of(x):
        return mask, *_filled(x, mask)


def _filled(x: Array, mask: Array) -> tuple[Array, Valid]:
    """`(filled x, what is known of it)`, see `masks`."""
    count = valid_count(mask, x.shape)
    if isinstance(x, np.ndarray):
        count = int(count)
    library = _library(x)
    fill = filling(Namespace(library), x, mask, count)
    filled = library.where(mask, x, column(fill, x))
    if filled.strides != x.strides or filled.dtype != x.dtype:  # such as of another byte order
        like = x.copy(order="K")
        like[...] = filled
        filled = like
    return filled, (count, fill.astype(np.float64))


def _library(x: Array) -> Any:
    """NumPy or CuPy."""
    return import_module(type(x).__module__.partition(".")[0])


def _zero(values: Array, mask: Array | None) -> None:
    """Set what is not valid to 0."""
    if mask is not None:
        with device_of(values):
            values[...] = _library(values).where(mask, values, 0)


def _size_of(communicator: Communicator | None) -> int:
    return 1 if communicator is None else communicator.size


def _without_layer(communicator: Communicator, x: Array) -> Exchange:
    """For calls that no layer makes."""
    return Exchange(communicator, lambda: "batch_norm", x.dtype.name)
