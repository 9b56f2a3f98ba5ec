"""The NumPy backend and its kernels, against the reference backend and against each other."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Steps

from syncbn_core import numpy_steps
from syncbn_core.backends import reference
from syncbn_core.kernels.cpu import planes as cpu_planes
from syncbn_core.kernels.cpu import rows as cpu_rows
from syncbn_core.layout import layout_of
from syncbn_core.moments import Moments

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


def test_results_of_foreign_bytes_have_the_memory_order_of_x(
    layouts: Layouts, make_case: Function
) -> None:
    case = make_case((4, 3, 2, 5))
    x = layouts["foreign byte order"](layouts["channels last"](case.x))
    y = backend.normalize(x, case.mean, case.invstd, None, None)
    assert layout_of(y) == layout_of(x)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_file_mapped_array_is_taken(
    mode: Any, tmp_path: Path, make_case: Function, run_steps: Function, equal_reference: Function
) -> None:
    case = make_case((4, 3, 5))
    case.x.tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", np.float32, mode, shape=case.x.shape)
    equal_reference(run_steps(backend, case._replace(x=x)), case)


def test_kernels_get_dense_aligned_arrays_of_this_machine(
    layout: str,
    layouts: Layouts,
    make_case: Function,
    run_steps: Function,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = []
    original = numpy_steps.launch

    def launch(kernel: Any, parallel: bool, *arguments: Any) -> None:
        kernels.append(kernel)
        activations = [a for a in arguments if np.ndim(a) > 1]
        assert activations
        for array in activations:
            assert array.flags.carray
            assert array.dtype.isnative
            assert array.size == case.x.size
        original(kernel, parallel, *arguments)

    monkeypatch.setattr(numpy_steps, "launch", launch)
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
def test_out_with_gaps_leaves_the_gaps_alone(step: str, make_case: Function) -> None:
    case = make_case((4, 3, 2, 5))
    wide = np.full((4, 3, 2, 10), 77, np.float32)
    write(step, case, wide[..., ::2])
    assert (wide[..., 1::2] == 77).all()
    assert (wide[..., ::2] != 77).all()


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


@WRITERS
@pytest.mark.parametrize("name", ["x", "dy"])
@pytest.mark.parametrize("shift", [-9, -1, 1, 9])
def test_out_may_overlap_an_operand_at_an_offset(
    step: str, name: str, shift: int, make_case: Function
) -> None:
    for shape in ((4, 3, 50), (50, 3), (3, 2, 40000)):
        case = make_case(shape)
        expected = write(step, case)
        size = prod(shape)
        memory = np.zeros(size + 18, np.float32)
        operand = memory[9 : 9 + size].reshape(shape)
        operand[...] = getattr(case, name)
        out = memory[9 + shift : 9 + shift + size].reshape(shape)
        assert write(step, case._replace(**{name: operand}), out) is out
        np.testing.assert_array_equal(out, expected)


@WRITERS
@pytest.mark.parametrize("name", ["x", "dy"])
def test_out_may_be_an_operand_transposed(step: str, name: str, make_case: Function) -> None:
    case = make_case((6, 6))
    expected = write(step, case)
    out = getattr(case, name).T
    assert write(step, case, out) is out
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
    got_mean, m2 = np.empty(shape[1]), np.empty(shape[1])
    if kind == "planes":
        getattr(cpu_planes.planes_moments, build)(x, got_mean, m2)
    else:
        rows = x.reshape(len(x) // cpu_rows.joined(len(x), x[0].size), -1)
        getattr(cpu_rows.rows_moments, build)(rows, prod(shape[2:]), 2, got_mean, m2)
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


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, -1e15, 3e-30])
def test_a_constant_has_no_variance_beyond_its_rounding(value: float) -> None:
    value = float(np.float32(value))
    rounding = np.finfo(np.float32).eps * abs(value)
    for shape in ((3, 2, 5000), (5000, 2), (700, 2, 3), (20_000, 2)):
        moments = backend.moments(np.full(shape, value, np.float32))
        assert np.sqrt(moments.var).max() <= rounding
        assert np.abs(moments.mean - value).max() <= rounding


def test_moments_are_merged_as_by_numpy() -> None:
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, np.inf, -np.inf, 1e300])
    parts = [Moments(n, rng.normal(1e3, 1, 40), rng.random(40)) for n in (7, 1, 30, 2**40)]
    parts.insert(1, Moments.empty(40))
    parts[0].mean[:4], parts[3].mean[4:8], parts[3].m2[8:12] = odd, odd, odd
    for some in (parts, parts[1:2] * 3):
        ours, theirs = numpy_steps.OPERATIONS.merge(some), reference.OPERATIONS.merge(some)
        assert ours.count == theirs.count
        np.testing.assert_array_equal(ours.mean, theirs.mean)
        np.testing.assert_array_equal(ours.m2, theirs.m2)
