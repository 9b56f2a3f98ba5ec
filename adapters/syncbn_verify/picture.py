"""The picture of what `pays` found. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure

from syncbn_verify.parts import Kind

COLORS: dict[Kind, str] = {
    "one sample": "#d55e00",
    "unlike": "#e69f00",
    "a little unlike": "#999999",
    "noisy": "#cc79a7",
    "alike": "#0072b2",
}


def draw(dots: Sequence[tuple[str, float, float, Kind]], path: Path) -> None:
    """A row of dots for each name; the ending of `path` says which kind of picture it is.

    A dot has a name, the samples of a part, those of random parts that differ as much, and a
    conclusion.
    """
    names = list(dict.fromkeys(name for name, *_ in dots))[::-1]
    figure = Figure((5.6, 1.3 + 0.32 * len(names)), layout="constrained")
    axis = figure.subplots()
    for name, samples, like, kind in dots:
        axis.plot(samples, names.index(name), "|", color="black", markersize=16, zorder=1)
        axis.plot(like, names.index(name), "o", color=COLORS[kind], label=kind, zorder=2)
    handles, kinds = axis.get_legend_handles_labels()
    found = dict(zip(kinds, handles, strict=True))
    figure.legend(found.values(), found, loc="outside upper right", ncols=3, frameon=False)
    axis.axvline(2, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(names)), [fill(name, 24) for name in names])
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel("like random parts of so many samples\n(| = samples of a part)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=240)
