"""What `pays` says: of the study's five tasks, and of networks on crops of two photographs.

    python benchmarks/pays.py                # ten seeds: ten minutes
    python benchmarks/pays.py --seeds 1

The study (`examples/study.py`) has trained the five tasks with and without synchronization: so it
is known which of them it pays for. The networks are those of torchvision, timm and
segmentation_models_pytorch without trained weights; parts are crops of both photographs, or each
part is of one. Writes pays-DATE.json to results/ or --output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import FOLDER, write
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from syncbn_torch import PartsReport, pays

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import study

PARTS, SIDE = 4, 96
BATCHES = {"tasks": 20, "networks": 5}
SAMPLES = (1, 2, 8, 16)  # of a part


def networks() -> dict[str, Callable[[], nn.Module]]:
    import segmentation_models_pytorch as smp
    import timm
    import torchvision.models as vision

    def deeplab() -> nn.Module:
        return vision.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)

    return {
        "torchvision resnet50": lambda: vision.resnet50(weights=None),
        "torchvision deeplabv3_resnet50": deeplab,
        "timm efficientnet_b0": lambda: timm.create_model("efficientnet_b0"),
        "segmentation_models_pytorch Unet": lambda: smp.Unet("resnet18", encoder_weights=None),
    }


def crops(samples: int, mixed: bool, random: np.random.Generator) -> Iterator[Tensor]:
    """Batches of all parts: of both photographs at random, or of one in each half of the parts."""
    photos = [image.astype(np.float32) / 255 for image in load_sample_images().images]
    for _ in range(BATCHES["networks"]):
        batch = []
        for index in range(PARTS * samples):
            photo = photos[random.integers(2) if mixed else 2 * index // (PARTS * samples)]
            top, left = (random.integers(size - SIDE) for size in photo.shape[:2])
            batch.append(photo[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1))
        yield torch.from_numpy(np.stack(batch)) * 4 - 2


def row_of(name: str, seed: int, report: PartsReport) -> dict[str, Any]:
    worst = min(report.layers, key=lambda layer: layer.samples)
    noisy = max(report.layers, key=lambda layer: layer.variance)
    row = {"name": name, "seed": seed, "samples": report.samples, "layers": len(report.layers)}
    row |= {"conclusion": report.conclusion, "chance": report.chance, "like": worst.samples}
    return row | {"mean": noisy.mean, "variance": noisy.variance, "off": report.off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    digits, _ = study.load()
    tasks, nets = [], []
    for seed in range(options.seeds):
        for task in study.TASKS:
            torch.manual_seed(seed)
            random = np.random.default_rng(seed)
            loader = (task.batch(digits, random, task.samples) for _ in range(BATCHES["tasks"]))
            tasks.append(row_of(task.name, seed, pays(task.network(), loader, PARTS)))
    for name, make in networks().items():
        for samples in SAMPLES:
            for mixed in (True, False):
                torch.manual_seed(0)
                loader = crops(samples, mixed, np.random.default_rng(0))
                report = pays(make().train(), loader, PARTS)
                kind = "both photographs" if mixed else "one photograph"
                nets.append(row_of(f"{name}, {kind} per part", 0, report))
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"What pays() says of batches in {PARTS} parts")
    for title in (
        "",
        "samples",
        "conclusion (seeds)",
        "like parts of",
        "mean off",
        "var off",
        "off",
    ):
        table.add_column(title)
    rows = tasks + nets
    for name, samples in dict.fromkeys((row["name"], row["samples"]) for row in rows):
        own = [row for row in rows if (row["name"], row["samples"]) == (name, samples)]
        said = [row["conclusion"] for row in own]
        counted = ", ".join(f"{kind} ({said.count(kind)})" for kind in dict.fromkeys(said))
        figures = [
            statistics.median(row[key] for row in own)
            for key in ("like", "mean", "variance", "off")
        ]
        table.add_row(name, f"{samples:g}", counted, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    facts = {"torch": torch.__version__, "parts": PARTS, "batches": BATCHES}
    path = write(options.output, "pays-DATE", facts, tasks=tasks, networks=nets)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
