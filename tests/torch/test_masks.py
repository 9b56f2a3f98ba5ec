"""Layers with a mask normalize the valid elements as a batch of their own; all others are 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from world import close, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import (
    ArgumentError,
    BatchSizeError,
    DeviceError,
    DTypeError,
    ShapeError,
    StateError,
)
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm, mask_of_lengths


class Own(Tensor):
    """A tensor that no kernel takes, so plain operations compute."""


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_lengths_that_do_not_fit_are_refused(kind: Any) -> None:
    assert mask_of_lengths(kind([0, 2]), 2).tolist() == [[False, False], [True, True]]
    assert mask_of_lengths(kind([]), 2).shape == (0, 2)
    for lengths in ([1, 3], [-1, 2]):
        with pytest.raises(ArgumentError, match=r"expected lengths from 0 to 2, got (3|-1);"):
            mask_of_lengths(kind(lengths), 2)
    for wrong in ([2.5, 1.0], [float("nan"), 1.0], [True, False], [[1, 2], [0, 1]], 2):
        with pytest.raises(ArgumentError, match=r"whole numbers on one axis \(N,\), got \w+ \("):
            mask_of_lengths(torch.tensor(wrong) if wrong == 2 else kind(wrong), 2)


def layer_for(channels: int, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer = SyncBatchNorm(channels, **settings).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, copy.deepcopy(layer)


def batch(shape: Any, share: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """`x, dy, mask`; what the mask hides is NaN. The last two samples have nothing valid."""
    x, dy = whole_batch(shape)
    mask = torch.rand(shape[0], *shape[2:], generator=torch.Generator().manual_seed(1)) < share
    mask[0], mask[-2:] = True, False
    hidden = ~mask[:, None].expand(shape)
    return x.masked_fill(hidden, float("nan")), dy.masked_fill(hidden, float("nan")), mask


def rows(values: Tensor, mask: Tensor) -> Tensor:
    return values.movedim(1, -1)[mask]


def results(y: Tensor, leaf: Tensor, layer: Any, dy: Tensor, twice: bool) -> list[Tensor]:
    """y and gradients by x, weight, bias; `twice`: also of the squares of the first of them."""
    dx, *others = torch.autograd.grad(y, [leaf, *layer.parameters()], dy, create_graph=twice)
    again = torch.autograd.grad(dx.square().sum(), [leaf, layer.weight]) if twice else ()
    return [y, dx, *others, *again]


def undivided(layer: Any, x: Tensor, dy: Tensor, mask: Tensor, twice: bool = False) -> list[Tensor]:
    """What torch gives for the valid elements as a batch, in all places."""
    leaf = torch.where(mask[:, None], x, 0).requires_grad_()
    y = torch.zeros_like(leaf)
    y.movedim(1, -1)[mask] = nn.functional.batch_norm(
        rows(leaf, mask), layer.running_mean, layer.running_var, layer.weight, layer.bias,
        layer.training, layer.momentum, layer.eps,
    )  # fmt: skip
    return results(y, leaf, layer, torch.where(mask[:, None], dy, 0), twice)


def step(model: Any, x: Tensor, dy: Tensor, mask: Tensor, twice: bool = False) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    layer = model.module if isinstance(model, DataParallelWithCallback) else model
    return results(model(leaf, mask), leaf, layer, dy, twice)


@pytest.mark.parametrize("kind", [Tensor, Own])
@pytest.mark.parametrize("shape", [(7, 3), (6, 3, 20), (5, 3, 40, 50), (5, 3, 2, 3, 4)], ids=str)
def test_alone_and_in_replicas(shape: Any, kind: Any) -> None:
    x, dy, mask = batch(shape)
    x = x.as_subclass(kind)
    for members in (1, 2, 3):
        layer, twin = layer_for(3)
        model = layer if members == 1 else DataParallelWithCallback(layer, replicas=members)
        for twice in (False, True):
            torch.testing.assert_close(
                step(model, x, dy, mask, twice), undivided(twin, x, dy, mask, twice)
            )
        close(layer.running_mean, twin.running_mean)
        close(layer.running_var, twin.running_var)
    evals = step(layer.eval(), x, dy, mask), undivided(twin.eval(), x, dy, mask)
    torch.testing.assert_close(*evals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [
        ((9, 3, 7, 7), False),
        ((3, 5, 70, 70), False),
        *(
            pytest.param(shape, True, marks=pytest.mark.slow)  # kernels that no other test uses
            for shape in ((9, 3, 7, 7), (3, 5, 70, 70), (40, 3))
        ),
    ],
    ids=str,
)
def test_narrow_dtypes_layouts_and_large_means(
    shape: Any, dtype: torch.dtype, channels_last: bool
) -> None:
    x, dy, mask = batch(shape)
    x = (x + (1e6 if dtype is torch.float32 else 0)).to(dtype)
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    layer = SyncBatchNorm(shape[1], activation="silu", dtype=torch.float32)
    nn.init.normal_(layer.weight)
    twin = copy.deepcopy(layer).double()
    y = layer(x.requires_grad_(), mask)  # torch 2.10 frees what the node of a lost y has saved
    kept = y.grad_fn.saved_tensors[0]
    assert kept.data_ptr() == x.data_ptr()  # no filled copy
    layer, x = copy.deepcopy(twin).float(), x.detach()
    y, dx, *others = step(layer, x, dy.to(dtype), mask)
    z = torch.where(mask[:, None], x.double(), 0)
    plain = nn.BatchNorm1d(shape[1]).double()
    plain.load_state_dict(twin.state_dict())
    rows_of_x = rows(z, mask).requires_grad_()
    wanted = nn.functional.silu(plain(rows_of_x))
    gradients = torch.autograd.grad(
        wanted, [rows_of_x, *plain.parameters()], rows(dy.to(dtype).double(), mask)
    )
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    same = {"check_dtype": False, **(tolerance or {"rtol": 1e-4, "atol": 1e-4})}
    for found, right in ((y, wanted), (dx, gradients[0])):
        torch.testing.assert_close(rows(found, mask), right, **same)
        assert not found.movedim(1, -1)[~mask].any()
    torch.testing.assert_close(others, list(gradients[1:]), **same)
    torch.testing.assert_close(layer.running_mean, plain.running_mean, **same)


@pytest.mark.parametrize("twice", [False, True])
def test_a_mask_may_change_before_backward(twice: bool) -> None:
    x, dy, mask = batch((5, 3, 4, 5))
    layer, twin = layer_for(3)
    leaf, given = x.clone().requires_grad_(), mask.clone()
    y = layer(leaf, given)
    given.fill_(True)
    expected = undivided(twin, x, dy, mask, twice)
    torch.testing.assert_close(results(y, leaf, layer, dy, twice), expected)


@on_ranks(2, 3)
def test_ranks_with_uneven_masks(rank: int, size: int) -> None:
    x, dy, mask = batch((7, 3, 5, 6))
    mine = rows_of(rank, (0, 5, 7) if size == 2 else (0, 1, 5, 7))  # the last has nothing valid
    for kind in (Tensor, Own):
        layer, twin = layer_for(3)
        for twice in (False, True):
            found = step(layer, x[mine].as_subclass(kind), dy[mine], mask[mine], twice)
            wanted = undivided(twin, x, dy, mask, twice)
            for part, whole in zip(found, wanted, strict=True):
                if part.dim() > 1:
                    close(part.as_subclass(Tensor), whole[mine])
                else:  # of a parameter
                    total = part.detach().clone()
                    dist.all_reduce(total)
                    close(total, whole)
        close(layer.running_var, twin.running_var)
    valid = torch.zeros(7, dtype=torch.bool)
    valid[0] = True
    words = "SyncBatchNorm", "more than 1 value per channel"
    raises(BatchSizeError, *words, call=lambda: layer(x[mine][:, :, 0, 0], valid[mine]))


@on_ranks(2)
def test_gradients_do_not_depend_on_the_padding(rank: int, size: int) -> None:
    """Sequences of unlike lengths, one rank after the other, with little and with much padding."""
    torch.manual_seed(0)
    sequences = [torch.randn(3, length).double() for length in (5, 2, 7, 1)]
    mine = sequences[:3] if rank == 0 else sequences[3:]
    lengths = torch.tensor([sequence.shape[1] for sequence in mine])
    found = []
    for size in (7, 30):
        layer, _ = layer_for(3)
        x = torch.stack([nn.functional.pad(s, (0, size - s.shape[1]), value=9.0) for s in mine])
        y = layer(x.requires_grad_(), mask_of_lengths(lengths, size))
        y.square().sum().backward()
        assert x.grad is not None
        found.append((y[..., :7], x.grad[..., :7], layer.weight.grad))
    torch.testing.assert_close(*found)


@pytest.mark.slow
@on_ranks(2)
def test_a_mask_in_one_graph(rank: int, size: int) -> None:
    x, dy, mask = batch((7, 3, 5, 6))
    mine = rows_of(rank, (0, 5, 7))
    layer, twin = layer_for(3)
    compiled = torch.compile(layer, fullgraph=True)
    found, wanted = step(compiled, x[mine], dy[mine], mask[mine]), undivided(twin, x, dy, mask)
    close(found[0], wanted[0][mine])
    close(found[1], wanted[1][mine])
    close(layer.running_var, twin.running_var)
    dist.destroy_process_group()  # and alone
    layer, twin = layer_for(3)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(step(compiled, x, dy, mask), undivided(twin, x, dy, mask))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_transforms_checkpoints_and_tracing() -> None:
    x, dy, mask = batch((6, 3, 20))
    layer, twin = layer_for(3)
    wanted = undivided(twin, x, dy, mask)
    for reentrant in (True, False):
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, mask, use_reentrant=reentrant).backward(dy)
        close(leaf.grad, wanted[1])
    close(layer.num_batches_tracked, torch.tensor(2))
    untracked, _ = layer_for(3, track_running_stats=False)
    pulled = torch.func.vjp(lambda x: untracked(x, mask), x)[1](dy)
    close(pulled[0], wanted[1])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layer

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(x, mask=mask)  # type: ignore[no-any-return]

    close(fx.symbolic_trace(Model())(x, mask), wanted[0])
    with pytest.raises(StateError, match=r"torch\.jit\.trace"):
        torch.jit.trace(Model(), (x, mask))


@pytest.mark.parametrize("training", [True, False])
def test_wrong_masks_are_told(training: bool) -> None:
    layer, x = SyncBatchNorm(3).train(training), torch.ones(4, 3, 5)
    with pytest.raises(DTypeError, match="a mask of bool, got int64"):
        layer(x, torch.ones(4, 5, dtype=torch.int64))
    with pytest.raises(DTypeError, match="that is a tensor, got list"):
        layer(x, [True] * 4)
    with pytest.raises(ShapeError, match=r"got \(4, 3, 5\)"):
        layer(x, torch.ones(4, 3, 5, dtype=torch.bool))
    with pytest.raises(DeviceError, match="a mask on cpu"):
        layer(x, torch.ones(4, 5, dtype=torch.bool, device="meta"))
