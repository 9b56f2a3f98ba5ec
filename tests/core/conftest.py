"""Shared by the tests of the core: tolerances, an oracle, memory layouts, groups of threads."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

from syncbn_core.backends import reference
from syncbn_core.comm import ThreadCommunicator, run_in_threads, thread_group

sys.path.insert(0, str(Path(__file__).parent))  # for `steps` and `mpi_ranks`

from steps import Steps

settings.register_profile("stable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("stable")

# Largest error, relative to `|expected| + scale`, against float64 over the undivided batch.
TOLERANCE = {np.dtype("f8"): 1e-12, np.dtype("f4"): 1e-6, np.dtype("f2"): 1e-3}

Array = np.ndarray


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """`close(actual, expected, scale=1, dtype=None)`: equal to rounding, NaN where NaN is due.

    `scale`: size of the terms that were summed up, where it is not that of the result; `dtype`:
    of the arithmetic, where it is not that of `actual`.
    """

    def check(actual: Any, expected: Any, scale: Any = 1.0, dtype: Any = None) -> None:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.shape == expected.shape
        tolerance = TOLERANCE[np.dtype(dtype or actual.dtype).newbyteorder("=")]
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        known = ~np.isnan(expected)
        bound = np.broadcast_to(tolerance * (np.abs(expected) + scale), expected.shape)
        error, bound = np.abs(actual - expected)[known], bound[known]
        assert (error <= bound).all(), f"{(error / bound).max():.1f} times the tolerance"

    return check


def _column(values: Any, like: Array) -> Array:
    return np.asarray(values, np.float64).reshape(1, -1, *[1] * (like.ndim - 2))


def _batch_norm(
    x: Array,
    weight: Any = None,
    bias: Any = None,
    *,
    dy: Array | None = None,
    eps: float = 1e-5,
    eps_mode: str = "plus",
) -> SimpleNamespace:
    """Batch normalization of the undivided x in float64, and its gradient by the chain rule.

    The gradient goes through variance and mean as in section 3 of Ioffe and Szegedy 2015, not
    by the gathered formula of the library.
    """
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    x = x.astype(np.float64)
    weight = np.ones(x.shape[1]) if weight is None else np.asarray(weight, np.float64)
    bias = np.zeros(x.shape[1]) if bias is None else np.asarray(bias, np.float64)
    count = x.size // x.shape[1] if x.size else 0
    n = max(count, 1)
    mean = x.sum(axes) / n
    centred = x - _column(mean, x)
    var = (centred**2).sum(axes) / n
    clamped = var < eps if eps_mode == "clamp" else np.zeros(var.shape, bool)
    invstd = 1 / np.sqrt(np.where(clamped, eps, var) if eps_mode == "clamp" else var + eps)
    xhat = centred * _column(invstd, x)
    result = SimpleNamespace(
        y=xhat * _column(weight, x) + _column(bias, x),
        xhat=xhat,
        count=count,
        mean=mean,
        var=var,
        unbiased=var * n / max(n - 1, 1),
        invstd=invstd,
    )
    if dy is not None:
        dy = dy.astype(np.float64)
        d_xhat = dy * _column(weight, x)
        d_var = np.where(clamped, 0, (d_xhat * centred).sum(axes) * -0.5 * invstd**3)
        d_mean = -d_xhat.sum(axes) * invstd
        result.dx = d_xhat * _column(invstd, x) + _column(d_var, x) * 2 * centred / n
        result.dx += _column(d_mean, x) / n
        result.dweight = (dy * xhat).sum(axes)
        result.dbias = dy.sum(axes)
        result.slope = _column(invstd * np.abs(weight), x)  # the scale of dx, for dy around 1
    return result


@pytest.fixture(scope="session")
def batch_norm() -> Callable[..., SimpleNamespace]:
    """The oracle: `batch_norm(x, weight, bias, dy=..., eps=..., eps_mode=...)`."""
    return _batch_norm


class Case(NamedTuple):
    """Everything that the four steps of a backend take."""

    x: Array
    dy: Array
    mean: Array
    invstd: Array
    weight: Array | None
    bias: Array | None
    mean_dy: Array
    mean_dy_xhat: Array


def _make_case(
    shape: tuple[int, ...],
    dtype: str = "f4",
    *,
    affine: str | None = "f4",
    seed: int = 0,
    mean: float = 1.0,
) -> Case:
    rng = np.random.default_rng(seed)
    channels = shape[1]
    means = mean + rng.normal(size=channels)
    x = means.reshape(channels, *[1] * (len(shape) - 2)) + rng.normal(size=shape)
    return Case(
        x.astype(dtype),
        rng.normal(size=shape).astype(dtype),
        means + 0.01 * rng.normal(size=channels),
        rng.uniform(0.5, 2, channels),
        None if affine is None else rng.normal(size=channels).astype(affine),
        None if affine is None else rng.normal(size=channels).astype(affine),
        rng.normal(size=channels),
        rng.normal(size=channels),
    )


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """`make_case(shape, dtype="f4", affine="f4", seed=0, mean=1)`: random arguments."""
    return _make_case


def _run_steps(module: Steps, case: Case, parallel: bool = True) -> dict[str, Array]:
    x, dy, mean, invstd, weight, bias, mean_dy, mean_dy_xhat = case
    moments = module.moments(x, parallel=parallel)
    sums = module.backward_reduce(x, dy, mean, invstd, parallel=parallel)
    backward = (weight, mean_dy, mean_dy_xhat)
    return {
        "count": np.array(moments.count),
        "mean": moments.mean,
        "var": moments.m2 / max(moments.count, 1),
        "y": module.normalize(x, mean, invstd, weight, bias, parallel=parallel),
        "sum_dy": sums[0],
        "sum_dy_xhat": sums[1],
        "dx": module.backward_input(x, dy, mean, invstd, *backward, parallel=parallel),
    }


@pytest.fixture(scope="session")
def run_steps() -> Callable[..., dict[str, Array]]:
    """`run_steps(steps, case)`: results of the four steps by name."""
    return _run_steps


@pytest.fixture(scope="session")
def equal_reference(close: Callable[..., None]) -> Callable[[dict[str, Array], Case], None]:
    """`equal_reference(results, case)`: what `run_steps` gave is right, to rounding."""

    def check(results: dict[str, Array], case: Case) -> None:
        wide = case._replace(x=case.x.astype("f8"), dy=case.dy.astype("f8"))
        expected = _run_steps(Steps(reference.OPERATIONS), wide)
        count = int(expected["count"])
        arithmetic = "f8" if case.x.dtype.itemsize == 8 else "f4"
        assert results["count"] == count
        for name in ("mean", "var"):
            close(results[name], expected[name], dtype=arithmetic)
        for name in ("sum_dy", "sum_dy_xhat"):
            close(results[name], expected[name], scale=count, dtype=arithmetic)
        for name in ("mean", "var", "sum_dy", "sum_dy_xhat"):
            assert results[name].dtype == np.float64
        for name in ("y", "dx"):
            assert results[name].dtype == case.x.dtype
            close(results[name], expected[name], scale=3)

    return check


def _in_memory_order(values: Array, axes: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(values.transpose(axes)).transpose(np.argsort(axes))


def _channels_last(values: Array) -> Array:
    return _in_memory_order(values, (0, *range(2, values.ndim), 1))


def _batch_last(values: Array) -> Array:
    return _in_memory_order(values, (*range(1, values.ndim), 0))


def _spatial_swapped(values: Array) -> Array:
    return _in_memory_order(values, (0, 1, *reversed(range(2, values.ndim))))


def _gaps(values: Array) -> Array:
    wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    wide[..., ::2] = values
    return wide[..., ::2]


def _some_channels(values: Array) -> Array:
    wide = np.zeros((values.shape[0], values.shape[1] + 2, *values.shape[2:]), values.dtype)
    wide[:, 1:-1] = values
    return wide[:, 1:-1]


def _flipped(values: Array) -> Array:
    return values[::-1, ::-1].copy()[::-1, ::-1]


def _repeated(values: Array) -> Array:
    return np.broadcast_to(values[..., :1], values.shape)


def _unaligned(values: Array) -> Array:
    raw = np.zeros(values.nbytes + 1, np.uint8)
    array = raw[1:].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def _foreign_bytes(values: Array) -> Array:
    return values.astype(values.dtype.newbyteorder())


def _read_only(values: Array) -> Array:
    array = values.copy()
    array.flags.writeable = False
    return array


LAYOUTS = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "channels last": _channels_last,
    "batch last": _batch_last,
    "spatial axes swapped": _spatial_swapped,
    "gaps": _gaps,
    "some channels of more": _some_channels,
    "flipped": _flipped,
    "repeated": _repeated,
    "unaligned": _unaligned,
    "foreign byte order": _foreign_bytes,
    "read-only": _read_only,
}


@pytest.fixture(scope="session")
def layouts() -> dict[str, Callable[[Array], Array]]:
    """`layouts[name](values)`: the values in that memory layout; "repeated" keeps the first."""
    return LAYOUTS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An argument `layout` runs the test once for each name in `LAYOUTS`; `out_layout` likewise."""
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS)
    if "out_layout" in metafunc.fixturenames:
        writable = [name for name in LAYOUTS if name not in ("repeated", "read-only")]
        metafunc.parametrize("out_layout", writable)


@pytest.fixture(scope="session")
def in_group() -> Callable[..., list[Any]]:
    """`in_group(size, member)`: results of `member(rank, communicator)`, each in its thread."""

    def run(size: int, member: Callable[[int, ThreadCommunicator], Any]) -> list[Any]:
        group = thread_group(size, timeout=60)
        return run_in_threads(
            [lambda rank=rank: member(rank, group[rank]) for rank in range(size)],
            abort=group[0].abort,
            leave=lambda rank: group[rank].leave(),
        )

    return run


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., str]:
    """`fresh_python(code, VARIABLE=...)`: what the code prints, run in a new interpreter."""

    def run(code: str, **environment: str) -> str:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        result = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, f"ended with {result.returncode}:\n{result.stderr}"
        return result.stdout

    return run
