"""Checks of shapes, dtypes, devices and settings, made before anything is computed or written.

Each function raises an error that states what was expected, what was given, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import numpy as np

from syncbn_core.backends import operations_for
from syncbn_core.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    ReadOnlyError,
    ShapeError,
)
from syncbn_core.moments import ACTIVATIONS, ActivationName, EpsMode, NormRule

Array = Any


def check_eps(eps: float) -> float:
    """`eps` as a float; raises `ArgumentError` unless it is finite and > 0."""
    if not (isinstance(eps, Real) and math.isfinite(eps) and eps > 0):
        raise ArgumentError(f"expected eps to be a finite number > 0, got {eps!r}")
    return float(eps)


def check_eps_mode(eps_mode: str) -> EpsMode:
    """`eps_mode`; raises `ArgumentError` unless it is "plus" or "clamp"."""
    if eps_mode not in get_args(EpsMode):
        raise ArgumentError(
            f'expected eps_mode "plus" (1/sqrt(var + eps)) or "clamp" '
            f"(1/sqrt(max(var, eps))), got {eps_mode!r}"
        )
    return eps_mode  # type: ignore[return-value]


def check_momentum(momentum: float | None) -> float | None:
    """`momentum`; raises `ArgumentError` unless it is None or a number from 0 to 1."""
    if momentum is not None and not (isinstance(momentum, Real) and 0 <= momentum <= 1):
        raise ArgumentError(
            "expected momentum to be None (cumulative average) or a number from 0 to 1 "
            f"(the share of the new batch), got {momentum!r}"
        )
    return momentum


def check_activation(
    activation: ActivationName | None, negative_slope: float
) -> tuple[ActivationName | None, float]:
    """Both; raises `ArgumentError` for an unknown activation, a slope < 0 or one without use."""
    if activation not in ACTIVATIONS:
        kind = getattr(activation, "__name__", type(activation).__name__).lower()
        meant = [name for name in ACTIVATIONS if name and name.replace("_", "") == kind]
        raise ArgumentError(
            f"expected activation to be one of {', '.join(map(str, ACTIVATIONS))}, got "
            f"{activation!r}" + "".join(f"; pass {name!r}" for name in meant)
        )
    if not (isinstance(negative_slope, Real) and 0 <= negative_slope < math.inf):
        raise ArgumentError(f"expected a finite negative_slope >= 0, got {negative_slope!r}")
    if activation != "leaky_relu" and negative_slope != 0.01:
        raise ArgumentError(
            f'expected negative_slope for activation="leaky_relu" alone, got {negative_slope!r} '
            f"for {activation!r}; leave it out"
        )
    return activation, float(negative_slope)


def check_rule(
    eps: float,
    eps_mode: str,
    activation: ActivationName | None = None,
    negative_slope: float = 0.01,
) -> NormRule:
    """The `NormRule` of these settings; raises `ArgumentError` if one is invalid."""
    act = check_activation(activation, negative_slope)
    return NormRule(check_eps(eps), check_eps_mode(eps_mode), *act)


def check_input(x: Array) -> None:
    """Check x: `ShapeError` unless it is `(N, C, *spatial)`, `DTypeError` unless it is floating."""
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise ShapeError(
            f"expected an array (N, C, *spatial) of rank 2 or more, got shape {shape}; "
            "for a batch of scalars pass x[:, None]"
        )
    if not _is_floating(x.dtype) or x.dtype.itemsize > 8:
        raise DTypeError(
            f"expected float16, bfloat16, float32 or float64, got {x.dtype}; convert it first, for "
            "example with x.astype(numpy.float32)"
        )


def check_num_features(x: Array, num_features: int) -> None:
    """Raise `ShapeError` if x is an array with another number of channels on axis 1."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) > 1 and shape[1] != num_features:
        raise ShapeError(
            f"expected {num_features} channels on axis 1 (num_features={num_features}), got "
            f"shape {shape}; check the layer before"
        )


def _is_floating(dtype: Any) -> bool:
    return bool(dtype.kind == "f" or dtype.name == "bfloat16")


def check_devices(arrays: Mapping[str, Array]) -> None:
    """Raise `DeviceError` unless all of `arrays` but None have the library and device of x.

    `BackendError` for what is no array.
    """
    if {np.ndarray, type(None)}.issuperset(map(type, arrays.values())):
        return
    x = arrays["x"]
    for name, array in arrays.items():
        if array is None:
            continue
        places = [getattr(a, "device", None) for a in (array, x)]
        if operations_for(array) is not operations_for(x) or places[0] != places[1]:
            raise DeviceError(
                f"expected {name} to be of the kind of x ({_kind(x)}), got {_kind(array)}; "
                "move both to one device"
            )


def _kind(array: Array) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__name__} on {getattr(array, 'device', None) or 'cpu'}"


def check_per_channel(arrays: Mapping[str, Array]) -> None:
    """Raise `ShapeError` or `DTypeError` unless numbers per channel are floating, one for each."""
    x = arrays["x"]
    for name in ("weight", "bias", "running_mean", "running_var"):
        array = arrays.get(name)
        if array is None:
            continue
        if array.shape != x.shape[1:2]:
            raise ShapeError(
                f"expected {name} of shape ({x.shape[1]},), one value per channel of x "
                f"{tuple(x.shape)}, got {tuple(array.shape)}"
            )
        if array.dtype != x.dtype and not _is_floating(array.dtype):
            raise DTypeError(f"expected {name} of a floating dtype, got {array.dtype}")


def check_running(
    running_mean: Array | None,
    running_var: Array | None,
    num_batches_tracked: Array | None,
    momentum: float | None,
) -> None:
    """Check that running statistics, which `check_per_channel` has seen, can be updated in place.

    Raises `ArgumentError`, `ShapeError`, `DTypeError` or `ReadOnlyError`.
    """
    check_momentum(momentum)
    if (running_mean is None) != (running_var is None):
        raise ArgumentError(
            "expected running_mean and running_var together or neither, got only "
            + ("running_var" if running_mean is None else "running_mean")
        )
    if momentum is None and running_mean is not None and num_batches_tracked is None:
        raise ArgumentError(
            "expected num_batches_tracked with momentum=None (average over all batches), got None; "
            "pass an integer array of shape (), or a momentum"
        )
    if num_batches_tracked is not None:
        if tuple(num_batches_tracked.shape) != ():
            raise ShapeError(
                "expected num_batches_tracked of shape (), an integer array such as "
                f"numpy.zeros((), int), got {tuple(num_batches_tracked.shape)}"
            )
        if num_batches_tracked.dtype.kind not in "iu":
            raise DTypeError(
                f"expected num_batches_tracked of an integer dtype, got {num_batches_tracked.dtype}"
            )
    _check_writable(
        running_mean=running_mean, running_var=running_var, num_batches_tracked=num_batches_tracked
    )


def _check_writable(**arrays: Array | None) -> None:
    """Raise `ReadOnlyError` for an array that can't be written, or has one value in many places."""
    for name, array in arrays.items():
        if array is None or array.size == 0:
            continue
        repeated = array.size > 1 and 0 in array.strides
        if repeated or not getattr(array.flags, "writeable", True):  # CuPy's always are
            what = f"strides {array.strides}" if repeated else "a read-only array"
            raise ReadOnlyError(
                f"expected a writable {name} with memory of its own for each value, got {what}; "
                "copy it first"
            )


def check_dy(x: Array, dy: Array) -> None:
    """Raise `ShapeError` or `DTypeError` unless `dy` is floating, with the shape of x."""
    if tuple(dy.shape) != tuple(x.shape):
        raise ShapeError(f"expected dy of the shape of x, {tuple(x.shape)}, got {tuple(dy.shape)}")
    if dy.dtype != x.dtype and not _is_floating(dy.dtype):
        raise DTypeError(f"expected dy of a floating dtype, got {dy.dtype}")


def check_out(x: Array, out: Array | None) -> None:
    """Raise `ShapeError` or `ReadOnlyError` unless `out` is None or a writable array like x."""
    if out is None:
        return
    if tuple(out.shape) != tuple(x.shape) or out.dtype != x.dtype:
        raise ShapeError(
            f"expected out of shape {tuple(x.shape)} and dtype {x.dtype}, like x, got "
            f"{tuple(out.shape)} and {out.dtype}"
        )
    _check_writable(out=out)
