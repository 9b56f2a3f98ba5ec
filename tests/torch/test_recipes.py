"""The recipes for DistributedDataParallel in docs/processes.md train as one process does.

Each rank runs the functions of the page. They are compared with a model of plain torch that gets
the undivided batches.
"""

import copy
import re
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from world import Net, close, on_ranks

from syncbn_core.errors import BatchSizeError, DTypeError
from syncbn_torch import (
    DataParallelWithCallback,
    convert_model,
    in_step,
    mean_over_ranks,
    revert_model,
)

PAGE = Path(__file__).parents[2] / "docs" / "processes.md"
Batch = tuple[Tensor, Tensor]


def functions(heading: str) -> dict[str, Any]:
    """The functions that the page shows below `## heading`."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    return names


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 3, 6, 6, dtype=torch.float64, generator=generator),
            torch.randint(5, (n,), generator=generator),
        )
        for n in sizes
    ]


def undivided(parts: list[list[Batch]]) -> list[Batch]:
    """The batches of all ranks, joined: `parts[rank]` may be shorter than others."""
    steps = max(map(len, parts))
    return [
        (torch.cat([b[k][0] for b in parts if k < len(b)]),
         torch.cat([b[k][1] for b in parts if k < len(b)]))
        for k in range(steps)
    ]  # fmt: skip


def models(**options: Any) -> tuple[DistributedDataParallel, nn.Module]:
    """A converted model in its wrapper, and the same model in plain torch."""
    torch.manual_seed(0)
    alone = Net().double()
    if "find_unused_parameters" in options:  # torch prints a warning where all are used
        alone.unused = nn.Linear(2, 2).double()
    return DistributedDataParallel(convert_model(copy.deepcopy(alone)), **options), alone


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def same_state(model: nn.Module, alone: nn.Module) -> None:
    for name, value in model.state_dict().items():
        close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name)


OPTIONS: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


@on_ranks(3)
def test_ranks_with_different_numbers_of_batches_train_as_one_process(rank: int, size: int) -> None:
    parts = [batches([2, 3, 1, 2], 0), batches([4], 1), batches([1, 2], 2)]
    for options in OPTIONS:
        model, alone = models(**options)
        functions("Different numbers of batches")["train"](model, parts[rank], optimizer_of(model))
        optimizer = optimizer_of(alone)
        for images, labels in undivided(parts):
            optimizer.zero_grad()
            cross_entropy(alone(images), labels).backward()
            optimizer.step()
        same_state(model.module, alone)


@on_ranks(2)
def test_a_rank_without_any_batch_is_an_error_on_all_ranks(rank: int, size: int) -> None:
    with pytest.raises(BatchSizeError, match="none on 1 of 2"):
        list(in_step([] if rank else batches([2], 0)))
    assert list(in_step([])) == []  # nobody has one
    found = list(in_step([] if rank else [[torch.ones(3, 2, 2)]], empty=[]))  # a list of samples
    assert [len(batch) for batch in found] == [1 - rank]


@dataclass
class Batch:
    data: dict[str, Any]


class Stubborn(UserDict[str, Any]):
    def __init__(self, *, x: Tensor) -> None:
        super().__init__(x=x)


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@on_ranks(2)
def test_in_step_empties_every_tensor_of_a_nested_batch(rank: int, size: int) -> None:
    batch = {"x": torch.ones(3, 2), "more": [torch.ones(3), torch.tensor(5.0)], "name": "b"}
    found = list(in_step([batch] * (1 + rank)))
    assert len(found) == 2
    last = found[-1]
    assert last["x"].shape == (3 * rank, 2)
    assert last["more"][0].shape == (3 * rank,)
    assert (last["more"][1], last["name"]) == (5, "b")
    for kind in (Batch, UserDict, lambda x: x["x"], lambda x: x["x"].numpy()):
        found = list(in_step([kind(batch)] * (1 + rank)))
        x = getattr(found[-1], "data", found[-1]) if kind in (Batch, UserDict) else found[-1]
        x = x["x"] if isinstance(x, dict) else x
        assert (len(found), x.shape) == (2, (3 * rank, 2))
    for hidden in (Opaque(torch.ones(3)), [1, 2, 3], Stubborn(x=torch.ones(3))):
        assert len(list(in_step([hidden]))) == 1
        with pytest.raises(BatchSizeError, match="got none on 1 of 2, and in_step can't make one"):
            list(in_step([hidden] * (1 + rank)))


@on_ranks(2)
def test_mean_over_ranks_averages_to_the_mean_of_all_losses(rank: int, size: int) -> None:
    losses = torch.arange(6.0, dtype=torch.float64)
    own = losses[: 0 if rank else 6].clone().requires_grad_()
    for part in (own, own.view(-1, 2)):
        mean = mean_over_ranks(part)
        total = mean.detach().clone()
        dist.all_reduce(total)
        close(total / size, losses.mean())
        (gradient,) = torch.autograd.grad(mean, own)
        close(gradient / size, torch.full_like(own, 1 / 6))
    assert mean_over_ranks(own[:0]) == 0


def test_without_process_groups_uneven_helpers_do_nothing() -> None:
    assert list(in_step([1, 2])) == [1, 2]
    close(mean_over_ranks(torch.tensor([1.0, 3.0])), torch.tensor(2.0))
    many = torch.full((3000,), 30.0, dtype=torch.float16)
    close(mean_over_ranks(many), many.mean())
    with pytest.raises(DTypeError, match="int64"):
        mean_over_ranks(torch.tensor([1, 3]))


@on_ranks(2)
def test_join_that_throws_ends_all_ranks_after_the_same_step(rank: int, size: int) -> None:
    parts = [batches([2, 2], 0), batches([2, 2, 2, 2], 1)]
    model, alone = models()
    recipe = functions("Different numbers of batches")["train_until_one_ends"]
    recipe(model, parts[rank], optimizer_of(model))
    optimizer = optimizer_of(alone)
    for images, labels in undivided([part[:2] for part in parts]):
        optimizer.zero_grad()
        cross_entropy(alone(images), labels).backward()
        optimizer.step()
    same_state(model.module, alone)


@on_ranks(2)
def test_gradient_accumulation_has_the_statistics_of_undivided_micro_batches(
    rank: int, size: int
) -> None:
    parts = [batches([2, 3, 2, 2], 0), batches([2, 3, 2, 2], 1)]
    for options in (OPTIONS[0], OPTIONS[2]):  # torch refuses static_graph with no_sync
        model, alone = models(**options)
        recipe = functions("Gradient accumulation")["train_accumulating"]
        recipe(model, parts[rank], optimizer_of(model), 2)
        optimizer = optimizer_of(alone)
        for number, (images, labels) in enumerate(undivided(parts)):
            (cross_entropy(alone(images), labels) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        same_state(model.module, alone)


def average_alone(alone: nn.Module, whole: list[Batch], **options: Any) -> AveragedModel:
    average = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.9), **options)
    optimizer = optimizer_of(alone)
    for images, labels in whole:
        optimizer.zero_grad()
        cross_entropy(alone(images), labels).backward()
        optimizer.step()
        average.update_parameters(alone)
    return average


@on_ranks(2)
def test_averaged_weights_and_their_statistics_are_those_of_one_process(
    rank: int, size: int
) -> None:
    parts = [batches([2, 3, 2], 0), batches([2, 3, 2], 1)]
    model, alone = models()
    recipe = functions("Averaged weights (EMA, SWA)")["train_with_average"]
    average = recipe(model, parts[rank], optimizer_of(model))
    expected = average_alone(alone, undivided(parts))
    update_bn(undivided(parts), expected)
    same_state(average, expected)

    # ranks with different numbers of batches
    more = [batches([1, 4, 2], 3), batches([3], 4)]
    update_bn((images for images, _ in in_step(more[rank])), average)
    update_bn(undivided(more), expected)
    same_state(average, expected)

    if rank == 0:  # the other rank is not needed
        update_bn(undivided(parts), revert_model(average))
        update_bn(undivided(parts), expected)
        same_state(average, expected)


def test_update_bn_with_replicas_gives_the_statistics_of_the_undivided_batches() -> None:
    alone = Net().double()
    average = AveragedModel(convert_model(copy.deepcopy(alone)))
    whole = batches([3, 4, 1], 0)
    update_bn(whole, DataParallelWithCallback(average, replicas=2))
    update_bn(whole, alone)
    same_state(average.module, alone)
