"""The array API on CuPy arrays and compiled CUDA kernels: `fake_cupy` stands for CuPy, an emulator
for the device, and the same calls with NumPy arrays in float64 for what is right.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from emulator.device import emulated
from emulator.machine import Schedule
from fake_cupy import DEVICES, Device, Stream, races

import syncbn_core.backends
from syncbn_core import BatchNorm, functional
from syncbn_core.backends import operations_for
from syncbn_core.backends.base import Affine
from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.comm import NCCLCommunicator, device_message, run_in_threads, thread_group
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import (
    ArgumentError,
    BackendError,
    BatchSizeError,
    CommError,
    CommTimeout,
    DeviceError,
    DTypeError,
    ProtocolError,
    ShapeError,
    SyncBNError,
)
from syncbn_core.moments import NormRule

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
thread_group_module = sys.modules["syncbn_core.comm.thread_group"]
NAME = "syncbn_core.backends.cuda.cupy"


# ------------------------------------------------------------------ CuPy on the emulated device


@pytest.fixture(scope="module", autouse=True)
def gpu(arch):
    """One for all tests of this file, so that a kernel is loaded once."""
    with emulated(arch, devices=DEVICES) as device:
        yield device


@pytest.fixture(scope="module", autouse=True)
def cupy(gpu):
    with pytest.MonkeyPatch.context() as patch:
        module = fake_cupy.install(gpu)
        patch.setitem(sys.modules, "cupy", module)
        patch.setitem(sys.modules, "cupy.cuda", module.cuda)
        patch.delitem(sys.modules, NAME, raising=False)
        backend = importlib.import_module(NAME)
        try:
            yield module
        finally:
            fake_cupy.install()
            backend.OPERATIONS.counters.clear()
            del sys.modules[NAME], syncbn_core.backends.cuda.cupy
            syncbn_core.backends._operations_for_type.cache_clear()


@pytest.fixture(autouse=True)
def no_races(cupy, gpu):
    counters = sys.modules[NAME].OPERATIONS.counters
    counters.clear()
    races.reset()
    gpu.launches.clear()
    gpu.fault, gpu.schedule = None, Schedule()
    yield races
    assert not races.found
    assert gpu.fault is None
    assert not any(array._a.any() for array in counters.values()), "kernels leave counters behind"


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def up(values):
    return None if values is None else sys.modules["cupy"].asarray(values)


def down(value):
    return value.get() if isinstance(value, fake_cupy.ndarray) else value


def wide(values):
    return None if values is None else np.asarray(values, np.float64)


def close(actual, expected, dtype, what=""):
    actual, expected = wide(down(actual)), np.asarray(expected)
    bound = TOLERANCE[dtype] * (1 + np.abs(expected).max(initial=0))
    assert actual.shape == expected.shape, what
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=what)


def alone(view):
    """The same array; kernels must not read what lies around it in its memory."""
    own = view._grains()
    if own is not None:
        kept = own.copy()
        view.data.mem.area.written[:] = False
        own[...] = kept
    return view


# shape of what is uploaded, and the (N, C, ...) view of it
LAYOUTS = {
    "NCHW": ((2, 5, 3, 4), lambda a: a),
    "long planes": ((2, 3, 37, 40), lambda a: a),
    "channels last": ((2, 3, 4, 8), lambda a: a.transpose(0, 3, 1, 2)),
    "(N, C)": ((9, 4), lambda a: a),
    "(N, C) by columns": ((4, 9), lambda a: a.T),
    "N last": ((3, 4, 5), lambda a: a.transpose(2, 0, 1)),
    "transposed": ((2, 3, 5, 4), lambda a: a.transpose(0, 1, 3, 2)),
    "sliced": ((2, 4, 5, 6), lambda a: a[:, 1:, 1:4, ::2]),
    "flipped": ((3, 2, 6), lambda a: a[::-1, :, ::-1]),
    "planes, not at a multiple of 16 bytes": ((193,), lambda a: a[1:].reshape(2, 3, 32)),
    "rows, not at a multiple of 16 bytes": ((73,), lambda a: a[1:].reshape(9, 8)),
}
SPLIT = {  # several blocks per channel, so scratch and tickets
    "planes": ((4, 2, 2048), lambda a: a),
    "ragged planes": ((3, 2, 4099), lambda a: a),
    "rows": ((1300, 8), lambda a: a),
    "rows in groups": ((11500, 3), lambda a: a),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
OTHERS = ("float64", "float16", "bfloat16")


def numpy_dtype(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def pair(rng, layout, dtype="float32", mean=3.0):
    """The same array on the device, and in float64 on the host."""
    named = {**LAYOUTS, **SPLIT}
    shape, view = named[layout] if isinstance(layout, str) else (layout, lambda a: a)
    values = rng.normal(mean, 2, shape).astype(numpy_dtype(dtype))
    return alone(view(up(values))), wide(view(values))


def parameters(rng, channels, dtype="float32"):
    return rng.normal(1, 0.3, channels).astype(dtype), rng.normal(size=channels).astype(dtype)


# ------------------------------------------------------------------------------ one member


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "float32") for layout in LAYOUTS),
        *((layout, dtype) for layout in ("NCHW", "channels last") for dtype in OTHERS),
    ],
)
def test_forward_and_backward_equal_numpy_in_two_launches_each(layout, dtype, rng, arch):
    if dtype == "bfloat16" and arch < (8, 0):
        pytest.skip("needs compute capability 8.0")
    x, host = pair(rng, layout, dtype)
    dy = rng.normal(size=host.shape).astype(x.dtype)
    weight, bias = parameters(rng, host.shape[1])
    grads = up(dy)
    settings = [up(weight), up(bias)]
    races.transfers.clear()
    y, saved = functional.batch_norm_forward(x, *settings)
    assert len(races.launches) == 2
    gradients = functional.batch_norm_backward(grads, saved)
    assert len(races.launches) == 4
    assert not races.transfers, "nothing goes by the host"
    expected, kept = functional.batch_norm_forward(host, wide(weight), wide(bias))
    wanted = functional.batch_norm_backward(wide(dy), kept)
    close(y, expected, dtype)
    close(saved.mean, kept.mean, dtype if dtype == "float64" else "float32")
    close(saved.invstd, kept.invstd, dtype if dtype == "float64" else "float32")
    close(gradients.x, wanted.x, dtype)
    for actual, value in zip(gradients[1:], wanted[1:], strict=True):
        close(actual, value, "float32")
        assert actual.dtype == weight.dtype
    assert y.dtype == gradients.x.dtype == x.dtype
    assert y.device == gradients.x.device == x.device
    if layout not in ("sliced", "flipped"):
        assert y.strides == gradients.x.strides == x.strides


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_channel_over_several_blocks_equals_numpy_whatever_their_order(layout, dtype, rng, gpu):
    x, host = pair(rng, layout, dtype)
    dy = rng.normal(size=host.shape).astype(dtype)
    runs = []
    for order in ("first", "random"):  # the second run finds the tickets as the first left them
        gpu.schedule = Schedule(order, width=8)
        y, saved = functional.batch_norm_forward(x)
        runs.append((y, *functional.batch_norm_backward(up(dy), saved)))
    first, *_ = gpu.launches
    assert first.grid[1] > 1, "one block per channel: choose another shape"
    expected, kept = functional.batch_norm_forward(host)
    wanted = functional.batch_norm_backward(wide(dy), kept)
    for one, other, value in zip(*runs, (expected, *wanted), strict=True):
        np.testing.assert_array_equal(down(one), down(other))
        close(one, value, dtype)
        assert one.dtype == x.dtype


@pytest.mark.parametrize("kind", ["none", "weight only", "bias only", "float64", "every second"])
@pytest.mark.parametrize("training", [True, False])
def test_weight_and_bias_of_any_kind(kind, training, rng):
    x, host = pair(rng, "NCHW")
    dtype = "float64" if kind == "float64" else "float32"
    weight, bias = parameters(rng, 10, dtype)
    if kind in ("none", "bias only"):
        weight = None
    if kind in ("none", "weight only"):
        bias = None
    every = slice(None, None, 2) if kind == "every second" else slice(0, 5)
    here = [None if v is None else v[every] for v in (weight, bias)]
    there = [None if v is None else alone(up(v)[every]) for v in (weight, bias)]
    dy = rng.normal(size=host.shape).astype("float32")
    mean, var = rng.normal(size=5), rng.uniform(1, 2, 5)
    if training:
        y, saved = functional.batch_norm_forward(x, *there)
        expected, kept = functional.batch_norm_forward(host, *map(wide, here))
    else:
        y, saved = functional.batch_norm_eval(x, up(mean), up(var), *there)
        expected, kept = functional.batch_norm_eval(host, mean, var, *map(wide, here))
    gradients = functional.batch_norm_backward(up(dy), saved)
    wanted = functional.batch_norm_backward(wide(dy), kept)
    for actual, value in zip((y, *gradients), (expected, *wanted), strict=True):
        close(actual, value, "float32")
    assert gradients.weight.dtype == gradients.bias.dtype == (x if weight is None else weight).dtype


def running_of(rng, kind):
    mean, var = rng.normal(size=10), rng.uniform(1, 2, 10)
    kinds = {
        "float64": ("f8", "f8", slice(5)),
        "float16": ("f2", "f2", slice(5)),
        "mixed": ("f4", "f8", slice(5)),
        "every second": ("f4", "f4", slice(None, None, 2)),
        "backwards": ("f4", "f4", slice(None, 4, -1)),
    }
    of_mean, of_var, part = kinds[kind]
    return mean.astype(of_mean), var.astype(of_var), part


@pytest.mark.parametrize("kind", ["float64", "float16", "mixed", "every second", "backwards"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_of_any_kind_are_updated_in_place(kind, momentum, rng):
    x, host = pair(rng, "NCHW")
    mean, var, part = running_of(rng, kind)
    there = up(mean), up(var), up(np.int64(2))
    here = wide(mean), wide(var), np.array(2)
    for values, running_mean, running_var, counter in ((x, *there), (host, *here)):
        functional.batch_norm_forward(
            values,
            running_mean=running_mean[part],
            running_var=running_var[part],
            num_batches_tracked=counter,
            momentum=momentum,
        )
    for actual, expected in zip(there, here, strict=True):
        close(actual, expected, "float16" if kind == "float16" else "float32")
    assert int(there[2]) == 3
    untouched = np.ones(10, bool)
    untouched[part] = False
    np.testing.assert_array_equal(down(there[0])[untouched], mean[untouched])
    y, _ = functional.batch_norm_eval(x, there[0][part], there[1][part])
    close(y, functional.batch_norm_eval(host, here[0][part], here[1][part])[0], "float16")


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("with_running", [True, False])
def test_a_counter_of_any_integers_counts(dtype, momentum, with_running, rng):
    counter = up(np.zeros((), dtype))
    mean, var = up(np.zeros(2)), up(np.ones(2))
    here = np.zeros(2), np.ones(2), np.array(0)
    for step in range(1, 3):
        x, host = pair(rng, (3, 2), mean=step)
        running = {"running_mean": mean, "running_var": var} if with_running else {}
        settings = {"momentum": momentum, "num_batches_tracked": counter}
        functional.batch_norm_forward(x, **settings, **running)
        settings["num_batches_tracked"] = here[2]
        functional.batch_norm_forward(host, running_mean=here[0], running_var=here[1], **settings)
        assert int(counter) == step
        if with_running:
            close(mean, here[0], "float32")
            close(var, here[1], "float32")
    assert counter.dtype == dtype


@pytest.mark.parametrize("layout", ["NCHW", "channels last"])
def test_clamp_equals_numpy_where_it_holds_and_where_not(layout, rng):
    x, host = pair(rng, layout, "float64")
    channels = host.shape[1]
    scale = np.where(np.arange(channels) % 2, 1.0, 1e-3).reshape(1, -1, 1, 1)
    host = host * scale
    x[...] = up(host)
    dy = rng.normal(size=host.shape)
    settings = {"eps": 0.01, "eps_mode": "clamp"}
    results = []
    for values, grad in ((x, up(dy)), (host, dy)):
        y, saved = functional.batch_norm_forward(values, **settings)
        gradients = functional.batch_norm_backward(grad, saved)
        of_eval = functional.batch_norm_eval(values, saved.mean, saved.mean**2, **settings)[0]
        results.append((y, *gradients, of_eval))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, "float64")


@pytest.mark.parametrize("layout", ["NCHW", "sliced"])
def test_eval_and_its_backward_leave_running_statistics(layout, rng):
    x, host = pair(rng, layout)
    channels = host.shape[1]
    mean, var = rng.normal(size=channels), rng.uniform(1, 2, channels)
    weight, bias = parameters(rng, channels)
    dy = rng.normal(size=host.shape)
    arrays = [up(v) for v in (mean, var, weight, bias)]
    grad = up(dy)
    races.transfers.clear()
    y, saved = functional.batch_norm_eval(x, *arrays)
    arrays[0][...] = 7.0  # what came before its backward is what counts
    gradients = functional.batch_norm_backward(grad, saved)
    assert not races.transfers
    assert len(races.launches) == 3
    expected, kept = functional.batch_norm_eval(host, mean, var, wide(weight), wide(bias))
    wanted = functional.batch_norm_backward(dy, kept)
    for actual, value in zip((y, *gradients), (expected, *wanted), strict=True):
        close(actual, value, "float32")
    np.testing.assert_array_equal(down(arrays[1]), var)


# two blocks: what one writes may not be what the other reads
OUT_SHAPE = (22, 5, 3, 4)
OUT = ["new", "in place", "other layout", "with gaps", "overlapping", "overlapping backwards"]


def out_for(kind, x):
    """`(x, out)`"""
    xp = sys.modules["cupy"]
    if kind == "in place":
        return x, x
    n, c, h, w = x.shape
    if kind == "other layout":
        return x, xp.empty((n, h, w, c), x.dtype).transpose(0, 3, 1, 2)
    if kind == "with gaps":
        return x, xp.empty((n, c, h, 2 * w), x.dtype)[..., ::2]
    if kind.startswith("overlapping"):
        flat = xp.empty(x.size + 4, x.dtype)
        parts = flat[:-4].reshape(x.shape), flat[4:].reshape(x.shape)
        moved, out = parts if kind == "overlapping" else parts[::-1]
        moved[...] = x
        return moved, out
    return x, xp.empty(x.shape, x.dtype)


@pytest.mark.parametrize("kind", OUT)
@pytest.mark.parametrize("training", [True, False])
def test_y_is_written_to_out(kind, training, rng):
    x, host = pair(rng, OUT_SHAPE)
    x, out = out_for(kind, x)
    mean, var = rng.normal(size=5), rng.uniform(1, 2, 5)
    if training:
        y, _ = functional.batch_norm_forward(x, out=out)
        expected, _ = functional.batch_norm_forward(host)
    else:
        y, _ = functional.batch_norm_eval(x, up(mean), up(var), out=out)
        expected, _ = functional.batch_norm_eval(host, mean, var)
    assert y is out
    close(out, expected, "float32")


@pytest.mark.parametrize("kind", OUT)
def test_dx_is_written_to_out_which_may_be_dy_or_lie_across_it(kind, rng):
    x, host = pair(rng, OUT_SHAPE)
    dy, grad = pair(rng, OUT_SHAPE, mean=0.0)
    dy, out = out_for(kind, dy)
    _, saved = functional.batch_norm_forward(x)
    _, kept = functional.batch_norm_forward(host)
    gradients = functional.batch_norm_backward(dy, saved, out=out)
    assert gradients.x is out
    close(out, functional.batch_norm_backward(grad, kept).x, "float32")


def test_dx_may_lie_across_x(rng):
    x, host = pair(rng, OUT_SHAPE)
    x, out = out_for("overlapping", x)
    dy, grad = pair(rng, OUT_SHAPE, mean=0.0)
    _, saved = functional.batch_norm_forward(x)
    _, kept = functional.batch_norm_forward(host)
    gradients = functional.batch_norm_backward(dy, saved, out=out)
    close(gradients.x, functional.batch_norm_backward(grad, kept).x, "float32")


@pytest.mark.parametrize("kind", ["float64", "other layout", "stretched"])
def test_dy_of_another_kind_than_x(kind, rng):
    x, host = pair(rng, "NCHW")
    dy, grad = pair(rng, (2, 5, 3, 4), "float64", mean=0.0)
    if kind == "other layout":
        values = grad.astype("float32").transpose(0, 2, 3, 1).copy()
        dy, grad = up(values).transpose(0, 3, 1, 2), wide(values.transpose(0, 3, 1, 2))
    if kind == "stretched":
        dy = dy[:1, :, :1, :1]
        dy = dy._view(np.broadcast_to(dy._a, host.shape))
        grad = np.broadcast_to(grad[:1, :, :1, :1], host.shape)
    _, saved = functional.batch_norm_forward(x)
    _, kept = functional.batch_norm_forward(host)
    gradients = functional.batch_norm_backward(dy, saved)
    wanted = functional.batch_norm_backward(grad, kept)
    assert gradients.x.dtype == x.dtype
    for actual, value in zip(gradients, wanted, strict=True):
        close(actual, value, "float32")


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3, 3), (2, 4, 0), (2, 4, 0, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_moves_the_counter_alone(shape, training, rng):
    x = up(np.zeros(shape, "float32"))
    weight = up(np.ones(4, "float32"))
    mean, var = rng.normal(size=4), rng.uniform(1, 2, 4)
    there = [up(mean), up(var)]
    counter = up(np.int64(0))
    if training:
        y, saved = functional.batch_norm_forward(
            x, weight, running_mean=there[0], running_var=there[1], num_batches_tracked=counter
        )
        assert int(counter) == 1
    else:
        y, saved = functional.batch_norm_eval(x, *there, weight)
    gradients = functional.batch_norm_backward(up(np.zeros(shape, "float32")), saved)
    assert y.shape == gradients.x.shape == shape
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(down(gradient), np.zeros(4, "float32"))
    np.testing.assert_array_equal(down(there[0]), mean)
    np.testing.assert_array_equal(down(there[1]), var)


def test_no_channels_are_nothing_to_do():
    x = up(np.zeros((4, 0, 3, 3), "float32"))
    y, saved = functional.batch_norm_forward(x)
    assert y.shape == functional.batch_norm_backward(y, saved).x.shape == (4, 0, 3, 3)


def test_one_value_per_channel_is_refused_with_nothing_changed(rng):
    layer = BatchNorm(4, device="cuda")
    before = {name: down(array) for name, array in layer.state_dict().items()}
    out = up(np.full((1, 4), 5, "float32"))
    x = up(np.zeros((1, 4), "float32"))
    with pytest.raises(BatchSizeError):
        layer(x)
    with pytest.raises(BatchSizeError):
        functional.batch_norm_forward(x, out=out)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(down(array), before[name])
    assert (down(out) == 5).all()


@layouts
def test_each_step_equals_numpy(layout, rng):
    x, host = pair(rng, layout)
    channels = host.shape[1]
    dy = rng.normal(size=host.shape).astype("float32")
    weight, bias = parameters(rng, channels)
    rule = NormRule(0.1, "clamp")
    results = []
    for a, g, convert in ((x, up(dy), up), (host, wide(dy), wide)):
        operations = operations_for(a)
        part = operations.moments(a)
        assert part.known_count == host.size // channels
        both = operations.merge([part, part])
        total = both.wait() if isinstance(both, DeviceMoments) else both
        assert total.count == both.known_count == 2 * part.known_count
        known = operations.statistics(part, rule)
        affine = Affine(convert(weight), convert(bias))
        y, known, _ = operations.forward(a, known, affine, rule)
        plain = operations.forward(a, operations.statistics(both, rule), Affine(), rule).y
        sums = operations.backward_reduce(a, g, known, affine, rule)
        results.append(
            (
                total.mean,
                total.m2,
                known.mean,
                known.invstd,
                y,
                plain,
                *sums,
                operations.backward_input(a, g, known, affine, rule, sums.exchange),
                operations.backward_input(a, g, known, Affine(), rule, None),
            )
        )
    for number, (actual, expected) in enumerate(zip(*results, strict=True)):
        close(actual, expected, "float32", f"result {number}")
    assert results[0][6].dtype == np.float64
    assert len(races.launches) == 6, "one kernel per step"


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)])
def test_each_step_takes_an_empty_part(shape):
    x, rule = up(np.zeros(shape, "float32")), NormRule()
    operations = operations_for(x)
    part = operations.moments(x)
    assert part.known_count == 0
    y, known, _ = operations.forward(x, operations.statistics(part, rule), Affine(), rule)
    assert y.shape == shape
    sums = operations.backward_reduce(x, x, known, Affine(), rule)
    for values in (part.rows[0, 1:5], part.rows[0, 5:], *sums):
        np.testing.assert_array_equal(down(values), np.zeros(values.shape))
    dx = operations.backward_input(x, x, known, Affine(), rule, sums.exchange)
    assert dx.shape == shape


def test_not_finite_values_stay_in_their_channel(rng):
    x, host = pair(rng, "NCHW")
    for values in (x, host):
        values[0:1, 1:2, 0:1, 0:1] = np.inf
    mean, var = up(np.zeros(5)), up(np.ones(5))
    y, _ = functional.batch_norm_forward(x, running_mean=mean, running_var=var)
    expected = np.zeros(5, bool)
    expected[1] = True
    np.testing.assert_array_equal(np.isnan(down(y)).all((0, 2, 3)), expected)
    np.testing.assert_array_equal(np.isfinite(down(y)).all((0, 2, 3)), ~expected)
    np.testing.assert_array_equal(np.isnan(down(var)), expected)


# ----------------------------------------------------------------------------------- layers


def layer_pair(rng, channels, **settings):
    here = BatchNorm(channels, dtype=np.float64, **settings)
    if here.parameters():
        here.weight[...], here.bias[...] = parameters(rng, channels, "f8")
    there = BatchNorm(channels, dtype=np.float64, device="cuda", **settings)
    there.load_state_dict(here.state_dict())
    return there, here


@pytest.mark.parametrize(
    "settings",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}],
    ids=["plain", "no affine", "no statistics", "momentum=None"],
)
def test_a_layer_trains_as_its_numpy_twin_without_the_host(settings, rng):
    there, here = layer_pair(rng, 5, **settings)
    batches = [(*pair(rng, "NCHW", "float64"), *pair(rng, "NCHW", "float64")) for _ in range(2)]
    races.transfers.clear()
    results = []
    for x, host, dy, grad in batches:
        results += [(there(x), here(host)), (there.backward(dy), here.backward(grad))]
        for layer in (there, here):
            for parameter, gradient in zip(layer.parameters(), layer.gradients(), strict=True):
                parameter += gradient * -0.1
        if there.gradients():
            results += [(there.weight_grad.copy(), here.weight_grad.copy())]
        there.zero_grad(), here.zero_grad()
    there.eval(), here.eval()
    results += [(there(x), here(host)), (there.backward(dy), here.backward(grad))]
    assert not races.transfers
    state, twin = there.state_dict(), here.state_dict()
    assert state.keys() == twin.keys()
    for actual, expected in [*results, *((state[name], twin[name]) for name in state)]:
        close(actual, expected, "float64")


@pytest.mark.parametrize("direction", ["to the device", "to the host", "on the device"])
def test_states_move_between_host_and_device(direction, rng):
    there, here = layer_pair(rng, 5)
    source, target = {
        "to the device": (here, BatchNorm(5, device="cuda")),
        "to the host": (there, BatchNorm(5)),
        "on the device": (there, BatchNorm(5, device="cuda:1")),
    }[direction]
    source.running_mean[...] = 3.0
    source.num_batches_tracked += 4
    target.load_state_dict(source.state_dict())
    for name, array in target.state_dict().items():
        assert type(array) is type(getattr(target, name))
        expected = down(getattr(source, name))
        np.testing.assert_array_equal(down(array), expected.astype(array.dtype))


def test_a_state_of_other_shapes_changes_nothing(rng):
    layer = BatchNorm(5, device="cuda")
    with pytest.raises(SyncBNError):
        layer.load_state_dict(BatchNorm(4, device="cuda").state_dict())
    assert (down(layer.weight) == 1).all()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_layer_is_where_it_shall_be(device):
    layer = BatchNorm(3, device=device)
    for array in (*layer.parameters(), *layer.gradients(), *layer.state_dict().values()):
        assert array.device == Device(int(device[-1]) if ":" in device else 0)


def test_a_device_that_is_not_there_is_an_error(cupy):
    with pytest.raises(BackendError, match="2 CUDA devices"):
        BatchNorm(3, device="cuda:2")


def test_a_layer_works_on_a_device_that_is_not_the_current_one(rng):
    layer, here = BatchNorm(5, device="cuda:1", dtype=np.float64), BatchNorm(5, dtype=np.float64)
    with Device(1):
        x, host = pair(rng, "NCHW", "float64")
        dy, grad = pair(rng, "NCHW", "float64")
    y, dx = layer(x), layer.backward(dy)
    for array in (y, dx, *layer.gradients()):
        assert array.device == Device(1)
    layer.zero_grad()
    state = layer.state_dict()
    layer.load_state_dict(state)
    close(y, here(host), "float64")
    close(dx, here.backward(grad), "float64")
    for name, array in here.state_dict().items():
        close(getattr(layer, name), array, "float64")
        assert state[name].device == Device(1)
    layer.eval(), here.eval()
    close(layer(x), here(host), "float64")
    close(layer.backward(dy), here.backward(grad), "float64")
    assert fake_cupy._get_device() == 0


# ----------------------------------------------------------------------------------- errors


def wrong_arguments(right, wrong):
    """Calls in which one array is of another kind or place than x."""
    channel, x = np.ones(4, "float32"), np.ones((3, 4), "float32")

    def saved():
        return functional.batch_norm_forward(right(x))[1]

    running = functional.batch_norm_forward
    return {
        "weight": lambda: running(right(x), wrong(channel)),
        "bias": lambda: running(right(x), right(channel), wrong(channel)),
        "running": lambda: running(
            right(x), running_mean=wrong(channel), running_var=wrong(channel)
        ),
        "counter": lambda: running(right(x), num_batches_tracked=wrong(np.zeros((), int))),
        "out": lambda: running(right(x), out=wrong(x)),
        "eval": lambda: functional.batch_norm_eval(right(x), right(channel), wrong(channel)),
        "dy": lambda: functional.batch_norm_backward(wrong(x), saved()),
        "dx": lambda: functional.batch_norm_backward(right(x), saved(), out=wrong(x)),
    }


def on_device_one(values):
    with Device(1):
        return up(values)


@pytest.mark.parametrize("name", wrong_arguments(up, up))
@pytest.mark.parametrize(
    ("right", "wrong"),
    [(up, np.array), (np.array, up), (up, on_device_one), (on_device_one, up)],
    ids=["host to device", "device to host", "1 to 0", "0 to 1"],
)
def test_arrays_of_two_kinds_or_devices_are_an_error(name, right, wrong):
    with pytest.raises(DeviceError, match="of the kind of x"):
        wrong_arguments(right, wrong)[name]()


@pytest.mark.parametrize("wrong", [np.array, on_device_one], ids=["host", "other device"])
def test_a_layer_with_an_input_from_elsewhere_changes_nothing(wrong):
    layer = BatchNorm(4, device="cuda")
    with pytest.raises(DeviceError):
        layer(wrong(np.ones((3, 4), "float32")))
    assert int(layer.num_batches_tracked) == 0
    assert not down(layer.running_mean).any()
    assert not races.launches


# ---------------------------------------------------------------------------- several members


@contextlib.contextmanager
def one_stream(rank):
    yield


@contextlib.contextmanager
def streams(rank):
    with Stream(non_blocking=True):
        yield


@contextlib.contextmanager
def per_thread_streams(rank):
    with Stream.ptds:
        yield


@contextlib.contextmanager
def two_devices(rank):
    with Device(rank % 2), Stream():
        yield


@contextlib.contextmanager
def two_devices_default_streams(rank):
    with Device(rank % 2):
        yield


PLACES = [one_stream, streams, per_thread_streams, two_devices, two_devices_default_streams]
places = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def in_group(size, place, member, nccl=False, **settings):
    """Results of `member(rank, communicator)`, each in its thread, at its place."""
    group = thread_group(size, timeout=60)
    identifier = NCCLCommunicator.new_id()

    def run(rank):
        with place(rank):
            if nccl:
                own = NCCLCommunicator(rank, size, identifier, timeout=30, **settings)
                return member(rank, own)
            return member(rank, group[rank])

    return run_in_threads(
        [lambda rank=rank: run(rank) for rank in range(size)],
        abort=group[0].abort,
        leave=lambda rank: group[rank].leave(),
    )


def train(parts, grads, place, nccl=False, **settings):
    """Two steps and an eval of a layer per member: arrays by member."""

    def member(rank, own):
        layer = BatchNorm(
            parts[0].shape[1], device="cuda", dtype=np.float64, communicator=own, **settings
        )
        results = []
        for scale in (1, 2):
            x, dy = up(parts[rank] * scale), up(grads[rank])
            races.transfers.clear()
            results += [layer(x), layer.backward(dy)]
            del x, dy  # memory is free for others as early as it can be
        gradients = own.all_reduce_sums(layer.weight_grad)
        results += [gradients, *layer.state_dict().values()]
        return [down(array) for array in results]

    return in_group(len(parts), place, member, nccl)


def train_alone(parts, grads, **settings):
    layer = BatchNorm(parts[0].shape[1], dtype=np.float64, **settings)
    results = []
    for scale in (1, 2):
        y = layer(np.concatenate(parts) * scale)
        results += [y, layer.backward(np.concatenate(grads))]
    return [*results, layer.weight_grad, *layer.state_dict().values()]


def check_group(rows, place, rng, nccl=False, **settings):
    parts = [rng.normal(3, 2, (n, 2, 3)) for n in rows]
    grads = [rng.normal(size=part.shape) for part in parts]
    members = train(parts, grads, place, nccl, **settings)
    expected = train_alone(parts, grads, **settings)
    for step in range(4):
        close(np.concatenate([member[step] for member in members]), expected[step], "float64")
    for member in members:
        for actual, wanted, first in zip(member[4:], expected[4:], members[0][4:], strict=True):
            np.testing.assert_array_equal(actual, first, "members differ")
            close(actual, wanted, "float64")


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        *(((2, 0, 1), place) for place in PLACES),
        *((rows, place) for rows in ((3, 2, 4), (0, 3)) for place in (streams, two_devices)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_members_equal_the_undivided_batch_in_every_place(rows, place, rng):
    check_group(rows, place, rng)


def test_members_that_clamp_equal_the_undivided_batch(rng):
    check_group((3, 1), two_devices, rng, eps=3.0, eps_mode="clamp", momentum=None)


@places
def test_one_row_in_all_is_refused_by_every_member(place):
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        with pytest.raises(BatchSizeError):
            layer(up(np.ones((int(rank == 1), 3), "float32")))
        assert int(layer.num_batches_tracked) == 0

    in_group(2, place, member)


@places
def test_an_empty_batch_of_all_members(place):
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        x = up(np.ones((0, 3), "float32"))
        assert layer(x).shape == layer.backward(x).shape == (0, 3)
        return int(layer.num_batches_tracked), down(layer.running_var)

    for count, var in in_group(2, place, member):
        assert count == 1
        np.testing.assert_array_equal(var, np.ones(3))


def test_members_with_the_current_device_elsewhere(rng):
    parts = [rng.normal(size=(2, 3)) for _ in range(2)]

    def member(rank, own):
        layer = BatchNorm(3, device=f"cuda:{rank}", dtype=np.float64, communicator=own)
        with Device(rank):
            x = up(parts[rank])
        with Device(1 - rank):
            y, dx = layer(x), layer.backward(x)
        assert y.device == dx.device == Device(rank)
        return down(y), down(dx)

    results = in_group(2, one_stream, member)
    twin = BatchNorm(3, dtype=np.float64)
    close(np.concatenate([y for y, _ in results]), twin(np.concatenate(parts)), "float64")
    close(
        np.concatenate([dx for _, dx in results]),
        twin.backward(np.concatenate(parts)),
        "float64",
    )


def test_a_step_of_members_launches_two_kernels_per_direction_and_leaves_the_host_alone():
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        x = up(np.ones((2, 3), "float32"))
        races.transfers.clear()
        layer(x)
        layer.backward(x)

    for place in (one_stream, two_devices):
        races.launches.clear()
        in_group(1, place, member)
        assert not races.transfers
        assert len(races.launches) == 4
        in_group(3, place, member)
        assert len(races.launches) == 16


@places
@pytest.mark.parametrize("kind", ["(3,)", "(2, 3)", "()", "every second", "by columns"])
def test_sums_of_any_shape_and_layout(kind, place, rng):
    values = rng.normal(size=(3, 2, 3))
    every = threading.Barrier(3, timeout=30)

    def member(rank, own):
        mine = values[rank]
        array, here = {
            "(3,)": lambda: (up(mine[0]), mine[0]),
            "(2, 3)": lambda: (up(mine), mine),
            "()": lambda: (up(mine[0, 0]), mine[0, 0]),
            "every second": lambda: (up(mine)[0, ::2], mine[0, ::2]),
            "by columns": lambda: (up(mine.T.copy()).T, mine),
        }[kind]()
        total = own.all_reduce_sums(array)
        assert total.device == array.device
        with total.device:
            total += float(rank)  # it is the member's own
        every.wait()
        return here, down(total), down(array)

    results = in_group(3, place, member)
    expected = sum(here for here, _, _ in results)
    for rank, (here, total, kept) in enumerate(results):
        close(total, expected + rank, "float64")
        np.testing.assert_array_equal(kept, here)


@places
def test_sums_of_two_dtypes_do_not_write_beyond_anybodys_memory(place):
    def member(rank, own):
        values = np.full(3, 1.5, "float64" if rank == 0 else "float32")
        return down(own.all_reduce_sums(up(values)))

    try:
        results = in_group(2, place, member)
    except SyncBNError:
        return
    for total in results:
        np.testing.assert_array_equal(total, np.full(3, 3.0))


def test_members_on_host_and_device_are_an_error():
    def member(rank, own):
        x = np.ones((2, 3), "float32")
        functional.batch_norm_forward(x if rank else up(x), communicator=own)

    with pytest.raises(DeviceError, match="1 of 2 on GPUs"):
        in_group(2, one_stream, member)


def test_members_of_other_channels_are_an_error():
    def member(rank, own):
        functional.batch_norm_forward(up(np.ones((2, 3 + rank), "float32")), communicator=own)

    with pytest.raises(ShapeError, match="same number of channels"):
        in_group(2, streams, member)


class Own:
    """A communicator of a user's own: members that all have the same part."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def all_gather(self, values, call=None):
        xp = np if isinstance(values, np.ndarray) else sys.modules["cupy"]
        return xp.concatenate([values[None]] * self.size)

    def all_reduce(self, values, call=None):
        xp = np if isinstance(values, np.ndarray) else sys.modules["cupy"]
        wide = xp.empty((2, 2 * values.shape[1]))
        wide[:, ::2] = values * float(self.size)
        return wide[:, ::2]  # in any layout


@pytest.mark.parametrize("size", [1, cuda.MAX_PARTS + 1])
def test_any_communicator_will_do_and_many_parts_are_merged_by_a_launch(size, rng):
    x, host = pair(rng, "NCHW", "float64")
    dy, grad = pair(rng, "NCHW", "float64")
    y, saved = functional.batch_norm_forward(x, communicator=Own(size))
    merging = ["merge_parts"] if size > cuda.MAX_PARTS else []
    assert races.launches == ["planes_moments", *merging, "planes_normalize"]
    dx = functional.batch_norm_backward(dy, saved, communicator=Own(size)).x
    expected, kept = functional.batch_norm_forward(host, communicator=Own(size))
    close(y, expected, "float64")
    close(dx, functional.batch_norm_backward(grad, kept, communicator=Own(size)).x, "float64")


def test_the_example_trains_on_streams_as_it_does_on_numpy():
    for package in ("sklearn", "rich", "tqdm"):
        pytest.importorskip(package)
    path = Path(__file__).parents[2] / "examples" / "cupy_pipeline.py"
    spec = importlib.util.spec_from_file_location("cupy_pipeline", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.TRAINED = 1780  # the others are taken at once, through all of the network
    xp, which = example.array_library()
    assert xp is sys.modules["cupy"]
    assert which.startswith("On CuPy")
    on_the_host, _ = example.train(np, 1, steps=2)[0]
    for state, _ in example.train(xp, 3, steps=2):
        for name, values in on_the_host.items():
            close(state[name], values, "float64", name)


# ----------------------------------------------------------------------- order, and its checker


# What is found once in `device_message`, and what it is replaced by.
MISTAKES = {
    "combiner does not wait": (r"stream\.wait_event\(message\.ready\)", "pass"),
    "member does not wait": (r"cupy\S+\.wait_event\(self\.done\)", "pass"),
    "inbox made after the event": (
        r"self\.ready = self\.stream\.record\(\)",
        "self.ready = self.stream.record(); "
        "self.inbox = cupy.empty((*prefix, *array.shape), array.dtype)",
    ),
    "done before the copies": (r"done = stream\.record\(\)", "done = home.ready"),
    "members keep the combiner's memory": (
        r"else Reply\(message\.inbox, done\)",
        "else Reply(result, done)",
    ),
}


def with_mistake(pattern, replacement):
    text = Path(device_message.__file__).read_text(encoding="utf-8")
    text, count = re.subn(pattern, replacement, text)
    assert count == 1, f"{pattern} is not there any more: change this test"
    module = ModuleType("syncbn_core.comm.device_message_with_mistake")
    exec(compile(text, "message_with_mistake.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checker_finds_a_missing_wait(mistake, monkeypatch, rng):
    module = with_mistake(*MISTAKES[mistake])
    for name in ("DeviceMessage", "Reply", "add_messages", "gather_messages"):
        monkeypatch.setattr(thread_group_module, name, getattr(module, name))
    parts = [rng.normal(size=(2, 3)) for _ in range(3)]
    train(parts, parts, streams)
    assert races.found
    assert "is not ordered after" in races.found[0]
    races.found.clear()


def test_the_checker_knows_streams_events_and_memory_given_back(cupy):
    first, second = Stream(), Stream()
    with first:
        array = cupy.ones(3)
        event = first.record()
    with second:
        second.wait_event(event)
        array + 1.0
    assert not races.found
    with second:
        array += 1.0
    del array  # goes back to the pool of `first`, which has not waited
    assert races.found
    assert all("its release" in text and "add" in text for text in races.found)
    races.found.clear()


@contextlib.contextmanager
def fault(gpu, match):
    with pytest.raises(BackendError, match=match):
        yield
    assert gpu.fault is not None
    gpu.fault = None


def merge(parts, size=1, stream=None):
    """A launch with the bare address of `parts`: who calls keeps the memory."""
    into = sys.modules["cupy"].empty(7)
    run = sys.modules[NAME].OPERATIONS.launcher(sys.modules["cupy"].cuda.runtime.getDevice())
    run.stream = run.stream if stream is None else stream.ptr
    cuda.merge_parts(run, parts, size, 3, into.data.ptr)
    return into


def test_kernels_may_touch_memory_until_it_is_released(cupy, gpu):
    array = cupy.ones(7)
    assert down(merge(array.data.ptr)).tolist() == [1] * 7
    with fault(gpu, r"out of bounds.* of float64 \(7,\) of test_cupy"):
        merge(array.data.ptr, 2)
    address = array.data.ptr
    del array
    with fault(gpu, "out of bounds"):
        merge(address)


def test_kernels_may_read_what_somebody_has_written(cupy, gpu):
    whole = cupy.empty(8)
    whole[:7] = cupy.ones(7)
    merge(whole.data.ptr)
    with fault(gpu, "reads what nobody has written"):
        merge(whole.data.ptr + 8)
    whole.sum()
    assert "sum, test_cupy_backend.py" in races.found.pop()


def test_kernels_have_memory_and_streams_of_their_own_device(cupy, gpu):
    with Device(1):
        far, stream = cupy.ones(7), Stream()
        merge(far.data.ptr)
    with fault(gpu, "merge_parts on device 0 touches memory of device 1"):
        merge(far.data.ptr)
    near = cupy.ones(7)
    with fault(gpu, "runs on device 0, on a stream of device 1"):
        merge(near.data.ptr, stream=stream)


def test_the_stand_in_refuses_what_cupy_refuses(cupy):
    array = cupy.ones(3)
    for refused in (
        lambda: np.asarray(array),
        lambda: array + np.ones(3),
        lambda: np.ones(3) + array,
        lambda: np.concatenate([array]),
    ):
        with pytest.raises(TypeError):
            refused()
    with Device(1), pytest.raises(ValueError, match="Array device"):
        array * 2.0


# ------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "place", [streams, per_thread_streams, two_devices_default_streams], ids=lambda p: p.__name__
)
def test_channels_over_several_blocks_on_streams_side_by_side(place, rng):
    """Each alone: what a stream counts in, and its partial sums, are no other's."""
    values = rng.normal(3, 2, (4, 2, 2048))

    def member(rank):
        with place(rank):
            x = up(values * (rank + 1))
            y, saved = functional.batch_norm_forward(x)
            return down(y), down(functional.batch_norm_backward(x, saved).x)

    results = run_in_threads([lambda rank=rank: member(rank) for rank in range(2)])
    assert len(sys.modules[NAME].OPERATIONS.counters) == 2
    for rank, result in enumerate(results):
        y, saved = functional.batch_norm_forward(values * (rank + 1))
        close(result[0], y, "float64")
        close(result[1], functional.batch_norm_backward(values * (rank + 1), saved).x, "float64")


# ------------------------------------------------------------------------------- CUDA graphs


@contextlib.contextmanager
def captured(stream):
    fake_cupy.capturing.add(stream.ptr)
    try:
        yield
    finally:
        fake_cupy.capturing.discard(stream.ptr)


@pytest.mark.parametrize("stream", [Stream, lambda: Stream.ptds], ids=["stream", "per thread"])
def test_a_captured_graph_has_counters_of_its_own(stream, rng, gpu):
    with stream() as current:
        x, _ = pair(rng, "planes")

        def launches_that_count():
            gpu.launches.clear()
            _, saved = functional.batch_norm_forward(x)
            functional.batch_norm_backward(x, saved)
            return sum(counters.data.ptr in launch.stored_bytes for launch in gpu.launches)

        functional.batch_norm_forward(x)
        (counters,) = sys.modules[NAME].OPERATIONS.counters.values()
        assert launches_that_count() == 2
        with captured(current):
            assert launches_that_count() == 0
        assert launches_that_count() == 2
    assert len(sys.modules[NAME].OPERATIONS.counters) == 1


@pytest.mark.parametrize("place", [one_stream, streams, two_devices], ids=lambda p: p.__name__)
@pytest.mark.parametrize("rows", [(2, 0, 1), (3, 2), (4,)], ids=str)
def test_ranks_of_nccl_equal_the_undivided_batch(rows, place, rng):
    check_group(rows, place, rng, nccl=True)


def test_the_host_takes_no_part_in_nccl(rng):
    x = rng.normal(size=(4, 3, 5))

    def member(rank, own):
        layer, part = BatchNorm(3, device="cuda", communicator=own), up(x)
        races.transfers.clear()
        layer.backward(layer(part))
        assert not races.transfers
        own.synchronize()

    in_group(2, two_devices, member, nccl=True)


def test_nccl_takes_arrays_of_the_host_there_and_back():
    def member(rank, own):
        total = own.all_reduce_sums(np.array([1.0, rank]))
        assert type(total) is np.ndarray
        counts = own.all_reduce_sums(up(np.int64([rank, 7])))
        with pytest.raises(DTypeError, match="complex128"):
            own.all_reduce_sums(np.array([1j]))
        return total.tolist(), down(counts).tolist()

    assert in_group(2, two_devices, member, nccl=True) == [([2.0, 1.0], [1, 14])] * 2


def test_nccl_ranks_in_different_layers_are_told_so():
    def member(rank, own):
        layers = [BatchNorm(c, device="cuda", communicator=own, name=f"layer {c}") for c in (3, 4)]
        with pytest.raises(ProtocolError, match=r"rank 1: call 1 .forward of layer 4, layer 1: 9"):
            layers[rank](up(np.ones((2, 3 + rank), "float32")))
        layers[0](up(np.ones((2, 3), "float32")))

    in_group(2, streams, member, nccl=True, check_order=True)


def unlike_branches(own, rank):
    """A backward of another layer on each rank: its dx."""
    layers = [BatchNorm(3, device="cuda", communicator=own, name=name) for name in "ab"]
    ys = [layer(up(np.ones((2, 3), "float32") + rank)) for layer in layers]
    return layers[rank].backward(ys[rank]), ys


TOLD = r"different ones in call 3 .backward of {}, layer {}, forward in call {}: 6 numbers"


@pytest.mark.parametrize("looks", ["the next call", "synchronize"])
def test_nccl_ranks_in_backward_of_other_layers_get_nan_and_are_told_later(looks):
    def member(rank, own):
        dx, ys = unlike_branches(own, rank)
        told = TOLD.format("ab"[rank], 1 + rank, 1 + rank)
        with pytest.raises(ProtocolError, match=told):
            own.synchronize() if looks == "synchronize" else own.all_reduce_sums(ys[0])
        assert np.isnan(down(dx)).all()
        with pytest.raises(CommError, match="failed before: expected all ranks"):
            own.all_reduce_sums(ys[0])

    in_group(2, streams, member, nccl=True)


def test_nobody_waits_to_be_told_of_nccl_ranks_in_other_layers():
    def member(rank, own):
        fake_cupy.stuck.append(True)
        dx, ys = unlike_branches(own, rank)
        total = own.all_reduce_sums(ys[0])
        own._nccl._comm._shared.barrier.wait()
        fake_cupy.stuck.clear()
        with pytest.raises(ProtocolError, match=TOLD.format("ab"[rank], 1 + rank, 1 + rank)):
            own.synchronize()
        return down(dx), down(total)

    try:
        for dx, total in in_group(2, streams, member, nccl=True):
            assert np.isnan(dx).all()
            assert np.isfinite(total).all()
    finally:
        fake_cupy.stuck.clear()


def test_a_captured_backward_of_other_layers_gives_nan():
    def member(rank, own):
        with captured(fake_cupy.get_current_stream()):
            dx, ys = unlike_branches(own, rank)
            own.all_reduce_sums(ys[0])
        assert not own._later
        return down(dx)

    assert all(np.isnan(dx).all() for dx in in_group(2, streams, member, nccl=True))


def test_waiting_for_nccl_has_a_deadline():
    def member(rank, own):
        x = up(np.ones((2, 3), "float32"))
        functional.batch_norm_forward(x, communicator=own)
        fake_cupy.stuck.append(True)
        with pytest.raises(CommTimeout, match=r"rank 0 of 1 waited 0.05 s for call 1 .forward"):
            own.synchronize(0.05)
        assert own._nccl._comm.aborted
        with pytest.raises(CommError, match=r"failed before.*waited 0.05 s"):
            functional.batch_norm_forward(x, communicator=own)

    try:
        in_group(1, streams, member, nccl=True)
    finally:
        fake_cupy.stuck.clear()


def test_nccl_waits_for_all_ranks_with_a_deadline(cupy, monkeypatch):
    with pytest.raises(CommTimeout, match=r"rank 0 of 2 waited 0\.05 s for all ranks"):
        NCCLCommunicator(0, 2, "lonely", timeout=0.05)
    with pytest.raises(ArgumentError, match="got rank 2 of 2"):
        NCCLCommunicator(2, 2, "lonely")
    monkeypatch.setattr(fake_cupy.nccl, "available", False)
    with pytest.raises(BackendError, match="pip install nvidia-nccl-cu12"):
        NCCLCommunicator.new_id()
