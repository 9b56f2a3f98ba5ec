"""The byte model against counted accesses, and what it says of real shapes: 3 and 5 passes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from simulated import Memory, Runner
from test_cuda_kernels import CASES, DTYPES, EPS, cases, empty_like, parameters_of, view_of

from syncbn_core.backends import cuda, traffic
from syncbn_core.backends.traffic import Traffic


class Counting(Runner):
    """Remembers the memory that kernels were given."""

    def launch(self, source, grid, *arguments):
        super().launch(source, grid, *arguments)
        self.memories = {id(a): a for a in arguments if isinstance(a, Memory)}.values()


def counted(run, *activations):
    """Bytes of the last launch; counts begin anew."""
    of_activations = [view.memory for view in activations]
    counts = dict.fromkeys(("read", "written", "shared_read", "shared_written"), 0)
    for memory in run.memories:
        prefix = "" if any(memory is other for other in of_activations) else "shared_"
        counts[f"{prefix}read"] += memory.read_bytes
        counts[f"{prefix}written"] += memory.written_bytes
        memory.read_bytes = memory.written_bytes = 0
    return Traffic(**counts)


def split_pivots(found, expected):
    """Pivots are numbers of x: `found` counts them with the activation."""
    pivots = found.read - expected.read
    return Traffic(found.read - pivots, found.written, found.shared_read + pivots,
                   found.shared_written)  # fmt: skip


@cases
@pytest.mark.usefixtures("short_groups")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_model_is_what_the_kernels_read_and_write(case, dtype, rng_of_traffic):
    rng, channels, threads = rng_of_traffic, case.channels, case.threads
    x, dy = (view_of(case, rng.normal(size=case.shape), dtype) for _ in range(2))
    y, dx = empty_like(x), empty_like(x)
    run = Counting(threads)
    packed = Memory.empty(2 * channels + 1, "float64")
    cuda.moments(run, x, packed)
    expected = traffic.moments(x, threads=threads)
    assert split_pivots(counted(run, x), expected) == expected

    statistics = Memory.empty(3 * channels + 1, "float64")
    running = cuda.Running(
        Memory.of(np.zeros(channels), "float32"),
        Memory.of(np.ones(channels), "float32"),
        cuda.CODES["float32"],
        Memory(np.zeros(1, np.int64)),
        0.1,
    )
    settings = {"eps": EPS, "clamp": False}
    parameters = parameters_of(rng, case)
    parts = Memory(np.concatenate([packed.array, packed.array]))
    cuda.normalize(run, x, y, parameters, parts, 2, statistics, running=running, **settings)
    assert counted(run, x, y) == traffic.normalize(x, y, parts=2, threads=threads)

    sums = Memory.empty(2 * channels, "float64")
    gradients = [Memory.empty(channels, "float32") for _ in range(2)]
    cuda.backward_reduce(run, x, dy, statistics, parameters, sums, *gradients)
    assert counted(run, x, dy) == traffic.backward_reduce(x, dy, threads=threads)

    cuda.backward_input(run, x, dy, dx, statistics, parameters, sums, **settings)
    assert counted(run, x, dy, dx) == traffic.backward_input(x, dy, dx, threads=threads)


@pytest.fixture
def rng_of_traffic():
    return np.random.default_rng(11)


@dataclass
class Shape:
    """A view without memory."""

    outer: int
    channels: int
    inner: int
    dtype: str
    pointer = offset = 0


RESNET = [
    *((64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 28), (256, 14)),
    *((1024, 14), (512, 14), (512, 7), (2048, 7)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("batch", [2, 32, 256])
def test_three_passes_forward_and_five_backward_and_little_else(layout, dtype, batch):
    for channels, side in RESNET:
        sizes = (batch, channels, side**2) if layout == "NCHW" else (batch * side**2, channels, 1)
        x = Shape(*sizes, dtype)
        nbytes = prod(sizes) * cuda.SIZES[dtype]
        steps = [
            traffic.moments(x),
            traffic.normalize(x, x),
            traffic.backward_reduce(x, x),
            traffic.backward_input(x, x, x),
        ]
        forward, backward = steps[0] + steps[1], steps[2] + steps[3]
        assert forward.read + forward.written == 3 * nbytes
        assert backward.read + backward.written == 5 * nbytes
        if nbytes >= 100e6:  # where bandwidth counts; and all of this stays in caches
            shares = [(step.shared_read + step.shared_written) / nbytes for step in steps]
            assert max(shares[::2]) < 0.1, (shares, x)
            assert max(shares[1::2]) < 0.3, (shares, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_block_is_left_with_a_long_sum(dtype):
    for channels, side in RESNET:
        rows = 256 * side**2
        cut = cuda._tiles(cuda.THREADS, Shape(rows, channels, 1, dtype))
        plan = cuda._row_splits(cut, rows)
        longest = max(plan.group, plan.groups) * cut.width * cut.lanes * 16
        assert longest <= 64 * 1024


@pytest.mark.usefixtures("short_groups")
def test_the_cases_reach_every_branch_of_the_plan():
    plans = {}
    for case in CASES:
        x = Shape(*case.shape, "float32")
        if cuda._is_rows(x):
            plan = cuda._row_splits(cuda._tiles(case.threads, x), x.outer)
            plans[case.name] = (plan.splits > 1, plan.groups > 1)
        else:
            walk = cuda._walk(case.threads, x)
            plans[case.name] = (walk.splits > 1, walk.ragged)
    for kind in ("rows", "planes"):
        found = {plan for name, plan in plans.items() if name.startswith(kind)}
        wanted = {(False, False), (True, False), (True, True)}
        assert wanted <= found, (kind, plans)
