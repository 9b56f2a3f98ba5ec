"""Compares a CUDA kernel with float64 NumPy on small cases, on the device.

Each case has several thread blocks and several channels. Planes of odd length start between two
vectors, where the kernel allows that. Around each result is memory that a kernel must not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.backends.cuda import grid
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.backends.cuda.driver import (
    DriverError,
    Kernel,
    KernelFailure,
    description,
    failure_of,
    multiprocessor_count,
)
from syncbn_core.backends.cuda.memory import DeviceMemory
from syncbn_core.backends.reference import OPERATIONS as REFERENCE
from syncbn_core.errors import BackendError
from syncbn_core.kernels.cuda.constants import MIN_INNER, UNROLL, VECTOR
from syncbn_core.moments import Moments, NormRule, Statistics
from syncbn_core.steps import Affine, RunningStatistics

__all__ = ["CASES", "check"]

Array = Any  # of the library
HostArray = np.ndarray[Any, Any]

# The largest error of a kernel for activations of a dtype, over the largest value.
TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-11}
CASES = 2  # to be increased when cases change: kernels are then checked again
GUARD = 32  # numbers before and behind each result, which a kernel must not write
GUARDED = 7.0
LABEL = 3.0 * 2**40  # of sums


@dataclass(slots=True)
class _View:
    """`View` of an activation `[outer, channels, inner]`."""

    pointer: Any
    offset: int
    dtype: str
    outer: int
    channels: int
    inner: int

    @classmethod
    def of(cls, pointer: Any, dtype: str, shape: tuple[int, ...]) -> _View:
        outer, channels, inner = shape
        return cls(pointer, int(pointer) % VECTOR, dtype, outer, channels, inner)


class _Result(NamedTuple):
    """What a kernel must write: `pieces`, one after the other, between two guards in `array`."""

    name: str
    array: Array
    tolerance: float
    pieces: tuple[HostArray, ...]


class _CheckRunner:
    """`Runner` that launches one kernel, on arrays of its own."""

    def __init__(self, memory: DeviceMemory, kernel: Kernel, device: int, stream: int) -> None:
        self.memory, self.kernel, self.device, self.stream = memory, kernel, device, stream
        self.threads = kernel.source.threads
        self.multiprocessors = multiprocessor_count(device)
        self.kept: list[Array] = []  # until the last case has run
        self.results: list[_Result] = []

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        """Start the kernel."""
        assert source.key == self.kernel.source.key, f"the case of {source.key}"
        try:
            self.kernel.launch(grid, self.stream, *arguments)
        except DriverError as error:
            raise failure_of(str(error), error.result) from error

    def scratch(self, size: int) -> tuple[Any, Array]:
        """A pointer to `size` float64, and the array that owns them."""
        array = self.memory.empty((size,), "float64", self.device)
        return self.memory.pointer(array), array

    def block_counters(self, size: int) -> tuple[Any, Array]:
        """A pointer to `size` int32 zeros, and the array that owns them."""
        array = self.memory.zeros((size,), "int32", self.device)
        return self.memory.pointer(array), array

    def given(self, values: HostArray, dtype: str, skew: int = 0) -> tuple[Any, HostArray]:
        """A pointer to `values` on the device, and the values as `dtype` holds them, in float64.

        The pointer exceeds a multiple of 16 bytes by `skew` numbers.
        """
        padded = np.concatenate([np.zeros(skew), values.ravel()])
        array = self.memory.upload(padded, dtype, self.device)[skew:]
        self.kept.append(array)
        return self.memory.pointer(array), self.memory.download(array).reshape(values.shape)

    def result(
        self,
        name: str,
        dtype: str,
        tolerance: float,
        *pieces: HostArray,
        before: HostArray | None = None,
    ) -> Any:
        """A pointer to room for a result; `compare` compares each of its pieces.

        `before`: the numbers that it holds before the launch.
        """
        size, guard = sum(piece.size for piece in pieces), np.full(GUARD, GUARDED)
        room = np.full(size, GUARDED) if before is None else before.ravel()
        whole = self.memory.upload(np.concatenate([guard, room, guard]), dtype, self.device)
        inside = whole[GUARD : GUARD + size]
        self.kept.append(inside)
        self.results.append(_Result(name, whole, tolerance, pieces))
        return self.memory.pointer(inside)

    def compare(self) -> None:
        """Wait for the kernel; raise `KernelFailure` if a result is wrong."""
        for name, array, tolerance, pieces in self.results:
            found, start = self._downloaded(array), GUARD
            for piece in pieces:
                values = found[start : start + piece.size]
                start += piece.size
                largest = max(float(np.abs(piece).max()), 1e-30)
                error = float(np.abs(values - piece.ravel()).max()) / largest
                if not error <= tolerance:  # also for NaN
                    raise KernelFailure(
                        f"its {name} differs from that of float64 NumPy by {error:.1e} of the "
                        f"largest value, more than {tolerance:.1e}"
                    )
            if (found[:GUARD] != GUARDED).any() or (found[start:] != GUARDED).any():
                raise KernelFailure(f"it writes beside the memory of its {name}")
        self.results.clear()

    def _downloaded(self, array: Array) -> HostArray:
        try:
            return self.memory.download(array)
        except Exception as error:  # the library's
            raise BackendError(
                f"expected kernel {self.kernel.source.key} to finish on "
                f"{description(self.device)}, got {type(error).__name__}: {error}; if no "
                "earlier kernel of the program has failed (CUDA_LAUNCH_BLOCKING=1 shows that), "
                "start again with SYNCBN_KERNELS=off, and report this text to syncbn's developers"
            ) from error


def check(memory: DeviceMemory, kernel: Kernel, device: int, stream: int) -> None:
    """Run a kernel on small cases, and wait for it.

    `device` must be the current device and `stream` its current stream. Raises `KernelFailure` if
    the kernel does not launch or a result is wrong, and `BackendError` if it breaks the device's
    context, for example by an access beyond its memory.
    """
    run = _CheckRunner(memory, kernel, device, stream)
    name, dtype, lanes, ragged = grid.variant_of(kernel.source)
    if name == "merge_parts":
        _check_merging(run)
        return
    rows, step = name.startswith("rows"), name.split("_", 1)[1]
    reduces = step in ("moments", "backward_reduce")
    shape = _shape(run.threads, lanes, ragged, rows, reduces)
    # elementwise kernels read an activation that starts between two vectors number by number
    case = _Case(run, dtype, shape, skew=1 if ragged and reduces else 0)
    steps: dict[str, Callable[[_Case], None]] = {
        "moments": _check_moments,
        "normalize": _check_normalize,
        "backward_reduce": _check_backward_reduce,
        "backward_input": _check_backward_input,
    }
    steps[step](case)


def _shape(
    threads: int, lanes: int, ragged: bool, rows: bool, reduces: bool
) -> tuple[int, int, int]:
    """`(outer, channels, inner)` for which `grid` chooses the kernel.

    With so many blocks that each loop over the partial sums of other blocks runs several times.
    """
    step = threads * UNROLL  # vectors that a block reads at a time
    if rows:
        channels = 3 * lanes + (lanes == 1) * 2
        vectors = channels // lanes
        # enough for blocks in groups, where the device has so many multiprocessors
        blocks = grid.LONE_GROUP + 2 if reduces else 3
        return blocks * (threads // vectors) * UNROLL + 5, channels, 1
    blocks = 21 if reduces else 3
    if lanes == 1:
        return (blocks * step) // 3 + 2, 2, 3
    inner = 4 * MIN_INNER + ragged
    slots = inner // lanes
    return (blocks * step) // slots + 2, 2, inner


class _Case:
    """An activation x for the kernel that `run` launches, a gradient, and parameters."""

    def __init__(
        self, run: _CheckRunner, dtype: str, shape: tuple[int, int, int], skew: int
    ) -> None:
        self.run, self.dtype, self.skew = run, dtype, skew
        wide = "float64" if dtype == "float64" else "float32"
        self.parameter_dtypes = tuple(dict.fromkeys((wide, dtype)))
        self.tolerance, self.sum_tolerance = TOLERANCES[dtype], TOLERANCES[wide]
        self.random = np.random.default_rng(0)
        self.view, self.x = self.activation(self.random.normal(3.0, 2.0, shape))

    def activation(self, values: HostArray) -> tuple[_View, HostArray]:
        pointer, held = self.run.given(values, self.dtype, self.skew)
        return _View.of(pointer, self.dtype, values.shape), held

    def gradient(self, statistics: Statistics) -> tuple[_View, HostArray]:
        """dy whose sums are far from zero, so that an error in a sum is large beside it.

        They fit into float16.
        """
        mean, invstd = (v[:, None] for v in (statistics.mean, statistics.invstd))
        noise = self.random.normal(0.5, 1.0, self.x.shape)
        return self.activation((noise + 0.5 * (self.x - mean) * invstd) / 32)

    def output(self, name: str, expected: HostArray) -> _View:
        pointer = self.run.result(name, self.dtype, self.tolerance, expected)
        return _View.of(pointer, self.dtype, expected.shape)

    def parameter(self, dtype: str) -> tuple[Any, HostArray]:
        return self.run.given(self.random.normal(1.0, 0.3, self.x.shape[1]), dtype)

    def affine(self, dtype: str) -> tuple[grid.Parameters, Affine]:
        (weight, w), (bias, b) = self.parameter(dtype), self.parameter(dtype)
        code = grid.CODES[dtype]
        return grid.Parameters(weight, code, bias, code), Affine(w, b)


def _check_moments(case: _Case) -> None:
    count, mean, m2 = REFERENCE.moments(case.x)
    pieces = np.array([count]), mean, m2, np.zeros(1)
    into = case.run.result("moments", "float64", case.sum_tolerance, *pieces)
    grid.moments(case.run, case.view, into)
    case.run.compare()


def _check_normalize(case: _Case) -> None:
    for dtype in case.parameter_dtypes:
        _check_training(case, dtype)
    _check_average(case)
    _check_eval(case)


def _check_training(case: _Case, dtype: str) -> None:
    """With weight, bias and running statistics of `dtype`."""
    run, x = case.run, case.x
    third, rule = len(x) // 3, NormRule(1e-3)
    parts = [REFERENCE.moments(x[a:b]) for a, b in pairwise((0, third, third, 2 * third, len(x)))]
    given, _ = run.given(_rows(parts), "float64")
    statistics = REFERENCE.statistics(REFERENCE.merge(parts), rule)
    parameters, affine = case.affine(dtype)
    (_, mean), (_, var) = case.parameter(dtype), case.parameter(dtype)
    tracked = np.array(4)
    wanted = REFERENCE.forward(
        x, statistics, affine, rule, RunningStatistics(mean, var, tracked, 0.25)
    )
    new: Any = wanted.running
    running = grid.Running(
        run.result("running_mean", dtype, TOLERANCES[dtype], new.mean, before=mean),
        run.result("running_var", dtype, TOLERANCES[dtype], new.var, before=var),
        grid.CODES[dtype],
        run.result("num_batches_tracked", "int64", 0, np.array([5]), before=tracked),
        0.25,
    )
    y = case.output("y", wanted.y)
    count, *others = (statistics.moments.count, *statistics.moments[1:], statistics.invstd)
    known = run.result("statistics", "float64", 1e-11, np.array([count]), *others)
    grid.normalize(
        run, case.view, y, parameters, given, len(parts), known, rule=rule, running=running
    )
    run.compare()


def _check_average(case: _Case) -> None:
    """Without weight and bias; the running statistics become the average over all batches."""
    run, x, rule = case.run, case.x, NormRule(1e-3)
    dtype = case.parameter_dtypes[0]
    moments = REFERENCE.moments(x)
    statistics = REFERENCE.statistics(moments, rule)
    (_, mean), (_, var) = case.parameter(dtype), case.parameter(dtype)
    before = RunningStatistics(mean, var, np.array(3), None)
    wanted = REFERENCE.forward(x, statistics, Affine(), rule, before)
    new: Any = wanted.running
    tracked, _ = run.given(np.array([3.0]), "int64")
    running = grid.Running(
        run.result("running_mean", dtype, TOLERANCES[dtype], new.mean, before=mean),
        run.result("running_var", dtype, TOLERANCES[dtype], new.var, before=var),
        grid.CODES[dtype],
        tracked,
        -1.0,
    )
    given, _ = run.given(_packed(moments), "float64")
    y = case.output("y without weight", wanted.y)
    known, _kept = run.scratch(3 * len(mean) + 1)
    grid.normalize(
        run, case.view, y, grid.Parameters(), given, 1, known, rule=rule, running=running
    )
    run.compare()


def _check_eval(case: _Case) -> None:
    run, rule = case.run, NormRule(1.0, "clamp")
    dtype = case.parameter_dtypes[0]
    (mean_pointer, mean), (var_pointer, var) = case.parameter(dtype), case.parameter(dtype)
    wanted = REFERENCE.forward_eval(case.x, RunningStatistics(mean, var), Affine(), rule)
    y = case.output("y in eval", wanted.y)
    known, _kept = run.scratch(3 * len(mean) + 1)
    running = grid.Running(mean_pointer, var_pointer, grid.CODES[dtype])
    grid.normalize(run, case.view, y, grid.Parameters(), 0, 0, known, rule=rule, running=running)
    run.compare()


def _check_backward_reduce(case: _Case) -> None:
    run, rule, tolerance = case.run, NormRule(1e-3), case.sum_tolerance
    statistics = REFERENCE.statistics(REFERENCE.moments(case.x), rule)
    given, _ = run.given(_known(statistics), "float64")
    dy_view, dy = case.gradient(statistics)
    for dtype in case.parameter_dtypes:
        parameters, affine = case.affine(dtype)
        wanted = REFERENCE.backward_reduce(case.x, dy, statistics, affine, rule)
        into = run.result("sums", "float64", tolerance, *wanted.exchange, np.array([LABEL]))
        least = max(tolerance, TOLERANCES[dtype])
        grad_weight = run.result("gradient of weight", dtype, least, wanted.grad_weight)
        grad_bias = run.result("gradient of bias", dtype, least, wanted.grad_bias)
        code, gradients = grid.CODES[dtype], (grad_weight, grad_bias)
        grid.backward_reduce(
            run,
            case.view,
            dy_view,
            given,
            parameters,
            into,
            *gradients,
            code=code,
            label=LABEL,
        )
        run.compare()
    wanted = REFERENCE.backward_reduce(case.x, dy, statistics, Affine(), rule)
    into = run.result("sums without weight", "float64", tolerance, *wanted.exchange)
    grid.backward_reduce(run, case.view, dy_view, given, grid.Parameters(), into)
    run.compare()


def _check_backward_input(case: _Case) -> None:
    run = case.run
    parameters, affine = case.affine(case.parameter_dtypes[0])
    for rule in (NormRule(1e-3), NormRule(100.0, "clamp")):
        statistics = REFERENCE.statistics(REFERENCE.moments(case.x), rule)
        dy_view, dy = case.gradient(statistics)
        total = REFERENCE.backward_reduce(case.x, dy, statistics, affine, rule).exchange
        wanted = REFERENCE.backward_input(case.x, dy, statistics, affine, rule, total)
        message = np.append(total, LABEL)
        (given, _), (sums, _) = (run.given(v, "float64") for v in (_known(statistics), message))
        dx = case.output(f'dx with eps_mode="{rule.mode}"', wanted)
        views = case.view, dy_view, dx
        grid.backward_input(run, *views, given, parameters, sums, rule=rule, label=LABEL)
        run.compare()
    wanted = REFERENCE.backward_input(case.x, dy, statistics, Affine(), rule, None)
    dx = case.output("dx in eval", wanted)
    grid.backward_input(run, case.view, dy_view, dx, given, grid.Parameters(), 0, rule=rule)
    run.compare()


def _check_merging(run: _CheckRunner) -> None:
    channels, random = run.threads + 5, np.random.default_rng(0)
    counts = (7, 0, *range(1, grid.MAX_PARTS + 1))
    values = random.uniform(1.0, 3.0, (len(counts), 2, channels))
    parts = [Moments(n, *(pair * (n > 0))) for n, pair in zip(counts, values, strict=True)]
    given, _ = run.given(_rows(parts), "float64")
    count, mean, m2 = REFERENCE.merge(parts)
    into = run.result("moments", "float64", 1e-11, np.array([count]), mean, m2, np.zeros(1))
    grid.merge_parts(run, given, len(parts), channels, into)
    run.compare()


def _rows(parts: Sequence[Moments]) -> HostArray:
    """The packed moments of several parts, each followed by a label, which no kernel reads."""
    return np.stack([np.append(_packed(part), np.nan) for part in parts])


def _packed(moments: Moments) -> HostArray:
    return np.concatenate([[moments.count], moments.mean, moments.m2])


def _known(statistics: Statistics) -> HostArray:
    return np.concatenate([_packed(statistics.moments), statistics.invstd])
