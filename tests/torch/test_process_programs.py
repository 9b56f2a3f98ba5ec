"""Random programs of several ranks, one of which differs: right ones are right, wrong ones told.

The odd rank holds its model in another way, which is right, or takes another layer once, which is
an error on every rank. All layers have the same size. `python3 dev.py soak` makes hundreds.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import close, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ProtocolError
from syncbn_torch import SynchronizedBatchNorm1d, revert_model

CHANNELS = 4


class Branches(nn.Module):
    """Layers in random places; `order` says which run, each with an output of its own."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.listed, self.named = nn.ModuleList(), nn.ModuleDict()
        self.layers: list[Callable[[Tensor], Tensor]] = []
        for number, place in enumerate(places):
            layer = SynchronizedBatchNorm1d(CHANNELS)
            if place == "attribute":
                setattr(self, f"bn{number}", layer)
            elif place == "list":
                self.listed.append(layer)
            elif place == "dict":
                self.named[f"head{number}"] = layer
            else:
                block = nn.Sequential(nn.Identity(), nn.Sequential(layer, nn.Tanh()))
                setattr(self, f"block{number}", block)

    def ordered(self) -> list[nn.Module]:
        """All layers, in the same order on every rank."""
        return [m for m in self.modules() if type(m).__name__.endswith("BatchNorm1d")]

    def forward(self, x: Tensor, order: list[int]) -> list[Tensor]:
        layers = self.ordered()
        return [layers[number](x * (1 + position)) for position, number in enumerate(order)]


class Holder(nn.Module):
    """A larger module, with a model of its own beside the one that it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.critic = model, Branches(["attribute", "list"])


def wrapped_and_unwrapped(model: nn.Module) -> Any:
    Holder(model)
    gc.collect()


# What the odd rank does with its model before the first step, and what it keeps; None: it swaps.
RIGHT: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "wraps it": lambda model: nn.Sequential(model),
    "wraps it twice": lambda model: nn.Sequential(nn.ModuleDict({"module": model})),
    "puts it into a larger one": Holder,
    "wraps it for a while": wrapped_and_unwrapped,
    "keeps an average": copy.deepcopy,
    "keeps a converted copy": lambda model: revert_model(copy.deepcopy(model)),
    "evaluates another one": lambda model: Branches(["dict", "list"]).eval()(torch.ones(2, 4), [0]),
    "evaluates it first": lambda model: model.eval()(torch.ones(2, 4).double(), [0]),
}
REPLACED: dict[str, Callable[[Any], Any]] = {
    "takes a copy": copy.deepcopy,
    "takes a pickled one": lambda model: pickle.loads(pickle.dumps(model)),
}
LATER = ("wraps it after a step", "keeps an average after a step")
WRONG = ("swaps two layers", "takes one twice", "skips one", "skips the last one")
WRONG += ("takes another into the loss",)
WAYS = (*RIGHT, *REPLACED, *LATER, *WRONG)
FIRST, LAST = map(int, os.environ.get("SYNCBN_PROGRAMS", f"0 {len(WAYS)}").split())


def train_once(model: nn.Module, x: Tensor, order: list[int]) -> None:
    torch.stack(model(x, order)).sum().backward()


def run_program(number: int, rank: int, size: int) -> None:
    """One program, in which all ranks choose alike."""
    seed, way = 1000 * size + number, WAYS[number % len(WAYS)]
    random_ = random.Random(seed)
    places = random_.choices(["attribute", "list", "dict", "block"], k=random_.randint(3, 5))
    odd, steps = random_.randrange(size) == rank, random_.randint(1, 3)
    one, other = random_.sample(range(len(places)), 2)
    torch.manual_seed(seed)
    model: Any = Branches(places).double()
    twin: Any = revert_model(copy.deepcopy(model))
    kept = []
    if odd and way in RIGHT:
        kept.append(RIGHT[way](model))
        model.train()
    if odd and way in REPLACED:
        model = REPLACED[way](model)
    bounds = [0, 2, *[2 * n + 3 for n in range(1, size)]]
    for step in range(steps):
        x, dy = whole_batch((bounds[-1], CHANNELS), seed + step)
        order = list(range(len(places)))
        mine, last = rows_of(rank, bounds), step == steps - 1
        part = x[mine].requires_grad_()
        wrong = way in WRONG and last
        if wrong and odd and way == "swaps two layers":
            order[one], order[other] = other, one
        if wrong and odd and way == "takes one twice":
            order[one] = other
        if wrong and odd and way == "skips one":
            del order[min(one, other)]
        if wrong and odd and way == "skips the last one":
            del order[-1]
        if wrong and way != "takes another into the loss":
            words = ("same layer", "rank 0: ", "rank 1: ")
            raises(ProtocolError, *words, call=lambda p=part, o=order: train_once(model, p, o))
            return
        ys = model(part, order)
        if wrong:
            y = ys[other if odd else one]
            words = ("backward of ", "rank 0: ", "rank 1: ")
            raises(ProtocolError, *words, call=lambda y=y, d=dy[mine]: y.backward(d))
            return
        (whole := x.clone()).requires_grad_()
        expected = twin(whole, order)
        torch.autograd.backward(expected, [dy * (1 + n) for n in order])
        torch.autograd.backward(ys, [dy[mine] * (1 + n) for n in order])
        for y, right in zip(ys, expected, strict=True):
            close(y, right[mine])
        assert part.grad is not None
        assert whole.grad is not None
        close(part.grad, whole.grad[mine])
        if odd and way == "wraps it after a step":
            kept.append(Holder(model))
        if odd and way == "keeps an average after a step":
            kept.append(copy.deepcopy(model))
    for name, buffer in twin.named_buffers():
        close(model.get_buffer(name), buffer)


@on_ranks(2, 3)
def test_random_programs_are_right_or_every_rank_is_told(rank: int, size: int) -> None:
    for number in range(FIRST, LAST):
        try:
            run_program(number, rank, size)
        except BaseException as error:
            error.add_note(f"program {number}: the odd rank {WAYS[number % len(WAYS)]}")
            raise
        dist.barrier()
