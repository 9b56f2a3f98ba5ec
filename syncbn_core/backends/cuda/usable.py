"""Decides whether kernels are used, and checks those of a dtype before their first use on a device.

    SYNCBN_KERNELS=checked    the default
    SYNCBN_KERNELS=on         kernels are used unchecked
    SYNCBN_KERNELS=off        no kernels: plain array operations

The check compares the steps by kernels with plain operations on the device. After a kernel that
fails (it does not compile, load or launch, or a result is wrong), one warning says so, and plain
operations take the place of all kernels on that device, until the process ends.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np

from syncbn_core.arrays import DeviceArrays
from syncbn_core.backends.cuda.driver import DriverError
from syncbn_core.backends.cuda.kernels import (
    KernelFailure,
    description,
    failure_of,
)
from syncbn_core.backends.cuda.plain import PlainDeviceOperations
from syncbn_core.disk_cache import on_rank
from syncbn_core.errors import ArgumentError, BackendError
from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm, RunningStatistics

__all__ = ["Setting", "give_up", "setting", "usable"]

Array = Any
Setting = Literal["checked", "on", "off"]

STEPS = ("moments", "merge", "forward", "backward_reduce", "backward_input")
SHAPES = ((9, 3, 1024), (600, 16))  # planes and rows, of several thread blocks
# The largest error for activations of a dtype, over the largest value.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3.2e-2, "float32": 4e-5, "float64": 1e-11}

_passed: set[tuple[int, str]] = set()
_failed: dict[int, str] = {}  # devices without kernels, and why
_locks: dict[Any, threading.Lock] = {}  # one each: a check may wait for other threads


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


def usable(operations: Any, index: int, dtype: str | None) -> bool:
    """Whether kernels for arrays of `dtype` (None: any) may be used on device `index`.

    `operations`: the `CudaOperations`. Raises `BackendError` where they are unchecked and the
    current stream is being captured into a CUDA graph, or where the check breaks the device's
    context.
    """
    if index in _failed:
        return False
    if dtype is not None and (index, dtype) not in _passed:
        with _locks.setdefault((index, dtype), threading.Lock()):
            if (index, dtype) not in _passed and index not in _failed:
                _first_use(operations, index, dtype)
    return index not in _failed


def give_up(index: int, failure: KernelFailure) -> None:
    """Use no kernel on device `index` from now on; warns the first time."""
    if index not in _failed:
        _failed[index] = str(failure)
        report = ". Please report this text to syncbn's developers" if failure.unexpected else ""
        warnings.warn(
            "syncbn uses plain operations instead of CUDA kernels, which is slower. "
            f"On {description(index)}{on_rank()}: {failure}{report}",
            stacklevel=2,
        )


def _first_use(operations: Any, index: int, dtype: str) -> None:
    arrays: DeviceArrays = operations.arrays
    if setting() == "checked":
        with arrays.on_device(index):
            if arrays.is_captured(index):
                raise BackendError(
                    f"expected CUDA kernels for {dtype} to be checked before a CUDA graph is "
                    "captured; run forward and backward once before the capture, or set "
                    "SYNCBN_KERNELS=on"
                )
            try:
                _compare(operations, index, dtype)
            except KernelFailure as failure:
                give_up(index, failure)
                return
    _passed.add((index, dtype))


def _compare(operations: Any, index: int, dtype: str) -> None:
    """Raise `KernelFailure` unless steps by kernels give the results of plain operations."""
    arrays: DeviceArrays = operations.arrays
    steps = {name: getattr(type(operations), name).__wrapped__ for name in STEPS}
    given = operations, operations.launcher(index)
    kernels = SimpleNamespace(**{name: partial(step, *given) for name, step in steps.items()})
    try:
        for shape in SHAPES:
            for name, *pair in _results(kernels, operations, index, dtype, shape):
                values, right = (
                    arrays.to_host(arrays.cast(own, arrays.widest(own))) for own in pair
                )
                error = float(np.abs(values - right).max() / np.abs(right).max())
                if not error <= TOLERANCES[dtype]:  # also for NaN
                    raise KernelFailure(
                        f"{name} of {dtype} {shape} differs from that of plain operations by "
                        f"{error:.1e} of the largest value, more than {TOLERANCES[dtype]:.1e}"
                    )
    except DriverError as error:
        raise failure_of(str(error), error.result) from error
    except BackendError:
        raise
    except Exception as error:  # the library's, of a kernel that broke the context
        raise BackendError(
            f"expected CUDA kernels for {dtype} to finish on {description(index)}, got "
            f"{type(error).__name__}: {error}; if no earlier kernel of the program has failed "
            "(CUDA_LAUNCH_BLOCKING=1 shows that), start again with SYNCBN_KERNELS=off, and report "
            "this text to syncbn's developers"
        ) from error


def _results(
    kernels: Any, operations: Any, index: int, dtype: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, Array, Array]]:
    """Of each step by kernels and by plain operations, given what the latter computed before."""
    arrays: DeviceArrays = operations.arrays
    plain, rule, channels = PlainDeviceOperations(arrays), NormRule(1e-3), shape[1]
    random, wide = np.random.default_rng(0), "float64" if dtype == "float64" else "float32"
    noise = random.normal(0, 1, (2, math.prod(shape)))

    def made(values: Array, name: str) -> Array:
        return arrays.from_host(values, arrays.empty((1,), name, index))

    # dy whose sums are far from zero, so that an error in a sum is large beside it
    x, dy = (
        made(values, dtype).reshape(shape) for values in (3 + 2 * noise[0], 0.5 + noise.sum(0) / 2)
    )
    weight, bias, mean, var, own_mean, own_var = (
        made(values, wide) for values in random.uniform(0.5, 2, (4, channels))[[0, 1, 2, 3, 2, 3]]
    )
    affine = Affine(weight, bias)
    part = plain.moments(x)
    total = plain.merge([part, part])
    for own, right in ((kernels.moments(x), part), (kernels.merge([part, part]), total)):
        for name, where in (("mean", slice(1, 1 + channels)), ("m2", slice(1 + channels, -1))):
            yield name, own.rows[0, where], right.rows[0, where]
    running = RunningStatistics(mean, var, None, 0.25)
    known, right_known = plain.statistics(total, rule), plain.statistics(total, rule)
    norm = Norm(right_known, affine, rule)
    right_y = plain.forward(x, norm, running)
    running = RunningStatistics(own_mean, own_var, None, 0.25)
    yield "y", kernels.forward(x, Norm(known, affine, rule), running), right_y
    yield "invstd", known.invstd, right_known.invstd
    yield "running_mean", own_mean, mean
    yield "running_var", own_var, var
    sums = kernels.backward_reduce(x, dy, norm)
    right_sums = plain.backward_reduce(x, dy, norm)
    names = ("sums", "gradient of weight", "gradient of bias")
    yield from zip(names, sums, right_sums, strict=True)
    given = x, dy, norm, right_sums.exchange
    yield "dx", kernels.backward_input(*given), plain.backward_input(*given)
