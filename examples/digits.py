"""Four replicas, each with digits of its own camera, equal one device with all of them.

A small convolutional network is trained on scikit-learn's real handwritten digits, three times
from the same parameters on the same batches. Each replica gets two digits, as its own camera shows
them: another contrast and brightness.

- per replica: each replica normalizes its own two digits (`nn.BatchNorm2d`),
- synchronized: four replicas with the statistics of all eight (`convert_model`),
- one device: the whole batch in one model, which the synchronized run has to follow to rounding.

Run it with `python3 dev.py demo` from a checkout, or with the extras `torch` and `examples`
installed as `python examples/digits.py`. It writes a picture, says how far the synchronized run is
from one device, and ends with status 1 if that is more than rounding. (When synchronization makes
a better model: `study.py`.)
"""

import argparse
import copy
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from syncbn_torch import DataParallelWithCallback, convert_model

# What a camera makes of an image: contrast * image + brightness.
CAMERAS = torch.tensor([(1.0, 0.0), (0.7, 0.2), (0.5, 0.4), (0.35, 0.6)])
EVERY = 30  # steps between two validations
WAYS = ("per replica", "synchronized", "one device")
# Largest difference to the one-device run that rounding explains, after one step and at the end.
# Training is chaotic: every step magnifies what the steps before have rounded differently.
TOLERANCE = {torch.float64: (1e-12, 1e-4), torch.float32: (1e-4, float("inf"))}


@dataclass
class Run:
    """What is kept of one training."""

    errors: list[float] = field(default_factory=list)  # % of digits in validation, every 30 steps
    first_step: dict[str, Tensor] = field(default_factory=dict)
    last_step: dict[str, Tensor] = field(default_factory=dict)


def load(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) from 0 to 1 and labels (N,): for training, then for validation."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, valid_x = (torch.tensor(x, dtype=dtype).view(-1, 1, 8, 8) for x in split[:2])
    return train_x, torch.tensor(split[2]), valid_x, torch.tensor(split[3])


def network(dtype: torch.dtype) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4, 10),
    ).to(dtype)  # fmt: skip


def seen(images: Tensor, parts: int) -> Tensor:
    """Consecutive parts of `images`, each as its camera shows it."""
    number = torch.arange(len(images)) * parts // len(images) % len(CAMERAS)
    contrast, brightness = CAMERAS[number].to(images.dtype).view(-1, 2, 1, 1, 1).unbind(1)
    return contrast * images + brightness


def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Wrong digits in validation, in %, by running statistics; all cameras see every digit."""
    model.eval()
    with torch.no_grad():
        found = model(seen(images.repeat(len(CAMERAS), 1, 1, 1), len(CAMERAS))).argmax(1)
    model.train()
    return 100 * (found != labels.repeat(len(CAMERAS))).double().mean().item()


def build(way: str, start: nn.Module, replicas: int) -> nn.Module:
    """The model of one way, with the parameters of `start`."""
    model = copy.deepcopy(start)
    if way == "one device":
        return model
    if way == "synchronized":
        model = convert_model(model)
    else:  # it is to show what happens without
        warnings.filterwarnings("ignore", ".*each replica takes the statistics of its own part")
    return DataParallelWithCallback(model, device_ids=["cpu"] * replicas)


def warm_up(way: str, start: nn.Module, data: tuple[Tensor, ...], args: argparse.Namespace) -> None:
    """One step whose result is dropped: the first one loads or compiles kernels."""
    model, rows = build(way, start, args.replicas), slice(args.batch_size)
    nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()


def train(way: str, start: nn.Module, data: tuple[Tensor, ...], args: argparse.Namespace) -> Run:
    train_x, train_y, valid_x, valid_y = data
    model = build(way, start, args.replicas)
    plain = model.module if isinstance(model, DataParallelWithCallback) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    order = torch.Generator().manual_seed(args.seed)
    run = Run()
    batches = -(-len(train_x) // args.batch_size)
    step = 0
    with tqdm(total=args.epochs * batches, desc=f"{way:>12}", unit="step", disable=None) as bar:
        for _ in range(args.epochs):
            for rows in torch.randperm(len(train_x), generator=order).split(args.batch_size):
                # The loss of the whole batch, from the joined output: replicas change nothing.
                y = model(seen(train_x[rows], args.replicas))
                loss = nn.functional.cross_entropy(y, train_y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % EVERY == 0:
                    run.errors.append(error(plain, valid_x, valid_y))
                if not run.first_step:
                    run.first_step = copy.deepcopy(plain.state_dict())
                bar.update()
                step += 1
    run.last_step = copy.deepcopy(plain.state_dict())
    run.errors.append(error(plain, valid_x, valid_y))
    return run


def difference(state: dict[str, Tensor], other: dict[str, Tensor], running: bool) -> float:
    """Largest difference in running statistics, or else in parameters."""
    names = [n for n in state if ("running" in n) is running and "tracked" not in n]
    return max((state[n] - other[n]).abs().max().item() for n in names)


def draw(runs: dict[str, Run], args: argparse.Namespace) -> None:
    """Wrong digits by step; one device is broad and light, below the others."""
    mpl.use("Agg")
    styles = {
        "one device": {"color": "#56B4E9", "linewidth": 7, "alpha": 0.55},
        "per replica": {"color": "#D55E00", "linewidth": 1.8},
        "synchronized": {"color": "#000000", "linewidth": 1.6, "linestyle": "--"},
    }
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for way, style in styles.items():
        errors = runs[way].errors
        axes.plot([EVERY * n for n in range(len(errors))], errors, label=way, **style)
    axes.set(yscale="log", xlabel="step", ylabel="wrong digits in validation (%)")
    axes.set_yticks([0.5, 1, 3, 10, 30, 90], ["0.5", "1", "3", "10", "30", "90"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    samples = args.batch_size / args.replicas
    figure.suptitle(
        f"{args.replicas} replicas with {samples:g} digits each, a camera per replica: "
        "synchronized equals one device"
    )
    figure.savefig(args.output, dpi=120)


def check(runs: dict[str, Run], dtype: torch.dtype) -> list[str]:
    """What is wrong with the runs; an empty list when all is well."""
    alone, together, apart = runs["one device"], runs["synchronized"], runs["per replica"]
    faults = []
    for when, bound in zip(("first_step", "last_step"), TOLERANCE[dtype], strict=True):
        for running in (False, True):
            off = difference(getattr(together, when), getattr(alone, when), running)
            if not off <= bound:
                faults.append(
                    f"synchronized is {off:.1e} off at {when}, more than the {bound:.0e} that "
                    "rounding explains at the default learning rate"
                )
    if difference(apart.first_step, alone.first_step, True) < 1e-3:
        faults.append("per replica should differ visibly after one step, and does not")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("digits.png"))
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.replicas) < 1:
        parser.error("expected at least 1 epoch, 1 sample in a batch and 1 replica")
    torch.set_num_threads(1)  # replicas are threads already, and a tiny model gains from no more
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    start, data = network(dtype), load(dtype)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("first steps; on a new machine they compile kernels, some seconds each"):
        for way in WAYS:
            warm_up(way, start, data, args)
    runs = {way: train(way, start, data, args) for way in WAYS}
    draw(runs, args)
    console.print(f"picture: {args.output}")
    faults = check(runs, dtype)
    for fault in faults:
        console.print(f"[bold red]{fault}")
    first = (runs[way].first_step for way in ("synchronized", "one device"))
    off = difference(*first, False)
    wrong = {way: f"{run.errors[-1]:.1f} %" for way, run in runs.items()}
    console.print(
        f"{args.replicas} replicas = one device: {'no' if faults else 'yes'} ({off:.0e} after a "
        f"step). Wrong digits: {wrong['synchronized']}, each replica by itself "
        f"{wrong['per replica']}."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
