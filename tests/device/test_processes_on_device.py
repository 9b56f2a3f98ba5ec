"""Groups of one process on a device; `test_ranks_on_device.py` has those of two.

The collectives are real, and so are streams and capture.
"""

from __future__ import annotations

import numpy as np
import pytest

from syncbn_core import BatchNorm
from syncbn_core.comm import NCCLCommunicator
from syncbn_core.errors import BackendError, ProtocolError
from syncbn_core.exchange import Exchange
from syncbn_core.labels import KINDS


@pytest.fixture
def communicator(device, tmp_path):
    """Of torch's default group: NCCL on a GPU, gloo where that is asked for."""
    dist = pytest.importorskip("torch.distributed")
    from syncbn_torch import DistributedCommunicator

    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_backend_available(backend):
        pytest.skip(f"this torch has no {backend}")
    store = (tmp_path / "store").as_uri()
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield DistributedCommunicator()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_over_torch_distributed(dtype, device, communicator):
    import torch
    from torch import nn

    from syncbn_torch import SynchronizedBatchNorm2d

    torch.manual_seed(0)
    layers = [SynchronizedBatchNorm2d(c, process_group=communicator).to(device) for c in (3, 8)]
    twins = [nn.BatchNorm2d(c).double() for c in (3, 8)]
    x = (torch.randn(4, 11, 9, 9) * 2 + 3).to(getattr(torch, dtype))
    dy = torch.randn(x.shape).to(x.dtype)
    wide = x.double().requires_grad_()
    parts = wide.split([3, 8], 1)
    expected = torch.cat([twin(part) for twin, part in zip(twins, parts, strict=True)], 1)
    expected.backward(dy.double())
    tolerance = 3e-2 if dtype == "bfloat16" else 1e-4
    leaf = x.to(device, copy=True).requires_grad_()
    ys = [layer(part) for layer, part in zip(layers, leaf.split([3, 8], 1), strict=True)]
    y = torch.cat(ys, 1)
    y.backward(dy.to(device))
    for actual, wanted in ((y, expected), (leaf.grad, wide.grad)):
        error = (actual.detach().cpu().double() - wanted.detach()).abs().max().item()
        assert error < tolerance * (1 + wanted.abs().max().item())
    for layer, twin in zip(layers, twins, strict=True):
        assert torch.allclose(layer.running_var.cpu().double(), twin.running_var, atol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_calls_of_other_layers_are_told_later(
    direction, replayed, kernels, only_cuda, communicator, monkeypatch
):
    """Of one rank: its own label is not what has to be there."""
    import torch

    from syncbn_torch import SynchronizedBatchNorm2d
    from syncbn_torch.backends import plain

    if not kernels:
        monkeypatch.setattr("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS)
    layer = SynchronizedBatchNorm2d(3, process_group=communicator).to("cuda")
    x = torch.randn(2, 3, 4, 4, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(x).sum().backward()
    labels_of = Exchange._labels

    def other_labels(self, member, kind, *rest):
        labels = labels_of(self, member, kind, *rest)
        wrong = KINDS[kind] == direction
        return labels._replace(expected=labels.expected + 4 * wrong)

    monkeypatch.setattr(Exchange, "_labels", other_labels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream) if replayed else torch.cuda.stream(stream):
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    if replayed:
        torch.cuda.synchronize()
        assert communicator._alarm.call() is None
        graph.replay()
    torch.cuda.synchronize()
    assert dx.isnan().all() == (direction == "backward")
    with pytest.raises(ProtocolError, match=rf"{direction} of .*BatchNorm2d, layer 1\)"):
        layer(x)


def test_nothing_waits_for_the_device(only_cuda, communicator):
    import torch

    from syncbn_torch import SynchronizedBatchNorm2d

    layer = SynchronizedBatchNorm2d(3, process_group=communicator).to("cuda")
    x = torch.randn(2, 3, 4, 4, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_layer_over_nccl_without_torch(only_cuda):
    cupy = pytest.importorskip("cupy")
    try:
        own = NCCLCommunicator(0, 1, NCCLCommunicator.new_id(), timeout=60)
    except BackendError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(3, 2, (2, 6, 5, 7, 7)).astype(np.float32)
    layer = BatchNorm(5, device="cuda", communicator=own)
    twin = BatchNorm(5)
    with cupy.cuda.Stream(non_blocking=True):
        y = layer(cupy.asarray(x))
        dx = layer.backward(cupy.asarray(dy))
        own.synchronize()
        np.testing.assert_allclose(y.get(), twin(x), atol=1e-4)
        np.testing.assert_allclose(dx.get(), twin.backward(dy), atol=1e-4)
    assert own.all_reduce(np.array([2.0])).tolist() == [2.0]
