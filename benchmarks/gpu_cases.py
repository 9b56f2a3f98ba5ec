"""The activations that `gpu.py` measures: ResNet-50's layers for three batch sizes, and more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from gpu_contenders import DENSE
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = {2: ("NC",), 3: ("NCL",)}  # by the number of axes; more have two
IMAGES = ("NCHW", "channels_last")

LARGE = 100e6  # bytes from which bandwidth alone should count
RESNET = """64,112,112 64,56,56 256,56,56 128,56,56 128,28,28 512,28,28 256,28,28 256,14,14
    1024,14,14 512,14,14 512,7,7 2048,7,7"""
RESNET_SHAPES = [tuple(map(int, shape.split(","))) for shape in RESNET.split()]
SHAPES = [(n, *shape) for n in (256, 32, 2) for shape in RESNET_SHAPES]
SHAPES += [(2, 256, 128, 128), (2, 16, 64, 128, 128), (4096, 1024)]
ERROR_SHAPES = [(32, 64, 56, 56), (32, 512, 7, 7), (4096, 1024)]
HOST_SHAPES = [(2, 64, 56, 56), (2, 512, 7, 7), (32, 256, 14, 14)]
DRY_LARGE, DRY_SHAPES = 1000, [(2, 8, 6, 6), (2, 3, 4, 3, 2), (32, 4, 2, 2), (9, 5)]


@dataclass(frozen=True)
class Case:
    """An activation (N, C, *spatial) in a dtype and a layout."""

    shape: tuple[int, ...]
    dtype: str
    layout: str  # "NCHW", "channels_last"; "NC" and "NCL" have only one

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.layout}"

    def tensor(self, device: torch.device, mean: float = 0.0) -> Tensor:
        x = (torch.randn(self.shape, device=device) + mean).to(DTYPES[self.dtype])
        dense = DENSE[x.dim()] if self.layout == "channels_last" else torch.contiguous_format
        return x.contiguous(memory_format=dense)


def cases_of(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str] = (*DTYPES,)) -> list[Case]:
    return [
        Case(shape, dtype, layout)
        for shape in shapes
        for dtype, layout in product(dtypes, LAYOUTS.get(len(shape), IMAGES))
    ]


class Selection(NamedTuple):
    """The cases whose error, host time and device time is measured, in this order."""

    errors: list[Case]
    host: list[Case]
    speed: list[Case]


def everything(dry: bool) -> Selection:
    if dry:
        host = cases_of(DRY_SHAPES[:1], ["fp32"])
        return Selection(cases_of(DRY_SHAPES), host, large_first(cases_of(DRY_SHAPES), DRY_LARGE))
    host = cases_of(HOST_SHAPES, ["fp32"])
    return Selection(cases_of(ERROR_SHAPES), host, large_first(cases_of(SHAPES), LARGE))


def large_first(cases: list[Case], large: float) -> list[Case]:
    return sorted(cases, key=lambda case: case.nbytes < large)
