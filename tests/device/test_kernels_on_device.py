"""Kernels pass their check on the device; steps without kernels are right there, too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from syncbn_core.backends.cuda import launcher, usable  # noqa: E402
from syncbn_core.backends.cuda.kernels import KernelFailure, launch_of  # noqa: E402
from syncbn_torch import SyncBatchNorm  # noqa: E402
from syncbn_torch.backends import cuda, plain  # noqa: E402
from syncbn_torch.forward import always_ours  # noqa: E402

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}
STEPS = ("moments", "normalize", "backward_reduce", "backward_input")


def test_kernels_pass_their_check(device, only_cuda):
    torch.zeros(1, device=device)  # torch makes the context
    try:
        torch.cuda.set_sync_debug_mode("error")  # which users may have set
        with torch.cuda.device(device):
            assert usable._passes(cuda.OPERATIONS, device.index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_equals_float64(dtype, channels_last, device):
    """A step of a lone layer beside torch's layer in float64."""
    generator = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(16, 24, 9, 11, generator=generator) for _ in range(2))
    x, dy = (value.to(device, getattr(torch, dtype)) for value in (x + 30, dy))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    layer = SyncBatchNorm(24, device=device)
    twin = torch.nn.BatchNorm2d(24, device=device).double()
    if dtype == "float64":
        layer = layer.double()
    own, wide = x.requires_grad_(), x.detach().double().requires_grad_()
    y, expected = layer(own), twin(wide)
    y.backward(dy)
    expected.backward(dy.double())
    pairs = [(y, expected), (own.grad, wide.grad), (layer.weight.grad, twin.weight.grad)]
    pairs += [(layer.bias.grad, twin.bias.grad), (layer.running_mean, twin.running_mean)]
    for actual, wanted in [*pairs, (layer.running_var, twin.running_var)]:
        scale = 1 + wanted.abs().max().item()
        atol = DTYPES[dtype] * scale
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_plain_operations_are_right(channels_last, dtype, device, monkeypatch):
    monkeypatch.setattr("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS)
    with always_ours():
        step_equals_float64(dtype, channels_last, device)


@pytest.mark.parametrize("failing", [*STEPS, ""])
def test_without_kernels_that_fail_their_check_steps_are_right(
    failing, device, only_cuda, monkeypatch
):
    """ "": all kernels fail."""

    def failing_launch_of(source, index):
        if failing in source.key:
            raise KernelFailure(f"{source.key} shall fail")
        return launch_of(source, index)

    monkeypatch.setattr(launcher, "launch_of", failing_launch_of)
    monkeypatch.setattr(usable, "_found", {})
    cuda._ready.cache_clear()
    try:
        with always_ours(), pytest.warns(UserWarning, match="uses plain operations instead"):
            step_equals_float64("float32", False, device)
    finally:
        cuda._ready.cache_clear()
