"""The compiled CUDA kernels, executed by the emulator and compared with float64.

Memory accesses are checked on the way (`emulator.memory`). Each basic block must be executed by
some case; the end of the run lists how many blocks each kernel has.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from zlib import crc32

import large
import numpy as np
import pytest
from emulated_device import Launch
from harness import (
    DTYPES,
    FORMS,
    SETTINGS,
    STEPS,
    Bench,
    Case,
    Steps,
    cases,
    moments_of,
    rows_of,
    source_of,
    steps,
)

from ptx_emulator.machine import Schedule
from syncbn_core._kernels.cuda.signatures import SIGNATURES, codes_of, signature_of
from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.labels import KINDS, differ, label_of
from syncbn_core.moments import NormRule, merged
from syncbn_core.numpy_steps import NumpySteps
from syncbn_core.steps import Affine, Norm, RunningStatistics

EPS = 1e-5


@pytest.fixture
def bench(device):
    with Bench(device) as bench:
        yield bench


@pytest.fixture
def rng(request):
    return np.random.default_rng(crc32(request.node.name.encode()))


class Executed:
    """How many threads have come by each basic block of each kernel."""

    def __init__(self) -> None:
        self.launches: dict[str, list[Launch]] = {}

    def add(self, keys: list[str], launches: list[Launch]) -> None:
        for key, launch in zip(keys, launches, strict=True):
            self.launches.setdefault(key, []).append(launch)

    def check(self, key: str, record_property: Callable[[str, object], None]) -> None:
        """Every block of that kernel has been executed."""
        blocks = len(self.launches[key][0].program.steps)
        missing = self.missing(key)
        record_property("ptx", (key, blocks - len(missing), blocks))
        assert not missing, f"{key}: no case executes " + "; ".join(missing)

    def missing(self, key: str) -> list[str]:
        program = self.launches[key][0].program
        threads = np.sum([launch.counts.threads for launch in self.launches[key]], axis=0)
        blocks, _ = program.kernel.blocks()
        return [  # of blocks that do more than jump
            f"lines {program.steps[number].lines}: {blocks[number][0].text} ..."
            for number in np.flatnonzero(threads == 0)
            if blocks[number][0].opcode != "bra.uni"
        ]


def needs(dtype: str, arch: tuple[int, int]) -> None:
    if dtype == "bfloat16" and arch < (8, 0):
        pytest.skip("no bfloat16 before compute capability 8.0")


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory that Linux provides on first use")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_basic_block_computes_what_is_right(form, dtype, device, arch, record_property):
    needs(dtype, arch)
    executed = Executed()
    for keys in steps(device, form, dtype):
        executed.add(keys, device.launches)
        device.launches.clear()
    device.schedule = Schedule()
    with Bench(device) as bench:
        large.run(bench, form, dtype)
        executed.add(bench.keys, device.launches)
    for step in STEPS:
        executed.check(source_of(form, dtype, step).key, record_property)


SPLIT = {
    "planes": Case("planes", 2, 2, 20000),
    "ragged planes": Case("ragged planes", 60, 2, 49 * 9),
    "rows": Case("rows", 4000, 16),
    "single rows": Case("single rows", 4000, 3),
}
split = pytest.mark.parametrize("name", SPLIT)


@split
@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_moments_keep_their_digits_far_from_zero(name, mean, bench, rng):
    x = bench.view(rng.normal(mean, 1, SPLIT[name].shape), "float32")
    into = bench.empty(2 * SPLIT[name].channels + 2, "float64")
    cuda.moments(bench, x, into.pointer)
    np.testing.assert_allclose(into.array[:-1], moments_of(x.values()), rtol=2e-6)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("shape", [(4, 1, 3000), (12000, 1, 1)], ids=str)
def test_an_outlier_leaves_its_digits_to_the_rest(shape, at, bench):
    values = np.full(shape, 3.0)
    values.reshape(-1)[at] = 1e6
    x = bench.view(values, "float32")
    into = bench.empty(4, "float64")
    cuda.moments(bench, x, into.pointer)
    np.testing.assert_allclose(into.array[:-1], moments_of(x.values()), rtol=1e-6)


@split
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_channel(name, bad, dtype, arch, bench, rng):
    needs(dtype, arch)
    case = SPLIT[name]
    values = rng.normal(size=case.shape)
    values[-1, 1, -1] = bad
    x, dy = bench.view(values, dtype), bench.view(rng.normal(size=case.shape), dtype)
    y, dx = bench.like(x), bench.like(x)
    channels = case.channels
    moments, kept = (
        bench.empty(2 * channels + 2, "float64"),
        bench.empty(3 * channels + 1, "float64"),
    )
    sums, settings = bench.empty(2 * channels, "float64"), {"rule": NormRule(EPS, "clamp")}
    none = cuda.Parameters()
    cuda.moments(bench, x, moments.pointer)
    cuda.normalize(bench, x, y, none, moments.pointer, 1, kept.pointer, **settings)
    cuda.backward_reduce(bench, x, dy, kept.pointer, none, sums.pointer)
    cuda.backward_input(bench, x, dy, dx, kept.pointer, none, sums.pointer, **settings)
    mean, m2 = moments.array[1:-1].reshape(2, -1)
    assert np.isnan(m2[1])
    assert not np.isfinite(mean[1])
    others = np.arange(channels) != 1
    for numbers in (mean, m2):
        assert np.isfinite(numbers[others]).all()
    for view in (y, dx):
        assert np.isfinite(view.values()[:, others]).all()
        assert np.isnan(view.values()[:, 1]).all()


@pytest.mark.parametrize("shape", [(0, 5, 1), (0, 5, 49), (3, 5, 0)], ids=str)
@pytest.mark.parametrize("others", [7, 0])
def test_an_empty_part_updates_running_statistics_too(shape, others, bench, rng):
    x = bench.view(np.zeros(shape), "float32")
    mean, var = bench.of(np.zeros(5), "float64"), bench.of(np.ones(5), "float64")
    tracked, values = bench.of(np.array([3]), "int64"), rng.normal(2, 3, (others, 5, 5))
    parts, kept = bench.of(moments_of(values), "float64"), bench.empty(16, "float64")
    running = cuda.Running(mean.pointer, var.pointer, cuda.CODES["float64"], tracked.pointer, 1.0)
    settings = {"rule": NormRule(EPS), "running": running}
    into = kept.pointer
    cuda.normalize(bench, x, bench.like(x), cuda.Parameters(), parts.pointer, 1, into, **settings)
    if others:
        np.testing.assert_allclose(mean.array, values.mean((0, 2)))
        np.testing.assert_allclose(var.array, values.var((0, 2), ddof=1))
    else:
        assert (mean.array == 0).all()
        assert (var.array == 1).all()
    assert tracked.array[0] == 4


def test_activations_that_miss_the_grid_differently_are_read_one_by_one(bench, rng):
    shape = (2, 3, 490)
    x = bench.view(rng.normal(size=shape), "float32", 1)
    dy = bench.view(rng.normal(size=shape), "float32", 2)
    kept = bench.of(np.concatenate([moments_of(x.values()), np.ones(3)]), "float64")
    sums = bench.empty(6, "float64")
    cuda.backward_reduce(bench, x, dy, kept.pointer, cuda.Parameters(), sums.pointer)
    np.testing.assert_allclose(sums.array[:3], dy.values().sum((0, 2)), rtol=1e-5, atol=1e-5)
    assert "-1-" in bench.keys[0]


ORDERS = [
    Schedule("first", 64),
    Schedule("last", 1),
    Schedule("last", 7),
    *(Schedule("random", width, seed=seed) for seed, width in enumerate((1, 5, 1000))),
]


@split
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_are_bitwise_the_same_in_every_order_of_blocks(name, dtype, device, bench, rng):
    case = SPLIT[name]
    x, dy = (bench.view(rng.normal(size=case.shape), dtype) for _ in range(2))
    channels, results = case.channels, set()
    kept = bench.of(np.concatenate([moments_of(x.values()), np.ones(channels)]), "float64")
    for schedule in ORDERS:
        device.schedule = schedule
        moments, sums = (bench.empty(2 * channels + n, "float64") for n in (2, 0))
        cuda.moments(bench, x, moments.pointer)
        cuda.backward_reduce(bench, x, dy, kept.pointer, cuda.Parameters(), sums.pointer)
        results.add(moments.array.tobytes() + sums.array.tobytes())
    assert device.launches[0].grid[1] > 1
    assert len(results) == 1


@pytest.mark.parametrize("schedule", ORDERS[1:], ids=lambda s: f"{s.order}-{s.width}")
@pytest.mark.parametrize("name", [*SPLIT, "single planes"])
def test_all_steps_in_every_order_of_blocks(name, schedule, device, bench, rng):
    case = SPLIT.get(name, Case(name, 2000, 2, 3))
    device.schedule = schedule
    step = Steps(bench, case, "float32", SETTINGS[0], rng)
    step.all()


SIZES_OF_PARTS = [
    *([1], [0], [0, 0], [0, 3], [1, 5, 2]),
    *([4, 0, 0, 2, 1, 0, 3], [2, 3, 0, 1, 0, 6, 1, 1, 0]),
]


def parts_of(sizes, channels, rng):
    """Packed moments of parts with so many numbers per channel, `[P, 2 C + 1]`."""
    return np.stack([moments_of(rng.normal(3, 2, (n, channels, 1))) for n in sizes])


def merged_by_formula(parts):
    """The packed moments that `syncbn_core.moments.merged` gives."""
    if len(parts) == 1:
        return parts[0]
    channels = parts.shape[1] // 2
    counts, means, m2s = np.split(parts, [1, 1 + channels], 1)
    # twice, because NumPy does not add up a lone column in its order
    mean, m2 = merged(counts, np.tile(means, 2), np.tile(m2s, 2))
    return np.concatenate([counts.sum(0), mean[:channels], m2[:channels]])


LABELS = [
    *(label_of(0, number, 0, "float32") for number in (0, 1, 2)),
    *(label_of(0, 1, extra, "float32") for extra in (1, 4096 * 5)),
    label_of(len(KINDS) - 1, 1, 0, "float32"),
    label_of(0, 1, 0, "bfloat16"),
    label_of(0, 2**19 - 2, 4095 + 2**27, "float64"),
]


def test_merge_parts_has_the_bits_of_the_formula(device, bench, rng, record_property):
    """Products are rounded before they are added (no `fma`), as NumPy's are."""
    for sizes in SIZES_OF_PARTS:
        parts = parts_of(sizes, 300, rng)
        into = bench.empty(602, "float64")
        every = bench.of(rows_of(parts), "float64")
        cuda.merge_parts(bench, every.pointer, len(sizes), 300, into.pointer, cuda.Check(5.0))
        np.testing.assert_array_equal(into.array, [*merged_by_formula(parts), 5])
    for own, other in itertools.product(LABELS, [*LABELS, float("nan"), -1.0, 0.0, 31.0, 1e300]):
        rows = bench.of(rows_of(parts_of([1, 2], 1, rng)), "float64")
        rows.array[3::4] = own, other
        for before in (0.0, 5.0)[: 1 + (own == LABELS[0])]:
            alarm = bench.alarm(before)
            check = cuda.Check(own, alarm.pointer, 7.0)
            cuda.merge_parts(bench, rows.pointer, 2, 1, into.pointer, check)
            assert alarm.array[0] == (before or 7.0 if differ(other, own) else before)
    executed = Executed()
    executed.add(bench.keys, device.launches)
    executed.check(bench.keys[0], record_property)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_all_kernels_merge_to_the_same_bits(form, dtype, arch, bench, rng):
    """Members with other layouts or dtypes, or an empty part, have other kernels."""
    needs(dtype, arch)
    case = cases(form, dtype)[0]
    x, channels = bench.view(rng.normal(size=case.shape), dtype, case.offset), case.channels
    for sizes in SIZES_OF_PARTS:
        parts = parts_of(sizes, channels, rng)
        into, settings = bench.empty(3 * channels + 1, "float64"), {"rule": NormRule(EPS)}
        ends = (bench.of(rows_of(parts), "float64").pointer, len(sizes), into.pointer)
        cuda.normalize(bench, x, bench.like(x), cuda.Parameters(), *ends, **settings)
        found = into.array[: 2 * channels + 1]
        np.testing.assert_array_equal(found, merged_by_formula(parts))


@pytest.mark.parametrize("members", [cuda.MAX_PARTS, cuda.MAX_PARTS + 1, 40])
def test_many_members_are_merged_before(members, bench, rng):
    x = bench.view(rng.normal(size=(6, 4, 1)), "float64")
    every = rng.normal(3, 2, (members, 5, 4, 3))
    parts = bench.of(rows_of([moments_of(part) for part in every]), "float64")
    into, y, settings = bench.empty(13, "float64"), bench.like(x), {"rule": NormRule(EPS)}
    none, kept = cuda.Parameters(), into.pointer
    cuda.normalize(bench, x, y, none, parts.pointer, members, kept, **settings)
    whole = moments_of(every.reshape(-1, 4, 3))
    np.testing.assert_allclose(into.array[:9], whole, rtol=1e-12)
    assert len(bench.keys) == (1 if members <= cuda.MAX_PARTS else 2)


ACTIVATIONS = ("relu", "leaky_relu", "silu", "hardswish", "relu6")
OF_ACTIVATIONS = {
    "planes": Case("planes", 2, 3, 5000),
    "ragged planes": Case("ragged planes", 5, 3, 49 * 3),
    "rows": Case("rows", 900, 16),
    "single rows": Case("single rows", 700, 3),
}
# y and the derivative are defined by cases there, or saturate
EDGES = [-np.inf, -1e4, -6, -3, -1, -0.0, 0.0, 0.5, 3, 6, 1e4, np.inf, np.nan]


def forward_of(rule):
    """What forward in place does is not asked of these kernels."""
    return NormRule(EPS) if rule.activation == "inverse_leaky_relu" else rule


def in_numpy(bench, rule, x, dy, weight, bias):
    """`y, dx, grad_weight, grad_bias` by the CPU's steps, in float64."""
    steps = NumpySteps()
    own, affine, _ = steps.take(x, Affine(weight, bias), None)
    norm = Norm(steps.statistics(steps.moments(own), rule), affine, rule)
    pair, y = steps.take_pair(x, dy), steps.forward(own, norm._replace(rule=forward_of(rule)))
    sums = steps.backward_reduce(*pair, norm)
    dx = steps.backward_input(*pair, norm, sums.exchange)
    return y, dx, sums.grad_weight, sums.grad_bias


def by_kernels(bench, rule, x, dy, weight, bias, code):
    """The same by the CUDA kernels; `x` and `dy` are views."""
    channels = x.channels
    of = cuda.Parameters(weight.pointer, code, bias.pointer, code)
    moments, kept = (bench.empty(size, "float64") for size in (2 * channels + 2, 3 * channels + 1))
    sums, grads = bench.empty(2 * channels, "float64"), bench.empty(2 * channels, "float64")
    y, dx, into = bench.like(x), bench.like(x), grads.pointer
    wide = cuda.CODES["float64"]
    cuda.moments(bench, x, moments.pointer)
    cuda.normalize(bench, x, y, of, moments.pointer, 1, kept.pointer, rule=forward_of(rule))
    for place in (into, into + 8 * channels):
        both = (place, 0) if place == into else (0, place)
        cuda.backward_reduce(
            bench, x, dy, kept.pointer, of, sums.pointer, *both, rule=rule, code=wide
        )
    cuda.backward_input(bench, x, dy, dx, kept.pointer, of, sums.pointer, rule=rule)
    return y.values(), dx.values(), *grads.array.reshape(2, -1)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "inverse_leaky_relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", OF_ACTIVATIONS)
def test_activations_are_those_of_the_cpu(form, dtype, activation, arch, bench, rng):
    needs(dtype, arch)
    slope = 0.2 if "leaky_relu" in activation else 0.01
    rule, case = NormRule(EPS, "plus", activation, slope), OF_ACTIVATIONS[form]
    x, dy = (bench.view(rng.normal(size=case.shape), dtype) for _ in range(2))
    weight, bias = (bench.of(4 * rng.normal(size=case.channels), "float32") for _ in range(2))
    found = by_kernels(bench, rule, x, dy, weight, bias, cuda.CODES["float32"])
    assert any(f"+{activation}-" in key for key in bench.keys)
    wide = [view.values() for view in (x, dy)]
    right = in_numpy(bench, rule, *wide, weight.array.astype("f8"), bias.array.astype("f8"))
    digits = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for own, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(own, expected, rtol=digits, atol=digits * np.abs(expected).max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_activations_where_they_are_defined_by_cases(dtype, activation, bench):
    """Of z = x, with constant statistics: y, and dx of dy = 1 and of an infinite dy."""
    x = np.array(EDGES).reshape(1, 1, -1)
    rule = NormRule(1.0, "clamp", activation)  # of running statistics 0 and 1
    steps, results = NumpySteps(), {}
    constant = RunningStatistics(np.zeros(1), np.ones(1))
    view, table = bench.view(x, dtype), bench.empty(4, "float64")
    running = bench.of([0.0, 1.0], "float64")
    given = cuda.Running(running.pointer, running.pointer + 8, cuda.CODES["float64"])
    y, none = bench.like(view), cuda.Parameters()
    cuda.normalize(bench, view, y, none, 0, 0, table.pointer, rule=rule, running=given)
    own, affine, held = steps.take(x.astype(dtype), Affine(), constant)
    right, statistics = steps.forward_eval(own, held, affine, rule)
    results["y"] = y.values(), right
    for dy in (1.0, np.inf):
        grad, dx = bench.view(np.full(x.shape, dy), dtype), bench.like(view)
        cuda.backward_input(bench, view, grad, dx, table.pointer, none, 0, rule=rule)
        pair = steps.take_pair(x.astype(dtype), np.full(x.shape, dy, dtype))
        expected = steps.backward_input(*pair, Norm(statistics, affine, rule), None)
        results[f"dx of {dy}"] = dx.values(), expected
    for name, (found, expected) in results.items():
        digits = 1e-6 if dtype == "float32" else 1e-14
        np.testing.assert_allclose(found, expected, rtol=digits, atol=1e-30, err_msg=name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_table_of_signatures_names_the_arguments_of_each_kernel(name):
    kernel = cuda.source(name, "float32", 4, False, cuda.THREADS).build()
    groups = re.findall(r"\([^)]*\)|\w+", signature_of(name))
    parameters = inspect.signature(kernel).parameters
    assert len(parameters) == len(groups)
    unpacked = inspect.getsource(kernel)
    for parameter, group in zip(parameters, groups, strict=True):
        names = re.findall(r"\w+", group)
        if group.startswith("("):
            found = re.search(rf" ([\w, ]+) = {parameter}\n", unpacked)
            assert found is None or found[1].strip().split(", ") == names
        else:
            assert parameter == group
    floats = {"eps", "factor", "label", "place"}
    letters = "".join("d" if n in floats else "q" for n in names_of(name))
    assert re.sub(r"\W", "", codes_of(SIGNATURES[name])) == letters


def names_of(kernel):
    return re.findall(r"\w+", SIGNATURES[kernel])


class Recorder:
    """A runner that keeps the arguments of each launch, by the names in the table."""

    threads = cuda.THREADS
    multiprocessors = 132

    def __init__(self):
        self.launches = {}

    def launch(self, source, grid, *arguments):
        name = source.key.partition("-")[0]
        self.launches[name] = dict(zip(names_of(name), arguments, strict=True))

    def scratch(self, size):
        return "partials", None

    def shared_sums(self, partials, counters):
        return "partials", "block_counters"


@pytest.mark.parametrize("kind", ["planes", "rows"])
def test_each_argument_is_launched_under_its_name(kind):
    shape = (40, 24, 1999) if kind == "planes" else (80000, 24, 1)
    names = ("x", "y", "dy", "dx")
    fields = ("outer", "channels", "inner")
    sizes = dict(zip(fields, shape, strict=True))
    x, y, dy, dx = (
        SimpleNamespace(pointer=name, offset=4, sizes=cuda.Sizes("float32", **sizes))
        for name in names
    )
    parameters = cuda.Parameters("weight", "weight_code", "bias", "bias_code")
    running = cuda.Running("running_mean", "running_var", "running_code", "tracked", "factor")
    rule = {"rule": NormRule("eps", "clamp")}
    run = Recorder()
    check = cuda.Check("label", "alarm", "place")
    cuda.moments(run, x, "moments", "label")
    cuda.normalize(
        run, x, y, parameters, "parts", 5, "statistics", **rule, running=running, check=check
    )
    gradients = ("sums", "grad_weight", "grad_bias")
    cuda.backward_reduce(
        run, x, dy, "statistics", parameters, *gradients, code="gradient_code", label="label"
    )
    cuda.backward_input(run, x, dy, dx, "statistics", parameters, "sums", **rule, check=check)
    cuda.merge_parts(run, "parts", 5, 24, "moments", check)
    sizes |= {"total": prod(shape), "rows": shape[0], "num_parts": 5, "clamp": 1}
    if kind == "planes":
        walk = cuda._walk(cuda.THREADS, 132, x.sizes, [x.offset])
        sizes |= {"skew": 1, "slots": walk.slots, "splits": walk.splits}
    else:
        tiles = cuda._tiles(cuda.THREADS, cuda.REDUCTION_WIDTH, x.sizes, [x.offset])
        plan = cuda._row_splits(132, tiles, shape[0])
        sizes |= {"splits": plan.splits, "group": plan.group}
        wider = cuda._tiles(cuda.THREADS, cuda.ELEMENTWISE_WIDTH, x.sizes, [x.offset])
        sizes |= {"width": wider.width, "piece": cuda._row_piece(wider, shape[0])[0]}
        assert wider.width == tiles.width  # so that both kinds of kernels can be compared below
    assert set(run.launches) == {f"{kind}_{step}" for step in STEPS} | {"merge_parts"}
    for name, arguments in run.launches.items():
        assert arguments == {n: sizes.get(n, n) for n in names_of(name)}, name
