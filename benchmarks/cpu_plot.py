"""The picture of what `cpu.py` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from cpu_report import name_of


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed of the layer over `nn.BatchNorm`'s, by shape: the largest above."""
    figure, axes = plt.subplots(2, 1, figsize=(5.6, 8), layout="constrained", sharex=True)
    for axis, layout in zip(axes, ("NCHW", "channels_last"), strict=True):
        bars(axis, results.get("layers", []), layout)
    figure.supxlabel("times as fast as nn.BatchNorm, forward and backward, float32", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=240)
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
    axis.set_yticks(range(len(names)), names)
    axis.set_title(layout, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
