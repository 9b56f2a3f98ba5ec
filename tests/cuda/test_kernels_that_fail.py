"""Torch layers some of whose kernels fail: right results, and one warning for each kernel."""

from __future__ import annotations

import warnings

import pytest
from failing import WAYS, failing

torch = pytest.importorskip("torch")

from test_torch_on_cuda import (  # noqa: E402
    SPLIT,
    batch,
    close,
    device,  # noqa: F401
    equals_torch,
    gpu,  # noqa: F401
    layer_for,
)

import syncbn_torch  # noqa: E402

STEPS = ["moments", "normalize", "backward_reduce", "backward_input"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_the_other_kernels_work_on(step, way, device, gpu, tmp_path):  # noqa: F811
    with failing(way, f"planes_{step}", device, tmp_path) as warned:
        for _ in range(2):
            device.launches.clear()
            equals_torch(layer_for(2), batch(SPLIT, "float32"), torch.randn(SPLIT))
    ran = [launch.program.kernel.name for launch in device.launches]
    assert [each for each in STEPS if any(each in name for name in ran)] == [
        each for each in STEPS if each != step
    ]
    (text,) = {str(warning.message) for warning in warned}
    assert len(warned) == 1
    assert f"kernel planes_{step}-float32-4-256" in text
    reason = {"wrong": "differs", "does not compile": "the compiler", "does not load": "loader"}
    assert reason[way] in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_without_any_kernel(channels_last, dtype, device, gpu, tmp_path):  # noqa: F811
    with failing("does not load", "", device, tmp_path) as warned:
        x = batch(SPLIT, dtype, channels_last)
        equals_torch(layer_for(2, dtype), x, torch.randn(SPLIT).to(x.dtype))
    assert len(warned) == 1, "one for all kernels"
    assert not device.launches


@pytest.mark.parametrize("step", [*STEPS, "merge_parts"])
def test_replicas_some_of_whose_kernels_fail(step, device, gpu, tmp_path):  # noqa: F811
    rows = 20 if step == "merge_parts" else 5
    x, dy = batch((rows, 4, 6, 6), "float32"), torch.randn(rows, 4, 6, 6)
    layer = layer_for(4)
    results = []
    with failing("wrong", step, device, tmp_path) as warned:
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


def test_kernels_that_are_right_warn_of_nothing(device, gpu, tmp_path):  # noqa: F811
    with failing("wrong", "no such kernel", device, tmp_path) as warned:
        equals_torch(layer_for(2), batch(SPLIT, "float32"), torch.randn(SPLIT))
    assert not warned
    assert len(list(tmp_path.glob("*.checked"))) == 4


def test_a_warning_that_is_an_error_leaves_running_statistics(device, gpu, tmp_path):  # noqa: F811
    layer = layer_for(2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with failing("wrong", "normalize", device, tmp_path):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="uses plain operations instead"):
            layer(batch(SPLIT, "float32"))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
