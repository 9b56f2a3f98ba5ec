"""The torch layers on compiled CUDA kernels, executed: CPU tensors stand for those of a device."""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated_device import Device, emulated

from ptx_emulator.machine import Schedule
from ptx_emulator.memory import Range

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import syncbn_torch  # noqa: E402
from syncbn_core.arrays import DeviceArrays  # noqa: E402
from syncbn_core.backends.cuda import kernels  # noqa: E402
from syncbn_core.backends.cuda.driver import DriverError  # noqa: E402
from syncbn_core.backends.cuda.launcher import BLOCK_COUNTERS, PARTIALS, Launcher  # noqa: E402
from syncbn_core.backends.cuda.operations import CudaOperations  # noqa: E402
from syncbn_core.errors import BackendError  # noqa: E402
from syncbn_torch.arrays import FLOATS  # noqa: E402
from syncbn_torch.backends import cuda, plain  # noqa: E402
from syncbn_torch.backends.tensors import TensorArrays  # noqa: E402
from syncbn_torch.forward import always_ours  # noqa: E402
from syncbn_torch.inplace import InPlaceABN  # noqa: E402

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}


class Here(threading.local):
    """What CUDA's runtime knows of a thread: its device and stream; new threads take the next."""

    def __init__(self, places: Iterator[tuple[int, int]]) -> None:
        self.index, self.stream = next(places)  # of the tensors that the thread works on
        self.current = self.index
        self.captures = False


@dataclass
class Known:
    """A tensor whose address was asked for; None for `written`: all of it has been."""

    tensor: weakref.ref[torch.Tensor]
    written: np.ndarray | None = None


class Gpu:
    """CPU tensors on an emulated device: kernels may touch those whose pointers they get, alone."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.here = Here(itertools.repeat((0, 0)))
        self.keys: list[str] = []  # of kernels, as they were launched
        self.switches: list[tuple[int, list[str]]] = []  # to a device, and what ran there
        self._known: dict[int, list[Known]] = {}
        self._alarms: list[torch.Tensor] = []
        self.operations: Operations

    def pointer(self, tensor: torch.Tensor) -> int:
        """Its address. A tensor that is gone when a kernel starts is not there for that kernel."""
        self._note(Known(weakref.ref(tensor)), tensor)
        return tensor.data_ptr()

    def page_locked(self, like: torch.Tensor) -> torch.Tensor:
        """A number to which all threads may write at once."""
        word = torch.zeros(1, dtype=torch.float64)
        self._alarms.append(word)
        self.pointer(word)
        return word

    def unwritten(self, tensor: torch.Tensor) -> None:
        """No kernel may read it before one has written it."""
        area = _range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor, written=False)
        self._note(Known(weakref.ref(tensor), area.written), tensor)

    def _note(self, known: Known, tensor: torch.Tensor) -> None:
        with self.device.memory.lock:
            others = self._known.get(tensor.data_ptr(), ())
            alive = [o for o in others if o.tensor() is not None and o.tensor() is not tensor]
            self._known[tensor.data_ptr()] = [*alive, known]

    @contextmanager
    def memory_of(self, arguments: tuple[int | float, ...]) -> Iterator[None]:
        """The tensors behind `arguments` are known to the device, and no others are."""
        memory = self.device.memory
        with memory.lock:  # one launch at a time, as the emulated driver does it
            alive = [
                (address, address + tensor.nbytes, known.written, tensor)
                for address in {a for a in arguments if isinstance(a, int)}
                for known in self._known.get(address, ())
                if (tensor := known.tensor()) is not None and tensor.nbytes
            ]
            merged: list[tuple[int, int, np.ndarray | None, torch.Tensor]] = []
            for start, end, written, tensor in sorted(alive, key=lambda each: each[:2]):
                if merged and start < merged[-1][1]:  # views of one memory
                    start, before, *_ = merged.pop()
                    end, written = max(end, before), None
                merged.append((start, end, written, tensor))
            areas = []
            for start, end, written, tensor in merged:
                areas.append(memory.add(_range(start, end, tensor)))
                areas[-1].written = written
                areas[-1].ordered = all(tensor is not alarm for alarm in self._alarms)
            try:
                yield
            finally:
                for area in areas:
                    memory.remove(area)

    @contextmanager
    def switched(self, index: int) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.here.current = self.here.current, index
        start = len(self.device.launches)
        try:
            yield
        finally:
            self.here.current = before
            names = [launch.program.kernel.name for launch in self.device.launches[start:]]
            self.switches.append((index, names))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the kernels take a tensor of that dtype on this device."""
        return tensor.dtype in FLOATS and cuda._ready(self.here.index, tensor.dtype)


class GpuArrays(TensorArrays):
    """CPU tensors in the place of a device's."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(torch)
        self.gpu = gpu
        self.shortened = 0  # numbers that new tensors of float64 lack

    def device_of(self, array):
        return self.gpu.here.index

    def is_current(self, index):
        return self.gpu.here.current == index

    def on_device(self, index):
        return nullcontext() if self.is_current(index) else self.gpu.switched(index)

    def stream(self, index):
        return self.gpu.here.stream

    def is_captured(self, index):
        return self.gpu.here.captures

    def keeps_stream(self, stream):
        return True

    def pointer(self, array):
        return self.gpu.pointer(array)

    def empty(self, shape, dtype, index):
        if self.shortened and dtype == "float64":
            return torch.empty(prod(shape) - self.shortened, dtype=torch.float64)
        array = torch.empty(shape, dtype=getattr(torch, dtype))
        self.gpu.unwritten(array)
        return array

    def zeros(self, shape, dtype, index):
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    lasting_zeros = DeviceArrays.lasting_zeros


class Operations(CudaOperations):
    """The steps whose launches are noted, and after which counters have to be zeros."""

    def __init__(self, arrays):
        super().__init__(arrays)
        scratch = self.scratch

        class Noted(Launcher):
            __slots__ = ()

            def launch(self, source, grid, *arguments):
                kernels.launch_of(source, self.index)  # or a failure, before memory is known
                arrays.gpu.keys.append(source.key)
                with arrays.gpu.memory_of(arguments):
                    super().launch(source, grid, *arguments)
                    left = [key for key, own in scratch.items() if counters_of(own).any()]
                assert not left, f"{source.key} leaves counters behind in {left}"

        self.launcher = lambda index, stream: Noted(arrays, index, stream, scratch)


def counters_of(scratch):
    return scratch.owner[-scratch.sizes[1] :]


def _range(start: int, end: int, tensor: torch.Tensor, *, written: bool = True) -> Range:
    data = np.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), np.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Range(start, data, written=written, name=f"{dtype} {tuple(tensor.shape)}")


@contextmanager
def on_kernels(device: Device) -> Iterator[Gpu]:
    """Plain CPU tensors go to the CUDA kernels as those of a device do, layers alone as well."""
    gpu = Gpu(device)
    gpu.operations = Operations(GpuArrays(gpu))

    def operations_for(tensor: torch.Tensor) -> Any:
        return gpu.operations if gpu.takes(tensor) else plain.OPERATIONS

    def uncached() -> None:
        cuda._ready.cache_clear()
        cuda._missing.cache_clear()

    mode = torch.get_deterministic_debug_mode()
    with pytest.MonkeyPatch.context() as patch, always_ours():
        patch.setattr("syncbn_torch.forward.operations_for", operations_for)
        patch.setattr(cuda, "OPERATIONS", gpu.operations)
        patch.setattr(TensorArrays, "page_locked", lambda self, like: gpu.page_locked(like))
        uncached()
        torch.set_deterministic_debug_mode("error")  # new tensors are NaN until they are written
        try:
            yield gpu
        finally:
            torch.set_deterministic_debug_mode(mode)
            uncached()


@pytest.fixture
def device(arch):
    with emulated(arch, devices=4) as device:
        yield device


@pytest.fixture(autouse=True)
def gpu(device):
    with on_kernels(device) as gpu:
        yield gpu


def close(actual, expected, dtype, scale=1.0):
    tolerance = DTYPES[dtype] * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def reference(layer, x, dy):
    """`(y, dx, dweight, dbias, running_mean, running_var)` of torch in float64."""
    twin = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine)
    twin._check_input_dim = lambda input: None
    twin.load_state_dict(copy.deepcopy(layer.state_dict()))
    twin.double().train(layer.training)
    wide = x.detach().double().requires_grad_()
    y = twin(wide)
    y.backward(dy.double())
    return y, wide.grad, twin.weight.grad, twin.bias.grad, twin.running_mean, twin.running_var


def equals_torch(layer, x, dy):
    """One step of a new layer, compared; gives its results."""
    expected = reference(layer, x, dy)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    results = (y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var)
    dtype = str(x.dtype).removeprefix("torch.")
    for actual, wanted in zip(results, expected, strict=True):
        scale = 1 + wanted.abs().max().item()
        narrow = dtype in ("float16", "bfloat16") and actual.shape != x.shape
        close(actual, wanted, "float32" if narrow else dtype, scale)
    assert y.dtype == x.grad.dtype == x.dtype
    assert layer.num_batches_tracked == 1
    return results


def layer_for(channels, dtype="float32", **settings):
    torch.manual_seed(channels)
    layer = syncbn_torch.SyncBatchNorm(channels, **settings)
    with torch.no_grad():
        layer.weight.normal_(1, 0.3)
        layer.bias.normal_()
        layer.running_mean.normal_()
    return layer.double() if dtype == "float64" else layer


def batch(shape, dtype, channels_last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator) * 2 + 3).to(getattr(torch, dtype))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return x


def steps_of(keys):
    return [key.split("-")[0].split("_", 1)[1] for key in keys]


def splits(gpu):
    """Of the last reduction: blocks that share a channel, or a tile of them."""
    return [
        launch.grid[1] for launch in gpu.device.launches if "reduce" in launch.program.kernel.name
    ][-1]


SPLIT = (8, 2, 32, 32)  # several blocks share a channel
SHAPES = [SPLIT, (3, 5, 7, 7), (2, 8, 4, 8), (4, 1, 3, 3), (4, 8, 16, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_equals_torch(shape, channels_last, dtype, gpu):
    x = batch(shape, dtype, channels_last)
    y, dx, *_ = equals_torch(layer_for(shape[1], dtype), x, torch.randn(shape).to(x.dtype))
    if gpu.takes(x):
        assert y.stride() == dx.stride() == x.stride()
        steps = ["moments", "normalize", "backward_reduce", "backward_input"]
        assert steps_of(gpu.keys) == steps, "two launches per direction"
    else:
        assert not gpu.keys, "a device too old for a dtype takes plain operations"


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_equals_torch(dtype, activation, gpu):
    x = batch(SPLIT, dtype)
    layer, twin = layer_for(2, dtype, activation=activation), layer_for(2, dtype).double()
    wide, dy = x.double().requires_grad_(), torch.randn(SPLIT).to(x.dtype)
    expected = getattr(F, activation)(F.batch_norm(wide, None, None, *twin.parameters(), True))
    wanted = torch.autograd.grad(expected, [wide, *twin.parameters()], dy.double())
    y = layer(x.requires_grad_())
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    for actual, value in zip((y, *found), (expected, *wanted), strict=True):
        close(actual, value, dtype, 1 + value.abs().max().item())
    assert len(gpu.keys) == (4 if gpu.takes(x) else 0)
    assert all(f"+{activation}-" in key for key in gpu.keys[1:]), "no pass of its own"


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_in_place(channels_last, dtype, activation, gpu):
    x = batch((6, 4, 12, 12), dtype, channels_last)
    layer = InPlaceABN(4, activation=activation, activation_param=0.2)
    nn.init.normal_(layer.weight, 1, 0.2)
    twin, dy = copy.deepcopy(layer).double(), torch.randn(x.shape).to(x)
    wide = x.double().requires_grad_()
    z = F.batch_norm(wide, None, None, twin.weight.abs() + layer.eps, twin.bias, True)
    expected = twin._applied.apply_(z.clone())
    wanted = torch.autograd.grad(expected, [wide, twin.weight, twin.bias], dy.double())
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    given = leaf.clone(memory_format=torch.preserve_format)
    y = layer(given)
    assert y.data_ptr() == given.data_ptr()
    found = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)
    for actual, value in zip((y, *found), (expected, *wanted), strict=True):
        close(actual, value, dtype, 4 * (1 + value.abs().max().item()))
    steps = ["moments", "normalize", "backward_reduce", "backward_input"]
    if activation == "leaky_relu":
        steps[1] += "+leaky_relu"
        steps[2:] = [f"{step}+inverse_leaky_relu" for step in steps[2:]]
    assert steps_of(gpu.keys) == steps


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_mask_equals_the_valid_elements(replicas, gpu):
    x, mask = batch((7, 3, 6, 6), "float32"), torch.rand(7, 6, 6) < 0.7
    layer = layer_for(3)
    twin = nn.BatchNorm1d(3)
    twin.load_state_dict(layer.state_dict())
    rows = x.movedim(1, -1)[mask].requires_grad_()
    expected, dy = twin(rows), torch.randn(int(mask.sum()), 3)
    expected.backward(dy)
    model = layer if replicas == 1 else syncbn_torch.DataParallelWithCallback(layer, replicas=3)
    given, valid = mask.clone(), mask[:, None].expand_as(x)
    x = torch.where(valid, x, torch.nan).requires_grad_()
    whole = model(x, given)
    given.fill_(True)  # what it was in forward counts
    y = whole.movedim(1, -1)[mask]
    y.backward(dy)
    assert not whole[~valid].any()
    assert not x.grad[~valid].any()
    close(y, expected, "float32", 4)
    close(x.grad.movedim(1, -1)[mask], rows.grad, "float32", 4)
    close(layer.weight.grad, twin.weight.grad, "float32", 100)
    close(layer.running_var, twin.running_var, "float32", 10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("shape", [(4, 6, 8, 8), (4, 6, 7, 7), (40, 8)], ids=str)
def test_misaligned_tensors(shape, dtype, gpu):
    buffer = batch((prod(shape) + 8,), dtype)
    dy = torch.randn(shape).to(buffer)
    for offset in (0, 1, 2, 3, 5):
        equals_torch(layer_for(shape[1], dtype), buffer[offset:][: prod(shape)].view(shape), dy)
    lanes = {key.split("-")[2] for key in gpu.keys}
    assert len(lanes) == 2, "by vectors, and one by one"


@pytest.mark.parametrize("channels_last", [False, True])
def test_results_are_bitwise_the_same_in_any_order_of_blocks(channels_last, gpu):
    x, dy = batch(SPLIT, "float32", channels_last), torch.randn(SPLIT)
    seen = set()
    for order, width in [("first", 32), ("last", 1), ("random", 5), ("random", 64)]:
        gpu.device.schedule = Schedule(order=order, width=width, seed=width)
        results = equals_torch(layer_for(2), x, dy)
        seen.add(b"".join(t.detach().contiguous().numpy().tobytes() for t in results))
    assert len(seen) == 1
    assert splits(gpu) > 1


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


# ------------------------------------------------------------------------------- replicas


def replicas_equal_the_undivided_batch(shape, replicas, **settings):
    layer = layer_for(shape[1], "float64", **settings)
    alone = copy.deepcopy(layer)
    model = syncbn_torch.DataParallelWithCallback(
        nn.Sequential(nn.Conv2d(shape[1], shape[1], 1).double(), layer),
        device_ids=["cpu"] * replicas,
    )
    single = nn.Sequential(copy.deepcopy(model.module[0]), alone)
    x, dy = batch(shape, "float64"), torch.randn(shape, dtype=torch.float64)
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    versions = [buffer._version for buffer in layer.buffers()]
    y, expected = model(many), single(one)
    for buffer, version in zip(layer.buffers(), versions, strict=True):
        assert buffer._version > version, "a graph that has saved it must notice"
    y.backward(dy)
    expected.backward(dy)
    close(y, expected, "float64", 10)
    close(many.grad, one.grad, "float64", 10)
    for ours, theirs in zip(model.module.parameters(), single.parameters(), strict=True):
        close(ours.grad, theirs.grad, "float64", 100)
    for ours, theirs in zip(model.module.buffers(), single.buffers(), strict=True):
        close(ours, theirs, "float64")
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("rows", [7, 6, 2])
def test_replicas_equal_the_undivided_batch(rows, eps_mode):
    replicas_equal_the_undivided_batch((rows, 4, 3, 5), 3, eps_mode=eps_mode)


def test_replicas_on_several_streams(gpu, monkeypatch):
    class Stream(NamedTuple):
        number: int
        device: str

        def wait_stream(self, other):
            waits.append((self.number, other.number))

    @contextmanager
    def entered(stream):
        before, gpu.here.stream = gpu.here.stream, stream.number
        yield
        gpu.here.stream = before

    waits = []
    gpu.here = Here(iter((0, number) for number in (99, 100, 101, 102)))
    assert gpu.here.stream == 99, "the replicas are in threads of their own"

    def here(*_):
        return Stream(gpu.here.stream, "device 0")

    monkeypatch.setattr("syncbn_torch.data_parallel.replica_sync.stream_of", here)
    monkeypatch.setattr(torch.cuda, "current_stream", here)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    replicas_equal_the_undivided_batch((12, 2, 32, 32), 3)
    forward, backward = gpu.device.launches[:2], gpu.device.launches[-4:]
    (first,) = {launch.stream for launch in forward}
    others = sorted({100, 101, 102} - {first})
    assert sorted(waits[:2]) == [(first, other) for other in others]
    assert sorted(waits[2:]) == [(other, first) for other in others]
    assert {launch.stream for launch in backward} == {99}, "backward is in the calling thread"


def test_a_loss_of_some_outputs_reaches_every_input():
    layer = layer_for(4, "float64")
    model = syncbn_torch.DataParallelWithCallback(layer, device_ids=["cpu"] * 3)
    x = batch((6, 4, 3, 5), "float64")
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    twin = nn.BatchNorm2d(4).double()
    twin.load_state_dict(layer.state_dict())
    model(many)[:2].pow(3).sum().backward()
    twin(one)[:2].pow(3).sum().backward()
    close(many.grad, one.grad, "float64", 100)


@pytest.mark.parametrize("replicas", [1, 3])
def test_second_derivatives_equal_torch(replicas):
    layer = layer_for(3, "float64")
    twin = nn.BatchNorm2d(3).double()
    twin.load_state_dict(layer.state_dict())
    if replicas > 1:
        layer = syncbn_torch.DataParallelWithCallback(layer, device_ids=["cpu"] * replicas)
    grads = []
    for module in (layer, twin):
        x = batch((3, 3, 2, 4), "float64").requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    close(grads[0], grads[1], "float64", 1e4)


# ---------------------------------------------------------------------- shapes and layouts


@pytest.mark.parametrize("view", ["slice", "transposed", "expanded gradient"])
def test_inputs_that_are_not_dense(view, gpu):
    whole = batch((3, 4, 6, 8), "float32")
    x = {"slice": whole[:, :, 1:5, 1:6], "transposed": whole.transpose(2, 3)}.get(view, whole)
    dy = torch.ones(()).expand(x.shape) if view == "expanded gradient" else torch.randn(x.shape)
    equals_torch(layer_for(4), x, dy)
    assert len(gpu.keys) == 4


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
    layer = syncbn_torch.SyncBatchNorm(4, affine=False, track_running_stats=False)
    x = batch((3, 4, 3, 3), "float32").requires_grad_()
    one = x.detach().clone().requires_grad_()
    dy = torch.randn(x.shape)
    layer(x).backward(dy)
    F.batch_norm(one, None, None, training=True).backward(dy)
    torch.testing.assert_close(x.grad, one.grad, rtol=1e-4, atol=1e-5)


def test_memory_kept_for_backward_is_x_and_per_channel_numbers():
    layer = layer_for(8, "float64")
    x = batch((4, 8, 6, 6), "float64").requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    large = {t.data_ptr() for t in kept if t.numel() > 100}
    assert large == {x.data_ptr()}
    statistics = y.grad_fn.known.norms[0].statistics
    assert statistics.table.numel() == 3 * 8 + 1
    assert statistics.table.isfinite().all()


# ---------------------------------------------------------------- streams, devices, faults


def step(channels_last=False):
    """A step that needs counters."""
    equals_torch(layer_for(2), batch(SPLIT, "float32", channels_last), torch.randn(SPLIT))


def test_launches_are_on_the_current_stream(gpu):
    gpu.here.stream = 0x7F12_3456_789A
    step()
    assert [launch.stream for launch in gpu.device.launches] == [gpu.here.stream] * 4


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_stream_has_counters_of_its_own(channels_last, gpu):
    for stream in (0, 5, 6, 5):
        gpu.here.stream = stream
        step(channels_last)
    assert list(gpu.operations.scratch) == [(0, stream) for stream in (0, 5, 6)]
    assert len({own.owner.data_ptr() for own in gpu.operations.scratch.values()}) == 3


def test_a_captured_graph_has_counters_of_its_own(gpu):
    gpu.here.stream, gpu.here.captures = 5, True
    step()
    assert not gpu.operations.scratch
    assert splits(gpu) > 1


def test_counters_grow(gpu):
    run = gpu.operations.launcher(0, 0)
    few = run.shared_sums(10, 10)
    assert run.shared_sums(20, 20) is few
    many = run.shared_sums(10, BLOCK_COUNTERS + 1)
    assert many is not few
    assert len(counters_of(many)) > BLOCK_COUNTERS
    assert not many.owner.any()
    assert run.shared_sums(PARTIALS, 10) is many
    more = run.shared_sums(PARTIALS + 1, 10)
    assert more.counters - more.partials > 8 * PARTIALS
    assert more.sizes[1] == many.sizes[1]


def test_a_launch_makes_its_device_current(gpu):
    gpu.here.index, gpu.here.stream = 1, 7
    step()
    ran = [launch.program.kernel.name for launch in gpu.device.launches]
    assert len(ran) == 4
    assert [index for index, names in gpu.switches if names] == [1] * 4
    assert [name for _, names in gpu.switches for name in names] == ran
    assert gpu.here.current == 0
    assert {device for key, device in kernels._machine.launches if "merge_parts" not in key} == {1}
    assert list(gpu.operations.scratch) == [(1, 7)]


def fails(monkeypatch, gpu, at):
    """The `at`-th launch from now on does not start."""
    numbers, launcher = itertools.count(), gpu.device.launcher

    def failing(*kernel):
        start = launcher(*kernel)

        def launch(*arguments):
            if next(numbers) == at:
                raise DriverError("out of resources", 701)
            start(*arguments)

        return launch

    monkeypatch.setattr(gpu.device, "launcher", failing)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("at", [0, 1])
def test_a_launch_that_fails_leaves_running_statistics(at, momentum, monkeypatch, gpu):
    layer = layer_for(8, momentum=momentum)
    before = copy.deepcopy(layer.state_dict())
    x, dy = batch((4, 8, 16, 32), "float32"), torch.randn(4, 8, 16, 32)
    fails(monkeypatch, gpu, at)
    name = ("moments", "normalize")[at]
    with pytest.raises(BackendError, match=rf"planes_{name}-float32-\S+ to start on device 0"):
        layer(x)
    for key, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    equals_torch(layer, x, dy)


@pytest.mark.parametrize("at", [2, 3])
def test_a_launch_that_fails_in_backward_leaves_gradients(at, monkeypatch, gpu):
    layer = layer_for(8)
    x, dy = batch((4, 8, 16, 32), "float32").requires_grad_(), torch.randn(4, 8, 16, 32)
    fails(monkeypatch, gpu, at)
    y = layer(x)
    with pytest.raises(BackendError, match="CUDA_LAUNCH_BLOCKING"):
        y.backward(dy, retain_graph=True)
    assert x.grad is layer.weight.grad is layer.bias.grad is None
    y.backward(dy)
    _, dx, by_weight, by_bias, *_ = reference(layer_for(8), x, dy)
    for actual, wanted in (
        (x.grad, dx),
        (layer.weight.grad, by_weight),
        (layer.bias.grad, by_bias),
    ):
        close(actual, wanted, "float32", 1 + wanted.abs().max().item())


@pytest.mark.parametrize("rank_1", ["with", "without"])
def test_processes_exchange_packed_moments(rank_1, tmp_path, arch):
    """Two processes whose tensors are "on a device", also in backwards of other layers."""
    script = str(Path(__file__).with_name("torch_member.py"))
    members = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store"), *map(str, arch), rank_1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    try:
        outputs = [member.communicate(timeout=100)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0, 0], "\n".join(outputs)
