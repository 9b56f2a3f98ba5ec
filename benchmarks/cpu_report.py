"""Tables of what `cpu.py` has measured, and its targets."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def name_of(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def show(results: Row) -> None:
    console = Console(width=120)
    console.print(results["facts"])
    if "layers" in results:
        show_layers(results["layers"], console)
    if "kernels" in results:
        show_kernels(results["kernels"], console)
    if "replicas" in results:
        show_replicas(results["replicas"], console)
    for row in results.get("exchanges", []):
        console.print(
            f"one synchronization of {row['replicas']} threads: {row['median'] * 1e6:.0f} us "
            f"(worst {row['worst'] * 1e6:.0f})"
        )
    for row in results.get("memory", []):
        console.print(f"{row['name']} keeps {row['activations']:.2f} activations for backward")
    for name, seconds in results.get("starts", {}).items():
        console.print(f"{name}: {seconds:.2f} s")


def show_layers(rows: list[Row], console: Console) -> None:
    table = Table(title="Whole layer: times as fast as nn.BatchNorm (forward / backward / both)")
    for column in ("shape", "dtype", "layout", "threads", "torch, ms", "shipped", "kernels"):
        table.add_column(column, justify="left" if column in ("shape", "dtype") else "right")
    for row in rows:
        found = row["found"]
        cells = [
            " / ".join(f"{found[who][part]['faster']:.2f}" for part in found[who])
            for who in ("shipped", "kernels")
        ]
        theirs = f"{found['torch']['both']['median'] * 1e3:.2f}"
        table.add_row(
            name_of(row["shape"]), row["dtype"], row["layout"], str(row["threads"]), theirs, *cells
        )
    console.print(table)
    for (dtype, layout, threads), some in grouped(rows, "dtype", "layout", "threads").items():
        for who in ("shipped", "kernels"):
            ratios = {name_of(r["shape"]): r["found"][who]["both"]["faster"] for r in some}
            worst = min(ratios, key=lambda name: ratios[name])
            console.print(
                f"{dtype} {layout} {threads} thread{'s' * (threads > 1)}, {who}: "
                f"{statistics.geometric_mean(ratios.values()):.2f}x torch, "
                f"worst {ratios[worst]:.2f}x ({worst})"
            )


def show_kernels(rows: list[Row], console: Console) -> None:
    table = Table(title="Kernels alone, float32: time over that of the same bytes copied")
    for column in ("shape", "threads", "copy, GB/s", "reused output", "fresh output"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            " / ".join(f"{ratio:.2f}" for ratio in row["over_floor"][which].values())
            for which in ("reused output", "fresh output")
        ]
        rate = f"{row['copy_bytes_per_second'] / 1e9:.1f}"
        table.add_row(name_of(row["shape"]), str(row["threads"]), rate, *cells)
    console.print(table)


def show_replicas(rows: list[Row], console: Console) -> None:
    table = Table(title="Synchronized replicas, forward and backward")
    columns = ("shape", "replicas", "threads", "unsplit, ms", "over unsplit", "plain, over ours")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        found = row["found"]
        ours = 1 / found["replicas"]["both"]["faster"]
        plain = 1 / found["plain replicas"]["both"]["faster"]
        table.add_row(
            name_of(row["shape"]), str(row["replicas"]), str(row["threads"]),
            f"{found['unsplit']['both']['median'] * 1e3:.2f}", f"{ours:.2f}x",
            f"{plain / ours:.2f}x",
        )  # fmt: skip
    console.print(table)


def grouped(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found
