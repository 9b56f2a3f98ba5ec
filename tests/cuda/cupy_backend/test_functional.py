"""The functions of `syncbn_core` on CuPy arrays equal those on NumPy arrays in float64."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cupy_arrays import (
    LAYOUTS,
    OTHERS,
    SPLIT,
    as_float64,
    close,
    pair,
    parameters,
    to_device,
    to_host,
)
from fake_cupy import log

from ptx_emulator.machine import Schedule
from syncbn_core import BatchNorm, functional
from syncbn_core.errors import BatchSizeError
from syncbn_core.moments import ACTIVATIONS


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
    grads = to_device(dy)
    settings = [to_device(weight), to_device(bias)]
    log.transfers.clear()
    y, saved = functional.batch_norm_forward(x, *settings)
    assert len(log.launches) == 2
    gradients = functional.batch_norm_backward(grads, saved)
    assert len(log.launches) == 4
    assert not log.transfers, "nothing goes by the host"
    expected, kept = functional.batch_norm_forward(host, as_float64(weight), as_float64(bias))
    wanted = functional.batch_norm_backward(as_float64(dy), kept)
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
    for order in (
        "first",
        "random",
    ):  # the second run uses the counters of the first
        gpu.schedule = Schedule(order, width=8)
        y, saved = functional.batch_norm_forward(x)
        runs.append((y, *functional.batch_norm_backward(to_device(dy), saved)))
    first, *_ = gpu.launches
    assert first.grid[1] > 1, "one block per channel: choose another shape"
    expected, kept = functional.batch_norm_forward(host)
    wanted = functional.batch_norm_backward(as_float64(dy), kept)
    for one, other, value in zip(*runs, (expected, *wanted), strict=True):
        np.testing.assert_array_equal(to_host(one), to_host(other))
        close(one, value, dtype)
        assert one.dtype == x.dtype


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
    there = to_device(mean), to_device(var), to_device(np.int64(2))
    here = as_float64(mean), as_float64(var), np.array(2)
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
    np.testing.assert_array_equal(to_host(there[0])[untouched], mean[untouched])
    y, _ = functional.batch_norm_eval(x, there[0][part], there[1][part])
    close(y, functional.batch_norm_eval(host, here[0][part], here[1][part])[0], "float16")


@pytest.mark.parametrize("layout", ["NCHW", "channels last"])
def test_clamp_equals_numpy_where_it_holds_and_where_not(layout, rng):
    x, host = pair(rng, layout, "float64")
    channels = host.shape[1]
    scale = np.where(np.arange(channels) % 2, 1.0, 1e-3).reshape(1, -1, 1, 1)
    host = host * scale
    x[...] = to_device(host)
    dy = rng.normal(size=host.shape)
    settings = {"eps": 0.01, "eps_mode": "clamp"}
    results = []
    for values, grad in ((x, to_device(dy)), (host, dy)):
        y, saved = functional.batch_norm_forward(values, **settings)
        gradients = functional.batch_norm_backward(grad, saved)
        of_eval = functional.batch_norm_eval(values, saved.mean, saved.mean**2, **settings)[0]
        results.append((y, *gradients, of_eval))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, "float64")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_activations_equal_numpy(activation, dtype, rng):
    x, host = pair(rng, "channels last", dtype)
    dy = rng.normal(size=host.shape).astype(x.dtype)
    weight, bias = parameters(rng, host.shape[1], "float64")
    results = []
    for values, grad, arrays in (
        (x, to_device(dy), [to_device(weight), to_device(bias)]),
        (host, as_float64(dy), [weight, bias]),
    ):
        y, saved = functional.batch_norm_forward(values, *arrays, activation=activation)
        gradients = functional.batch_norm_backward(grad, saved)
        running = saved.mean, saved.mean**2 + 1
        of_eval = functional.batch_norm_eval(values, *running, *arrays, activation=activation)
        results.append((y, *gradients, of_eval[0]))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_masks_equal_numpy(dtype, rng):
    x, host = pair(rng, "channels last", dtype)
    dy = rng.normal(size=host.shape).astype(x.dtype)
    mask = rng.random((len(host), 1, *host.shape[2:])) < 0.6
    results = []
    for values, grad, given in (
        (x, to_device(dy), to_device(mask)),
        (host, as_float64(dy), mask),
    ):
        mean, var = (grad.sum((0, 2, 3)) * 0 + n for n in (0.0, 1.0))
        running = {"running_mean": mean, "running_var": var}
        y, saved = functional.batch_norm_forward(values, mask=given, **running)
        of_eval, _ = functional.batch_norm_eval(values, mean, var, mask=given)
        if values is x:
            given[...] = True  # what it was in forward counts
        results.append((y, *functional.batch_norm_backward(grad, saved), mean, var, of_eval))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, dtype)


@pytest.mark.parametrize("layout", ["NCHW", "sliced"])
def test_eval_and_its_backward_leave_running_statistics(layout, rng):
    x, host = pair(rng, layout)
    channels = host.shape[1]
    mean, var = rng.normal(size=channels), rng.uniform(1, 2, channels)
    weight, bias = parameters(rng, channels)
    dy = rng.normal(size=host.shape)
    arrays = [to_device(v) for v in (mean, var, weight, bias)]
    grad = to_device(dy)
    log.transfers.clear()
    y, saved = functional.batch_norm_eval(x, *arrays)
    arrays[0][...] = 7.0  # what came before its backward is what counts
    gradients = functional.batch_norm_backward(grad, saved)
    assert not log.transfers
    assert len(log.launches) == 3
    expected, kept = functional.batch_norm_eval(
        host, mean, var, as_float64(weight), as_float64(bias)
    )
    wanted = functional.batch_norm_backward(dy, kept)
    for actual, value in zip((y, *gradients), (expected, *wanted), strict=True):
        close(actual, value, "float32")
    np.testing.assert_array_equal(to_host(arrays[1]), var)


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
        y, _ = functional.batch_norm_eval(x, to_device(mean), to_device(var), out=out)
        expected, _ = functional.batch_norm_eval(host, mean, var)
    assert y is out
    close(out, expected, "float32")


@pytest.mark.parametrize("kind", ["float64", "other layout", "stretched"])
def test_dy_of_another_kind_than_x(kind, rng):
    x, host = pair(rng, "NCHW")
    dy, grad = pair(rng, (2, 5, 3, 4), "float64", mean=0.0)
    if kind == "other layout":
        values = grad.astype("float32").transpose(0, 2, 3, 1).copy()
        dy, grad = to_device(values).transpose(0, 3, 1, 2), as_float64(values.transpose(0, 3, 1, 2))
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
    x = to_device(np.zeros(shape, "float32"))
    weight = to_device(np.ones(4, "float32"))
    mean, var = rng.normal(size=4), rng.uniform(1, 2, 4)
    there = [to_device(mean), to_device(var)]
    counter = to_device(np.int64(0))
    if training:
        y, saved = functional.batch_norm_forward(
            x, weight, running_mean=there[0], running_var=there[1], num_batches_tracked=counter
        )
        assert int(counter) == 1
    else:
        y, saved = functional.batch_norm_eval(x, *there, weight)
    gradients = functional.batch_norm_backward(to_device(np.zeros(shape, "float32")), saved)
    assert y.shape == gradients.x.shape == shape
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(to_host(gradient), np.zeros(4, "float32"))
    np.testing.assert_array_equal(to_host(there[0]), mean)
    np.testing.assert_array_equal(to_host(there[1]), var)


def test_one_value_per_channel_is_refused_with_nothing_changed(rng):
    layer = BatchNorm(4, device="cuda")
    before = {name: to_host(array) for name, array in layer.state_dict().items()}
    out = to_device(np.full((1, 4), 5, "float32"))
    x = to_device(np.zeros((1, 4), "float32"))
    with pytest.raises(BatchSizeError):
        layer(x)
    with pytest.raises(BatchSizeError):
        functional.batch_norm_forward(x, out=out)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(to_host(array), before[name])
    assert (to_host(out) == 5).all()


def test_not_finite_values_stay_in_their_channel(rng):
    x, host = pair(rng, "NCHW")
    for values in (x, host):
        values[0:1, 1:2, 0:1, 0:1] = np.inf
    mean, var = to_device(np.zeros(5)), to_device(np.ones(5))
    y, _ = functional.batch_norm_forward(x, running_mean=mean, running_var=var)
    expected = np.zeros(5, bool)
    expected[1] = True
    np.testing.assert_array_equal(np.isnan(to_host(y)).all((0, 2, 3)), expected)
    np.testing.assert_array_equal(np.isfinite(to_host(y)).all((0, 2, 3)), ~expected)
    np.testing.assert_array_equal(np.isnan(to_host(var)), expected)
