"""Layers with a mask on a CPU, over the same without, and over torch's layer on the valid rows.

    python benchmarks/masks.py

Forward and backward; contenders take turns within each round, ratios are medians of the ratios of
a round. A fifth of the places is masked, at random or as the end of each sample. Writes
masks-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import FOLDER, write
from torch import Tensor, nn

from syncbn_torch import SyncBatchNorm
from syncbn_torch.forward import always_ours

SHAPES = [(8, 64, 56, 56), (32, 256, 28, 28), (32, 512, 7, 7), (16, 64, 400), (64, 128, 1000)]


def contenders(x: Tensor, dy: Tensor, mask: Tensor) -> dict[str, Callable[[], None]]:
    layer, plain = SyncBatchNorm(x.shape[1]), nn.BatchNorm1d(x.shape[1])

    def ours(*own: Tensor) -> None:
        with always_ours():
            layer(x.detach().requires_grad_(), *own).backward(dy)

    def torchs() -> None:
        leaf = x.detach().requires_grad_()
        y = torch.zeros_like(leaf)
        y.movedim(1, -1)[mask] = plain(leaf.movedim(1, -1)[mask])
        y.backward(dy)

    return {"without": ours, "mask": lambda: ours(mask), "torch": torchs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            for channels_last in (False, True)[: 1 + (len(shape) == 4)]:
                for kind in ("random", "ends"):
                    torch.manual_seed(0)
                    x, dy = torch.randn(2, *shape).unbind()
                    if channels_last:
                        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
                    mask = torch.rand(shape[0], *shape[2:]) > 0.2
                    if kind == "ends":
                        mask = mask.flatten(1).sort(1, descending=True).values.view_as(mask)
                    runs = contenders(x, dy, mask)
                    times: dict[str, list[float]] = {name: [] for name in runs}
                    for _ in range(options.rounds):
                        for name, run in runs.items():
                            run()  # the contender before has filled the caches
                            begin = time.perf_counter()
                            run()
                            times[name].append(time.perf_counter() - begin)
                    over = {
                        peer: statistics.median(
                            a / b for a, b in zip(times["mask"], times[peer], strict=True)
                        )
                        for peer in ("without", "torch")
                    }
                    rows.append(
                        {"shape": shape, "channels_last": channels_last, "places": kind}
                        | {"threads": threads, "over": over}
                        | {name: statistics.median(t) for name, t in times.items()}
                    )
                    print(rows[-1])
    print(
        f"written: {write(options.output, 'masks-DATE', {'torch': torch.__version__}, rows=rows)}"
    )


if __name__ == "__main__":
    main()
