"""What the README says of `torch.nn.SyncBatchNorm`, and what the layers here do instead.

Its kernels need a GPU, so some of its faults are shown here by what it sends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import close, equals_undivided, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ProtocolError
from syncbn_torch import SynchronizedBatchNorm2d, convert_model


@on_ranks(2)
def test_processes_on_cpu(rank: int, size: int) -> None:
    x, dy = whole_batch((6, 3, 4, 4))
    mine = rows_of(rank, (0, 2, 6))
    raises(ValueError, "expected input tensor to be on", call=lambda: nn.SyncBatchNorm(3)(x[mine]))
    equals_undivided(SynchronizedBatchNorm2d(3).double(), nn.BatchNorm2d(3).double(), x, dy, mine)


class Branches(nn.Module):
    """Rank 1 skips the first of two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor, skip: bool) -> Any:
        return self.second(x if skip else self.first(x))


@on_ranks(2)
def test_a_rank_that_skips_a_layer(rank: int, size: int) -> None:
    """Torch adds up what comes: the sums of `first` on one rank and of `second` on the other."""
    model = convert_model(Branches()).double()
    x, _ = whole_batch((4, 3, 4, 4))
    model(x, False)
    words = "rank 0: forward of first (Synchr", "rank 1: forward of second (Synchr"
    raises(ProtocolError, *words, call=lambda: model(x, rank == 1))


@on_ranks(2)
def test_an_empty_part_in_16_bits(rank: int, size: int) -> None:
    sent: list[Tensor] = []

    def record(received: list[Tensor], part: Tensor, *_: Any, **__: Any) -> None:
        sent.append(part)
        raise InterruptedError

    x, _ = whole_batch((6, 3, 4, 4))
    x = x.half()
    theirs = nn.modules._functions.SyncBatchNorm  # type: ignore[attr-defined]
    rest = None, None, None, None, 1e-5, 0.1, dist.group.WORLD, size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_gather", record)
        raises(InterruptedError, call=lambda: theirs.apply(x[:0], *rest))
    assert sent[0].dtype is torch.float16  # beside float32 of ranks with values

    mine = rows_of(rank, (0, 0, 6))
    y = SynchronizedBatchNorm2d(3)(x[mine])
    close(y.double(), nn.BatchNorm2d(3).double()(x.double())[mine], rtol=0, atol=4e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_count_once(reentrant: bool) -> None:
    """In one process torch's layer takes CPU tensors."""
    layers = nn.SyncBatchNorm(3), SynchronizedBatchNorm2d(3)
    for layer in layers:
        x = torch.randn(4, 3, 5, 5, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()  # type: ignore[no-untyped-call]
    assert [int(layer.num_batches_tracked) for layer in layers] == [2, 1]  # type: ignore[arg-type]


class Activated(nn.BatchNorm2d):
    """With its activation, like timm's `BatchNormAct2d`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_conversion_of_a_layer_with_an_activation() -> None:
    x = torch.randn(4, 3, 5, 5)
    expected = Activated(3)(x)
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Activated(3)))
    assert theirs(x).min() < 0  # no longer activated, and nothing says so
    with pytest.warns(UserWarning, match="Activated"):
        ours = convert_model(nn.Sequential(Activated(3)))
    assert torch.equal(ours(x), expected)
