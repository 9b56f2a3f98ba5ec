"""`forward_together` over several processes: layers that share one message."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from world import close, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import StateError
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d, forward_together
from syncbn_torch.process_group import communicator_for

BOUNDS = (0, 2, 2, 9)
CHANNELS = [1, 2, 3]
DTYPES = (torch.float64, torch.bfloat16)


def three_layers(dtype: torch.dtype) -> list[SynchronizedBatchNorm2d]:
    momenta = (0.1, None, 0.3)
    layers = [
        SynchronizedBatchNorm2d(channels, momentum=momentum)
        for channels, momentum in zip(CHANNELS, momenta, strict=True)
    ]
    return [layer.double() if dtype is torch.float64 else layer for layer in layers]


@on_ranks(3)
def test_layers_together_give_the_bits_of_separate_layers_in_fewer_messages(
    rank: int, size: int
) -> None:
    x, dy = whole_batch((9, 6, 4, 5))
    mine = rows_of(rank, BOUNDS)
    for dtype in DTYPES:
        layers = three_layers(dtype)
        apart = copy.deepcopy(layers)
        results = []
        for each, joint in ((layers, True), (apart, False)):
            leaf = x[mine].to(dtype).requires_grad_()
            inputs = leaf.split(CHANNELS, 1)
            communicator = communicator_for(None)
            assert communicator is not None
            before = communicator.calls
            if joint:
                ys = forward_together(each, inputs)
            else:
                ys = [layer(part) for layer, part in zip(each, inputs, strict=True)]
            # the last output is not part of the loss
            given = dy[mine].to(dtype).split(CHANNELS, 1)
            torch.autograd.backward(ys[:2], given[:2])
            assert communicator.calls - before == (2 if joint else 5)
            results.append([leaf.grad, *ys, *(v for layer in each for v in layer.buffers())])
            results[-1] += [p.grad for layer in each[:2] for p in layer.parameters()]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@on_ranks(3)
def test_layers_together_in_eval_keep_the_dtype_and_wait_for_no_rank(rank: int, size: int) -> None:
    x, _ = whole_batch((9, 6, 4, 5))
    for dtype in DTYPES if rank == 0 else ():
        layers = [layer.eval() for layer in three_layers(dtype)]
        ys = forward_together(layers, x.to(dtype).split(CHANNELS, 1))
        assert all(y.dtype is dtype for y in ys)


class Positive(SynchronizedBatchNorm2d):
    """A layer that does more than its base class."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@on_ranks(3)
def test_layers_together_run_the_forward_of_subclasses(rank: int, size: int) -> None:
    x, _ = whole_batch((9, 6, 4, 5))
    mine = rows_of(rank, BOUNDS)
    layers: list[Any] = [Positive(3).double() for _ in range(2)]
    ys = forward_together(layers, [x[mine, :3], x[mine, 3:]])
    assert all((y >= 0).all() for y in ys)


class SumOfTwo(nn.Module):
    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        first, second = forward_together(list(self.layers), x.split([3, 3], 1))  # type: ignore[arg-type]
        return first + second


@on_ranks(3)
def test_inputs_that_layers_together_refuse_change_nothing_and_the_next_batch_is_right(
    rank: int, size: int
) -> None:
    """The next batch runs in two replica threads of each rank."""
    x, _ = whole_batch((9, 6, 4, 5))
    mine = rows_of(rank, BOUNDS)
    layers = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    raises(ValueError, "2 inputs for 1", call=lambda: forward_together(layers[:1] * 2, [x, x]))
    one_value = [x[:3, :3], x[: int(rank == 0), :3, :1, :1]]
    raises(ValueError, "more than 1 value", call=lambda: forward_together(layers, one_value))
    assert all(int(layer.num_batches_tracked) == 0 for layer in layers)
    freed = [SynchronizedBatchNorm2d(3).double() for _ in range(2)]
    freed[1].weight.untyped_storage().resize_(0)
    before = communicator_for(None).calls
    halves = x.split([3, 3], 1)
    raises(StateError, "storage was freed", call=lambda: forward_together(freed, halves))
    assert int(freed[0].num_batches_tracked) == 0
    assert not freed[0].running_mean.any()
    assert communicator_for(None).calls == before
    parallel = DataParallelWithCallback(SumOfTwo(layers), replicas=2)
    expected = [nn.BatchNorm2d(3).double()(part) for part in x.split([3, 3], 1)]
    close(parallel(x[mine]), (expected[0] + expected[1])[mine])
