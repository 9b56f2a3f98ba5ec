"""A synchronized layer in plain tensor operations: what one would write by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from syncbn_core.comm import SyncMaster


class PlainSynchronized(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all replicas: sums go to the first one, and come back in the graph."""

    _ends: Any = None

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        if copy_id == 0:
            context.sync_master = SyncMaster(_add_up)
            self._ends = context.sync_master.run_master
        else:
            self._ends = context.sync_master.register_slave(copy_id).run_slave

    def forward(self, input: Tensor) -> Tensor:
        axes = [0, 2, 3]
        message = (input.sum(axes), input.square().sum(axes), input.numel() // input.shape[1])
        total, squares, count = self._ends(message) if self._ends else message
        mean = total / count
        var = squares / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        shape = (1, -1, 1, 1)
        invstd = (var + self.eps).rsqrt()
        slope = (invstd * self.weight).view(shape)
        return (input - mean.view(shape)) * slope + self.bias.view(shape)


def _add_up(messages: list[Any]) -> list[Any]:
    values = [message for _, message in messages]
    total = tuple(sum(parts) for parts in zip(*values, strict=True))
    return [(identifier, total) for identifier, _ in messages]
