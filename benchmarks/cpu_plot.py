"""The picture of what `cpu.py` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from cpu_report import name_of


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed of the layer over `nn.BatchNorm`'s by shape, and of the kernels over a copy's."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 5.5), layout="constrained")
    for axis, layout in zip(axes, ("NCHW", "channels_last"), strict=False):
        bars(axis, results.get("layers", []), layout)
    floor(axes[2], results.get("kernels", []))
    processor, cores = results["facts"]["processor"], results["facts"]["cores"]
    figure.suptitle(
        f"Forward and backward on CPU, float32 ({processor}, {cores} cores, "
        f"torch {results['facts']['torch']}, {results['facts']['date']})"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(axis: Any, rows: list[dict[str, Any]], layout: str) -> None:
    rows = [row for row in rows if row["dtype"] == "float32" and row["layout"] == layout]
    rows.sort(key=lambda row: row["bytes"])
    names = list(dict.fromkeys(name_of(row["shape"]) for row in rows))
    counts = sorted({row["threads"] for row in rows})
    for index, count in enumerate(counts):
        some = [row for row in rows if row["threads"] == count]
        places = [names.index(name_of(row["shape"])) for row in some]
        values = [row["found"]["shipped"]["both"]["faster"] for row in some]
        offset = (index - (len(counts) - 1) / 2) * 0.4
        label = f"{count} thread{'s' * (count > 1)}"
        axis.barh([place + offset for place in places], values, height=0.36, label=label)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_title(f"layer, {layout}: times as fast as nn.BatchNorm", fontsize=10)
    if rows:
        axis.legend(loc="lower right", fontsize=8)


def floor(axis: Any, rows: list[dict[str, Any]]) -> None:
    for part, marker in (("forward", "o"), ("backward", "s")):
        for count in sorted({row["threads"] for row in rows}):
            some = [row for row in rows if row["threads"] == count]
            axis.scatter(
                [row["bytes"] / 2**20 for row in some],
                [row["over_floor"]["reused output"][part] for row in some],
                marker=marker,
                s=18,
                label=f"{part}, {count} thread{'s' * (count > 1)}",
            )
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    axis.set_ylim(0, 4)
    axis.set_xlabel("size of the activation, MiB")
    axis.set_title("kernels: time over 3 and 5 passes at copy speed", fontsize=10)
    if rows:
        axis.legend(fontsize=8)
