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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncbn_core import order
from syncbn_core.arrays import at_device_of, copy_of
from syncbn_core.backends import operations_for
from syncbn_core.checks import (
    check_devices,
    check_dy,
    check_input,
    check_out,
    check_per_channel,
    check_rule,
    check_running,
)
from syncbn_core.comm import Communicator
from syncbn_core.dlpack import NATIVE_TYPES, NO_CONVERSION, Caller, caller_of, readable, writable
from syncbn_core.errors import ArgumentError
from syncbn_core.exchange import Exchange
from syncbn_core.masks import mask_shape
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
_NAMES = (
    *("x", "weight", "bias", "mask"),
    *("running_mean", "running_var", "num_batches_tracked", "out"),
)
UNKNOWN = -1  # only the device knows the count; reading it would make the host wait


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What `batch_norm_backward` needs of a forward: x itself and O(C) numbers.

    `x`: NumPy's or CuPy's, over the memory that was given.
    `count`: values per channel over all members, -1 where only the device knows; None when the
    statistics were constants (running statistics in eval), through which no gradient flows.
    `known`: what else the steps need.
    `caller`: how results become arrays of the library of x. `members`: how many there were.
    """

    x: Array
    count: int | None
    known: order.Forward
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
    exchange: Callable[[str], Exchange] | None = None,
) -> tuple[Array, Saved]:
    """Normalize x by the statistics of the whole batch; returns `(y, saved)`.

    `running_mean`, `running_var` (C,) and the integer counter `num_batches_tracked` () are
    updated in place: `(1 - momentum) * old + momentum * new`, with the unbiased variance;
    `momentum=None` averages over all batches, by the counter. An empty x takes part in the
    exchange; when the whole batch is empty only the counter is incremented.

    `out`: where to write y; x itself only if no backward follows. `parallel`: False
    uses the calling thread only. `exchange`: a layer's access to its `communicator`, by the name
    of a dtype.
    """
    read, written = [x, weight, bias, mask], [running_mean, running_var, num_batches_tracked, out]
    caller, steps, arrays = _entered(parallel, read, written)
    x, weight, bias, mask, mean, var, counter, target = arrays
    rule = check_rule(eps, eps_mode, activation, negative_slope)
    check_running(mean, var, counter, momentum)
    mask = _checked_mask(x, mask)
    link = _link(communicator, exchange, x)
    running = RunningStatistics(mean, var, counter, momentum)
    # Another library may refuse y. Then running statistics must not have changed.
    at_once = running if caller is NO_CONVERSION else None
    part = order.Part(x, Affine(weight, bias), at_once, mask, target)
    with at_device_of(x):
        (y,), known = order.forward(steps, [part], rule, link)
    statistics = known.norms[0].statistics
    count = UNKNOWN if statistics.count is None else statistics.count
    members = 1 if communicator is None else communicator.size
    saved = Saved(x, count, known, caller, members)
    y = caller.give(y, out)
    if at_once is None:
        with at_device_of(x):
            steps.update_running(running, statistics)
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
    read = [x, weight, bias, mask, running_mean, running_var]
    caller, steps, arrays = _entered(parallel, read, [None, out])
    x, weight, bias, mask, mean, var, _, target = arrays
    if mean is None or var is None:
        raise ArgumentError(
            "expected running_mean and running_var, got None; use batch_norm_forward, which takes "
            "the statistics of the batch"
        )
    rule = check_rule(eps, eps_mode, activation, negative_slope)
    mask = _checked_mask(x, mask)
    given = Affine(weight, bias), RunningStatistics(mean, var), mask
    with at_device_of(x):
        own, affine, running = steps.take(x, *given)
        y, statistics = steps.forward_eval(own, running, affine, rule, target)
        y = order.zeroed(steps, y, mask, target)
    masks = () if mask is None else [mask]
    known = order.Forward(steps, [Norm(statistics, affine, rule)], constant=True, masks=masks)
    return caller.give(y, out), Saved(x, None, known, caller)


def batch_norm_backward(
    dy: Array,
    saved: Saved,
    *,
    communicator: Communicator | None = None,
    out: Array | None = None,
    parallel: bool = True,
    exchange: Callable[[str], Exchange] | None = None,
) -> Gradients:
    """Gradients by x, weight and bias, given `dy`, the gradient by y.

    With `sum_dy = sum(dy)` and `sum_dy_xhat = sum(dy * xhat)` over all members and n values:

        dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n)

    with dy times the derivative of the activation in the place of dy, and without the last term
    where eps_mode "clamp" made invstd a constant. The gradients of weight and bias are the local
    sums: add them up over members as those of any other parameter.

    `communicator` has to be the one of the forward. `out`: where to write dx, may be dy.
    """
    gradients = gradients_of(dy, saved, communicator, exchange, out, parallel)
    give = saved.caller.give
    return Gradients(give(gradients.x, out), give(gradients.weight), give(gradients.bias))


def gradients_of(
    dy: Array,
    saved: Saved,
    communicator: Communicator | None,
    exchange: Callable[[str], Exchange] | None,
    out: Array | None = None,
    parallel: bool = True,
) -> Gradients:
    """`batch_norm_backward` with results of NumPy or CuPy."""
    x, known = saved.x, saved.known
    if not NATIVE_TYPES.issuperset((type(dy), type(out))):
        (dy,), (out,) = readable(dy=dy), writable(out=out)
    members = 1 if communicator is None else communicator.size
    if saved.count is not None and members != saved.members:
        raise ArgumentError(
            f"expected the communicator of the forward, of {saved.members} members, got one of "
            f"{members}; pass the same one to forward and backward"
        )
    check_devices({"x": x, "dy": dy, "out": out})
    check_dy(x, dy)
    check_out(x, out)
    steps = known.steps if parallel else known.steps.serial
    # constant statistics need no exchange
    link = None if saved.count is None else _link(communicator, exchange, x)
    known = known._replace(steps=steps, exchange=link)
    with at_device_of(x):
        (dx,), (sums,) = order.backward(known, [x], [dy], out=out)
    return Gradients(dx, sums.grad_weight, sums.grad_bias)


def _entered(
    parallel: bool, read: list[Array], written: list[Array]
) -> tuple[Caller, Operations, list[Array]]:
    """How results go back, the steps for x, and `_NAMES`, as the core's arrays, which fit x."""
    arrays, caller, first = [*read, *written], NO_CONVERSION, len(read)
    if not NATIVE_TYPES.issuperset(map(type, arrays)):
        caller = caller_of(read[0])
        arrays = readable(**dict(zip(_NAMES[:first], read, strict=True)))
        arrays += writable(**dict(zip(_NAMES[first:], written, strict=True)))
    steps, named = operations_for(arrays[0]), dict(zip(_NAMES, arrays, strict=True))
    check_input(named["x"])
    check_devices(named)
    check_per_channel(named)
    check_out(named["x"], named["out"])
    return caller, steps if parallel else steps.serial, arrays


def _checked_mask(x: Array, mask: Array | None) -> Array | None:
    """A copy of the mask, as it broadcasts against x; the given one may change before backward."""
    if mask is None:
        return None
    shape = mask_shape(mask.shape, x.shape, str(mask.dtype))
    return copy_of(mask.reshape(shape))


def _link(
    communicator: Communicator | None, exchange: Callable[[str], Exchange] | None, x: Array
) -> Exchange | None:
    """The access to the communicator; "batch_norm" is the name of calls that no layer makes."""
    if communicator is None:
        return None
    link = exchange or partial(Exchange, communicator, lambda: "batch_norm")
    return link(x.dtype.name)
