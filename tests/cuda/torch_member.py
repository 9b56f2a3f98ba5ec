"""A process of a world whose CPU tensors stand for those of an emulated device.

python torch_member.py RANK STORE MAJOR MINOR [without]

"without": rank 1 has no kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from emulated_device import emulated
from test_torch_on_cuda import on_kernels
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_core.arrays import arrays_of
from syncbn_core.comm import local
from syncbn_core.errors import CommError, ProtocolError
from syncbn_core.exchange import Exchange
from syncbn_torch import SynchronizedBatchNorm2d
from syncbn_torch.backends import plain
from syncbn_torch.backends.tensors import TensorArrays

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
    patch.setattr(Exchange, "_on_its_device", lambda _, values: (arrays_of(values), -1))
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
            own = torch.stack([layer.running_mean, layer.running_var])
            of_all = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(of_all, own)
            assert torch.equal(*of_all), "ranks differ"
    assert on_device == [True] * 4, on_device
    if not without:
        assert len(gpu.keys) == 16, gpu.keys

    # what a device does beside our kernels
    layer = SynchronizedBatchNorm2d(3).double()
    leaf, whole_dy = x[mine, :3].clone().requires_grad_(), dy[mine, :3].contiguous()
    layer(leaf).backward(whole_dy)
    leaf.grad, layer.weight.grad, layer.bias.grad = None, None, None
    if not without or rank == 0:
        with DeviceOperations() as noted:
            y = layer(leaf)
        assert list(noted) == ["c10d._allgather_base_.default"], noted
        with DeviceOperations() as noted:
            y.backward(whole_dy)
        assert list(noted) == ["c10d.allreduce_.default"], noted
    else:
        layer(leaf).backward(whole_dy)

    patch.setattr("syncbn_core.exchange.MANY", 1)  # as in a large group
    layer, twin = SynchronizedBatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
    whole = x.clone().requires_grad_()
    for _ in range(2):
        large, whole.grad = x[mine].clone().requires_grad_(), None
        y, expected = layer(large), twin(whole)
        y.backward(dy[mine])
        expected.backward(dy)
        torch.testing.assert_close(y, expected[mine])
        torch.testing.assert_close(large.grad, whole.grad[mine])
    torch.testing.assert_close(layer.running_var, twin.running_var)
    patch.setattr("syncbn_core.exchange.MANY", 64)

    # other layers on each rank: the device notices, and the next call tells
    def told(kind: str, capturing: bool, by_x: bool = True) -> None:
        group = dist.new_group()
        patch.setattr(TensorArrays, "is_captured", lambda self, index: capturing)
        layers = [SynchronizedBatchNorm2d(3, process_group=group).double() for _ in range(2)]
        own = leaf if by_x else leaf.detach()
        ys = [layer(own) for layer in layers]
        if kind == "forward":
            layers[rank](leaf)
        else:
            leaf.grad = None
            ys[rank].backward(dy[mine, :3])
            assert leaf.grad.isnan().all() if by_x else leaf.grad is None
        text = rf"call 3 \({kind} of SynchronizedBatchNorm2d, layer {1 + rank}\)"
        with pytest.raises(ProtocolError, match=text):
            layers[0](leaf)  # sends nothing
        with pytest.raises(CommError, match="failed before"):
            layers[0](leaf)

    for kind in ("forward", "backward"):
        for capturing in (False, True):
            told(kind, capturing)
    told("backward", False, by_x=rank == 0)
dist.barrier()
dist.destroy_process_group()
