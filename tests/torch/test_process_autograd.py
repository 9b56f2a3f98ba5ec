"""Backward over several processes: graphs used again, checkpoints, what autograd can't send."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import close, equals_undivided, gradients_equal, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ProtocolError, StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
)

BOUNDS = (0, 1, 3, 6)


class MaybeCheckpointed(nn.Module):
    """Calls a layer, under a checkpoint unless `use_reentrant` is None."""

    def __init__(self, layer: nn.Module, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layer = layer
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        if self.use_reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


@on_ranks(2)
def test_a_checkpointed_layer_counts_once_and_gives_the_same_bits(rank: int, size: int) -> None:
    x, dy = whole_batch((8, 3, 4, 4))
    mine = rows_of(rank, (0, 3, 8))
    for replicas in (1, 2):
        results = []
        for use_reentrant in (None, False, True)[: 4 - replicas]:
            layer = SynchronizedBatchNorm2d(3).double()
            part = x[mine].clone().requires_grad_()
            called = MaybeCheckpointed(layer, use_reentrant)
            model = DataParallelWithCallback(called, replicas=replicas)
            model(part).backward(dy[mine])
            results.append([part.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
            assert int(layer.num_batches_tracked) == 1
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@on_ranks(3)
def test_a_checkpointed_layer_agrees_between_ranks_with_one_and_two_replicas(
    rank: int, size: int
) -> None:
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    parallel = DataParallelWithCallback(MaybeCheckpointed(layer, False), replicas=2)
    x, dy = whole_batch((7, 3))
    for bounds in ((0, 4, 5, 7), (0, 1, 5, 7)):
        layer.zero_grad()
        twin.zero_grad()
        equals_undivided(parallel, twin, x, dy, rows_of(rank, bounds))


@on_ranks(3)
def test_a_rank_whose_input_needs_no_gradient_takes_part_in_backward(rank: int, size: int) -> None:
    x, dy = whole_batch((6, 3))
    mine = rows_of(rank, BOUNDS)
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    leaf, whole = x[mine].clone().requires_grad_(rank != 0), x.clone().requires_grad_()
    layer(leaf).backward(dy[mine])
    twin(whole).backward(dy)
    if rank != 0:
        assert whole.grad is not None
        close(leaf.grad, whole.grad[mine])


@on_ranks(2)
def test_batched_gradients_are_refused_and_plain_ones_of_the_same_graph_succeed(
    rank: int, size: int
) -> None:
    x, dy = (values[rows_of(rank, (0, 3, 8))] for values in whole_batch((8, 3, 4, 4)))
    layer = SynchronizedBatchNorm2d(3).double()
    leaf = x.clone().requires_grad_()
    dys = torch.stack([dy, dy])
    for y in (layer(leaf), DataParallelWithCallback(layer, replicas=2)(leaf)):
        grad = partial(torch.autograd.grad, y, leaf, retain_graph=True)
        batched = partial(grad, dys, is_grads_batched=True)
        raises(StateError, "SynchronizedBatchNorm2d", "replicas or processes", call=batched)
        grad(dy)


def penalized(y: Tensor, x: Tensor, order: int) -> Tensor:
    """A loss with derivatives of y by x up to `order - 1`."""
    weights = torch.linspace(0.5, 2, y.shape[1:].numel(), dtype=y.dtype).view(y.shape[1:])
    loss = (y.pow(3) * weights).sum()
    for _ in range(order - 1):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = (dx.square() * weights).sum()
    return loss


def derivatives_equal_the_undivided_batch(
    rank: int, bounds: Sequence[int], order: int, layer: nn.Module, twin: nn.Module
) -> None:
    x, _ = whole_batch((bounds[-1], 3, 2, 2))
    x[:, 0] = 4 + (x[:, 0] - 5) * 1e-4  # in mode "clamp" this channel has a constant invstd
    leaf, whole = x[rows_of(rank, bounds)].requires_grad_(), x.clone().requires_grad_()
    penalized(layer(leaf), leaf, order).backward()
    penalized(twin(whole), whole, order).backward()
    assert leaf.grad is not None
    assert whole.grad is not None
    close(leaf.grad, whole.grad[rows_of(rank, bounds)], rtol=1e-9, atol=1e-9)
    gradients_equal(layer, twin)


class Formula(nn.Module):
    """Batch norm as one would write it; third derivatives of `nn.BatchNorm2d` are wrong."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x - mean).square().mean((0, 2, 3), keepdim=True)
        var = var + 1e-5 if self.mode == "plus" else torch.where(var < 1e-5, 1e-5, var)
        return (x - mean) / var.sqrt() * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def layer_and_twin(mode: str) -> tuple[nn.Module, nn.Module]:
    return SynchronizedBatchNorm2d(3, eps_mode=mode).double(), Formula(mode)


@on_ranks(3)
def test_derivatives_of_any_order_equal_those_of_the_undivided_batch(rank: int, size: int) -> None:
    for order in (2, 3, 4):
        for bounds in ((0, 1, 3, 6), (0, 3, 3, 6)):  # uneven, and one rank without samples
            for mode in ("plus", "clamp"):
                pair = layer_and_twin(mode)
                derivatives_equal_the_undivided_batch(rank, bounds, order, *pair)


@on_ranks(2)
def test_a_rank_whose_input_needs_no_gradient_takes_part_in_second_derivatives(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((6, 3, 2, 2))
    mine = rows_of(rank, (0, 2, 6))
    layer, twin = layer_and_twin("plus")
    leaf, whole = x[mine].clone().requires_grad_(rank != 0), x.clone().requires_grad_()
    for module, values in ((layer, leaf), (twin, whole)):
        loss = module(values).pow(3).sum()
        (by_bias,) = torch.autograd.grad(loss, module.bias, create_graph=True)
        by_bias.sum().backward()  # linear: the sum over ranks is that of the undivided batch
    if rank != 0:
        assert whole.grad is not None
        close(leaf.grad, whole.grad[mine])


@on_ranks(2)
def test_create_graph_on_one_rank_alone_is_an_error_on_both(rank: int, size: int) -> None:
    x, _ = whole_batch((6, 3))
    leaf = x[rows_of(rank, (0, 2, 6))].requires_grad_()
    layer = SynchronizedBatchNorm1d(3).double()
    grad = partial(torch.autograd.grad, layer(leaf).sum(), leaf, create_graph=rank == 0)
    raises(ProtocolError, "SynchronizedBatchNorm1d", "create_graph", call=grad)
    layer(leaf).sum().backward()


@on_ranks(2)
def test_second_derivatives_accumulate_in_DistributedDataParallel(rank: int, size: int) -> None:  # noqa: N802
    layer, twin = layer_and_twin("plus")
    wrapper, mine = DistributedDataParallel(layer), rows_of(rank, (0, 2, 6))
    for seed in range(2):
        x, _ = whole_batch((6, 3, 2, 2), seed)
        leaf, whole = x[mine].requires_grad_(), x.clone().requires_grad_()
        with nullcontext() if seed else wrapper.no_sync():
            penalized(wrapper(leaf), leaf, 2).backward()
        penalized(twin(whole), whole, 2).backward()
        assert leaf.grad is not None
        assert whole.grad is not None
        close(leaf.grad, whole.grad[mine], rtol=1e-9, atol=1e-9)
    for own, expected in zip(layer.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None  # averaged over the ranks
        close(own.grad * size, expected.grad, rtol=1e-9, atol=1e-9)
