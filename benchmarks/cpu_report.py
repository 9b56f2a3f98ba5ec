"""Tables of what `cpu.py` has measured, and its targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
LARGE = 32 << 20  # bytes: larger than the last-level cache of most


def name_of(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def show(results: Row) -> None:
    console = Console(width=120)
    console.print(results["facts"])
    if "layers" in results:
        show_layers(results["layers"], console, "Whole layer")
    if "layers_kept" in results:
        show_layers(results["layers_kept"], console, "With an allocator that keeps its memory")
    for allocator, rows in results.get("nets", {}).items():
        show_nets(rows, console, f"Training steps of networks, {allocator} allocator")
    if "kernels" in results:
        show_kernels(results["kernels"], console)
    if "dtypes" in results:
        show_dtypes(results["dtypes"], console)
    if "replicas" in results:
        show_replicas(results["replicas"], console)
    for row in results.get("exchanges", []):
        console.print(
            f"one synchronization of {row['replicas']} threads: {row['median'] * 1e6:.0f} us "
            f"(worst {row['worst'] * 1e6:.0f})"
        )
    for row in results.get("memory", []):
        console.print(
            f"{row['name']} keeps {row['activations']:.2f} activations for backward; a forward and "
            f"backward add {row['peak']:.1f} to the memory in use"
        )
    for name, seconds in results.get("starts", {}).items():
        console.print(f"{name}: {seconds:.2f} s")
    show_targets(results, console)


def show_nets(rows: list[Row], console: Console, title: str) -> None:
    """Steps of whole networks."""
    table = Table(title=title)
    for column in ("net", "step", "times as fast", "quartiles"):
        table.add_column(column)
    for row in rows:
        low, high = row["quartiles"]
        seconds = row["step_seconds"]["torch"]
        cells = f"{seconds * 1e3:.0f} ms", f"{row['faster']:.3f}", f"{low:.3f} - {high:.3f}"
        table.add_row(row["net"], *cells)
    console.print(table)


def show_targets(results: Row, console: Console) -> None:
    """What was aimed at, and what came of it."""
    table = Table(title="Targets")
    for column in ("what", "aim", "geometric mean", "worst"):
        table.add_column(column)
    for what, aim, ratios, best in targets(results):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            table.add_row(what, aim, f"{mean:.2f}", f"{best(ratios):.2f}")
    console.print(table)


def targets(results: Row) -> Iterator[tuple[str, str, list[float], Any]]:
    """`(what, aim, ratios, which of them is the worst)`."""
    for layout, aim in (("NCHW", ">= 2"), ("channels_last", ">= 1.3")):
        for threads in (1, 2):
            ratios = [
                row["found"]["shipped"]["both"]["faster"]
                for row in results.get("layers", [])
                if (row["dtype"], row["layout"], row["threads"]) == ("float32", layout, threads)
            ]
            what = f"layer, float32 {layout}, {threads} thread(s): times as fast as torch"
            yield what, f"{aim}, worst >= 1", ratios, min
    for allocator, rows in results.get("nets", {}).items():
        ratios = [row["faster"] for row in rows]
        yield f"steps of networks, {allocator} allocator: times as fast", ">= 1.06", ratios, min
    large = [row for row in results.get("kernels", []) if row["bytes"] >= LARGE]
    for part in ("forward", "backward"):
        ratios = [row["over_floor"]["reused output"][part] for row in large]
        yield f"kernels {part}, from {LARGE >> 20} MiB: over the copy floor", "<= 1.2", ratios, max
    for name in ("float16", "bfloat16"):
        ratios = [
            ratio
            for row in results.get("dtypes", [])
            for ratio in row["over_float32_by_bytes"][name].values()
        ]
        yield f"kernels in {name}: over float32 by bytes", "<= 1.3", ratios, max
    four = [row for row in results.get("replicas", []) if row["replicas"] == 4]
    for depth in sorted({row["depth"] for row in four}):
        some = [row["found"] for row in four if row["depth"] == depth]
        over = [1 / found["replicas"]["both"]["faster"] for found in some]
        layers = f"{depth} layer(s) in 4 replicas"
        yield f"{layers}: over unsplit", "<= 1.15", over, max
        plain = [
            found["plain replicas"]["both"]["median"] / found["replicas"]["both"]["median"]
            for found in some
        ]
        yield f"{layers}: times as fast as plain operations", ">= 5", plain, min
    tiny = [
        1 / row["found"]["shipped"]["both"]["faster"]
        for row in results.get("layers", [])
        if row["bytes"] <= 1 << 14 and row["dtype"] == "float32"
    ]
    yield "a tiny input: over torch", "<= 1.5", tiny, max


def show_layers(rows: list[Row], console: Console, title: str) -> None:
    table = Table(title=f"{title}: times as fast as nn.BatchNorm (forward / backward / both)")
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


def show_dtypes(rows: list[Row], console: Console) -> None:
    table = Table(title="Kernels in 16 bits: over half the time of float32 (forward / backward)")
    for column in ("shape", "layout", "threads", "float16", "bfloat16"):
        table.add_column(column, justify="right")
    for row in rows:
        over = row["over_float32_by_bytes"]
        cells = [" / ".join(f"{ratio:.2f}" for ratio in over[name].values()) for name in over]
        table.add_row(name_of(row["shape"]), row["layout"], str(row["threads"]), *cells)
    console.print(table)


def show_replicas(rows: list[Row], console: Console) -> None:
    table = Table(title="Synchronized replicas, forward and backward")
    columns = (
        "shape",
        "layers",
        "replicas",
        "threads",
        "unsplit, ms",
        "over unsplit",
        "plain, over ours",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        found = row["found"]
        ours = 1 / found["replicas"]["both"]["faster"]
        plain = 1 / found["plain replicas"]["both"]["faster"]
        table.add_row(
            name_of(row["shape"]), str(row["depth"]), str(row["replicas"]), str(row["threads"]),
            f"{found['unsplit']['both']['median'] * 1e3:.2f}", f"{ours:.2f}x",
            f"{plain / ours:.2f}x",
        )  # fmt: skip
    console.print(table)


def grouped(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found
