"""A process of a world whose CPU tensors stand for those of an emulated device.

python torch_member.py RANK STORE MAJOR MINOR [without]

"without": rank 1 has no kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from emulator.device import emulated
from test_torch_on_cuda import on_kernels
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_core.comm import local
from syncbn_core.errors import CommError, ProtocolError
from syncbn_core.exchange import Exchange
from syncbn_torch import SynchronizedBatchNorm2d, process_group
from syncbn_torch.backends import plain

rank, store, capability = int(sys.argv[1]), Path(sys.argv[2]), tuple(map(int, sys.argv[3:5]))
without = sys.argv[5:] == ["without"]
local.host_name = lambda: str(rank)  # else tensors on the CPU go by local connections
dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)


class DeviceOperations(TorchDispatchMode, list):
    """The names of the operations that a device would run, apart from our own kernels."""

    def __torch_dispatch__(self, operation, types, arguments=(), settings=None):
        name = str(operation)
        if not any(word in name for word in HOST_ONLY):
            self.append(name)
        return operation(*arguments, **(settings or {}))


HOST_ONLY = (
    "profiler",
    "empty",
    "view",
    "detach",
    "slice",
    "select",
    "unbind",
    "alias",
    "lift_fresh",
    "_local_scalar",
)

on_device = []
original = Exchange.moments


def recorded(self, *arguments):
    own = arguments[0]
    on_device.append(isinstance(own.rows, torch.Tensor))
    total, number = original(self, *arguments)
    assert not all(on_device) or total.count is None, "the host has waited for a count"
    return total, number


Exchange.moments = recorded
generator = torch.Generator().manual_seed(0)
x, dy = torch.randn(2, 5, 4, 3, 3, dtype=torch.float64, generator=generator)
mine = slice(0, 1) if rank == 0 else slice(1, 5)
with (
    emulated(capability) as device,
    on_kernels(device) as gpu,
    pytest.MonkeyPatch.context() as patch,
):
    patch.setattr("syncbn_core.exchange._stays_on_device", lambda group, values: True)
    if without and rank == 1:
        patch.setattr("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS)
    for _ in range(2):
        layers = [SynchronizedBatchNorm2d(c).double() for c in (1, 3)]
        twins = [nn.BatchNorm2d(c).double() for c in (1, 3)]
        leaf, whole = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        inputs = leaf.split([1, 3], 1)
        ys = [layer(part) for layer, part in zip(layers, inputs, strict=True)]
        torch.cat(list(ys), 1).backward(dy[mine])
        expected = [twin(part) for twin, part in zip(twins, whole.split([1, 3], 1), strict=True)]
        torch.cat(expected, 1).backward(dy)
        torch.testing.assert_close(torch.cat(list(ys), 1), torch.cat(expected, 1)[mine])
        torch.testing.assert_close(leaf.grad, whole.grad[mine])
        for layer, twin in zip(layers, twins, strict=True):
            torch.testing.assert_close(layer.running_var, twin.running_var)
    assert on_device == [True] * 4, on_device
    if without:
        dist.barrier()
        dist.destroy_process_group()
        sys.exit()
    assert len(gpu.keys) == 16, gpu.keys

    # a backward of another layer on each rank, whose total is known later
    sent = []
    events = SimpleNamespace(query=lambda: bool(come), synchronize=lambda: None)
    come = []

    patch.setattr(process_group, "_on_cuda", lambda tensor: True)
    patch.setattr(process_group, "_captures", lambda tensor: bool(capturing))
    patch.setattr(process_group, "_sent_to_host", lambda found: (sent.append(1) or found, events))
    for capturing in (True, False):
        layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
        leaf = x[mine, :3].clone().requires_grad_()
        y, whole_dy = layers[0](leaf), dy[mine, :3].contiguous()
        with DeviceOperations() as noted:
            y.backward(whole_dy)
        assert list(noted) == ["c10d.allreduce_.default"], list(noted)
        ys = [layer(leaf) for layer in layers]
        ys[rank].backward(dy[mine, :3])
        assert leaf.grad.isnan().all()
        assert len(sent) == (0 if capturing else 5)  # labels of three forwards and two backwards
        layers[0](leaf)  # nobody waits for the news
    come.append(True)
    with pytest.raises(ProtocolError, match=rf"layer {7 + rank}, forward in call"):
        layers[0](leaf)
    with pytest.raises(CommError, match="failed before"):
        layers[0](leaf)
dist.barrier()
dist.destroy_process_group()
