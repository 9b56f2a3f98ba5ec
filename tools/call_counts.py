"""How many Python functions of ours a small step calls: most of what a small step costs.

    python tools/call_counts.py
    python tools/call_counts.py --rounds 9

Counted are calls of functions of `syncbn_core` and `syncbn_torch`, in all threads, and apart from
them those of all Python functions. A layer alone calls the same number in every round. Replicas
wait for each other, so their numbers vary: shown are the fewest and the most of all rounds.
Nothing is asserted. Compare the numbers before and after a change.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_forward
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
from syncbn_torch.batchnorm import always_ours

SHAPE = (4, 8, 8, 8)
WARM_UP = 3  # steps before the first count: they compile, load and fill caches
Action = Callable[[], Any]


@contextmanager
def counting() -> Iterator[list[bool]]:
    """A list with an entry per call of a Python function: whether the function is ours."""
    found: list[bool] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            found.append("syncbn_torch" in file or "syncbn_core" in file)

    gc.disable()
    threading.setprofile(profile)  # for threads that start from here on
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


def count(action: Action, rounds: int) -> list[tuple[int, int]]:
    """`(calls of ours, all calls)` of each round."""
    for _ in range(WARM_UP):
        action()
    results = []
    for _ in range(rounds):
        with counting() as found:
            action()
        results.append((sum(found), len(found)))
    return results


def torch_layer() -> Iterator[tuple[str, Action]]:
    x, dy = torch.randn(2, *SHAPE)
    x.requires_grad_()
    layer = SyncBatchNorm(SHAPE[1])
    operands = [x, *layer.parameters()]
    for kernel, chosen in (("torch's kernel", nullcontext), ("our kernel", always_ours)):
        with chosen():
            y = layer(x)
            backward = partial(torch.autograd.grad, y, operands, dy, retain_graph=True)
            yield f"layer alone, {kernel}: forward", lambda: layer(x)
            yield f"layer alone, {kernel}: backward", backward
    layer.eval()
    yield "layer alone, eval: forward", lambda: layer(x)


def numpy_arrays() -> Iterator[tuple[str, Action]]:
    x = np.ones(SHAPE, np.float32)
    layer, (_, saved) = BatchNorm(SHAPE[1]), batch_norm_forward(x)
    yield "NumPy function: forward", lambda: batch_norm_forward(x)
    yield "NumPy function: backward", lambda: batch_norm_backward(x, saved)
    yield "NumPy layer alone: forward and backward", lambda: layer.backward(layer(x))


def replicas() -> Iterator[tuple[str, Action]]:
    x = torch.randn(SHAPE, requires_grad=True)
    for number in (1, 2, 4):
        for layers in (1, 8):
            model = nn.Sequential(*(SyncBatchNorm(SHAPE[1]) for _ in range(layers)))
            parallel = DataParallelWithCallback(model, replicas=number)
            what = f"{number} replica{'s' * (number > 1)} of {layers} layer{'s' * (layers > 1)}"
            yield f"{what}: forward", lambda parallel=parallel: parallel(x)
            step = lambda parallel=parallel: parallel(x).sum().backward()  # noqa: E731
            yield f"{what}: forward and backward", step


def span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table(title=f"Python calls of a step on {'x'.join(map(str, SHAPE))}, float32")
    table.add_column("step")
    table.add_column("ours", justify="right")
    table.add_column("all", justify="right")
    for cases in (torch_layer, numpy_arrays, replicas):
        for what, action in cases():
            ours, every = zip(*count(action, rounds), strict=True)
            table.add_row(what, span(list(ours)), span(list(every)))
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
