"""The public array API: forward, backward and eval of synchronized batch normalization.

    mean, var = moments of x over all members of the communicator, per channel
    invstd    = 1 / sqrt(var + eps)                 (eps_mode "clamp": 1 / sqrt(max(var, eps)))
    xhat      = (x - mean) * invstd
    y         = xhat * weight + bias

Ioffe and Szegedy 2015, "Batch Normalization". Shapes and dtypes, the same everywhere:

    x, dy, y, dx                  (N, C, *spatial), float64, float32, float16 or bfloat16 (CuPy's,
                                  or NumPy's of the package ml_dtypes); 16 bits are computed in
                                  float32. Any memory layout; results have the layout of x.
    weight, bias, running_*       (C,), floating
    mean, invstd, sums            (C,), float64

Arrays are NumPy's, or CuPy's on a GPU, all of one kind; results are of that kind.

This is the one place that knows both arithmetic (a backend) and communication (a
communicator). NaN or infinity in a channel makes the statistics of that channel NaN, in the
output and in the running statistics, and leaves other channels alone.

Raised before anything is written: `ShapeError`, `DTypeError`, `DeviceError`, `ReadOnlyError`,
`ArgumentError`, `BatchSizeError` (one value per channel in all), and the communicator's errors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.backends import backend_of, fused_backend_of
from syncbn_core.comm import Communicator, SingleCommunicator, forward_call, located
from syncbn_core.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    ReadOnlyError,
    ShapeError,
)
from syncbn_core.moments import (
    EpsMode,
    Moments,
    averaging_factor,
    blend,
    check_eps,
    check_eps_mode,
    check_momentum,
    invstd_from_var,
    mean_gradients,
    require_more_than_one_value,
)

__all__ = [
    "Gradients",
    "Saved",
    "backward_alone",
    "backward_input",
    "backward_sums",
    "batch_norm_backward",
    "batch_norm_eval",
    "batch_norm_forward",
    "forward_alone",
    "local_moments",
    "normalize",
    "update_running",
]

Array = Any
UNKNOWN = -1  # a count that only the device knows: asking would wait for it
_ALONE = SingleCommunicator()
# Infinity and NaN go through to the results of their channel; they are no cause for warnings.
_SILENT: Any = {"invalid": "ignore", "over": "ignore"}


def _no_layer() -> str:
    return "batch_norm"


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What `batch_norm_backward` needs of a forward: x itself and O(C) numbers.

    `count`: values per channel over all members, -1 where only the device knows; None when the
    statistics were constants (running statistics in eval), through which no gradient flows.
    `clamped`: (C,) bool, where eps_mode "clamp" made invstd a constant; None when nowhere.
    `device`: the statistics as the kernels of a device take them, which know `clamped`
    themselves; None on the host.
    `call`: the number of the exchange in its group, by which backward is known; 0 for none.
    """

    x: Array
    mean: Array
    invstd: Array
    weight: Array | None
    count: int | None
    clamped: Array | None = None
    device: Any = None
    call: int = 0


class Gradients(NamedTuple):
    """Gradients of one member: `x` like x; `weight`, `bias` (C,), this member's own share."""

    x: Array
    weight: Array
    bias: Array


def batch_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    num_batches_tracked: Array | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    eps_mode: EpsMode = "plus",
    communicator: Communicator | None = None,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Saved]:
    """Normalize x by the statistics of the whole batch; returns `(y, saved)`.

    `running_mean`, `running_var` (C,) and the integer counter `num_batches_tracked` () are
    updated in place: `(1 - momentum) * old + momentum * new`, with the unbiased variance;
    `momentum=None` averages over all batches, by the counter. An empty x takes part in the
    exchange; when the whole batch is empty only the counter moves.

    `out`: where to write y; x itself only if no backward follows. `parallel`: False keeps to
    the calling thread.
    """
    check_input(x)
    check_per_channel(x, weight=weight, bias=bias)
    check_running(x, running_mean, running_var, num_batches_tracked, momentum)
    check_out(x, out)
    eps, eps_mode = check_eps(eps), check_eps_mode(eps_mode)
    if communicator is None and x.size > 0:
        count = x.size // x.shape[1]
        require_more_than_one_value(count, x.shape)
        settings: dict[str, Any] = {"eps": eps, "eps_mode": eps_mode}
        done = forward_alone(x, weight, bias, out=out, parallel=parallel, **settings)
        if done is not None:
            y, total, invstd = done
            with np.errstate(**_SILENT):
                _update_running(running_mean, running_var, num_batches_tracked, total, momentum)
            clamped = total.var < eps if eps_mode == "clamp" else None
            return y, Saved(x, total.mean, invstd, weight, count, clamped)
    moments = local_moments(x, parallel=parallel)
    group = located(communicator, _no_layer, x.dtype) or _ALONE
    total = group.merge_moments(moments)
    call = forward_call(group)
    count = UNKNOWN if total.known_count is None else total.known_count
    require_more_than_one_value(count, x.shape)
    fused = fused_backend_of(x)
    if fused is not None:
        y, device = fused.finish_forward(
            x,
            total,
            weight,
            bias,
            running_mean=running_mean,
            running_var=running_var,
            num_batches_tracked=num_batches_tracked,
            momentum=momentum,
            eps=eps,
            eps_mode=eps_mode,
            out=out,
        )
        return y, Saved(x, device.mean, device.invstd, weight, count, None, device, call)
    invstd = total.invstd(eps, eps_mode)
    y = normalize(x, total.mean, invstd, weight, bias, out=out, parallel=parallel)
    with np.errstate(**_SILENT):
        _update_running(running_mean, running_var, num_batches_tracked, total, momentum)
    clamped = total.var < eps if eps_mode == "clamp" else None
    return y, Saved(x, total.mean, invstd, weight, count, clamped, call=call)


def batch_norm_eval(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    eps_mode: EpsMode = "plus",
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Saved]:
    """Normalize x by running statistics, which stay as they are; returns `(y, saved)`."""
    check_input(x)
    check_per_channel(
        x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    check_out(x, out)
    eps, eps_mode = check_eps(eps), check_eps_mode(eps_mode)
    fused = fused_backend_of(x)
    if fused is not None:
        settings: dict[str, Any] = {"eps": eps, "eps_mode": eps_mode, "out": out}
        y, device = fused.finish_eval(x, running_mean, running_var, weight, bias, **settings)
        return y, Saved(x, device.mean, device.invstd, weight, None, None, device)
    variance = np.asarray(running_var, dtype=np.float64)
    invstd = invstd_from_var(variance, eps, eps_mode)
    mean = np.array(running_mean, dtype=np.float64)
    y = normalize(x, mean, invstd, weight, bias, out=out, parallel=parallel)
    return y, Saved(x, mean, invstd, weight, None)


def batch_norm_backward(
    dy: Array,
    saved: Saved,
    *,
    communicator: Communicator | None = None,
    out: Array | None = None,
    parallel: bool = True,
) -> Gradients:
    """Gradients by x, weight and bias, given `dy`, the gradient by y.

    With `sum_dy = sum(dy)` and `sum_dy_xhat = sum(dy * xhat)` over all members and n values:

        dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n)

    without the last term where eps_mode "clamp" made invstd a constant. The gradients of weight
    and bias are the local sums: add them up over members as those of any other parameter.

    `communicator` has to be the one of the forward. `out`: where to write dx, may be dy.
    """
    x = saved.x
    communicator = located(communicator, _no_layer, x.dtype, forward=saved.call)
    backend_of(dy)
    if tuple(dy.shape) != tuple(x.shape):
        raise ShapeError(f"expected dy of the shape of x, {tuple(x.shape)}, got {tuple(dy.shape)}")
    _check_device("dy", dy, x)
    if not _is_floating(dy.dtype):
        raise DTypeError(f"expected dy of a floating dtype, got {dy.dtype}")
    check_out(x, out)
    if saved.device is not None:
        return _fused_backward(dy, saved, communicator, out)
    dtype = (x if saved.weight is None else saved.weight).dtype
    if communicator is None and saved.count is not None:
        operands = (x, dy, saved.mean, saved.invstd, saved.weight, saved.clamped)
        done = backward_alone(*operands, out=out, parallel=parallel)
        if done is not None:
            with np.errstate(**_SILENT):
                return Gradients(done[2], done[1].astype(dtype), done[0].astype(dtype))
    sum_dy, sum_dy_xhat = backward_sums(x, dy, saved.mean, saved.invstd, parallel=parallel)
    with np.errstate(**_SILENT):
        means = _means_over_members(sum_dy, sum_dy_xhat, saved, communicator or _ALONE)
        gradients = (sum_dy_xhat.astype(dtype), sum_dy.astype(dtype))
    per_channel = (saved.mean, saved.invstd, saved.weight, *means)
    dx = backward_input(x, dy, *per_channel, out=out, parallel=parallel)
    return Gradients(dx, *gradients)


def _fused_backward(
    dy: Array, saved: Saved, communicator: Communicator | None, out: Array | None
) -> Gradients:
    fused = fused_backend_of(saved.x)
    assert fused is not None
    inputs = (saved.x, dy, saved.device, saved.weight)
    sums, by_weight, by_bias = fused.local_sums(*inputs)
    if saved.count is None:  # constant statistics: no gradient flows through them
        sums = None
    elif communicator is not None:
        sums = communicator.all_reduce_sums(sums)
    dx = fused.finish_backward(*inputs, sums, out=out)
    return Gradients(dx, by_weight, by_bias)


def _means_over_members(
    sum_dy: Array, sum_dy_xhat: Array, saved: Saved, communicator: Communicator
) -> tuple[Array, Array]:
    """The two sums over all members, times weight, over the count; what `backward_input` takes."""
    if saved.count is None:  # constant statistics: no gradient flows through them
        zeros = np.zeros_like(sum_dy)
        return zeros, zeros
    total = communicator.all_reduce_sums(np.stack([sum_dy, sum_dy_xhat]))
    if saved.weight is not None:
        total = total * np.asarray(saved.weight, dtype=np.float64)
    return mean_gradients(total, saved.count, saved.clamped)


# The steps, for adapters that bring their own graph and communication. They check nothing.


def local_moments(x: Array, *, parallel: bool = True) -> Moments:
    """Moments of this member's part; an empty x gives the empty part."""
    return backend_of(x).moments(x, parallel=parallel)


def normalize(
    x: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`y = (x - mean) * invstd * weight + bias`."""
    return backend_of(x).normalize(x, mean, invstd, weight, bias, out=out, parallel=parallel)


def forward_alone(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    eps_mode: EpsMode,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Moments, Array] | None:
    """`(y, moments, invstd)` of a batch that is x alone, in one; None where that is no gain."""
    step = getattr(backend_of(x), "forward_alone", None)
    settings: dict[str, Any] = {"eps": eps, "eps_mode": eps_mode, "out": out}
    return None if step is None else step(x, weight, bias, parallel=parallel, **settings)


def backward_alone(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    frozen: Array | None,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> tuple[Array, Array, Array] | None:
    """`(sum_dy, sum_dy_xhat, dx)` of a batch that is x alone; None where that is no gain.

    `frozen` (C,) bool: where "clamp" made invstd a constant; None for nowhere.
    """
    step = getattr(backend_of(x), "backward_alone", None)
    operands = (x, dy, mean, invstd, weight, frozen)
    return None if step is None else step(*operands, out=out, parallel=parallel)


def update_running(
    running_mean: Array, running_var: Array, tracked: Array | None, total: Moments, factor: float
) -> bool:
    """Blend `total` into running statistics, and count it, at once; False where that can't be."""
    step = getattr(backend_of(running_mean), "update_running", None)
    return bool(step is not None and step(running_mean, running_var, tracked, total, factor))


def backward_sums(
    x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
) -> tuple[Array, Array]:
    """`(sum(dy), sum(dy * xhat))` of this member."""
    return backend_of(x).backward_reduce(x, dy, mean, invstd, parallel=parallel)


def backward_input(
    x: Array,
    dy: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    mean_dy: Array,
    mean_dy_xhat: Array,
    *,
    out: Array | None = None,
    parallel: bool = True,
) -> Array:
    """`dx = invstd * (weight * dy - mean_dy - xhat * mean_dy_xhat)`.

    `mean_dy`, `mean_dy_xhat`: the sums over all members, times weight, over the total count.
    """
    return backend_of(x).backward_input(
        x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, out=out, parallel=parallel
    )


# Checks, before anything is computed or written.


def check_input(x: Array, num_features: int | None = None) -> None:
    """Raise unless x is a floating `(N, C, *spatial)` array with `num_features` channels."""
    backend_of(x)
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise ShapeError(
            f"expected an array (N, C, *spatial) of rank 2 or more, got shape {shape}; "
            "a batch of scalars is x[:, None]"
        )
    if not _is_floating(x.dtype) or x.dtype.itemsize > 8:
        raise DTypeError(
            f"expected float16, bfloat16, float32 or float64, got {x.dtype}; convert it first, for "
            "example with x.astype(numpy.float32)"
        )
    if num_features is not None and shape[1] != num_features:
        raise ShapeError(
            f"expected {num_features} channels on axis 1 (num_features={num_features}), got "
            f"shape {shape}; check the layer before"
        )


def _is_floating(dtype: Any) -> bool:
    return bool(dtype.kind == "f" or dtype.name == "bfloat16")


def _is_writable(array: Array) -> bool:
    return bool(getattr(array.flags, "writeable", True))  # on a device every array is


def _check_device(name: str, array: Array, x: Array) -> None:
    """Raise unless `array` is an array of the kind of x, on its device."""
    places = [getattr(a, "device", None) for a in (array, x)]
    if backend_of(array) is not backend_of(x) or places[0] != places[1]:
        raise DeviceError(
            f"expected {name} to be of the kind of x ({_kind(x)}), got {_kind(array)}; "
            "move both to one device"
        )


def _kind(array: Array) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__name__} on {getattr(array, 'device', None) or 'cpu'}"


def check_per_channel(x: Array, **arrays: Array | None) -> None:
    """Raise unless each of `arrays` is None or a floating `(C,)` array of x's kind."""
    for name, array in arrays.items():
        if array is None:
            continue
        _check_device(name, array, x)
        if tuple(array.shape) != (x.shape[1],):
            raise ShapeError(
                f"expected {name} of shape ({x.shape[1]},), one value per channel of x "
                f"{tuple(x.shape)}, got {tuple(array.shape)}"
            )
        if not _is_floating(array.dtype):
            raise DTypeError(f"expected {name} of a floating dtype, got {array.dtype}")


def check_running(
    x: Array,
    running_mean: Array | None,
    running_var: Array | None,
    num_batches_tracked: Array | None,
    momentum: float | None,
) -> None:
    """Raise unless the running statistics fit x and can be updated in place."""
    check_momentum(momentum)
    if (running_mean is None) != (running_var is None):
        raise ArgumentError(
            "expected running_mean and running_var together or neither, got only "
            + ("running_var" if running_mean is None else "running_mean")
        )
    check_per_channel(x, running_mean=running_mean, running_var=running_var)
    if momentum is None and running_mean is not None and num_batches_tracked is None:
        raise ArgumentError(
            "expected num_batches_tracked with momentum=None, the average over all batches; "
            "give an integer array of shape (), or a momentum"
        )
    if num_batches_tracked is not None:
        _check_device("num_batches_tracked", num_batches_tracked, x)
        if tuple(num_batches_tracked.shape) != ():
            raise ShapeError(
                "expected num_batches_tracked of shape (), an integer array such as "
                f"numpy.zeros((), int), got {tuple(num_batches_tracked.shape)}"
            )
        if num_batches_tracked.dtype.kind not in "iu":
            raise DTypeError(
                f"expected num_batches_tracked of an integer dtype, got {num_batches_tracked.dtype}"
            )
    named = {
        "running_mean": running_mean,
        "running_var": running_var,
        "num_batches_tracked": num_batches_tracked,
    }
    for name, array in named.items():
        if array is not None and not _is_writable(array):
            raise ReadOnlyError(
                f"expected a writable {name}, which training updates in place, got a read-only "
                "array; copy it first"
            )
        if array is not None and array.size > 1 and 0 in array.strides:
            raise ReadOnlyError(
                f"expected {name} with memory for each value, got strides {array.strides}; copy it "
                "first"
            )


def check_out(x: Array, out: Array | None) -> None:
    """Raise unless `out` is None or can take a result like x."""
    if out is None:
        return
    _check_device("out", out, x)
    if tuple(out.shape) != tuple(x.shape) or out.dtype != x.dtype:
        raise ShapeError(
            f"expected out of shape {tuple(x.shape)} and dtype {x.dtype}, as x, got "
            f"{tuple(out.shape)} and {out.dtype}"
        )
    if not _is_writable(out):
        raise ReadOnlyError("expected a writable out, got a read-only array")


def _update_running(
    running_mean: Array | None,
    running_var: Array | None,
    num_batches_tracked: Array | None,
    total: Moments,
    momentum: float | None,
) -> None:
    """Update all three in one call of C, between whose writes no interrupt can come."""
    targets, values = [], []
    if running_mean is not None and running_var is not None and total.count > 0:
        tracked = 0 if num_batches_tracked is None else int(num_batches_tracked) + 1
        factor = averaging_factor(momentum, tracked)
        if update_running(running_mean, running_var, num_batches_tracked, total, factor):
            return
        targets += [running_mean, running_var]
        values += [
            blend(running_mean, total.mean, factor),
            blend(running_var, total.unbiased_var, factor),
        ]
    if num_batches_tracked is not None:
        targets.append(num_batches_tracked)
        values.append(num_batches_tracked + 1)
    deque(map(setitem, targets, repeat(...), values), maxlen=0)
