from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np
import pytest
from simulated import Memory, Runner, View, work_epsilon

from syncbn_core.backends import cuda
from syncbn_core.kernels import cuda_constants

# NaN and infinity on purpose; the simulator computes with NumPy's numbers.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("short_groups"),
]

DTYPES = ["float32", "float64", "float16", "bfloat16"]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    name: str
    outer: int
    channels: int
    inner: int
    offset: int = 0  # of the activation, in numbers
    threads: int = 8

    @property
    def shape(self):
        return self.outer, self.channels, self.inner

    def __str__(self):
        return self.name


CASES = [
    Case("planes", 2, 3, 64),
    Case("planes-tail", 3, 2, 32),
    Case("planes-split", 2, 2, 256),
    Case("planes-one-channel", 1, 1, 700),
    Case("planes-7x7", 3, 5, 49),
    Case("planes-7x7-split", 16, 2, 49),
    Case("planes-5x1", 3, 4, 5),
    Case("planes-2", 5, 3, 2),
    Case("planes-17", 2, 3, 17),
    Case("planes-off-by-one", 2, 3, 40, offset=1),
    Case("planes-off-by-three-ragged", 2, 3, 23, offset=3),
    Case("planes-many", 40, 3, 16),
    Case("rows", 9, 16, 1),
    Case("rows-split", 70, 8, 1),
    Case("rows-C1", 50, 1, 1),
    Case("rows-C3", 45, 3, 1),
    Case("rows-C13", 11, 13, 1),
    Case("rows-many-tiles", 6, 96, 1),
    Case("rows-one", 1, 8, 1),
    Case("rows-off-by-one", 12, 8, 1, offset=1),
    Case("rows-32-threads", 40, 24, 1, threads=32),
    Case("planes-32-threads", 4, 3, 49, threads=32),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def rng(request):
    return np.random.default_rng(abs(hash(request.node.name)) % 2**32)


def view_of(case, values, dtype):
    offset = case.offset * cuda.SIZES[dtype] % 16
    return View(Memory.of(values, dtype, offset), *case.shape)


def empty_like(view, dtype=None):
    memory = view.memory
    return View(
        Memory.empty(memory.array.size, dtype or memory.dtype, memory.offset),
        view.outer,
        view.channels,
        view.inner,
    )


def stored(view):
    """What the kernel sees, as float64 [A, C, B]."""
    return view.memory.values().reshape(view.outer, view.channels, view.inner)


def packed(count, mean, m2):
    return np.concatenate([[count], mean, m2])


def moments_of(values):
    mean = values.mean((0, 2))
    m2 = ((values - mean[:, None]) ** 2).sum((0, 2))
    return packed(values.size // values.shape[1], mean, m2)


def statistics_of(values, eps=EPS):
    whole = moments_of(values)
    channels = values.shape[1]
    invstd = 1 / np.sqrt(whole[1 + channels :] / whole[0] + eps)
    return np.concatenate([whole, invstd])


def column(values):
    return values[None, :, None]


@cases
@dtypes
def test_moments_equal_the_reference(case, dtype, rng):
    mean, spread = (
        rng.normal(0, 3, (1, case.channels, 1)),
        rng.uniform(0.5, 2, (1, case.channels, 1)),
    )
    x = view_of(case, rng.normal(mean, spread, case.shape), dtype)
    into = Memory.empty(2 * case.channels + 1, "float64")
    run = Runner(case.threads)
    cuda.moments(run, x, into)
    expected = moments_of(stored(x))
    _, unit = work_epsilon(dtype)
    np.testing.assert_allclose(into.array, expected, rtol=64 * unit, atol=64 * unit)
    assert into.array[0] == case.outer * case.inner
    assert (into.written == 1).all()
    assert x.memory.written_bytes == 0
    assert len(run.launched) == 1
    assert not run.counters.array.any(), "tickets are zeros again"
    assert x.memory.read_bytes - x.memory.array.nbytes <= extra_reads(case, run, x)


def extra_reads(case, run, x):
    """Bytes beyond one pass: each block reads the pivot of its channels."""
    (_, grid), *_ = run.launched
    lanes = cuda.lanes_of(x.dtype)
    return 2 * grid[0] * grid[1] * case.threads * lanes * x.memory.array.itemsize


@pytest.mark.parametrize("mean", [1e3, 1e6])
@pytest.mark.parametrize("name", ["planes", "planes-7x7-split", "rows-split", "rows-C3"])
def test_moments_keep_their_digits_far_from_zero(name, mean, rng):
    case = next(c for c in CASES if c.name == name)
    x = view_of(case, rng.normal(mean, 1, case.shape), "float32")
    into = Memory.empty(2 * case.channels + 1, "float64")
    cuda.moments(Runner(), x, into)
    np.testing.assert_allclose(into.array, moments_of(stored(x)), rtol=2e-6)


@pytest.mark.parametrize("at", [0, -1])
def test_an_outlier_leaves_its_digits_to_the_rest(at, rng):
    case = Case("outlier", 4, 1, 300)
    values = np.full(case.shape, 3.0)
    values.reshape(-1)[at] = 1e6
    x = view_of(case, values, "float32")
    into = Memory.empty(3, "float64")
    cuda.moments(Runner(), x, into)
    np.testing.assert_allclose(into.array, moments_of(stored(x)), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["planes-split", "planes-7x7", "rows", "rows-C3"])
def test_nan_and_infinity_stay_in_their_channel(name, bad, rng):
    case = next(c for c in CASES if c.name == name)
    values = rng.normal(size=case.shape)
    values[-1, 1, -1] = bad
    x = view_of(case, values, "float32")
    into = Memory.empty(2 * case.channels + 1, "float64")
    cuda.moments(Runner(), x, into)
    mean, m2 = into.array[1:].reshape(2, -1)
    assert np.isnan(m2[1])
    assert not np.isfinite(mean[1])
    others = np.arange(case.channels) != 1
    assert np.isfinite(mean[others]).all()
    assert np.isfinite(m2[others]).all()


def parameters_of(rng, case, dtype="float32"):
    weight, bias = rng.normal(1, 0.3, case.channels), rng.normal(size=case.channels)
    weight, bias = Memory.of(weight, dtype), Memory.of(bias, dtype)
    code = cuda.CODES[dtype]
    return cuda.Parameters(weight, code, bias, code)


@cases
@dtypes
def test_normalize_equals_the_reference(case, dtype, rng):
    x = view_of(case, rng.normal(rng.normal(0, 3, (1, case.channels, 1)), 1.5, case.shape), dtype)
    y = empty_like(x)
    parameters = parameters_of(rng, case)
    values = stored(x)
    whole = moments_of(values)
    into = Memory.empty(3 * case.channels + 1, "float64")
    run = Runner(case.threads)
    cuda.normalize(
        run,
        x,
        y,
        parameters,
        Memory(whole),
        1,
        into,
        eps=EPS,
        clamp=False,
    )
    statistics = statistics_of(values)
    _, mean, _, invstd = np.split(statistics, [1, 1 + case.channels, 1 + 2 * case.channels])
    xhat = (values - column(mean)) * column(invstd)
    expected = xhat * column(parameters.weight.values()) + column(parameters.bias.values())
    unit, arithmetic = work_epsilon(dtype)
    bound = 2 * unit * np.abs(expected) + 32 * arithmetic * (1 + np.abs(expected))
    assert (np.abs(stored(y) - expected) <= bound).all()
    np.testing.assert_allclose(into.array, statistics, rtol=1e-14)
    assert (into.written == 1).all(), "one block writes the statistics of a channel"
    assert (y.memory.written == 1).all()
    assert x.memory.read_bytes == x.memory.array.nbytes
    assert y.memory.written_bytes == y.memory.array.nbytes
    assert y.memory.read_bytes == 0
    assert len(run.launched) == 1


@pytest.mark.parametrize("name", ["planes", "planes-7x7", "planes-many", "rows", "rows-C3"])
@pytest.mark.parametrize("factor", [0.1, 1.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalize_merges_members_and_updates_running_statistics(name, factor, dtype, rng):
    case = next(c for c in CASES if c.name == name)
    channels = case.channels
    x = view_of(case, rng.normal(5, 1.5, case.shape), "float32")
    others = rng.normal(2, 3, (7, channels, 5))
    nothing = np.zeros((0, channels, 5))
    values = stored(x)
    parts = [moments_of(values), packed(0, np.zeros(channels), np.zeros(channels))]
    parts += [moments_of(others[:1]), moments_of(others[1:])]
    assert nothing.size == 0
    running_mean, running_var = rng.normal(size=channels), rng.uniform(1, 2, channels)
    mean, var = Memory.of(running_mean, dtype), Memory.of(running_var, dtype)
    old_mean, old_var = mean.values(), var.values()
    tracked = Memory(np.array([4], np.int64))
    into = Memory.empty(3 * channels + 1, "float64")
    running = cuda.Running(mean, var, cuda.CODES[dtype], tracked, factor)
    cuda.normalize(
        Runner(),
        x,
        empty_like(x),
        cuda.Parameters(),
        Memory(np.concatenate(parts)),
        len(parts),
        into,
        eps=EPS,
        clamp=False,
        running=running,
    )
    every = np.concatenate(
        [np.moveaxis(v, 1, 0).reshape(channels, -1) for v in (values, others)], 1
    )
    np.testing.assert_allclose(into.array[1 : 1 + channels], every.mean(1), rtol=1e-12)
    share = 1 / 5 if factor < 0 else factor
    unit, _ = work_epsilon(dtype)
    for new, old, batch in [
        (mean, old_mean, every.mean(1)),
        (var, old_var, every.var(1, ddof=1)),
    ]:
        expected = (1 - share) * old + share * batch
        np.testing.assert_allclose(new.values(), expected, rtol=1.01 * unit + 1e-14, atol=1e-14)
        assert (new.written == 1).all()
    assert tracked.array[0] == (4 if factor < 0 else 5), "an average leaves the counter to others"


@pytest.mark.parametrize("name", ["planes", "planes-7x7", "rows"])
def test_normalize_by_running_statistics_leaves_them(name, rng):
    case = next(c for c in CASES if c.name == name)
    x = view_of(case, rng.normal(5, 1.5, case.shape), "float32")
    y = empty_like(x)
    mean, var = rng.normal(size=case.channels), rng.uniform(1, 2, case.channels)
    running = cuda.Running(Memory(mean.copy()), Memory(var.copy()), cuda.CODES["float64"])
    into = Memory.empty(3 * case.channels + 1, "float64")
    cuda.normalize(
        Runner(),
        x,
        y,
        cuda.Parameters(),
        0,
        0,
        into,
        eps=EPS,
        clamp=False,
        running=running,
    )
    expected = (stored(x) - column(mean)) / np.sqrt(column(var) + EPS)
    np.testing.assert_allclose(stored(y), expected, rtol=1e-5, atol=1e-5)
    assert running.mean.written_bytes == running.var.written_bytes == 0


@pytest.mark.parametrize(
    "case", [Case("rows", 0, 5, 1), Case("planes", 0, 5, 49), Case("S=0", 3, 5, 0)]
)
def test_an_empty_part_updates_running_statistics_too(case, rng):
    x = View(Memory.empty(0, "float32"), *case.shape)
    mean, var = Memory(np.zeros(5)), Memory(np.ones(5))
    others = rng.normal(2, 3, (7, 5, 5))
    into = Memory.empty(16, "float64")
    cuda.normalize(
        Runner(),
        x,
        empty_like(x),
        cuda.Parameters(),
        Memory(moments_of(others)),
        1,
        into,
        eps=EPS,
        clamp=False,
        running=cuda.Running(mean, var, cuda.CODES["float64"], 0, 1.0),
    )
    np.testing.assert_allclose(mean.array, others.mean((0, 2)))
    np.testing.assert_allclose(into.array, statistics_of(others))


def test_nothing_at_all_leaves_running_statistics(rng):
    x = View(Memory.empty(0, "float32"), 0, 5, 1)
    mean, var = Memory(np.zeros(5)), Memory(np.ones(5))
    into, tracked = Memory.empty(16, "float64"), Memory(np.array([3], np.int64))
    cuda.normalize(
        Runner(),
        x,
        empty_like(x),
        cuda.Parameters(),
        Memory(np.zeros(11)),
        1,
        into,
        eps=EPS,
        clamp=False,
        running=cuda.Running(mean, var, cuda.CODES["float64"], tracked, 1.0),
    )
    assert mean.written_bytes == var.written_bytes == 0
    assert tracked.array[0] == 4


@pytest.mark.parametrize("name", ["planes", "rows"])
def test_clamp_bounds_the_variance(name, rng):
    case = next(c for c in CASES if c.name == name)
    values = rng.normal(1, 1e-4, case.shape)
    values[:, 0] *= 1e4
    x = view_of(case, values, "float64")
    dy = view_of(case, rng.normal(size=case.shape), "float64")
    eps = 1e-5
    into = Memory.empty(3 * case.channels + 1, "float64")
    whole = moments_of(values)
    cuda.normalize(
        Runner(),
        x,
        empty_like(x),
        cuda.Parameters(),
        Memory(whole),
        1,
        into,
        eps=eps,
        clamp=True,
    )
    var = values.var((0, 2))
    invstd = 1 / np.sqrt(np.maximum(var, eps))
    np.testing.assert_allclose(into.array[1 + 2 * case.channels :], invstd, rtol=1e-10)
    sums = rng.normal(size=(2, case.channels))
    dx = empty_like(x)
    cuda.backward_input(
        Runner(),
        x,
        dy,
        dx,
        into,
        cuda.Parameters(),
        Memory(sums.ravel().copy()),
        eps=eps,
        clamp=True,
    )
    count = values.size // case.channels
    xhat = (values - column(values.mean((0, 2)))) * column(invstd)
    second = np.where(var < eps, 0, sums[1])
    expected = column(invstd) * (
        stored(dy) - column(sums[0]) / count - xhat * column(second) / count
    )
    np.testing.assert_allclose(stored(dx), expected, rtol=1e-9, atol=1e-9)


@cases
@dtypes
def test_backward_equals_the_reference(case, dtype, rng):
    channels = case.channels
    x = view_of(case, rng.normal(rng.normal(0, 3, (1, channels, 1)), 1.5, case.shape), dtype)
    dy = view_of(case, rng.normal(size=case.shape), dtype)
    dx = empty_like(x)
    parameters = parameters_of(rng, case)
    values, grad = stored(x), stored(dy)
    statistics = statistics_of(values)
    count, mean, _, invstd = np.split(statistics, [1, 1 + channels, 1 + 2 * channels])
    weight = parameters.weight.values()
    xhat = (values - column(mean)) * column(invstd)
    sum_dy, sum_dy_xhat = grad.sum((0, 2)), (grad * xhat).sum((0, 2))

    run = Runner()
    sums = Memory.empty(2 * channels, "float64")
    grad_weight, grad_bias = Memory.empty(channels, "float64"), Memory.empty(channels, "float64")
    cuda.backward_reduce(
        run,
        x,
        dy,
        Memory(statistics),
        parameters,
        sums,
        grad_weight,
        grad_bias,
        code=cuda.CODES["float64"],
    )
    unit, arithmetic = work_epsilon(dtype)
    scale = np.abs(grad * (1 + np.abs(xhat))).sum((0, 2)) * 8 * arithmetic
    assert (np.abs(grad_bias.array - sum_dy) <= scale).all()
    assert (np.abs(grad_weight.array - sum_dy_xhat) <= scale).all()
    np.testing.assert_allclose(
        sums.array, np.r_[grad_bias.array, grad_weight.array] * np.r_[weight, weight]
    )
    for memory in (x.memory, dy.memory):
        assert memory.read_bytes == memory.array.nbytes, "one pass"
        memory.read_bytes = 0
    assert (sums.written == 1).all()
    assert len(run.launched) == 1
    assert not run.counters.array.any(), "tickets are zeros again"

    total = np.concatenate([sum_dy * weight, sum_dy_xhat * weight])
    cuda.backward_input(
        run,
        x,
        dy,
        dx,
        Memory(statistics),
        parameters,
        Memory(total),
        eps=EPS,
        clamp=False,
    )
    inner = grad * column(weight) - column(total[:channels]) / count
    expected = column(invstd) * (inner - xhat * column(total[channels:]) / count)
    bound = 2 * unit * np.abs(expected) + 64 * arithmetic * (
        1 + np.abs(grad) + np.abs(xhat)
    ) * column(invstd)
    assert (np.abs(stored(dx) - expected) <= bound).all()
    assert (dx.memory.written == 1).all()
    for memory in (x.memory, dy.memory):
        assert memory.read_bytes == memory.array.nbytes, "one pass"
    assert dx.memory.read_bytes == 0
    assert len(run.launched) == 2


@pytest.mark.parametrize("name", ["planes", "planes-7x7", "rows-C13"])
def test_without_sums_no_gradient_flows_through_the_statistics(name, rng):
    case = next(c for c in CASES if c.name == name)
    x, dy = (view_of(case, rng.normal(size=case.shape), "float32") for _ in range(2))
    dx = empty_like(x)
    statistics = statistics_of(stored(x))
    cuda.backward_input(
        Runner(),
        x,
        dy,
        dx,
        Memory(statistics),
        cuda.Parameters(),
        0,
        eps=EPS,
        clamp=False,
    )
    invstd = statistics[1 + 2 * case.channels :]
    np.testing.assert_allclose(stored(dx), stored(dy) * column(invstd), rtol=1e-6)


def test_activations_that_miss_the_grid_differently_are_read_one_by_one(rng):
    case = Case("planes", 2, 3, 49)
    x = View(Memory.of(rng.normal(size=case.shape), "float32", 4), *case.shape)
    dy = View(Memory.of(rng.normal(size=case.shape), "float32", 8), *case.shape)
    statistics = statistics_of(stored(x))
    sums = Memory.empty(6, "float64")
    run = Runner()
    cuda.backward_reduce(run, x, dy, Memory(statistics), cuda.Parameters(), sums)
    np.testing.assert_allclose(sums.array[:3], stored(dy).sum((0, 2)), rtol=1e-5, atol=1e-5)
    assert "-1-" in run.launched[0][0]


def test_sums_are_the_same_on_every_run_and_do_not_depend_on_who_is_last(rng):
    case = Case("planes", 4, 2, 512)
    x = view_of(case, rng.normal(size=case.shape), "float32")
    results = set()
    for _ in range(3):
        into = Memory.empty(5, "float64")
        cuda.moments(Runner(), x, into)
        results.add(into.array.tobytes())
    assert len(results) == 1


def test_merge_parts_is_the_merge_of_moments(rng):
    parts = [rng.normal(size=(n, 4, 3)) for n in (1, 5, 2)]
    into = Memory.empty(9, "float64")
    every = Memory(np.concatenate([moments_of(p) for p in parts]))
    cuda.merge_parts(Runner(), every, 3, 4, into)
    np.testing.assert_allclose(into.array, moments_of(np.concatenate(parts)), rtol=1e-13)


@pytest.mark.parametrize("members", [cuda.MAX_PARTS, cuda.MAX_PARTS + 1, 40])
def test_many_members_are_merged_before(members, rng):
    x = view_of(Case("rows", 6, 4, 1), rng.normal(size=(6, 4, 1)), "float64")
    every = rng.normal(3, 2, (members, 5, 4, 3))
    parts = Memory(np.concatenate([moments_of(part) for part in every]))
    into, y, run = Memory.empty(13, "float64"), empty_like(x), Runner()
    settings = {"eps": EPS, "clamp": False}
    cuda.normalize(run, x, y, cuda.Parameters(), parts, members, into, **settings)
    np.testing.assert_allclose(into.array, statistics_of(every.reshape(-1, 4, 3)), rtol=1e-12)
    assert len(run.launched) == (1 if members <= cuda.MAX_PARTS else 2)


def test_argument_codes_are_those_of_the_kernels():
    for name, codes in cuda._ARGUMENTS.items():
        kernel = cuda.source(name, "float32", 4, False, 8).build()
        names = list(inspect.signature(kernel).parameters)
        assert codes == "".join("d" if n in ("eps", "factor") else "q" for n in names), name


def test_the_table_holds_what_a_block_can_touch():
    for dtype in DTYPES:
        lanes = cuda.lanes_of(dtype)
        for vector, inner in [(lanes, cuda_constants.MIN_INNER), (1, 2)]:
            numbers = cuda_constants.THREADS * cuda_constants.UNROLL * vector
            assert numbers // inner + 2 <= cuda_constants.TABLE
