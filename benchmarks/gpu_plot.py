"""The table of docs/speed.md, and its picture, from what `gpu.py` has measured.

python benchmarks/gpu_plot.py benchmarks/results/gpu-....json docs/speed-h100.png
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PEERS = {
    "torch sync": "torch's SyncBatchNorm",
    "torch cudnn": "nn.BatchNorm2d, with cuDNN",
    "torch native": "nn.BatchNorm2d, without",
}
GROUPS = [(d, layout) for layout in ("NCHW", "channels_last") for d in ("fp32", "fp16", "bf16")]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def ratio(case: dict[str, Any], peer: str) -> float:
    """Time of a peer over ours, forward and backward."""
    found = case["found"]
    return float(found[peer]["both"] / found["ours"]["both"])


def over_floor(case: dict[str, Any]) -> float:
    return float(case["found"]["ours"]["both"] / sum(case["floor"].values()))


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(results: dict[str, Any]) -> str:
    heads = ["", "shapes", "over the floor, from 100 MB"]
    heads += [f"times as fast as {label}" for label in PEERS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for dtype, layout in GROUPS:
        cases = [c for c in results["cases"] if (c["dtype"], c["layout"]) == (dtype, layout)]
        large = [over_floor(c) for c in cases if c["nbytes"] >= results["large"]]
        row = [
            f"{DTYPES[dtype]}, {layout}",
            str(len(cases)),
            f"{mean(large):.2f} ({max(large):.2f})",
        ]
        for peer in PEERS:
            values = [ratio(c, peer) for c in cases]
            row.append(f"{mean(values):.2f} ({min(values):.2f})")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(
        2, 3, figsize=(13, 7), layout="constrained", sharex=True, sharey=True
    )
    for axis, (dtype, layout) in zip(axes.flat, GROUPS, strict=True):
        cases = [c for c in results["cases"] if (c["dtype"], c["layout"]) == (dtype, layout)]
        for marker, (peer, label) in zip("os^", PEERS.items(), strict=True):
            sizes = [c["nbytes"] / 1e6 for c in cases]
            values = [ratio(c, peer) for c in cases]
            axis.scatter(sizes, values, s=16, marker=marker, label=label, alpha=0.8)
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        ticks = [0.5, 1, 2, 4, 8]
        axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axis.set_title(f"{DTYPES[dtype]}, {layout}", fontsize=10)
    for axis in axes[1]:
        axis.set_xlabel("activation, MB")
    for axis in axes[:, 0]:
        axis.set_ylabel("our kernels: times as fast")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    machine = results["machine"]
    figure.suptitle(
        f"Forward and backward of a layer, device time, {machine['device']} "
        f"(torch {machine['torch']}, {machine['date'][:10]})"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of gpu.py")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    plot(results, options.picture)
    print(table(results))


if __name__ == "__main__":
    main()
