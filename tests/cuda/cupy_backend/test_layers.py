"""`BatchNorm` on a device, and arrays that lie somewhere else than the input."""

from __future__ import annotations

import fake_cupy
import numpy as np
import pytest
from cupy_arrays import close, pair, parameters, to_device, to_host
from fake_cupy import Device, log

from syncbn_core import BatchNorm, functional
from syncbn_core.errors import BackendError, DeviceError, SyncBNError

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
    log.transfers.clear()
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
    assert not log.transfers
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
        expected = to_host(getattr(source, name))
        np.testing.assert_array_equal(to_host(array), expected.astype(array.dtype))


def test_a_state_of_other_shapes_changes_nothing(rng):
    layer = BatchNorm(5, device="cuda")
    with pytest.raises(SyncBNError):
        layer.load_state_dict(BatchNorm(4, device="cuda").state_dict())
    assert (to_host(layer.weight) == 1).all()


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
        return to_device(values)


@pytest.mark.parametrize("name", wrong_arguments(to_device, to_device))
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (to_device, np.array),
        (np.array, to_device),
        (to_device, on_device_one),
        (on_device_one, to_device),
    ],
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
    assert not to_host(layer.running_mean).any()
    assert not log.launches
