"""Which layers of the ranks belong together: mix-ups are told, right programs run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import close, equals_undivided, on_ranks, raises, rows_of, same_on_all_ranks, whole_batch

from syncbn_core.errors import DTypeError, ProtocolError
from syncbn_core.exchange import Exchange
from syncbn_core.moments import Moments
from syncbn_torch import (
    DistributedCommunicator,
    SynchronizedBatchNorm1d,
    convert_model,
)

BOUNDS = (0, 1, 3, 6)  # the rows of each rank


class Heads(nn.Module):
    """Two heads of equal width, called in the order of `names`."""

    def __init__(self, names: tuple[str, str] = ("depth", "normals")) -> None:
        super().__init__()
        self.names = names
        self.body = nn.Conv2d(3, 4, 1)
        for name in sorted(names):
            self.add_module(name, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return sum(
            self.get_submodule(name)(features) * (1 + i) for i, name in enumerate(self.names)
        )


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(3))
    ).double()


def equals_the_undivided_model(
    rank: int, prepare: Callable[[nn.Module], Any] = lambda model: model
) -> None:
    """Two steps of the model, after `prepare(model)`, equal torch's layers over all rows."""
    model, twin = convert_model(model_of()), model_of()
    kept = prepare(model)
    for seed in range(2):
        x, dy = whole_batch((6, 3, 4, 4), seed)
        equals_undivided(model, twin, x, dy, rows_of(rank, BOUNDS))
        model.zero_grad()
        twin.zero_grad()
    del kept


# ---------------------------------------------------------------------------------- mix-ups


@on_ranks(2, 3)
def test_heads_in_another_order_on_one_rank_are_told_in_their_first_call(
    rank: int, size: int
) -> None:
    names = ("depth", "normals")
    model = convert_model(Heads(names if rank else names[::-1])).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = DistributedDataParallel(model)
    x, _ = whole_batch((2 * size, 3, 4, 4))
    words = ["normals.1", "depth.1", "rank 0: ", "rank 1: ", "same order"]
    raises(ProtocolError, *words, call=lambda: wrapped(x[2 * rank : 2 * rank + 2]))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@on_ranks(2)
def test_a_copy_on_one_rank_after_the_first_step_is_told_with_a_remedy(
    rank: int, size: int
) -> None:
    model = convert_model(model_of())
    x = torch.randn(3, 3, 4, 4).double()
    model(x)
    model = copy.deepcopy(model) if rank else model
    words = (
        "alike, but not the same layers",
        "copied the model after its first step, copy it on all",
    )
    raises(ProtocolError, *words, call=lambda: model(x))


@on_ranks(3)
def test_input_of_another_dtype_is_told_and_the_next_step_is_right(rank: int, size: int) -> None:
    layer, twin = SynchronizedBatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    part = x[rows_of(rank, BOUNDS)]
    raises(
        DTypeError,
        "{0: 'float16', 1: 'float32', 2: 'float32'}",
        call=lambda: layer(part if rank else part.half()),
    )
    close(layer(part), twin(x)[rows_of(rank, BOUNDS)])


# --------------------------------------------------------------------- right programs run


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


@on_ranks(3)
def test_a_wrapper_on_one_rank(rank: int, size: int) -> None:
    equals_the_undivided_model(rank, lambda model: Wrapper(model) if rank == 0 else None)


@on_ranks(3)
def test_a_second_holder_of_parts_on_one_rank(rank: int, size: int) -> None:
    def hold(model: Any) -> Any:
        return (
            nn.ModuleDict({"first features": model[1], "later features": model[3]})
            if rank
            else None
        )

    equals_the_undivided_model(rank, hold)


@pytest.mark.slow
@on_ranks(3)
def test_compiled_on_one_rank(rank: int, size: int) -> None:
    def compiled(model: Any) -> None:
        if rank == 0:
            model[3] = torch.compile(model[3], backend="eager")

    equals_the_undivided_model(rank, compiled)


@on_ranks(2)
def test_a_layer_that_joins_a_model_after_its_first_call(rank: int, size: int) -> None:
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x, dy = whole_batch((6, 3))
    equals_undivided(layer, twin, x, dy, rows_of(rank, (0, 2, 6)))
    model = nn.ModuleDict({"bn": layer, "other": SynchronizedBatchNorm1d(3).double()})
    for module in (layer, twin):
        module.zero_grad()
    equals_undivided(model["bn"], twin, x, dy, rows_of(rank, (0, 2, 6)))
    twin = nn.BatchNorm1d(3).double()
    equals_undivided(model["other"], twin, x, dy, rows_of(rank, (0, 2, 6)))


@on_ranks(2)
def test_a_teacher_of_the_same_class_and_a_new_model_in_every_trial(rank: int, size: int) -> None:
    for trial in range(2):
        student, teacher = (convert_model(model_of(trial)) for _ in range(2))
        for model in (student, teacher):
            x, dy = whole_batch((6, 3, 4, 4), trial)
            equals_undivided(model, model_of(trial), x, dy, rows_of(rank, (0, 2, 6)))


# --------------------------------------------------- one format of messages, whatever computes


@on_ranks(3)
def test_a_rank_with_rows_on_a_device_goes_with_ranks_without_kernels(rank: int, size: int) -> None:
    rng = np.random.default_rng(rank)
    part = Moments.of(rank + 2, rng.normal(size=5), rng.uniform(size=5))
    if rank == 0:  # as a device has them, in a tensor
        part = Moments(torch.from_numpy(part.rows), part.count)
    exchange = Exchange(DistributedCommunicator(), lambda: "bn", "float32")
    total, _ = exchange.moments(part, exchange.begin(5))
    assert isinstance(total.rows, Tensor) == (rank == 0)
    same_on_all_ranks(torch.as_tensor(total.rows))
