"""Decides whether kernels are used, and checks them before their first use on a device.

    SYNCBN_KERNELS=checked    the default
    SYNCBN_KERNELS=on         kernels are used unchecked
    SYNCBN_KERNELS=off        no kernels: plain array operations

The check compares small steps, forward and backward, by kernels with plain operations on the
device: planes and rows, of float32 and bfloat16. If kernels fail it (one does not compile, load or
launch, or a result is wrong), one warning says so, and plain operations take the place of all
kernels on that device, until the process ends. A kernel that fails later is an error.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np

from syncbn_core.arrays import DeviceArrays
from syncbn_core.backends.cuda.driver import DriverError
from syncbn_core.backends.cuda.kernels import (
    KernelFailure,
    compute_capability,
    description,
    failure_of,
)
from syncbn_core.backends.plain import PlainOperations
from syncbn_core.disk_cache import on_rank
from syncbn_core.errors import ArgumentError, BackendError
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics

__all__ = ["Setting", "setting", "usable"]

Array = Any
Setting = Literal["checked", "on", "off"]

SHAPES = ((9, 3, 1024), (600, 16))  # planes and rows, of several thread blocks
# Of each dtype that is checked: the oldest compute capability, and the largest error over the
# largest value.
DTYPES = {"float32": ((0, 0), 4e-5), "bfloat16": ((8, 0), 3.2e-2)}

_found: dict[int, bool] = {}  # by device
_locks: dict[int, threading.Lock] = {}  # one each: members may run on several devices


def setting() -> Setting:
    """The value of SYNCBN_KERNELS; raises `ArgumentError` if it has no meaning."""
    given: Any = os.environ.get("SYNCBN_KERNELS", "").strip().lower() or "checked"
    if given not in get_args(Setting):
        raise ArgumentError(
            "expected the environment variable SYNCBN_KERNELS to be checked, on or off, "
            f"got {given!r}; unset it to have kernels checked"
        )
    known: Setting = given
    return known


def usable(kernels: Any, index: int) -> bool:
    """Whether kernels are used on device `index`; the first call there checks them.

    `kernels`: the `CudaOperations`. Raises `BackendError` if they are unchecked and the current
    stream is being captured into a CUDA graph, or if the check breaks the device's context.
    """
    found = _found.get(index)
    if found is None:
        with _locks.setdefault(index, threading.Lock()):
            found = _found.get(index)
            if found is None:
                found = _found[index] = setting() == "on" or _passes(kernels, index)
    return found


def _passes(kernels: Any, index: int) -> bool:
    arrays: DeviceArrays = kernels.arrays
    with arrays.on_device(index):
        if arrays.is_captured(index):
            raise BackendError(
                "expected CUDA kernels to be checked before a CUDA graph is captured; run forward "
                "and backward once before the capture, or set SYNCBN_KERNELS=on"
            )
        try:
            for dtype, (oldest, tolerance) in DTYPES.items():
                if compute_capability(index) >= oldest:
                    with suppress(ImportError):  # CuPy has bfloat16 by the package ml_dtypes
                        for shape in SHAPES:
                            _compare(kernels, index, dtype, shape, tolerance)
        except KernelFailure as failure:
            warnings.warn(
                "syncbn uses plain operations instead of CUDA kernels, which is slower. "
                f"On {description(index)}{on_rank()}: {failure.args[0]}. Unless the text says what "
                "to do, please report it to syncbn's developers",
                stacklevel=2,
            )
            return False
    return True


def _compare(
    kernels: Any, index: int, dtype: str, shape: tuple[int, ...], tolerance: float
) -> None:
    """Raise `KernelFailure` unless a step by kernels gives the results of plain operations."""
    arrays: DeviceArrays = kernels.arrays
    try:
        right = _step(PlainOperations(arrays), arrays, index, dtype, shape)
        for name, own in _step(kernels, arrays, index, dtype, shape).items():
            wide = [arrays.cast(each, arrays.widest(each)) for each in (own, right[name])]
            value, wanted = map(arrays.to_host, wide)
            error = float(np.abs(value - wanted).max() / np.abs(wanted).max())
            if not error <= tolerance:  # also for NaN
                raise KernelFailure(
                    f"{name} of {dtype} {shape} differs from that of plain operations by "
                    f"{error:.1e} of the largest value, more than {tolerance:.1e}"
                )
    except DriverError as error:
        raise failure_of(str(error), error.result) from error
    except (BackendError, ImportError):
        raise
    except Exception as error:  # the library's, of a kernel that broke the context
        raise BackendError(
            f"expected CUDA kernels for {dtype} to finish on {description(index)}, got "
            f"{type(error).__name__}: {error}; if no earlier kernel of the program has failed "
            "(CUDA_LAUNCH_BLOCKING=1 shows that), start again with SYNCBN_KERNELS=off, and report "
            "this text to syncbn's developers"
        ) from error


def _step(
    steps: Operations, arrays: DeviceArrays, index: int, dtype: str, shape: tuple[int, ...]
) -> dict[str, Array]:
    """Results of a forward and a backward, of two equal parts, on the device."""
    rule, channels = NormRule(1e-3), shape[1]
    random = np.random.default_rng(0)
    noise = random.normal(0, 1, (2, math.prod(shape)))

    def made(values: Array, name: str) -> Array:
        return arrays.from_host(values, arrays.empty((1,), name, index))

    # dy whose sums are far from zero, so that an error in a sum is large beside it
    x, dy = (
        made(values, dtype).reshape(shape) for values in (3 + 2 * noise[0], 0.5 + noise.sum(0) / 2)
    )
    weight, bias, mean, var = (
        made(values, "float32") for values in random.uniform(0.5, 2, (4, channels))
    )
    running = RunningStatistics(mean, var, None, 0.25)
    own, affine, running = steps.take(x, Affine(weight, bias), running)
    part = steps.moments(own)
    total = steps.merge([part, part])
    statistics = steps.statistics(total, rule)
    norm = Norm(statistics, affine, rule)
    y = steps.forward(own, norm, running, None, total)
    pair = steps.take_pair(x, dy, affine)
    sums = steps.backward_reduce(*pair, norm)
    return {
        "mean": total.mean,
        "m2": total.m2,
        "invstd": statistics.invstd,
        "y": y,
        "running_mean": mean,
        "running_var": var,
        "sums": sums.exchange,
        "gradient of weight": sums.grad_weight,
        "gradient of bias": sums.grad_bias,
        "dx": steps.backward_input(*pair, norm, sums.exchange),
    }
