"""Tables and picture of the docs from the JSON of `gpu_session.py` or `gpu.py`.

    python tools/figures/gpu_plot.py benchmarks/results/gpu-....json docs/speed-h100.png

Writes the picture and prints the tables: two of docs/speed.md, a shorter one of
docs/internals/gpu-results.md, which says how they are read, and that of the process groups, if
there were any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from gpu_report import of_resnet50, process_label, total_of_resnet50

PEERS = {
    "torch sync": "torch's SyncBatchNorm",
    "torch cudnn": "nn.BatchNorm2d, with cuDNN",
    "torch native": "nn.BatchNorm2d, without",
    "apex": "apex's SyncBatchNorm",
    "apex (formula)": "apex's formula in tensor operations, batch of 32",
}
GROUPS = [(d, layout) for layout in ("NCHW", "channels_last") for d in ("fp32", "fp16", "bf16")]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


SHORT = {"float32": ("fp32",), "16 bits": ("fp16", "bf16")}
DRY = "*** DRY RUN on CPU: NO GPU FIGURE WAS MEASURED ***"

Row = dict[str, Any]


def ratio(case: Row, peer: str) -> float | None:
    """Time of a peer over ours, forward and backward."""
    theirs, ours = (case["found"].get(name, {}).get("both") for name in (peer, "ours"))
    return float(theirs / ours) if theirs and ours else None


def over_floor(case: Row) -> float | None:
    ours = case["found"]["ours"].get("both")
    return float(ours / sum(case["floor"].values())) if ours else None


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def cell(values: Sequence[float], worst: Callable[[Sequence[float]], float]) -> str:
    """Geometric mean, in brackets the worst."""
    return f"{statistics.geometric_mean(values):.2f} ({worst(values):.2f})" if values else "-"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def peers_of(results: Row) -> dict[str, str]:
    """The peers that were measured."""
    cases = results["cases"]
    return {
        peer: label
        for peer, label in PEERS.items()
        if any(ratio(case, peer) is not None for case in cases)
    }


def cases_of(results: Row, dtypes: Sequence[str], layout: str) -> list[Row]:
    return [c for c in results["cases"] if c["dtype"] in dtypes and c["layout"] == layout]


def resnet50(cases: Sequence[Row]) -> list[Row]:
    """Those of ResNet-50's layers; all, where a dry run has none of them."""
    return [case for case in cases if of_resnet50(case)] or list(cases)


def floor_cell(results: Row, cases: Sequence[Row]) -> str:
    large = [case for case in cases if case["nbytes"] >= results["large"]]
    return cell(known(map(over_floor, large)), max)


def table(results: Row) -> str:
    """The first of docs/speed.md."""
    peers = peers_of(results)
    heads = ["", "over the floor, from 100 MB"]
    heads += [f"times as fast as {label}" for label in peers.values()]
    rows = []
    for dtype, layout in GROUPS:
        cases = cases_of(results, [dtype], layout)
        row = [f"{DTYPES[dtype]}, {layout}", floor_cell(results, cases)]
        row += [cell(known(ratio(c, peer) for c in resnet50(cases)), min) for peer in peers]
        rows.append(row)
    return markdown(heads, rows)


def totals_table(results: Row) -> str:
    """The second of docs/speed.md: all 53 layers of ResNet-50, by batch."""
    batches = (2, 32, 256)
    peers = peers_of(results)
    rows = []
    for dtype, layout in GROUPS:
        row = [f"{DTYPES[dtype]}, {layout}"]
        for batch in batches:
            ours, *others = (
                total_of_resnet50(results, batch, dtype, layout, who) for who in ("ours", *peers)
            )
            if ours is not None:
                ratios = ["-" if other is None else f"{other / ours:.2f}" for other in others]
                row.append(f"{ours * 1e3:.2f} ms: {' / '.join(ratios)}")
        if len(row) > len(batches):
            rows.append(row)
    return markdown(["", *(f"batch of {batch}" for batch in batches)], rows) if rows else ""


def short_table(results: Row) -> str:
    """For docs/internals/gpu-results.md: of torch's two kernels the faster one, shape by shape."""

    def to_plain(case: Row) -> float | None:
        return min(
            known(ratio(case, peer) for peer in ("torch cudnn", "torch native")), default=None
        )

    heads = ["", "over copies, from 100 MB", "times as fast as torch's SyncBatchNorm"]
    rows = []
    for layout in ("NCHW", "channels_last"):
        for name, dtypes in SHORT.items():
            cases = cases_of(results, dtypes, layout)
            layers = resnet50(cases)
            to_sync = known(ratio(case, "torch sync") for case in layers)
            row = [f"{name}, {layout}", floor_cell(results, cases), cell(to_sync, min)]
            rows.append([*row, cell(known(map(to_plain, layers)), min)])
    return markdown([*heads, "times as fast as nn.BatchNorm2d"], rows)


def process_table(results: Row) -> str:
    """Of the process groups, and of what NCCL refused; empty if there were none."""
    rows = []
    for group in results.get("session", {}).get("processes", []):
        where = f"{group['backend']}, {group['ranks']}"
        for case in group["rows"]:
            times = [
                f"{name}: " + (row.get("error") or f"{row['wall'] * 1e6:.0f} us")
                for name, row in case["found"].items()
            ]
            rows.append([where, process_label(case), "; ".join(times)])
        if "error" in group:
            rows.append([where, "none", f"refused: {group['error']}"])
    return markdown(["backend, ranks", "case", "wall time per step"], rows) if rows else ""


def plot(results: Row, path: Path) -> None:
    peers = peers_of(results)
    figure, axes = plt.subplots(
        3, 2, figsize=(5.6, 7), layout="constrained", sharex=True, sharey=True
    )
    for axis, (dtype, layout) in zip(axes.T.flat, GROUPS, strict=True):
        for marker, (peer, label) in zip("os^Dv", peers.items(), strict=False):
            cases = [c for c in cases_of(results, [dtype], layout) if ratio(c, peer) is not None]
            sizes = [c["nbytes"] / 1e6 for c in cases]
            values = [ratio(c, peer) for c in cases]
            axis.scatter(sizes, values, s=16, marker=marker, label=label, alpha=0.8)
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        ticks = [0.5, 1, 2, 4, 8]
        axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axis.set_title(f"{DTYPES[dtype]}, {layout}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("activation, MB")
    axes[1, 0].set_ylabel("our kernels: times as fast as")
    axes[0, 1].legend(fontsize=8, loc="upper left")
    machine = results["machine"]
    figure.suptitle(
        (f"{DRY}\n" if results["dry_run"] else "")
        + f"Forward and backward of a layer, device time\n{machine['device']}, "
        f"torch {machine['torch']}, {machine['date'][:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=240)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    if "cases" not in results:
        parser.error("the benchmark has left no results in this file")
    plot(results, options.picture)
    tables = {
        "docs/speed.md": table(results),
        "docs/speed.md, totals": totals_table(results),
        "docs/internals/gpu-results.md": short_table(results),
    }
    tables["process groups"] = process_table(results)
    for name, text in tables.items():
        if text:
            print(f"{name}:\n\n{text}\n")
    if results["dry_run"]:
        print(DRY)


if __name__ == "__main__":
    main()
