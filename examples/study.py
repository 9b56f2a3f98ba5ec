"""When does synchronization pay? Five tasks, trained with and without it.

    python examples/study.py               # five seeds: ten minutes, a table and a picture
    python examples/study.py --quick       # one seed, a sixth of the steps: half a minute

Four replicas train on scikit-learn's handwritten digits. The tasks differ in what a batch holds.
Both ways begin with the same parameters and see the same batches. "apart": each replica takes the
statistics of its own samples (`nn.BatchNorm2d`). "synchronized": all take those of the whole batch
(`convert_model`). As under DistributedDataParallel, the running statistics that are
kept, and used in validation, are those of the first replica.

Each result is written to a file at once, so after an interrupt the same command goes on.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from syncbn_torch import DataParallelWithCallback, convert_model

PARTS = 4
WAYS = ("apart", "synchronized")
BACKGROUND = 10  # the class of pixels without ink
SIDE = 24  # of a scene: three by three places for digits
# What the camera of each replica makes of an image: contrast * image + brightness.
CAMERAS = ((1.0, 0.0), (0.7, 0.2), (0.5, 0.4), (0.35, 0.6))

Batch = tuple[Tensor, Tensor]
Random = np.random.Generator


class Digits(NamedTuple):
    """Images of digits, and which digits they are."""

    images: np.ndarray  # (N, 8, 8), from 0 to 1
    labels: np.ndarray  # (N,)


class Task(NamedTuple):
    """What is trained, on which batches."""

    name: str
    network: Callable[[], nn.Module]
    batch: Callable[[Digits, Random, int], Batch]  # of so many samples for each part
    samples: int  # of a part
    steps: int


def load() -> tuple[Digits, Digits]:
    """Digits for training, and others for validation."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    return Digits(split[0], split[2]), Digits(split[1], split[3])


def block(inputs: int, outputs: int, dilation: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def classifier() -> nn.Module:
    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4, 10),
    )  # fmt: skip


def segmenter() -> nn.Module:
    """A class for each pixel: which digit its ink belongs to, or background."""
    blocks = *block(1, 16), *block(16, 32), *block(32, 32, 2), *block(32, 32, 2)
    return nn.Sequential(*blocks, nn.Conv2d(32, BACKGROUND + 1, 1))


def mixed(digits: Digits, random: Random, samples: int) -> Batch:
    """Every part gets digits at random."""
    chosen = random.permutation(len(digits.images))[: PARTS * samples]
    return torch.tensor(digits.images[chosen])[:, None], torch.tensor(digits.labels[chosen])


def cameras(digits: Digits, random: Random, samples: int) -> Batch:
    """Every part gets digits at random, as its own camera shows them."""
    images, labels = mixed(digits, random, samples)
    contrast, brightness = torch.tensor(CAMERAS).repeat_interleave(samples, 0).unbind(1)
    return images * contrast.view(-1, 1, 1, 1) + brightness.view(-1, 1, 1, 1), labels


def scenes(digits: Digits, random: Random, samples: int) -> Batch:
    """Every part gets scenes: some digits, in a light that differs from scene to scene."""
    images = np.zeros((PARTS * samples, 1, SIDE, SIDE), np.float32)
    target = np.full((PARTS * samples, SIDE, SIDE), BACKGROUND)
    for image, pixels in zip(images, target, strict=True):
        for row, column in np.argwhere(random.random((SIDE // 8, SIDE // 8)) < 0.6) * 8:
            number = random.integers(len(digits.images))
            digit, place = digits.images[number], np.s_[row : row + 8, column : column + 8]
            image[0][place] = digit
            pixels[place] = np.where(digit > 0.3, digits.labels[number], BACKGROUND)
        image *= random.uniform(0.3, 1)
        image += random.uniform(0, 1)
    return torch.tensor(images), torch.tensor(target)


TASKS = (
    Task("digits, 16 per part", classifier, mixed, 16, 600),
    Task("digits, 2 per part", classifier, mixed, 2, 600),
    Task("digits, 16 per part, a camera per part", classifier, cameras, 16, 600),
    Task("scenes, 2 per part", segmenter, scenes, 2, 1500),
    Task("scenes, 1 per part", segmenter, scenes, 1, 1500),
)


def error(model: nn.Module, batch: Batch) -> float:
    """The share of digits, or of pixels with ink, whose class is wrong."""
    images, target = batch
    with torch.no_grad():
        wrong = model(images).argmax(1) != target
    return wrong[target != BACKGROUND].double().mean().item()


def train(task: Task, way: str, seed: int, steps: int, data: tuple[Digits, Digits]) -> float:
    """The validation error after training."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = task.network()
    if way == "synchronized":
        model = convert_model(model)
    replicas = DataParallelWithCallback(model, device_ids=["cpu"] * PARTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    title = f"{task.name}, {way}, seed {seed}"
    for _ in tqdm(range(steps), desc=title, unit="step", leave=False, disable=None):
        images, target = task.batch(data[0], random, task.samples)
        loss = nn.functional.cross_entropy(replicas(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    return error(model, task.batch(data[1], np.random.default_rng(0), len(data[1].images) // PARTS))


def errors(runs: list[dict], task: Task, way: str) -> list[float]:
    return [100 * run["error"] for run in runs if (run["task"], run["way"]) == (task.name, way)]


def show_table(runs: list[dict], console: Console) -> None:
    table = Table(title="Wrong digits or pixels in validation, %: mean (least to largest)")
    for column in ("", *WAYS):
        table.add_column(column)
    for task in TASKS:
        found = [errors(runs, task, way) for way in WAYS]
        cells = [f"{statistics.mean(e):.1f} ({min(e):.1f} to {max(e):.1f})" for e in found]
        table.add_row(task.name, *cells)
    console.print(table)


def draw(runs: list[dict], path: Path) -> None:
    """A dot for each seed."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
    for way, color, offset in zip(WAYS, ("#D55E00", "#0072B2"), (-0.15, 0.15), strict=True):
        for row, task in enumerate(TASKS):
            found = errors(runs, task, way)
            axes.plot(found, [row + offset] * len(found), "o", color=color, alpha=0.6,
                      label=None if row else way, markeredgewidth=0)  # fmt: skip
    axes.set_yticks(range(len(TASKS)), [task.name.replace(", a ", ",\na ") for task in TASKS])
    axes.set(xscale="log", xlabel="wrong digits or pixels in validation (%)")
    axes.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=240)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, a sixth of the steps")
    parser.add_argument("--results", type=Path, help="default: study.jsonl beside the picture")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("study.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # replicas are threads already
    warnings.filterwarnings("ignore", ".*each replica takes the statistics of its own part")
    results = args.results or args.output.with_suffix(".jsonl")
    seeds, share = (1, 6) if args.quick else (args.seeds, 1)
    results.touch()
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    data, runs = load(), []
    wanted = [(task, way, seed) for seed in range(seeds) for task in TASKS for way in WAYS]
    for task, way, seed in tqdm(wanted, unit="training", disable=None):
        key = {"task": task.name, "way": way, "seed": seed, "steps": task.steps // share}
        run = next((run for run in kept if key.items() <= run.items()), None)
        if run is None:
            run = key | {"error": train(task, way, seed, task.steps // share, data)}
            with results.open("a") as file:
                file.write(json.dumps(run) + "\n")
        runs.append(run)
    console = Console(width=None if sys.stdout.isatty() else 120)
    show_table(runs, console)
    draw(runs, args.output)
    console.print(f"picture: {args.output}")
    apart, together = (statistics.mean(errors(runs, TASKS[2], way)) for way in WAYS)
    if apart < together + 5:
        console.print("[bold red]a camera per part: apart should be far worse, and is not")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
