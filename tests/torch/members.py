"""What the processes of a test do: one function per test, run in every process of a world.

Each makes the whole batch, works on its own rows, and compares with all of it.
"""

from __future__ import annotations

import copy
import datetime
import gc
import inspect
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn_core.errors import ProtocolError, StateError
from syncbn_torch import (
    DataParallelWithCallback,
    DistributedCommunicator,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
    create_syncbn_process_group,
    forward_together,
)
from syncbn_torch.process_group import communicator_for

# DistributedDataParallel's option, under the name that this torch wants
SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"

close = torch.testing.assert_close


def cut(bounds: Sequence[int], rank: int) -> slice:
    return slice(bounds[rank], bounds[rank + 1])


def whole_batch(shape: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator) * 2 + 5
    return x, torch.randn(*shape, dtype=torch.float64, generator=generator)


def same_on_all_ranks(values: Tensor) -> None:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values.contiguous())
    assert all(torch.equal(other, every[0]) for other in every), "ranks differ"


def follow(layer: nn.Module, twin: nn.Module, x: Tensor, dy: Tensor, mine: slice) -> Tensor:
    """Forward and backward of `layer` on the own rows equal those of `twin` on all of them."""
    x_twin = x.clone().requires_grad_()
    y_twin = twin(x_twin)
    y_twin.backward(dy)
    part = x[mine].clone().requires_grad_()
    y = layer(part)
    y.backward(dy[mine])
    close(y, y_twin[mine])
    assert part.grad is not None
    assert x_twin.grad is not None
    close(part.grad, x_twin.grad[mine])
    for (name, buffer), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
        close(buffer, other, msg=name)
        same_on_all_ranks(buffer)
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        total = parameter.grad.clone()
        dist.all_reduce(total)
        close(total, other.grad)
    return part.grad


def raises(kind: type[BaseException], *words: str, call: Any) -> str:
    try:
        call()
    except kind as error:
        message = str(error)
        assert all(word in message for word in words), message
        return message
    raise AssertionError(f"expected {kind.__name__}")


def parts(rank: int, size: int) -> None:
    """Uneven ranks, an empty one, threads within processes; eval waits for nobody."""
    x, dy = whole_batch((8, 3, 4, 4))
    mine = cut((0, 3, 3, 8), rank)
    for kind in (SynchronizedBatchNorm2d, SyncBatchNorm):
        for replicas in (1, 2):
            layer, twin = kind(3).double(), nn.BatchNorm2d(3).double()
            parallel = DataParallelWithCallback(layer, replicas=replicas)
            for _ in range(2):
                follow(parallel, twin, x, dy, mine)
            before = layer.running_var.clone()
            layer.eval()
            if rank == 0:
                layer(x[mine])
            assert torch.equal(layer.running_var, before)
    if rank == 0:  # nor without running statistics
        SynchronizedBatchNorm2d(3, track_running_stats=False).double().eval()(x)


def shapes(rank: int, size: int) -> None:
    """One sample per rank, (N, C), volumes, channels_last, all ranks empty; any setting."""
    bounds = tuple(range(size + 1))
    for kind, twin_kind, shape in [
        (SynchronizedBatchNorm1d, nn.BatchNorm1d, (size, 5)),
        (SynchronizedBatchNorm1d, nn.BatchNorm1d, (size, 5, 3)),
        (SyncBatchNorm, nn.BatchNorm3d, (size, 5, 2, 3, 2)),
    ]:
        x, dy = whole_batch(shape)
        follow(kind(5).double(), twin_kind(5).double(), x, dy, cut(bounds, rank))
    x, dy = whole_batch((9, 3, 4, 5))
    x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    mine = cut((0, 2, 6, 9), rank)
    for settings in ({}, {"momentum": None}, {"eps": 0.1}):
        layer = SynchronizedBatchNorm2d(3, **settings).double()
        grad = follow(layer, nn.BatchNorm2d(3, **settings).double(), x, dy, mine)
        assert grad.is_contiguous(memory_format=torch.channels_last)
    for settings in ({"affine": False}, {"track_running_stats": False}):
        layer = SynchronizedBatchNorm2d(3, **settings).double()
        follow(layer, nn.BatchNorm2d(3, **settings).double(), x, dy, mine)
    # images of unlike sizes: every pixel counts the same
    layer = SynchronizedBatchNorm2d(3).double()
    images = [whole_batch((2, 3, 4 + 3 * r, 5), seed=r) for r in range(size)]
    wide = torch.cat([x.flatten(2) for x, _ in images], 2).requires_grad_()
    wide_dy = torch.cat([dy.flatten(2) for _, dy in images], 2)
    twin = nn.BatchNorm1d(3).double()
    expected = twin(wide)
    expected.backward(wide_dy)
    own = images[rank][0].requires_grad_()
    y = layer(own)
    y.backward(images[rank][1])
    ends = torch.tensor([5 * (4 + 3 * r) for r in range(size)]).cumsum(0).tolist()
    columns = slice(ends[rank] - 5 * (4 + 3 * rank), ends[rank])
    assert own.grad is not None
    assert wide.grad is not None
    close(y.flatten(2), expected[:, :, columns])
    close(own.grad.flatten(2), wide.grad[:, :, columns])
    close(layer.running_var, twin.running_var)
    layer = SynchronizedBatchNorm2d(3).double()
    before = copy.deepcopy(layer.state_dict())
    empty = x[:0].requires_grad_()
    layer(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape
    assert torch.equal(layer.running_var, before["running_var"])
    assert int(layer.num_batches_tracked) == 1


def half(rank: int, size: int) -> None:
    """Half precision and autocast; ranks of unlike dtypes are told so, and can go on."""
    x, _ = whole_batch((9, 3, 4, 5))
    mine = cut((0, 2, 6, 9), rank)
    twin = nn.BatchNorm2d(3).double()
    x = x.half().double()  # what all dtypes hold
    expected = twin(x)
    layer = SynchronizedBatchNorm2d(3)
    y = layer(x[mine].half())
    assert y.dtype is torch.float16
    close(y.double(), expected[mine], rtol=0, atol=4e-3)
    close(layer.running_var.double(), twin.running_var, rtol=0, atol=1e-6)
    before = layer.running_var.clone()
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    message = raises(
        TypeError, "0: 'float32'", "1: 'bfloat16'", call=lambda: layer(x[mine].to(dtype))
    )
    assert "SynchronizedBatchNorm2d" in message
    assert torch.equal(layer.running_var, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
        model(x[mine].float()).sum().backward()
    same_on_all_ranks(layer.running_mean)


def recomputed(rank: int, size: int) -> None:
    """A checkpointed layer counts once, and has bitwise the gradients and statistics of others."""
    x, dy = whole_batch((8, 3, 4, 4))
    mine = cut((0, 3, 8), rank)
    for replicas in (1, 2):
        results = []
        for reentrant in (None, False, True)[: 4 - replicas]:
            layer = SynchronizedBatchNorm2d(3).double()
            part = x[mine].clone().requires_grad_()
            model = DataParallelWithCallback(Calls(layer, reentrant), replicas=replicas)
            model(part).backward(dy[mine])
            results.append([part.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
            assert int(layer.num_batches_tracked) == 1
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Calls(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.layer = layer
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def transforms(rank: int, size: int) -> None:
    """Tangents and wrapped tensors can't be sent: each is refused, and all go on."""
    x, dy = whole_batch((8, 3, 4, 4))
    x, dy = x[cut((0, 3, 8), rank)], dy[cut((0, 3, 8), rank)]
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    layer = layers[0]
    refused = (StateError, "SynchronizedBatchNorm2d", "over processes")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, dy)
        raises(*refused, call=lambda: layer(dual))
        raises(*refused, call=lambda: forward_together(layers, [x, dual]))
        layer(x)
    raises(*refused, call=lambda: torch.func.jvp(layer, (x,), (dy,)))
    assert int(layer.num_batches_tracked) == 1
    leaf = x.clone().requires_grad_()
    dys = torch.stack([dy, dy])
    for y in (layer(leaf), DataParallelWithCallback(layer, replicas=2)(leaf)):
        grad = partial(torch.autograd.grad, y, leaf, retain_graph=True)
        batched = partial(grad, dys, is_grads_batched=True)
        raises(StateError, "over processes", call=batched)
        grad(dy)
    ys = forward_together(layers, [leaf, leaf])
    batched = partial(torch.autograd.grad, ys, leaf, [dys, dys], is_grads_batched=True)
    raises(StateError, "over processes", call=batched)


def groups(rank: int, size: int) -> None:
    """Subgroups, one dimension of a mesh, a group without this rank, a copy of a layer."""
    x, _ = whole_batch((8, 3, 4, 4))
    half_of_batch = slice(0, 4) if rank < 2 else slice(4, 8)
    rows = slice(0, 1) if rank % 2 == 0 else slice(1, 4)
    twin = nn.BatchNorm2d(3).double()
    expected = twin(x[half_of_batch])[rows]
    own = create_syncbn_process_group(2)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    given = [own, mesh["within"], DistributedCommunicator(own, check_order=True)]
    for group in given:
        layer = SynchronizedBatchNorm2d(3, process_group=group).double()
        for each in (
            layer,
            copy.deepcopy(layer),
            convert_model(nn.BatchNorm2d(3), process_group=group).double(),
        ):
            close(each(x[half_of_batch][rows]), expected)
            close(each.running_var, twin.running_var)
    layer = SynchronizedBatchNorm2d(3, process_group=mesh).double()
    raises(ValueError, 'mesh["across"]', call=lambda: layer(x))
    raises(ValueError, "divides", "4", call=lambda: create_syncbn_process_group(3))
    assert create_syncbn_process_group(0) is None  # as in apex: the whole world
    everybody = SynchronizedBatchNorm2d(3, process_group=create_syncbn_process_group(0)).double()
    close(everybody(x[2 * rank : 2 * rank + 2]), nn.BatchNorm2d(3).double()(x)[2 * rank :][:2])
    pair = dist.new_group([0, 2])
    layer = SynchronizedBatchNorm2d(3, process_group=pair).double()
    if rank in (0, 2):
        close(
            layer(x[cut((0, 3, 3, 8), rank)]),
            nn.BatchNorm2d(3).double()(x)[cut((0, 3, 3, 8), rank)],
        )
    else:
        raises(RuntimeError, "belongs to", call=lambda: layer(x))
    wire = DistributedCommunicator().transport
    wire._types = {"meta"}  # type: ignore[attr-defined]  # a group for devices alone
    assert wire._wire(x.numpy()).is_meta  # type: ignore[attr-defined]
    lonely = [dist.new_group([other]) for other in range(size)][rank]  # a world of one
    layer = SynchronizedBatchNorm2d(3, process_group=lonely).double()
    close(layer(x[rows]), nn.BatchNorm2d(3).double()(x[rows]))


def one_value(rank: int, size: int) -> None:
    """One value per channel in all is torch's error, on every rank; then all goes on."""
    layer = SynchronizedBatchNorm2d(3).double()
    x, dy = whole_batch((8, 3, 4, 4))
    raises(
        ValueError,
        "more than 1 value",
        call=lambda: layer(x[:1, :, :1, :1] if rank == 0 else x[:0]),
    )
    assert int(layer.num_batches_tracked) == 0
    follow(layer, nn.BatchNorm2d(3).double(), x, dy, cut((0, 1, 2, 8), rank))


def together(rank: int, size: int) -> None:
    """Layers that share a message give bitwise what they give apart, in fewer calls."""
    x, dy = whole_batch((9, 6, 4, 5))
    mine = cut((0, 2, 2, 9), rank)
    for dtype in (torch.float64, torch.bfloat16):
        layers = [
            SynchronizedBatchNorm2d(c, momentum=m) for c, m in ((1, 0.1), (2, None), (3, 0.3))
        ]
        layers = [layer.double() if dtype is torch.float64 else layer for layer in layers]
        apart = copy.deepcopy(layers)
        results = []
        for each, joint in ((layers, True), (apart, False)):
            leaf = x[mine].to(dtype).requires_grad_()
            inputs = leaf.split([1, 2, 3], 1)
            communicator = communicator_for(None)
            assert communicator is not None
            before = communicator.calls
            if joint:
                ys = forward_together(each, inputs)
            else:
                ys = [layer(part) for layer, part in zip(each, inputs, strict=True)]
            # the last output is not part of the loss
            given = dy[mine].to(dtype).split([1, 2, 3], 1)
            torch.autograd.backward(ys[:2], given[:2])
            assert communicator.calls - before == (2 if joint else 5)
            results.append([leaf.grad, *ys, *(v for layer in each for v in layer.buffers())])
            results[-1] += [p.grad for layer in each[:2] for p in layer.parameters()]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    more: list[Any] = [Positive(3).double() for _ in range(2)]
    assert all((y >= 0).all() for y in forward_together(more, [x[mine, :3], x[mine, 3:]]))
    for layer in layers:
        layer.eval()
    ys = forward_together(layers, x.to(dtype).split([1, 2, 3], 1))
    assert all(y.dtype is dtype for y in ys)
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    raises(ValueError, "2 inputs for 1", call=lambda: forward_together(layers[:1] * 2, [x, x]))
    one_value = [x[:3, :3], x[: int(rank == 0), :3, :1, :1]]
    raises(ValueError, "more than 1 value", call=lambda: forward_together(layers, one_value))
    assert all(int(layer.num_batches_tracked) == 0 for layer in layers)
    parallel = DataParallelWithCallback(Pair(layers), replicas=2)
    twin = nn.BatchNorm2d(3).double()
    close(parallel(x[mine]), (twin(x[:, :3]) + nn.BatchNorm2d(3).double()(x[:, 3:]))[mine])


class Pair(nn.Module):
    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        first, second = forward_together(list(self.layers), x.split([3, 3], 1))  # type: ignore[arg-type]
        return first + second


def unlike_layers(rank: int, size: int) -> None:
    """Without `check_order` too, unlike layers of one size are told, once each has been called."""
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    x, dy = whole_batch((6, 3, 4, 4))
    mine = cut((0, 1, 3, 6), rank)
    for layer in layers:
        follow(layer, nn.BatchNorm2d(3).double(), x, dy, mine)
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    message = raises(
        RuntimeError, "same layer", "SYNCBN_CHECK_ORDER", call=lambda: layers[rank % 2](x[mine])
    )
    assert "SynchronizedBatchNorm2d" in message
    for layer, state in zip(layers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layers[0](x[mine])
    del layer
    if rank == 0:  # when layers go is a rank's own affair
        layers.pop()
        gc.collect()
    new = [SynchronizedBatchNorm2d(3).double() for _ in range(3)]
    # a first call that comes to nothing gives no number
    raises(RuntimeError, "same layer", call=lambda: (new if rank else layers)[0](x[mine]))
    for layer in reversed(new):
        layer(x[mine])
    raises(ValueError, "DeviceMesh", "'oops'", call=lambda: DistributedCommunicator("oops"))
    layer = SynchronizedBatchNorm2d(3, process_group=DistributedCommunicator())
    assert copy.deepcopy(layer).process_group is layer.process_group
    raises(RuntimeError, "state_dict()", call=lambda: pickle.dumps(layer))


class Branches(nn.Module):
    """Two branches with equal channels."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.a = SynchronizedBatchNorm1d(3, process_group=group)
        self.b = SynchronizedBatchNorm1d(3, process_group=group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x.exp())


def branches(rank: int, size: int) -> None:
    """A loss of unlike branches is told to every rank, by layer and call; then all goes on."""
    for check in (False, True):
        unlike_branches(rank, size, check)


def unlike_branches(rank: int, size: int, check: bool) -> None:
    x, dy = whole_batch((2 * size + 1, 3))
    x = x - 5  # for exp
    rows = slice(2 * rank, 2 * rank + 2 + (rank == size - 1))
    group = DistributedCommunicator(check_order=check)
    model = Branches(group).double()
    bare = [SynchronizedBatchNorm1d(3, process_group=group).double() for _ in range(2)]
    forwards: dict[str, Any] = {
        "model": model,
        "bare": lambda x: (bare[0](x), bare[1](x.exp())),
        "threads": DataParallelWithCallback(Branches(group).double(), replicas=2),
        "together": lambda x: [forward_together(bare, two)[0] for two in ([x, x.exp()], [x, x])],
    }
    own = [1, 0] if rank == 0 else [0, 1]
    for kind, forward in forwards.items():
        leaf = x[rows].clone().requires_grad_()
        a, b = forward(leaf)
        loss = (a**3).sum() if rank == 0 else (b**2 * leaf.detach()).sum()
        named = f"{'a' if rank == 0 else 'b'} (" if kind == "model" else ""
        words = ["rank 0: call", "rank 1: call"] if check else ["SYNCBN_CHECK_ORDER"]
        words += [f"backward of {named}", "forward in call"]
        message = raises(ProtocolError, *words, call=loss.backward)
        if kind == "bare":
            counts = [message.count(f"SynchronizedBatchNorm1d, layer {n}") for n in (3, 4)]
            assert counts == ([1, size - 1] if check else own), message
    message = raises(ProtocolError, call=lambda: bare[min(rank, 1)](x[rows]))  # forward too
    counts = [message.count(f"SynchronizedBatchNorm1d, layer {n}") for n in (3, 4)]
    assert counts == ([1, size - 1] if check else own), message
    another = Branches(group).double()
    layer = another.a
    follow(layer, nn.BatchNorm1d(3).double(), x, dy, rows)
    # two calls of one layer
    ys = [layer(x[rows].clone().requires_grad_()) for _ in range(2)]
    mixed = ys[min(rank, 1)]
    raises(ProtocolError, "backward of a (", call=lambda: mixed.backward(dy[rows]))
    # the sums of a layer, and sums of something else
    y = layer(x[rows].clone().requires_grad_())
    if rank == 0:
        raises(ProtocolError, "all", call=lambda: group.all_reduce_sums(torch.zeros(2, 3).double()))
    else:
        raises(ProtocolError, "backward of a (", call=lambda: y.backward(dy[rows]))
    assert group.all_reduce_sums(torch.ones(2, 3)).tolist() == [[size] * 3] * 2


def same_graph(rank: int, size: int) -> None:
    """Passes again over one graph, recomputed forwards, ranks without a gradient: no mix-ups."""
    x, dy = whole_batch((6, 3))
    mine = cut((0, 1, 3, 6), rank)
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    whole, leaf = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    y_twin, y = twin(whole), layer(leaf)
    other = layer(leaf.exp())  # an exchange in between
    for scale in (1.0, -3.0):
        (expected,) = torch.autograd.grad(y_twin, whole, dy * scale, retain_graph=True)
        (found,) = torch.autograd.grad(y, leaf, dy[mine] * scale, retain_graph=True)
        close(found, expected[mine])
    del other
    for reentrant in (False, True):
        leaf = x[mine].clone().requires_grad_()
        twice = leaf
        for _ in range(2):
            twice = checkpoint(layer, twice, use_reentrant=reentrant)
        twice.backward(dy[mine])
        whole = x.clone().requires_grad_()
        twin(twin(whole)).backward(dy)
        close(leaf.grad, whole.grad[mine])  # type: ignore[index]
    # rank 0 takes part, though it needs no gradient by its x
    leaf = x[mine].clone().requires_grad_(rank != 0)
    layer(leaf).backward(dy[mine])
    whole = x.clone().requires_grad_()
    twin(whole).backward(dy)
    if rank != 0:
        close(leaf.grad, whole.grad[mine])  # type: ignore[index]
    # NaN and infinity in the sums are the model's own affair
    for value in (float("nan"), float("inf")):
        leaf = x[mine].clone().requires_grad_()
        layer(leaf).backward(torch.full_like(leaf, value))
        assert not leaf.grad.isfinite().any()  # type: ignore[union-attr]


def one_replica(rank: int, size: int) -> None:
    """A small batch makes one replica on one rank, which goes on with the others' two."""
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    parallel = DataParallelWithCallback(layer, replicas=2)
    x, dy = whole_batch((7, 3))
    for bounds in ((0, 4, 5, 7), (0, 1, 5, 7), (0, 2, 5, 7)):
        layer.zero_grad()
        twin.zero_grad()
        follow(parallel, twin, x, dy, cut(bounds, rank))
    for bounds in ((0, 4, 5, 7), (0, 3, 3, 7)):  # x needs no gradient, on some ranks or on all
        for needed in ((), (0,), (1, 2)):
            layer.zero_grad()
            mine = cut(bounds, rank)
            parallel(x[mine].requires_grad_(rank in needed)).backward(dy[mine])
            twin.zero_grad()
            twin(x).backward(dy)
            for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
                assert own.grad is not None
                total = own.grad.clone()
                dist.all_reduce(total)
                close(total, other.grad)
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    recomputed = DataParallelWithCallback(Recomputed(layer), replicas=2)
    for bounds in ((0, 4, 5, 7), (0, 1, 5, 7)):
        layer.zero_grad()
        twin.zero_grad()
        follow(recomputed, twin, x, dy, cut(bounds, rank))


class Recomputed(nn.Module):
    """A layer that is checkpointed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return y


class Positive(SynchronizedBatchNorm2d):
    """A layer that does more than its base class."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def compiled(rank: int, size: int) -> None:
    """`torch.compile` breaks the graph at the layer, and changes nothing."""
    torch.manual_seed(0)
    start = convert_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())).double()
    x, _ = whole_batch((6, 3, 4, 4))
    mine = cut((0, 1, 3, 6), rank)
    results = []
    for compiling in (False, True):
        model = copy.deepcopy(start)
        call: Any = torch.compile(model, backend="aot_eager") if compiling else model
        y = call(x[mine])
        y.square().sum().backward()
        results.append([y, *model.buffers(), *(p.grad for p in model.parameters())])
    for eager, other in zip(*results, strict=True):
        close(other, eager)


def again(rank: int, size: int) -> None:
    """A layer outlives its process group, and takes the next one."""
    x, dy = whole_batch((6, 3, 4, 4))
    layer, twin = SynchronizedBatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    mine = cut(range(0, 8, 2), rank)
    follow(layer, twin, x, dy, mine)
    kept = DistributedCommunicator()
    store = Path(os.environ["FOLDER"], "another").as_uri()
    dist.barrier()
    dist.destroy_process_group()
    close(layer(x), twin(x))  # alone: on the whole batch
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    gc.collect()
    raises(RuntimeError, "destroyed", call=lambda: kept.all_reduce_sums(torch.ones(1)))
    layer.zero_grad()
    twin.zero_grad()
    follow(layer, twin, x, dy, mine)


class Net(nn.Module):
    """Branches, a layer that is used twice, and one that is known by two names."""

    def __init__(self, kind: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = kind(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn_left, self.bn_right = kind(8), kind(8)
        self.alias = self.bn_right
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        x = self.bn_left(self.left(x)) + self.bn_right(self.right(x))
        x = self.alias(x).relu()
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def train(
    model: nn.Module, x: Tensor, dy: Tensor, mine: slice, scale: float, forwards: int = 1
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        loss: Any = 0.0
        for _ in range(forwards):  # several forwards, one backward
            loss = loss + (model(x[mine]) * dy[mine]).sum() * (scale / len(x))
        loss.backward()
        optimizer.step()


def wrappers(rank: int, size: int) -> None:
    """DistributedDataParallel, FSDP2, and threads in both; each is one device to rounding."""
    torch.manual_seed(0)
    start = Net().double()
    x, _ = whole_batch((7, 3, 6, 6))
    dy = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = cut((0, 2, 2, 7), rank)
    for way in ("ddp", "ddp, threads", "ddp, two forwards", "ddp, own buffers", "fsdp", "alone"):
        alone, model = copy.deepcopy(start), convert_model(copy.deepcopy(start))
        forwards = 2 if way == "ddp, two forwards" else 1
        train(alone, x, dy, slice(0, len(x)), 1.0, forwards)
        inner = model
        if way == "ddp, threads":
            model = DataParallelWithCallback(model, replicas=2)
        if way.startswith("ddp"):
            settings = {} if way != "ddp, own buffers" else {SYNC_BUFFERS: False}
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, **settings)
        elif way == "fsdp":
            from torch.distributed.fsdp import fully_shard

            model = fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
        if way == "alone":  # no wrapper: the gradients are the user's to add up
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        # wrappers average gradients over ranks
        train(model, x, dy, mine, 1.0 if way == "alone" else float(size), forwards)
        for name, value in inner.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-9, msg=f"{way}: {name}")


def order(rank: int, size: int) -> None:
    """With `check_order` the first wrong call says who does what, by name, and all can go on."""
    os.environ["SYNCBN_CHECK_ORDER"] = "1"  # before the first call
    model = convert_model(Net()).double()
    x, _ = whole_batch((6, 3, 6, 6))
    model(x[rank : rank + 2]).sum().backward()
    wrong = model.bn_left if rank == 1 else model.bn
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = raises(
        RuntimeError,
        "rank 0: call 9 (forward of bn (SynchronizedBatchNorm2d)",
        "rank 1: call 9 (forward of bn_left (SynchronizedBatchNorm2d)",
        "rank 2: call 9 (forward of bn (Synch",
        call=lambda: wrong(torch.ones(2, 8, 3, 3, dtype=torch.float64)),
    )
    assert "same order" in message
    late = SynchronizedBatchNorm2d(3).double()
    held = nn.ModuleDict({"late": late})
    if rank == 0:  # one container more on one rank is no fault
        held = nn.ModuleDict({"net": held})
    late(x[rank : rank + 2])
    assert held
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    y = model(x[rank : rank + 2])
    if rank == 2:  # backward on one rank, the next forward on the others
        raises(RuntimeError, "backward of bn_right", call=lambda: y.sum().backward())
    else:
        raises(RuntimeError, "backward of bn_right", call=lambda: model(x[rank : rank + 2]))
    SynchronizedBatchNorm2d(3).double()(x[rank : rank + 2])


def twofold(forward: Any, other: bool, x: Tensor) -> Tensor:
    """Of two branches with equal channels one rank takes the other one into its loss."""
    ys: list[Tensor] = [forward(x), forward(x.sin())]
    if other:
        print("FAULT", flush=True)
    return ys[other]


def faulty(
    rank: int, size: int, seed: int, fault: str, culprit: int, at: int, ddp: bool, seconds: float
) -> None:
    """Steps of a random model, where rank `culprit` goes wrong as it begins its call `at`.

    Ends with a line `FAULT`, `ERROR class: message` or `DONE`.
    """
    choice = random.Random(seed)
    channels = [choice.choice((4, 4, 7)) for _ in range(5)]
    layers: list[nn.Module] = []
    for before, after in zip([3, *channels], channels, strict=False):
        layers += [nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.Tanh()]
    torch.manual_seed(seed)
    plain = convert_model(nn.Sequential(*layers))
    model: nn.Module = DistributedDataParallel(plain) if ddp else plain
    x = torch.randn(2, 3, 4, 4)
    model(x).square().mean().backward()  # loads the kernels
    dist.barrier()  # all have: from here on the deadline is short
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))
    calls = 0

    def counted(layer: nn.Module, given: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == culprit and calls == at:
            print("FAULT", flush=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "exit":
                os._exit(0)
            if fault == "raise":
                raise ZeroDivisionError("a fault of this rank's own")
            if fault == "again":  # one call more than the others
                layer.forward(*given)

    for layer in plain:
        if isinstance(layer, SynchronizedBatchNorm2d):
            if rank == culprit and fault == "skip" and at % 5 == calls:
                layer.forward = lambda x: x  # type: ignore[method-assign]
                print("FAULT", flush=True)
            if fault == "branch" and at % 5 == calls:
                layer.forward = partial(twofold, layer.forward, culprit == rank)  # type: ignore[method-assign]
            calls += 1
            layer.register_forward_pre_hook(counted)
    calls = 0
    for _ in range(3):
        model(x).square().mean().backward()


def main(case: str, rank: int, size: int, folder: str, arguments: Sequence[Any]) -> None:
    """In a new process: its output goes to a file of its own."""
    with open(Path(folder, f"{rank}.log"), "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["FOLDER"] = folder
    faults = case == "faulty"
    store, check = Path(folder, "store").as_uri(), False
    if faults:
        store, check, *arguments = arguments
    os.environ["SYNCBN_CHECK_ORDER"] = str(int(check))
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        globals()[case](rank, size, *arguments)
        if not faults:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        if not faults:
            traceback.print_exc()
        else:
            print(f"ERROR {type(error).__name__}: {error}", flush=True)
        sys.stderr.flush()
        os._exit(1)
    if faults:
        print("DONE", flush=True)
        os._exit(0)


if __name__ == "member":
    main(CASE, RANK, SIZE, FOLDER, ARGUMENTS)  # type: ignore[name-defined]  # noqa: F821
