"""Ranks that call different layers, or the same ones in another order: every rank is told."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import Net, equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ProtocolError
from syncbn_torch import (
    DataParallelWithCallback,
    DistributedCommunicator,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
)


@on_ranks(3)
def test_an_error_names_what_each_rank_calls_and_no_state_changes(rank: int, size: int) -> None:
    model = convert_model(Net()).double()
    x, _ = whole_batch((6, 3, 6, 6))
    model(x[rank : rank + 2]).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    called = model.bn_left if rank == 1 else model.bn
    words = (
        "call 9 (forward of ",
        "rank 0: forward of bn (SynchronizedBatchNorm2d)",
        "rank 1: forward of bn_left (SynchronizedBatchNorm2d)",
        "rank 2: forward of bn (Synch",
        "same order",
    )
    ones = torch.ones(2, 8, 3, 3, dtype=torch.float64)
    raises(ProtocolError, *words, call=lambda: called(ones))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model(x[rank : rank + 2])  # the next step succeeds


class Detector(nn.Module):
    """The head is skipped where there are no boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor, boxes: bool) -> Tensor:
        y: Tensor = self.body(x)
        return self.head(y) if boxes else y  # type: ignore[no-any-return]


@on_ranks(2, 4)
def test_a_rank_that_skips_the_last_layer_is_told_on_every_rank(rank: int, size: int) -> None:
    """At once, with and without DistributedDataParallel; and the processes end."""
    model = convert_model(Detector())
    x = torch.randn(4, 4)
    words = ("rank 0: forward of head.1 (", "rank 1: backward of body.1 (", "same order")
    step = lambda: model(x, rank != 1).sum().backward()  # noqa: E731
    for _ in range(2):
        raises(ProtocolError, *words, call=step)
        model(x, True).sum().backward()
    model = DistributedDataParallel(model, find_unused_parameters=True)
    raises(ProtocolError, *words, call=step)


@on_ranks(3)
def test_different_layers_of_one_size_are_told_apart(rank: int, size: int) -> None:
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    x, dy = whole_batch((6, 3, 4, 4))
    mine = rows_of(rank, (0, 1, 3, 6))
    for layer in layers:
        equals_undivided(layer, nn.BatchNorm2d(3).double(), x, dy, mine)
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    told = "rank 0: forward of SynchronizedBatchNorm2d, layer 1; rank 1: forward of Synchr"
    words = ("same layer", told, "SynchronizedBatchNorm2d, layer 2")
    raises(RuntimeError, *words, call=lambda: layers[rank % 2](x[mine]))
    for layer, state in zip(layers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layers[0](x[mine])


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


@on_ranks(2, 3)
def test_losses_of_different_branches_are_told_to_every_rank_and_the_next_step_is_right(
    rank: int, size: int
) -> None:
    """Rank 0 takes branch a into its loss, the others take branch b."""
    x, dy, rows = batch_of_ranks(rank, size)
    group = DistributedCommunicator()
    model = Branches(group).double()
    bare = [SynchronizedBatchNorm1d(3, process_group=group).double() for _ in range(2)]
    forwards: dict[str, Any] = {
        "model": model,
        "bare": lambda x: (bare[0](x), bare[1](x.exp())),
        "threads": DataParallelWithCallback(Branches(group).double(), replicas=2),
    }
    # how often two bare layers are named: once for each rank, and in the call of this one
    of_layers = [1 + (rank == 0), size - 1 + (rank != 0)]

    def times_named(message: str, *numbers: int) -> list[int]:
        return [message.count(f"SynchronizedBatchNorm1d, layer {number}") for number in numbers]

    for kind, forward in forwards.items():
        leaf = x[rows].clone().requires_grad_()
        a, b = forward(leaf)
        loss = (a**3).sum() if rank == 0 else (b**2 * leaf.detach()).sum()
        named = f"{'a' if rank == 0 else 'b'} (" if kind == "model" else ""
        words = ["rank 0: backward of", "rank 1: backward of", f"of {named}", "forward in call"]
        message = raises(ProtocolError, *words, call=loss.backward)
        if kind == "bare":
            assert times_named(message, 3, 4) == of_layers, message
    message = raises(ProtocolError, call=lambda: bare[min(rank, 1)](x[rows]))  # forward too
    assert times_named(message, 3, 4) == of_layers, message
    layer = SynchronizedBatchNorm1d(3, process_group=group).double()
    equals_undivided(layer, nn.BatchNorm1d(3).double(), x, dy, rows)
