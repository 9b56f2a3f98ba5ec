"""ResNets of any layer that normalizes, and the layers that talk in a group, ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as Function

from syncbn_torch import DistributedCommunicator, SyncBatchNorm

Norm = Callable[[int], nn.Module]  # of so many channels


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, beside an identity or a projection."""

    def __init__(
        self, inputs: int, width: int, stride: int, norm: Norm, act: type[nn.Module]
    ) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), norm(width), act()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), act()),
            *(nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)),
        )
        self.act = act()
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.path(x) + self.shortcut(x))
        return y


def resnet(
    norm: Norm, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), smooth: bool = False
) -> nn.Sequential:
    """ResNet-50 with its 53 layers of `norm`; narrower and shorter as asked for.

    `smooth`: without the maximum over 3x3, whose backward need not be the same in every run, and
    with SiLU: a ReLU makes a whole gradient of a difference in the last bit.
    """
    act = nn.SiLU if smooth else nn.ReLU
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), act()]
    layers += [nn.MaxPool2d(3, 2, 1)] * (not smooth)
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, width << stage, stride, norm, act))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def ours_in_group(channels: int) -> nn.Module:
    """Our layer over the default group, which it talks to even if it is the only rank."""
    return SyncBatchNorm(channels, process_group=DistributedCommunicator())


class AlwaysInGroup(nn.SyncBatchNorm):
    """torch's layer, which calls its function even if it is the only rank."""

    def forward(self, x: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        running = self.running_mean, self.running_var
        settings = self.eps, self.momentum, group, dist.get_world_size()
        y: Tensor = Function.apply(x, self.weight, self.bias, *running, *settings)
        return y


def torch_in_group(channels: int) -> nn.Module:
    alone = dist.get_world_size() == 1
    return AlwaysInGroup(channels) if alone else nn.SyncBatchNorm(channels)
