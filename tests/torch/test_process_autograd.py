"""Backward over several processes: graphs used again, checkpoints, what autograd can't send."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from world import close, equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    forward_together,
    revert_model,
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
def test_a_layer_checkpointed_twice_in_one_graph_equals_the_undivided_batch(
    rank: int, size: int
) -> None:
    x, dy = whole_batch((6, 3))
    mine = rows_of(rank, BOUNDS)
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    for use_reentrant in (False, True):
        leaf, whole = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        y = leaf
        for _ in range(2):
            y = checkpoint(layer, y, use_reentrant=use_reentrant)
        y.backward(dy[mine])
        twin(twin(whole)).backward(dy)
        assert whole.grad is not None
        close(leaf.grad, whole.grad[mine])


@on_ranks(3)
def test_backward_again_over_one_graph_equals_the_undivided_batch(rank: int, size: int) -> None:
    x, dy = whole_batch((6, 3))
    mine = rows_of(rank, BOUNDS)
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    whole, leaf = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    y_twin, y = twin(whole), layer(leaf)
    other = layer(leaf.exp())  # an exchange between forward and backward
    for scale in (1.0, -3.0):
        (expected,) = torch.autograd.grad(y_twin, whole, dy * scale, retain_graph=True)
        (found,) = torch.autograd.grad(y, leaf, dy[mine] * scale, retain_graph=True)
        close(found, expected[mine])
    del other


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


@on_ranks(3)
def test_gradients_that_are_not_finite_raise_no_error(rank: int, size: int) -> None:
    """They come from the model; the layer must not take them for a mix-up between ranks."""
    x, _ = whole_batch((6, 3))
    layer = SynchronizedBatchNorm1d(3).double()
    for value in (float("nan"), float("inf")):
        leaf = x[rows_of(rank, BOUNDS)].clone().requires_grad_()
        layer(leaf).backward(torch.full_like(leaf, value))
        assert leaf.grad is not None
        assert not leaf.grad.isfinite().any()


@on_ranks(2)
def test_forward_mode_derivatives_are_refused_and_the_next_forward_succeeds(
    rank: int, size: int
) -> None:
    x, tangent = (values[rows_of(rank, (0, 3, 8))] for values in whole_batch((8, 3, 4, 4)))
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    layer = layers[0]
    refused = (StateError, "SynchronizedBatchNorm2d", "over processes")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        raises(*refused, call=lambda: layer(dual))
        raises(*refused, call=lambda: forward_together(layers, [x, dual]))
        layer(x)
    raises(*refused, call=lambda: torch.func.jvp(layer, (x,), (tangent,)))
    assert int(layer.num_batches_tracked) == 1


@on_ranks(2)
def test_batched_gradients_are_refused_and_plain_ones_of_the_same_graph_succeed(
    rank: int, size: int
) -> None:
    x, dy = (values[rows_of(rank, (0, 3, 8))] for values in whole_batch((8, 3, 4, 4)))
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    leaf = x.clone().requires_grad_()
    dys = torch.stack([dy, dy])
    for y in (layers[0](leaf), DataParallelWithCallback(layers[0], replicas=2)(leaf)):
        grad = partial(torch.autograd.grad, y, leaf, retain_graph=True)
        batched = partial(grad, dys, is_grads_batched=True)
        raises(StateError, "over processes", call=batched)
        grad(dy)
    ys = forward_together(layers, [leaf, leaf])
    batched = partial(torch.autograd.grad, ys, leaf, [dys, dys], is_grads_batched=True)
    raises(StateError, "over processes", call=batched)


@on_ranks(2)
def test_second_derivatives_are_refused_and_succeed_as_the_error_advises(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((6, 3))
    part = x[rows_of(rank, (0, 2, 6))].requires_grad_()
    model = nn.Sequential(SynchronizedBatchNorm1d(3)).double()

    def penalty() -> Tensor:
        (dx,) = torch.autograd.grad(model(part).pow(3).sum(), part, create_graph=True)
        return dx.square().sum()

    words = ("0 (SynchronizedBatchNorm1d)", "over 2 processes", "in eval", "revert_model")
    raises(StateError, *words, call=penalty)
    model.eval()
    penalty().backward()
    revert_model(model.train())
    penalty().backward()
