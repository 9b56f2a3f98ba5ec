"""The NumPy backend and its kernels, against the reference backend and against each other."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Steps

from syncbn_core import numpy_steps
from syncbn_core._kernels.cpu import planes as cpu_planes
from syncbn_core._kernels.cpu import rows as cpu_rows
from syncbn_core.backends import reference
from syncbn_core.layout import layout_of

backend = Steps(numpy_steps.OPERATIONS)
Array = np.ndarray
Layouts = dict[str, Callable[[Array], Array]]
Function = Callable[..., Any]

DTYPES = ("f2", "f4", "f8")
NOT_DENSE = ("gaps", "some channels of more", "flipped", "repeated")

shapes = st.lists(st.integers(0, 6), min_size=2, max_size=5).map(tuple)


# ------------------------------------------------------------------ against the reference


@settings(max_examples=300)
@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    affine=st.sampled_from([None, *DTYPES]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_step_equals_the_reference(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: str,
    affine: str | None,
    seed: int,
    layouts: Layouts,
    make_case: Function,
    run_steps: Function,
    equal_reference: Function,
) -> None:
    of_x, of_dy = (data.draw(st.sampled_from(sorted(layouts)), label) for label in ("x", "dy"))
    case = make_case(shape, dtype, affine=affine, seed=seed)
    case = case._replace(x=layouts[of_x](case.x), dy=layouts[of_dy](case.dy))
    before = case.x.copy(), case.dy.copy()
    equal_reference(run_steps(backend, case), case)
    np.testing.assert_array_equal(case.x, before[0])
    np.testing.assert_array_equal(case.dy, before[1])


@pytest.mark.parametrize(
    ("of_x", "of_dy"), [("f4", "f8"), ("f8", "f4"), ("f2", "f4"), ("f4", "f2")]
)
def test_gradient_of_another_dtype_is_taken(
    of_x: str, of_dy: str, make_case: Function, run_steps: Function, equal_reference: Function
) -> None:
    case = make_case((4, 3, 5), of_x)
    case = case._replace(dy=case.dy.astype(of_dy))
    equal_reference(run_steps(backend, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_layout_and_dtype_of_x(
    layout: str, dtype: str, layouts: Layouts, make_case: Function, run_steps: Function
) -> None:
    for shape in ((4, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 3, 4), (4, 1, 2, 5), (1, 3, 2, 5)):
        case = make_case(shape, dtype)
        case = case._replace(x=layouts[layout](case.x))
        results = run_steps(backend, case)
        for name in ("y", "dx"):
            assert results[name].dtype == case.x.dtype
            assert results[name].shape == case.x.shape
            if layout not in NOT_DENSE:
                assert layout_of(results[name]) == layout_of(case.x), (name, shape)


def test_kernels_get_dense_aligned_arrays_of_this_machine(
    layout: str,
    layouts: Layouts,
    make_case: Function,
    run_steps: Function,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = []
    original: Any = numpy_steps.NumpySteps._run

    def run(steps: Any, step: str, x: Any, dy: Any, norm: Any, *last: Any) -> None:
        kernels.append(step)
        activations = [x.flat, x.flat if dy is None else dy.flat, *last[1:]]
        for array in activations:
            assert array.flags.carray
            assert array.dtype.isnative
            assert array.size == case.x.size
        original(steps, step, x, dy, norm, *last)

    monkeypatch.setattr(numpy_steps.NumpySteps, "_run", run)
    for shape in ((40, 3), (4, 3, 2, 5)):
        case = make_case(shape, affine="f8")
        run_steps(backend, type(case)(*(a if a.ndim == 1 else layouts[layout](a) for a in case)))
    assert len(kernels) == 8


# --------------------------------------------------------------------- where to write

WRITERS = pytest.mark.parametrize("step", ["normalize", "backward_input"])


def write(step: str, case: Any, out: Array | None = None) -> Array:
    x, dy, mean, invstd, weight, bias, mean_dy, mean_dy_xhat = case
    if step == "normalize":
        return backend.normalize(x, mean, invstd, weight, bias, out=out)
    return backend.backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, out=out)


@WRITERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_takes_the_result_whatever_its_layout(
    step: str, out_layout: str, dtype: str, layouts: Layouts, make_case: Function
) -> None:
    for of_x in ("C", "channels last", "gaps"):
        case = make_case((4, 3, 2, 5), dtype)
        case = case._replace(x=layouts[of_x](case.x))
        expected = write(step, case)
        out = layouts[out_layout](np.full(case.x.shape, np.nan, dtype))
        assert write(step, case, out) is out
        np.testing.assert_array_equal(out, expected)


@WRITERS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["x", "dy"])
def test_out_may_be_an_operand(
    step: str, name: str, out_layout: str, dtype: str, layouts: Layouts, make_case: Function
) -> None:
    for shape in ((4, 3, 2, 5), (40, 3), (2, 1, 9)):
        case = make_case(shape, dtype)
        expected = write(step, case)
        out = layouts[out_layout](getattr(case, name))
        assert write(step, case._replace(**{name: out}), out) is out
        np.testing.assert_array_equal(out, expected)


# ------------------------------------------------------------------------------ accuracy


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e6, -1e6])
@pytest.mark.parametrize("build", ["serial", "parallel"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("planes", (8, 4, 3136)),
        ("planes", (1, 1, 300_000)),
        ("planes", (5000, 3, 9)),
        ("planes", (20_000, 3, 2)),
        ("planes", (3, 200, 49)),
        ("rows", (200, 2048)),
        ("rows", (1000, 512)),
        ("rows", (25_088, 64)),
        ("rows", (20_000, 16)),
        ("rows", (50_000, 3)),
        ("rows", (16_384, 2)),
        ("rows", (50_003, 3)),
        ("rows", (300, 70, 49)),
    ],
)
def test_variance_keeps_six_digits_in_float32_at_any_mean(
    kind: str, shape: tuple[int, ...], build: str, mean: float
) -> None:
    x = (mean + np.random.default_rng(5).normal(size=shape)).astype(np.float32)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    sums, no = np.empty((2, shape[1])), (None,) * 5
    if kind == "planes":
        getattr(cpu_planes.planes_sums, build)(x, None, *no, sums)
    else:
        rows = x.reshape(len(x) // cpu_rows.joined(len(x), x[0].size), -1)
        getattr(cpu_rows.rows_sums, build)(rows, None, prod(shape[2:]), 2, *no, sums)
    got_mean, m2 = sums
    var = m2 / (x.size // shape[1])
    wide = x.astype(np.float64)
    assert np.abs(var / wide.var(axes) - 1).max() < 1e-6
    assert np.abs(got_mean - wide.mean(axes)).max() < 1e-7


@pytest.mark.parametrize("shape", [(3, 5, 700), (700, 5)])
@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_large_mean_costs_no_digits_of_the_results(
    shape: tuple[int, ...], mean: float, make_case: Function, run_steps: Function, close: Function
) -> None:
    """x holds few digits of its deviations; what it holds has to come through."""
    case = make_case(shape, mean=mean)
    x = case.x.astype(np.float64)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    case = case._replace(mean=x.mean(axes), invstd=1 / x.std(axes))
    got = run_steps(backend, case)
    expected = run_steps(
        Steps(reference.OPERATIONS), case._replace(x=x, dy=case.dy.astype(np.float64))
    )
    close(got["y"], expected["y"], scale=3)
    close(got["dx"], expected["dx"], scale=3)
    close(got["sum_dy_xhat"], expected["sum_dy_xhat"], scale=int(got["count"]), dtype="f4")
