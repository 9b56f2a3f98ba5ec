"""The picture of docs/is-it-for-me.md from the JSON of `benchmarks/pays.py`.

python tools/figures/pays_plot.py benchmarks/results/pays-....json docs/pays.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLORS = {
    "one sample": "#d55e00",
    "unlike": "#e69f00",
    "a little unlike": "#999999",
    "alike": "#0072b2",
}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A row for each kind of parts: their samples, and like random parts of how many they are."""
    figure, axis = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    kinds = list(dict.fromkeys((name_of(row), row["samples"]) for row in rows))[::-1]
    for place, (name, samples) in enumerate(kinds):
        own = [row for row in rows if (name_of(row), row["samples"]) == (name, samples)]
        axis.plot([samples], [place], "|", color="black", markersize=16, zorder=1)
        colors = [COLORS[row["conclusion"]] for row in own]
        axis.scatter([row["like"] for row in own], [place] * len(own), c=colors, s=28, zorder=2)
    axis.axvline(2, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axis.set_yticks(range(len(kinds)), [label_of(*kind) for kind in kinds])
    axis.set_xlabel("the parts differ as random parts of so many samples (| = samples of a part)")
    axis.spines[["top", "right"]].set_visible(False)
    for kind, color in COLORS.items():
        axis.scatter([], [], c=color, label=kind)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    figure.savefig(path, dpi=160)


def name_of(row: dict[str, Any]) -> str:
    name = str(row["name"])
    return name.rpartition(", ")[2] if "photograph" in name else name


def label_of(name: str, samples: float) -> str:
    if "photograph" not in name:
        return name
    return f"{name}, {samples:g} sample{'s' * (samples > 1)}"


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plot(results["tasks"] + results["networks"], Path(sys.argv[2]))
