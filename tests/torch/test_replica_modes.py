"""Replicas in unlike modes of autograd, with checkpoints and empty parts."""

import copy
import random
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from syncbn_core.errors import CheckpointError
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d

CHANNELS = 3
MODES = ("grad", "no_grad", "inference")


def mode_of(name: str) -> AbstractContextManager[Any]:
    return torch.inference_mode() if name == "inference" else torch.set_grad_enabled(name == "grad")


class Model(nn.Module):
    """A layer, called in the mode of its replica with the first rows of its part."""

    def __init__(self, modes: tuple[str, ...], rows: list[int], checkpoints: bool) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(CHANNELS)
        self.modes, self.rows, self.checkpoints = modes, rows, checkpoints

    def part(self, x: Tensor, replica: int) -> Tensor:
        with mode_of(self.modes[replica]):
            return self.bn(x * 2)

    def forward(self, x: Tensor, replica: Tensor) -> Tensor:
        index = int(replica[0])
        part = x[: self.rows[index]]
        if self.checkpoints:
            y: Tensor = checkpoint(self.part, part, index, use_reentrant=False)
        else:
            y = self.part(part, index)
        return y.clone().relu_().square()  # a clone, as inference tensors can't be saved


@pytest.mark.parametrize("length", [5, 30_000])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_each_replica_keeps_its_mode_and_the_others_their_gradients(
    checkpoints: bool, length: int
) -> None:
    """As the undivided batch, of which the parts in other modes are constants."""
    chosen = random.Random(0)
    combinations = [modes for size in (1, 2, 3) for modes in product(MODES, repeat=size)]
    for modes in combinations if length == 5 else chosen.sample(combinations, 6):
        size = len(modes)
        rows = [chosen.choice([0, 1, 2, 3]) for _ in modes]
        rows[chosen.randrange(size)] = 3
        model = Model(modes, rows, checkpoints).double()
        nn.init.uniform_(model.bn.weight, 0.5, 1.5)
        x = torch.randn(3 * size, CHANNELS, length, dtype=torch.float64, requires_grad=True)
        replicas = torch.arange(size).repeat_interleave(3)
        wrapper = DataParallelWithCallback(model, replicas=size)
        y = wrapper(x, replicas)

        twin = nn.BatchNorm1d(CHANNELS).double()
        twin.weight.data.copy_(model.bn.weight.data)
        z = x.detach().clone().requires_grad_()
        parts = [part[:n] * 2 for part, n in zip(z.split(3), rows, strict=True)]
        seen = [p if m == "grad" else p.detach() for p, m in zip(parts, modes, strict=True)]
        whole = twin(torch.cat(seen)).split(rows)
        kept = [p if m == "grad" else p.detach() for p, m in zip(whole, modes, strict=True)]
        expected = torch.cat(kept).relu().square()

        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(dict(model.bn.named_buffers()), dict(twin.named_buffers()))
        if not expected.requires_grad:
            assert not y.requires_grad
            continue
        cotangent = torch.randn_like(expected)
        y.backward(cotangent)
        expected.backward(cotangent)
        torch.testing.assert_close(x.grad, z.grad)
        for one, other in zip(model.bn.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_an_empty_part_goes_through_a_layer_twice_inside_a_checkpoint() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(CHANNELS, dtype=torch.float64)

        def part(self, x: Tensor) -> Tensor:
            return self.bn(self.bn(x).tanh())

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return x.index_put((keep,), checkpoint(self.part, x[keep], use_reentrant=False))

    model = Twice()
    x = torch.randn(4, CHANNELS, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([True, True, False, False])
    DataParallelWithCallback(model, replicas=2)(x, keep).pow(3).sum().backward()
    z = x.detach().clone().requires_grad_()
    once = F.batch_norm(z[:2], None, None, training=True).tanh()
    twice = F.batch_norm(once, None, None, training=True)
    torch.cat([twice, z[2:]]).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


class Saves(nn.Module):
    """A selective checkpoint, which keeps the results of some operations."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept
        self.linear, self.bn = nn.Linear(CHANNELS, CHANNELS), SynchronizedBatchNorm1d(CHANNELS)
        self.double()

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operation in self.kept
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        block = lambda x: self.bn(self.linear(x)).relu().sin().reshape(x.shape)  # noqa: E731
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kept", [(), (torch.ops.aten.addmm.default, torch.ops.aten.relu.default)])
def test_a_selective_checkpoint_is_as_without_it(replicas: int, kept: Any) -> None:
    model = Saves(kept)
    twin = copy.deepcopy(model)
    x = torch.randn(5, CHANNELS, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    expected = twin.bn(twin.linear(z)).relu().sin()
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    DataParallelWithCallback(model, replicas=replicas)(x).backward(cotangent)
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Random(nn.Module):
    """A layer and a random one in a checkpoint, and dropout after it."""

    def __init__(self, random_layer: nn.Module | None) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(CHANNELS, dtype=torch.float64)
        self.random, self.head = random_layer, nn.Dropout()

    def part(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(x)
        return (y if self.random is None else self.random(y)).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=False))  # type: ignore[no-any-return]


class StochasticDepth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) > 0.5)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.RReLU(), StochasticDepth()])
def test_random_layers_in_a_checkpoint_in_replicas_are_refused(layer: nn.Module) -> None:
    model = Random(layer)
    x = torch.randn(16, CHANNELS, dtype=torch.float64, requires_grad=True)
    y = DataParallelWithCallback(model, replicas=2)(x)
    with pytest.raises(
        CheckpointError, match=r"^expected no random operations .* beside layer 'bn'"
    ):
        y.sum().backward()
    DataParallelWithCallback(model, replicas=1)(x).sum().backward()
