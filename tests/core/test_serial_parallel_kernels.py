"""The serial and the parallel build of the kernels: same bits, and which one runs when."""

import threading
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncbn_core._kernels.cpu import launch as cpu
from syncbn_core._kernels.cpu import planes as cpu_planes
from syncbn_core._kernels.cpu import rows as cpu_rows
from syncbn_core._kernels.cpu.activations import activation_of

Array = np.ndarray
Function = Callable[..., Any]

BUILDS = ("serial", "parallel")
KERNELS = {
    f"{kind}_{step}": getattr(module, f"{kind}_{step}")
    for kind, module in (("planes", cpu_planes), ("rows", cpu_rows))
    for step in ("sums", "write")
}

# [A, C, B]; TILE is 4096, PIECE 16384, and channels share out 64 chunks.
PLANES = {
    "a tile exactly": (2, 3, 4096),
    "a tile and one more": (2, 3, 4097),
    "long runs, many chunks": (70, 1, 8192),
    "tiles do not divide into chunks": (40, 3, 4096),
    "pieces with a tail": (1, 2, 2 * 16384 + 5),
    "one element short of a piece": (1, 1, 16383),
    "joined runs, one tile": (7, 3, 5),
    "joined runs, many tiles, a short last one": (5000, 3, 3),
    "joined runs, more tiles than chunks": (140_000, 1, 2),
    "runs just too short to stand alone": (3, 2, 4095),
    "many channels": (3, 2048, 7),
    "one element": (1, 1, 2),
}
# [A, C] or [A, C, B]; a block has 512 columns, a tile 32768 elements and 32 to 256 rows; blocks
# share out 64 chunks; rows of 256 columns and less are joined where their number has a divisor.
ROWS = {
    "one row": (1, 3),
    "a tile exactly": (256, 300),
    "a tile and one row": (257, 300),
    "joined rows, more tiles than chunks": (9_000_000 // 25, 25),
    "rows that cannot be joined": (5003, 3),
    "several blocks, one tile": (32, 2048),
    "a last block that is narrow, a tail of one row": (65, 1030),
    "several blocks, more tiles than chunks": (1300, 2048),
    "two channels": (40_000, 2),
    "joined planes": (300, 7, 9),
    "planes in several blocks": (37, 70, 49),
    "planes longer than a block": (40, 3, 600),
}


def run_kernels(
    kind: str, build: str, case: Any, activation: str | None = None, valid: Array | None = None
) -> dict[str, Array]:
    """All four kernels of a kind, straight, with results that were NaN before."""
    x, dy, mean, invstd, weight, bias, mean_dy, mean_dy_xhat = case
    inner: tuple[int, ...] = ()
    if kind == "rows":
        inner = (prod(x.shape[2:]), 1 if build == "serial" else 3)  # and workers
        repeats = 1 if valid is not None else cpu_rows.joined(len(x), x[0].size)
        x, dy = (a.reshape(len(a) // repeats, -1) for a in (x, dy))
    weight = np.empty(0) if weight is None else weight.astype("f8")
    bias = np.empty(0) if bias is None else bias.astype("f8")
    run_sums, run_write = (getattr(KERNELS[f"{kind}_{step}"], build) for step in ("sums", "write"))
    moments, products = np.full((2, 2, case.x.shape[1]), np.nan)
    y, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    table = np.concatenate([[1], mean, mean, invstd])
    given = table, weight, bias, activation_of(activation, 0.1), valid
    run_sums(x, None, *inner, None, None, None, None, valid, moments)
    run_write(x, None, *inner, *given, None, y)
    run_sums(x, dy, *inner, *given, products)
    run_write(x, dy, *inner, *given, np.stack([mean_dy, mean_dy_xhat]), dx)
    names = ("mean", "m2", "sum_dy", "sum_dy_xhat")
    result = dict(zip(names, [*moments, *products], strict=True))
    return result | {"y": y.reshape(case.x.shape), "dx": dx.reshape(case.x.shape)}


def assert_same_bits(a: dict[str, Array], b: dict[str, Array]) -> None:
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(kind, shape, id=f"{kind}: {name}")
        for kind, shapes in (("planes", PLANES), ("rows", ROWS))
        for name, shape in shapes.items()
    ],
)
def test_serial_and_parallel_builds_give_the_same_bits(
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    make_case: Function,
    equal_reference: Function,
) -> None:
    for affine in ("f4", None):
        case = make_case(shape, dtype, affine=affine)
        serial, parallel = (run_kernels(kind, build, case) for build in BUILDS)
        assert_same_bits(serial, parallel)
        count = prod(shape) // shape[1]
        equal_reference(serial | {"count": np.array(count), "var": serial["m2"] / count}, case)


# Of float64 other tests use the kernels too.
PRECISIONS = pytest.mark.parametrize(
    "precision", ["f8", pytest.param("f4", marks=pytest.mark.slow)]
)


@PRECISIONS
@pytest.mark.parametrize("activation", ["silu", "hardswish"])
@pytest.mark.parametrize(("kind", "shape"), [("planes", (3, 5, 4900)), ("rows", (1300, 2048))])
def test_an_activation_gives_the_same_bits_too(
    kind: str, shape: tuple[int, ...], activation: str, precision: str, make_case: Function
) -> None:
    case = make_case(shape, precision, affine="f4")
    assert_same_bits(*(run_kernels(kind, build, case, activation) for build in BUILDS))


@PRECISIONS
@pytest.mark.parametrize(("kind", "shape"), [("planes", (3, 5, 4900)), ("rows", (1300, 2048))])
def test_a_mask_gives_the_same_bits_too(
    kind: str, shape: tuple[int, ...], precision: str, make_case: Function
) -> None:
    case = make_case(shape, precision, affine="f4")
    valid = np.random.default_rng(0).random((shape[0], *shape[2:])) < 0.3
    valid[-1:] = False  # whole tiles without any
    masked = valid.astype(np.uint8)
    assert_same_bits(*(run_kernels(kind, build, case, None, masked) for build in BUILDS))


def test_results_do_not_depend_on_the_number_of_threads(make_case: Function) -> None:
    numba = cpu.numba
    threads = numba.get_num_threads()
    for kind, shape in (("planes", (70, 1, 8192)), ("rows", (200_000, 3))):
        case = make_case(shape)
        many = run_kernels(kind, "parallel", case)
        numba.set_num_threads(1)
        try:
            assert_same_bits(run_kernels(kind, "parallel", case), many)
        finally:
            numba.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("build", ["serial", "parallel"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("planes", (3, 4, 5000)),
        ("planes", (30, 4, 9)),
        ("rows", (40, 4)),
        ("rows", (5003, 4)),
        ("rows", (30, 4, 9)),
    ],
)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_channel(
    kind: str, shape: tuple[int, ...], build: str, dtype: str, odd: float, make_case: Function
) -> None:
    case = make_case(shape, dtype)
    plain = run_kernels(kind, build, case)
    x, dy = case.x.copy(), case.dy.copy()
    x[1, 1] = dy[2, 2] = odd
    result = run_kernels(kind, build, case._replace(x=x, dy=dy))
    for name in ("mean", "m2"):
        np.testing.assert_array_equal(np.isnan(result[name]), [False, True, False, False])
    np.testing.assert_array_equal(np.isfinite(result["sum_dy"]), [True, True, False, True])
    np.testing.assert_array_equal(np.isfinite(result["sum_dy_xhat"]), [True, False, False, True])
    np.testing.assert_array_equal(np.isfinite(result["y"]), np.isfinite(x))
    np.testing.assert_array_equal(np.isfinite(result["dx"]), np.isfinite(x + dy))
    for name, value in plain.items():
        others = (slice(None), [0, 3]) if value.ndim > 1 else [0, 3]
        np.testing.assert_array_equal(result[name][others], value[others], err_msg=name)


# ----------------------------------------------------------------- which build is chosen


class FakeKernel:
    """SerialParallelKernel that only say which of them was called."""

    def __init__(self, during: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[str] = []
        self.during = during

    def serial(self, *arguments: Array) -> None:
        self.calls.append("serial")

    def parallel(self, *arguments: Array) -> None:
        self.calls.append("parallel")
        self.during()


@pytest.fixture
def chosen() -> Callable[..., list[str]]:
    """`chosen(during=)`: the builds that were run."""

    def run(during: Callable[[FakeKernel], Any] = lambda kernel: None) -> list[str]:
        kernel: Any = FakeKernel(lambda: during(kernel))
        cpu.launch(kernel)
        return kernel.calls  # type: ignore[no-any-return]

    return run


def test_thread_that_comes_during_a_parallel_kernel_takes_the_serial_build(
    chosen: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_layer", lambda: "omp")

    def from_another_thread(kernel: FakeKernel) -> None:
        thread = threading.Thread(target=cpu.launch, args=(kernel,))
        thread.start()
        thread.join()

    assert chosen(during=from_another_thread) == ["parallel", "serial"]
    assert chosen() == ["parallel"], "the place is free again"


def test_parallel_kernel_that_fails_leaves_its_place(
    chosen: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_layer", lambda: "omp")

    def fail(kernel: FakeKernel) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        chosen(during=fail)
    assert chosen() == ["parallel"]


def test_workqueue_layer_is_not_entered_while_other_threads_live(
    chosen: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu.threading, "active_count", lambda: 1)
    monkeypatch.setattr(cpu, "_layer", lambda: "workqueue")
    assert chosen() == ["parallel"]
    monkeypatch.setattr(cpu.threading, "active_count", lambda: 2)
    assert chosen() == ["serial"]
    monkeypatch.setattr(cpu, "_layer", lambda: "tbb")
    assert chosen() == ["parallel"]


# ------------------------------------------------------------------- building and caching


# ---------------------------------------------------------------- threads, and forked children

TWO_THREADS = """
import threading
import numba, numpy as np
from syncbn_core import batch_norm_backward, batch_norm_forward

rng = np.random.default_rng(0)
x, dy = rng.normal(size=(2, 8, 16, 1000)).astype(np.float32)

def step(parallel=True):
    y, saved = batch_norm_forward(x, parallel=parallel)
    return np.stack([y, batch_norm_backward(dy, saved, parallel=parallel).x])

expected = step(parallel=False)
start = threading.Barrier(2)
wrong = []

def body(call):
    start.wait()
    for _ in range(40):
        result = call()
        if result is not None and not np.allclose(result, expected, atol=1e-5):
            wrong.append(1)

def both(call):
    other = threading.Thread(target=body, args=(call,))
    other.start()
    body(step)
    other.join()

both(step)  # nobody has started the layer so far
assert np.allclose(step(), expected, atol=1e-5)  # alone: the parallel build

@numba.njit(parallel=True, nogil=True)
def foreign(a):
    for i in numba.prange(a.size):
        a[i] += 1

mine = np.zeros(100_000)
foreign(mine)
both(lambda: foreign(mine))  # parallel code of somebody else, and ours
print(numba.threading_layer(), len(wrong))
"""


def test_two_threads_never_meet_in_the_workqueue_layer(fresh_python: Function) -> None:
    """Numba would abort the process."""
    printed = fresh_python(TWO_THREADS, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert printed.split() == ["workqueue", "0"]


FORK = """
import os, signal
import numba, numpy as np
from syncbn_core import batch_norm_forward

x = np.random.default_rng(0).normal(size=(8, 16, 1000)).astype(np.float32)
try:
    y, _ = batch_norm_forward(x)
except ValueError as error:
    assert "threading layer" in str(error), error
    print("absent")
    raise SystemExit

def works():
    return np.allclose(batch_norm_forward(x)[0], y, atol=1e-5)

layer = numba.threading_layer()  # the parallel build has run
child = os.fork()
if child == 0:
    signal.alarm(60)
    good = works()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if works() else 1)
    os._exit(0 if good and os.waitpid(grandchild, 0)[1] == 0 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert works(), "the parent goes on"
print(layer, status)
"""


@pytest.mark.skipif(not hasattr(cpu.os, "fork"), reason="no fork here")
@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb"])
def test_forked_child_works_after_the_parent_used_threads(
    layer: str, fresh_python: Function
) -> None:
    variables = {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    printed = fresh_python(FORK, PYTHONWARNINGS="ignore::DeprecationWarning", **variables)
    if printed.strip() == "absent":
        pytest.skip(f"no {layer} here")
    assert printed.split() == [layer, "0"]


# ------------------------------------------------------------------------ too little memory


MEMORY = """
import resource
import numpy as np
from syncbn_core._kernels.cpu import planes as cpu_planes
from syncbn_core._kernels.cpu import rows as cpu_rows

CHANNELS = 4_000_000  # with partial results of 32 MB each
WORKERS = 1_000_000  # with lines of 20 bytes each, and of 40

def kernels(build, channels, workers):
    x = np.ones((1, channels, 2), np.float32)
    sums, ones = np.full((2, channels), 7.0), np.ones(channels)
    of = lambda module, name: getattr(getattr(module, name), build)
    table, none = np.ones(3 * channels + 1), np.empty(0)
    moments = None, None, None, None, None
    yield sums, lambda: of(cpu_planes, "planes_sums")(x, None, *moments, sums)
    given = table, none, none, None, None
    yield sums, lambda: of(cpu_planes, "planes_sums")(x, x, *given, sums)
    x2, sums2, table2 = np.ones((64, 3), np.float32), np.full((2, 3), 7.0), np.ones(10)
    y = np.full((64, 3), 7, np.float32)
    each = 1, workers, table2, none, none, None, None
    rows = lambda name: of(cpu_rows, "rows_" + name)
    yield sums2, lambda: rows("sums")(x2, None, 1, workers, *moments, sums2)
    yield y, lambda: rows("write")(x2, None, *each, None, y)
    yield sums2, lambda: rows("sums")(x2, x2, *each, sums2)
    yield y, lambda: rows("write")(x2, x2, *each, np.ones((2, 3)), y)

for build in ("serial", "parallel"):
    for _, run in kernels(build, 3, 2):
        run()  # compiles, or loads
prepared = [pair for build in ("serial", "parallel") for pair in kernels(build, CHANNELS, WORKERS)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
raised = 0
for result, run in prepared:
    try:
        run()
    except MemoryError:
        raised += bool((result == 7).all())
print(raised, len(prepared))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
def test_kernel_without_memory_raises_and_writes_nothing(fresh_python: Function) -> None:
    printed = fresh_python(MEMORY, NUMBA_NUM_THREADS="2")
    assert printed.split() == ["12", "12"]
