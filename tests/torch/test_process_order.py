"""Ranks that call different layers, or the same ones in another order: every rank is told."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import torch
from torch import Tensor, nn
from world import Net, equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ProtocolError
from syncbn_torch import (
    DataParallelWithCallback,
    DistributedCommunicator,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
)

# -------------------------------------------------------------------------- with check_order


def checked_model() -> Any:
    os.environ["SYNCBN_CHECK_ORDER"] = "1"  # read at the first call
    return convert_model(Net()).double()


@on_ranks(3)
def test_check_order_names_what_each_rank_calls_and_no_state_changes(rank: int, size: int) -> None:
    model = checked_model()
    x, _ = whole_batch((6, 3, 6, 6))
    model(x[rank : rank + 2]).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    called = model.bn_left if rank == 1 else model.bn
    words = (
        "rank 0: call 9 (forward of bn (SynchronizedBatchNorm2d)",
        "rank 1: call 9 (forward of bn_left (SynchronizedBatchNorm2d)",
        "rank 2: call 9 (forward of bn (Synch",
        "same order",
    )
    ones = torch.ones(2, 8, 3, 3, dtype=torch.float64)
    raises(RuntimeError, *words, call=lambda: called(ones))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model(x[rank : rank + 2])  # the next step succeeds


@on_ranks(3)
def test_check_order_accepts_a_layer_inside_another_container_on_one_rank(
    rank: int, size: int
) -> None:
    os.environ["SYNCBN_CHECK_ORDER"] = "1"
    x, _ = whole_batch((6, 3, 6, 6))
    layer = SynchronizedBatchNorm2d(3).double()
    held = nn.ModuleDict({"layer": layer})
    if rank == 0:
        held = nn.ModuleDict({"net": held})
    layer(x[rank : rank + 2])
    assert held


@on_ranks(3)
def test_check_order_tells_a_backward_from_the_next_forward_of_other_ranks(
    rank: int, size: int
) -> None:
    model = checked_model()
    x, _ = whole_batch((6, 3, 6, 6))
    y = model(x[rank : rank + 2])
    if rank == 2:
        raises(RuntimeError, "backward of bn_right", call=lambda: y.sum().backward())
    else:
        raises(RuntimeError, "backward of bn_right", call=lambda: model(x[rank : rank + 2]))
    SynchronizedBatchNorm2d(3).double()(x[rank : rank + 2])  # the next call succeeds


# ----------------------------------------------------------------------- without check_order


@on_ranks(3)
def test_different_layers_of_one_size_are_told_apart_without_check_order(
    rank: int, size: int
) -> None:
    """As soon as each layer has been called once."""
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    x, dy = whole_batch((6, 3, 4, 4))
    mine = rows_of(rank, (0, 1, 3, 6))
    for layer in layers:
        equals_undivided(layer, nn.BatchNorm2d(3).double(), x, dy, mine)
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    words = (
        "same layer",
        "rank 0: SynchronizedBatchNorm2d, layer 1; rank 1: SynchronizedBatchNorm2d, layer 2",
    )
    raises(RuntimeError, *words, call=lambda: layers[rank % 2](x[mine]))
    for layer, state in zip(layers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layers[0](x[mine])


@on_ranks(3)
def test_layers_deleted_on_one_rank_or_refused_in_their_first_call_keep_numbers_equal(
    rank: int, size: int
) -> None:
    """Ranks compare the numbers of layers, which count first calls that succeeded."""
    x, _ = whole_batch((6, 3, 4, 4))
    part = x[rows_of(rank, (0, 1, 3, 6))]
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    for layer in layers:
        layer(part)
    del layer
    if rank == 0:
        layers.pop()
        gc.collect()
    new = [SynchronizedBatchNorm2d(3).double() for _ in range(3)]
    raises(RuntimeError, "same layer", call=lambda: (new if rank else layers)[0](part))
    for layer in reversed(new):
        layer(part)


class Branches(nn.Module):
    """Two branches with equal channels."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.a = SynchronizedBatchNorm1d(3, process_group=group)
        self.b = SynchronizedBatchNorm1d(3, process_group=group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x.exp())


def batch_of_ranks(rank: int, size: int) -> tuple[Tensor, Tensor, slice]:
    """`x, dy` of all ranks, and the rows of this one: two, of the last rank three."""
    x, dy = whole_batch((2 * size + 1, 3))
    return x - 5, dy, slice(2 * rank, 2 * rank + 2 + (rank == size - 1))  # small, for exp


def losses_of_different_branches(rank: int, size: int, check: bool) -> None:
    """Rank 0 takes branch a into its loss, the others take branch b."""
    x, dy, rows = batch_of_ranks(rank, size)
    group = DistributedCommunicator(check_order=check)
    model = Branches(group).double()
    bare = [SynchronizedBatchNorm1d(3, process_group=group).double() for _ in range(2)]
    forwards: dict[str, Any] = {
        "model": model,
        "bare": lambda x: (bare[0](x), bare[1](x.exp())),
        "threads": DataParallelWithCallback(Branches(group).double(), replicas=2),
    }
    # how often the two bare layers, number 1 and 2, are named: once for each rank
    of_all, of_rank = [1, size - 1], [int(rank == 0), int(rank != 0)]

    def times_named(message: str) -> list[int]:
        return [message.count(f"SynchronizedBatchNorm1d, layer {number}") for number in (1, 2)]

    for kind, forward in forwards.items():
        leaf = x[rows].clone().requires_grad_()
        a, b = forward(leaf)
        loss = (a**3).sum() if rank == 0 else (b**2 * leaf.detach()).sum()
        named = f"{'a' if rank == 0 else 'b'} (" if kind == "model" else ""
        words = ["rank 0: call", "rank 1: call", f"backward of {named}", "forward in call"]
        message = raises(ProtocolError, *words, call=loss.backward)
        if kind == "bare":
            assert times_named(message) == of_all, message
    message = raises(ProtocolError, call=lambda: bare[min(rank, 1)](x[rows]))  # forward too
    once_more = [0, 0] if check else of_rank  # in the description of the call
    assert times_named(message) == [a + b for a, b in zip(of_all, once_more, strict=True)], message
    layer = SynchronizedBatchNorm1d(3, process_group=group).double()
    equals_undivided(layer, nn.BatchNorm1d(3).double(), x, dy, rows)


@on_ranks(2, 3)
def test_losses_of_different_branches_are_told_to_every_rank_and_the_next_step_is_right(
    rank: int, size: int
) -> None:
    for check in (False, True):
        losses_of_different_branches(rank, size, check)


@on_ranks(2, 3)
def test_backward_of_different_calls_of_one_layer_is_told_to_every_rank(
    rank: int, size: int
) -> None:
    x, dy, rows = batch_of_ranks(rank, size)
    for check in (False, True):
        model = Branches(DistributedCommunicator(check_order=check)).double()
        ys = [model.a(x[rows].clone().requires_grad_()) for _ in range(2)]
        y = ys[min(rank, 1)]
        raises(ProtocolError, "backward of a (", call=lambda y=y: y.backward(dy[rows]))


@on_ranks(2, 3)
def test_the_sums_of_a_layer_are_never_added_to_other_sums(rank: int, size: int) -> None:
    x, dy, rows = batch_of_ranks(rank, size)
    for check in (False, True):
        group = DistributedCommunicator(check_order=check)
        model = Branches(group).double()
        y = model.a(x[rows].clone().requires_grad_())
        if rank == 0:
            zeros = torch.zeros(2, 3).double()
            raises(ProtocolError, "all", call=lambda z=zeros, g=group: g.all_reduce_sums(z))
        else:
            raises(ProtocolError, "backward of a (", call=lambda y=y: y.backward(dy[rows]))
        assert group.all_reduce_sums(torch.ones(2, 3)).tolist() == [[size] * 3] * 2
