"""How far a reader follows x: Python calls of ours in a step, how many files, and the turns.

A turn is a call of a function in another file than the call before. Conversions are calls of
`_in_form`. Numbers hold for one Python and one torch; a change that lowers them lowers the bounds.
"""

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from world import hosts_apart, on_ranks

import syncbn_core
import syncbn_torch
from syncbn_core import BatchNorm
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d
from syncbn_torch.inplace import InPlaceABN

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or not torch.__version__.startswith("2.13."),
    reason="counted with Python 3.11 and torch 2.13",
)
FOLDERS = tuple(str(Path(str(each.__file__)).parent) for each in (syncbn_core, syncbn_torch))
Call = tuple[str, str]  # file, function


def walk(function: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """The result, and the calls of our functions in this thread and in those that it starts."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(FOLDERS)
            and not code.co_name.endswith("comp>")  # no calls from Python 3.12 on
        ):
            calls.append((code.co_filename, code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def sizes(calls: list[Call]) -> tuple[int, int, int, int]:
    """Calls, files, turns, conversions."""
    turns = sum(one[0] != next_[0] for one, next_ in pairwise(calls))
    conversions = sum(name == "_in_form" for _, name in calls)
    return len(calls), len({file for file, _ in calls}), turns, conversions


def step(model: Callable[[Tensor], Tensor]) -> tuple[list[Call], list[Call]]:
    """The walks of forward and backward, after two steps that fill all caches."""
    x = torch.randn(4, 8, 7, 7)
    for _ in range(3):
        y, forward = walk(lambda: model(x.clone().requires_grad_()))
        loss = y.square().sum()
        with torch.autograd.set_multithreading_enabled(False):
            _, backward = walk(loss.backward)
    return forward, backward


def within(calls: list[Call], *bounds: int) -> None:
    found = sizes(calls)[: len(bounds)]
    names = ", ".join(f"{Path(file).stem}.{name}" for file, name in calls)
    assert all(map(int.__le__, found, bounds)), f"expected at most {bounds}, got {found}: {names}"


@on_ranks(2)
def test_a_step_of_a_rank(rank: int, size: int) -> None:
    hosts_apart()
    forward, backward = step(SynchronizedBatchNorm2d(8))
    within(forward, 60, 17, 37, 0)
    within(backward, 45, 14, 28, 0)


def test_a_step_of_a_layer_alone() -> None:
    forward, backward = step(SynchronizedBatchNorm2d(8, eps_mode="clamp", activation="relu"))
    within(forward, 37, 14, 28, 0)
    within(backward, 25, 10, 19, 0)


def test_a_step_in_place() -> None:
    layer = InPlaceABN(8)
    forward, backward = step(lambda x: layer(x * 1))
    within(forward, 35, 13, 27, 0)
    within(backward, 34, 9, 27, 0)


def test_a_step_of_arrays() -> None:
    layer, x = BatchNorm(8), np.random.default_rng(1).standard_normal((4, 8, 7, 7), np.float32)
    for _ in range(3):
        y, forward = walk(lambda: layer.forward(x))
        _, backward = walk(lambda y=y: layer.backward(y))
    within(forward, 44, 10, 18)
    within(backward, 28, 9, 14)


def test_a_step_of_two_replicas() -> None:
    model = DataParallelWithCallback(SynchronizedBatchNorm2d(8), replicas=2)
    forward, backward = step(model)
    within(forward, 219)  # 212 or 219, by which replica comes first
    within(backward, 2)
