"""What torch's profilers see of the layers."""

import os

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from world import on_ranks

from syncbn_torch import SynchronizedBatchNorm2d


@on_ranks(2)
def test_a_profiler_shows_the_exchange_of_each_layer_in_both_directions(
    rank: int, size: int
) -> None:
    model = nn.Sequential(SynchronizedBatchNorm2d(3), nn.ReLU(), SynchronizedBatchNorm2d(3))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(torch.randn(4, 3, 5, 5)).sum().backward()
    names = [event.name for event in profiled.events() or []]
    assert names.count("syncbn.exchange") == 4
    with open(f"{os.environ['FOLDER']}/{rank}.log", "w"):
        pass  # what Kineto prints about its start
