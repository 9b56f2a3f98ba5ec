"""The torch layers on the CUDA kernels: CPU tensors stand for those of a device."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulated import Memory, Runner

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import syncbn_torch  # noqa: E402
from syncbn_torch import arithmetic, batchnorm, cuda  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}


def memory_of(tensor):
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16":
        flat = flat.view(torch.uint16)
    return Memory(flat.numpy(), name, tensor.data_ptr() % 16)


class TensorRunner(Runner):
    def __init__(self, device):
        super().__init__()
        launches.append(self.launched)

    def scratch(self, size):
        return super().scratch(size)


launches = []


def send_to_kernels(monkeypatch):
    """Send every plain CPU tensor to the CUDA kernels."""
    monkeypatch.setattr(arithmetic, "has_kernels", lambda tensor: False)
    monkeypatch.setattr(batchnorm, "has_kernels", lambda tensor: tensor.dtype in cuda._NAMES)
    monkeypatch.setattr(arithmetic, "has_cuda_kernels", lambda tensor: tensor.dtype in cuda._NAMES)
    monkeypatch.setattr(cuda, "_pointer", memory_of)
    monkeypatch.setattr(cuda, "_Runner", TensorRunner)


@pytest.fixture(autouse=True)
def on_simulated_device(monkeypatch):
    launches.clear()
    send_to_kernels(monkeypatch)
    with batchnorm.always_ours():
        yield


def kernels_run():
    return [key for launched in launches for key, _ in launched]


def close(actual, expected, dtype, scale=1.0):
    tolerance = DTYPES[dtype] * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def reference(layer, x, dy, parts=1):
    """`(y, dx, dweight, dbias, running_mean, running_var)` of torch in float64."""
    twin = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine)
    twin.load_state_dict(copy.deepcopy(layer.state_dict()))
    twin.double().train(layer.training)
    wide = x.detach().double().requires_grad_()
    y = twin(wide)
    y.backward(dy.double())
    return y, wide.grad, twin.weight.grad, twin.bias.grad, twin.running_mean, twin.running_var


def layer_for(channels, **settings):
    torch.manual_seed(channels)
    layer = syncbn_torch.SynchronizedBatchNorm2d(channels, **settings)
    with torch.no_grad():
        layer.weight.normal_(1, 0.3)
        layer.bias.normal_()
        layer.running_mean.normal_()
    return layer


def batch(shape, dtype, channels_last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator) * 2 + 3).to(getattr(torch, dtype))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7, 7), (2, 8, 4, 8), (4, 1, 3, 3)])
def test_a_layer_equals_torch(shape, channels_last, dtype):
    layer = layer_for(shape[1])
    if dtype == "float64":
        layer.double()
    x = batch(shape, dtype, channels_last).requires_grad_()
    dy = torch.randn(shape).to(x.dtype)
    expected = reference(layer, x, dy)
    y = layer(x)
    y.backward(dy)
    results = (y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var)
    for actual, wanted in zip(results, expected, strict=True):
        scale = 1 + wanted.abs().max().item()
        close(actual, wanted, dtype if actual.shape == shape else "float32", scale)
    assert y.stride() == x.stride()
    assert x.grad.stride() == x.stride()
    assert y.dtype == x.grad.dtype == x.dtype
    assert layer.num_batches_tracked == 1
    assert len(kernels_run()) == 4, "two launches per direction"


def test_momentum_none_averages_over_batches():
    layer, twin = layer_for(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    twin.load_state_dict(layer.state_dict())
    for step in range(3):
        x = batch((3, 3, 4, 4), "float32") + step
        layer(x), twin(x)
        torch.testing.assert_close(layer.running_mean, twin.running_mean)
        torch.testing.assert_close(layer.running_var, twin.running_var)
    assert layer.num_batches_tracked == 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_buffers_that_no_kernel_takes_are_updated_too(momentum):
    layer, twin = layer_for(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    twin.load_state_dict(layer.state_dict())
    layer.num_batches_tracked = layer.num_batches_tracked.int()
    layer.running_mean = torch.stack([layer.running_mean] * 2, 1)[:, 0]
    x = batch((3, 3, 4, 4), "float32")
    layer(x), twin(x)
    torch.testing.assert_close(layer.running_mean, twin.running_mean)
    torch.testing.assert_close(layer.running_var, twin.running_var)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("rows", [7, 6, 2])
def test_replicas_equal_one_device(rows, eps_mode):
    layer = layer_for(4, eps_mode=eps_mode).double()
    alone = copy.deepcopy(layer)
    model = syncbn_torch.DataParallelWithCallback(
        nn.Sequential(nn.Conv2d(4, 4, 1).double(), layer), device_ids=["cpu"] * 3
    )
    single = nn.Sequential(copy.deepcopy(model.module[0]), alone)
    x = batch((rows, 4, 3, 5), "float64")
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    dy = torch.randn(rows, 4, 3, 5, dtype=torch.float64)
    y = model(many)
    y.backward(dy)
    expected = single(one)
    expected.backward(dy)
    close(y, expected, "float64", 10)
    close(many.grad, one.grad, "float64", 10)
    for ours, theirs in zip(model.module.parameters(), single.parameters(), strict=True):
        close(ours.grad, theirs.grad, "float64", 100)
    for ours, theirs in zip(model.module.buffers(), single.buffers(), strict=True):
        close(ours, theirs, "float64")
    assert layer.num_batches_tracked == 1


def test_a_loss_of_some_outputs_reaches_every_input():
    layer = layer_for(4).double()
    model = syncbn_torch.DataParallelWithCallback(layer, device_ids=["cpu"] * 3)
    x = batch((6, 4, 3, 5), "float64")
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    twin = nn.BatchNorm2d(4).double()
    twin.load_state_dict(layer.state_dict())
    model(many)[:2].pow(3).sum().backward()
    twin(one)[:2].pow(3).sum().backward()
    close(many.grad, one.grad, "float64", 100)


def test_second_derivatives_equal_torch():
    layer = layer_for(3).double()
    twin = nn.BatchNorm2d(3).double()
    twin.load_state_dict(layer.state_dict())
    grads = []
    for module in (layer, twin):
        x = batch((3, 3, 2, 4), "float64").requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    close(grads[0], grads[1], "float64", 1e4)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (2, 4, 2, 3, 2)])
def test_any_rank(shape):
    layer = syncbn_torch.SyncBatchNorm(4)
    x = batch(shape, "float32").requires_grad_()
    one = x.detach().clone().requires_grad_()
    dy = torch.randn(shape)
    layer(x).backward(dy)
    F.batch_norm(one, None, None, training=True).backward(dy)
    torch.testing.assert_close(x.grad, one.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("view", ["slice", "transposed", "expanded gradient"])
def test_inputs_that_are_not_dense(view):
    layer = layer_for(4)
    whole = batch((3, 4, 6, 8), "float32")
    x = {"slice": whole[:, :, 1:5, 1:6], "transposed": whole.transpose(2, 3)}.get(view, whole)
    x = x.detach().requires_grad_()
    dy = torch.ones(()).expand(x.shape) if view == "expanded gradient" else torch.randn(x.shape)
    expected = reference(layer, x, dy)
    y = layer(x)
    y.backward(dy)
    close(y, expected[0], "float32", 10)
    close(x.grad, expected[1], "float32", 10)


def test_an_empty_batch():
    layer = layer_for(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.zeros(0, 4, 3, 3, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    assert not layer.weight.grad.any()
    torch.testing.assert_close(layer.running_mean, before["running_mean"])
    assert layer.num_batches_tracked == 1


def test_one_value_per_channel_is_refused_with_nothing_changed():
    layer = layer_for(4)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1, 4, 1, 1))
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, before[name])


def test_without_affine_and_without_running_statistics():
    layer = syncbn_torch.SynchronizedBatchNorm2d(4, affine=False, track_running_stats=False)
    x = batch((3, 4, 3, 3), "float32").requires_grad_()
    one = x.detach().clone().requires_grad_()
    dy = torch.randn(x.shape)
    layer(x).backward(dy)
    F.batch_norm(one, None, None, training=True).backward(dy)
    torch.testing.assert_close(x.grad, one.grad, rtol=1e-4, atol=1e-5)


def test_memory_kept_for_backward_is_x_and_per_channel_numbers():
    layer = layer_for(8).double()
    x = batch((4, 8, 6, 6), "float64").requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    large = {t.data_ptr() for t in kept if t.numel() > 100}
    assert large == {x.data_ptr()}
    statistics = y.grad_fn.member.statistics
    assert statistics.parts is None
    assert statistics.packed.numel() == 3 * 8 + 1
    assert np.isfinite(statistics.packed.numpy()).all()


def test_processes_exchange_packed_moments(tmp_path):
    """Two processes whose tensors are "on a device", also in backwards of other layers."""
    script = str(Path(__file__).with_name("torch_member.py"))
    members = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [member.communicate(timeout=100)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0, 0], "\n".join(outputs)
