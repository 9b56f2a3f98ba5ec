"""Torch layers whose kernels fail: right results by plain operations, and one warning."""

from __future__ import annotations

import pytest
from failing import WAYS, failing

torch = pytest.importorskip("torch")

from test_torch_on_cuda import (  # noqa: E402
    DTYPES,
    SPLIT,
    batch,
    close,
    device,  # noqa: F401
    equals_torch,
    gpu,  # noqa: F401
    layer_for,
)

import syncbn_torch  # noqa: E402
from syncbn_core.backends.cuda import launcher, usable  # noqa: E402
from syncbn_core.backends.cuda.driver import DriverError  # noqa: E402
from syncbn_core.errors import ArgumentError, BackendError  # noqa: E402

STEPS = ["moments", "normalize", "backward_reduce", "backward_input"]


def a_step(dtype="float32", channels_last=False):
    x = batch(SPLIT, dtype, channels_last)
    return equals_torch(layer_for(2, dtype), x, torch.randn(SPLIT).to(x.dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("step", STEPS)
def test_plain_operations_take_the_place_of_kernels_that_fail(step, form, way, device, gpu):  # noqa: F811
    with failing(way, f"{form}_{step}", device) as warned:
        a_step()
        device.launches.clear()
        a_step()
    assert not device.launches, "of no kernel of the device"
    (warning,) = warned
    text = str(warning.message)
    reason = {"wrong": "differs", "does not compile": "the compiler", "does not load": "loader"}
    assert reason[way] in text
    assert "plain operations instead of CUDA kernels, which is slower. On Emulator, driver" in text
    assert text.endswith("please report it to syncbn's developers")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_are_right_are_checked_once(dtype, device, gpu):  # noqa: F811
    with failing("wrong", "no such kernel", device) as warned:
        a_step(dtype)
        counts = [len(device.launches)]
        for other in (dtype, "float64"):
            device.launches.clear()
            a_step(other)
            counts.append(len(device.launches))
        takes = gpu.takes(batch(SPLIT, dtype))
    assert not warned
    if takes:
        checked = 10 if device.capability < (8, 0) else 20
        assert counts == [4 + checked, 4, 4], "of each dtype two shapes of five kernels"


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_without_any_kernel(channels_last, dtype, device, gpu):  # noqa: F811
    with failing("does not load", "", device) as warned:
        a_step(dtype, channels_last)
    assert len(warned) == 1
    assert not device.launches


def test_a_kernel_that_fails_after_the_check_is_an_error(device, gpu):  # noqa: F811
    """Members may not change how they compute in the middle of a training."""
    layer, x = layer_for(3), batch((4, 3, 31, 33), "float32")
    before = layer.running_mean.clone()
    with failing("does not compile", "ragged", device) as warned:
        a_step()
        with pytest.raises(BackendError, match=r"words of the compiler; SYNCBN_KERNELS=off"):
            layer(x)
        a_step()
    assert not warned
    assert torch.equal(layer.running_mean, before)


@pytest.mark.parametrize("step", [*STEPS, "merge_parts"])
def test_replicas_some_of_whose_kernels_fail(step, device, gpu):  # noqa: F811
    rows = 20 if step == "merge_parts" else 5
    x, dy = batch((rows, 4, 6, 6), "float32"), torch.randn(rows, 4, 6, 6)
    layer = layer_for(4)
    results = []
    with failing("wrong", step, device) as warned:
        for replicas in (1, rows):
            own = syncbn_torch.SyncBatchNorm(4)
            own.load_state_dict(layer.state_dict())
            model = syncbn_torch.DataParallelWithCallback(own, device_ids=["cpu"] * replicas)
            given = x.clone().requires_grad_()
            y = model(given)
            y.backward(dy)
            results.append((y, given.grad, own.weight.grad, own.running_mean, own.running_var))
    assert len(warned) == 1, [str(warning.message) for warning in warned]
    for one, many in zip(*results, strict=True):
        close(many, one, "float32")


def test_an_unchecked_kernel_is_refused_in_a_captured_graph(device, gpu):  # noqa: F811
    layer, x = layer_for(2), batch(SPLIT, "float32")
    with failing("wrong", "no such kernel", device) as warned:
        gpu.here.stream, gpu.here.captures = 2**40, True
        with pytest.raises(BackendError, match="kernels to be checked before a CUDA graph is capt"):
            layer(x)
        gpu.here.captures = False
        layer(x)
        gpu.here.captures = True
        layer(x)
    assert not warned


def failing_launch(result):
    def launch(*arguments):
        raise DriverError(f"result {result}", result)

    return lambda *_: launch


def test_kernels_that_do_not_launch_are_not_used(device, gpu, monkeypatch):  # noqa: F811
    with failing("wrong", "no such kernel", device) as warned:
        monkeypatch.setattr(launcher, "launch_of", failing_launch(701))
        a_step()
    assert "result 701" in str(warned[0].message)


def test_a_kernel_that_breaks_the_context_is_an_error_that_says_what_to_do(
    device,  # noqa: F811
    gpu,  # noqa: F811
    monkeypatch,
):
    def to_host(values):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with failing("wrong", "no such kernel", device):
        monkeypatch.setattr(gpu.operations.arrays, "to_host", to_host)
        with pytest.raises(BackendError, match=r"illegal memory.*SYNCBN_KERNELS=off"):
            a_step()


def test_a_setting_without_meaning_is_refused(monkeypatch):
    monkeypatch.setenv("SYNCBN_KERNELS", "yes")
    with pytest.raises(ArgumentError, match=r"SYNCBN_KERNELS to be checked, on or off, got 'yes'"):
        usable.setting()
