"""What a model says of the CUDA kernels on GPUs, most of which have not been tried.

The model is in `gpu_times.py`, the devices are in `gpu_devices.py`. Nothing here was measured on
any GPU but an H100. docs/internals/gpu-model.md has the assumptions and the results.

    python tools/gpu_model/gpu_model.py                    # tables for each device
    python tools/gpu_model/gpu_model.py --markdown         # those of the docs
    python tools/gpu_model/gpu_model.py --picture docs/internals/gpu-model.png
    python tools/gpu_model/gpu_model.py --fit              # the constants once more
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_report
from gpu_devices import GPUS, Gpu
from gpu_times import (
    CALIBRATED,
    DIRECTIONS,
    DTYPES,
    LAYOUTS,
    LIMITS,
    RATES,
    STEPS,
    Shape,
    binding,
    error,
    fit,
    floor,
    launch,
    measured,
    over_measured,
    predict,
    resnet,
    seconds,
)

from syncbn_core.backends.cuda import grid

GROUPS = [(dtype, layout) for layout in LAYOUTS for dtype in DTYPES.values()]


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def runs_on(gpu: Gpu, dtype: str) -> bool:
    return dtype != "bfloat16" or gpu.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# Which sizes of planes a row of the table of limits is about.
SIZES_OF = {"28x28 to 112x112": (784, 3136, 12544), "14x14": (196,), "7x7": (49,)}
KINDS = [
    (layout, planes, dtype)
    for layout in LAYOUTS
    for planes in SIZES_OF
    for dtype in ("float32", "float16")
]


def shares(gpu: Gpu, shape: Shape, step: str) -> dict[str, float]:
    """The time that each limit alone allows, over that of the bandwidth."""
    found = seconds(gpu, launch(gpu, shape, step))
    return {name: found[name] / found["bandwidth"] for name in LIMITS}


def nearest(gpu: Gpu, kind: tuple[str, str, str], step: str) -> tuple[float, str]:
    """The rate besides bandwidth that is nearest to bind, in the worst shape of batch 256."""
    layout, planes, dtype = kind
    shapes = [s for s in resnet(256, dtype, layout) if s.size in SIZES_OF[planes]]
    every = [shares(gpu, shape, step) for shape in shapes]
    return max((found[name], name) for found in every for name in RATES)


def limits_table() -> Table:
    rows = []
    for kind in KINDS:
        for step in STEPS:
            cells = []
            for gpu in GPUS.values():
                share, name = nearest(gpu, kind, step)
                text = f"{100 * share:.0f} {name[0]}"
                cells.append(f"**{text}**" if share > 1 else text)
            rows.append((f"{', '.join(kind)}: {step}", *cells))
    title = "Share of the time at full bandwidth, batch 256, worst shape, %"
    return Table(title, ("", *GPUS), tuple(rows))


def float64_table() -> Table:
    """Where float64 binds: on devices with few units for it."""
    few = [gpu for gpu in GPUS.values() if gpu.float64 < 16]
    rows = []
    for dtype, layout in GROUPS:
        cells = []
        for gpu in few:
            bound = [
                (shape.nbytes, step, shape)
                for batch in (2, 4, 8, 16, 32, 64, 128, 256)
                for shape in (resnet(batch, dtype, layout) if runs_on(gpu, dtype) else ())
                for step in STEPS
                if binding(gpu, shape, step) == "float64"
            ]
            cells.append("-")
            if bound:
                nbytes, step, shape = max(bound, key=lambda found: found[0])
                where = str(shape).split()[0]
                cells[-1] = f"{nbytes / 1e6:.1f} MB ({step}, {where})"
        rows.append((f"{dtype}, {layout}", *cells))
    title = "Largest activation where float64 binds, batches 2 to 256"
    return Table(title, ("", *(gpu.name for gpu in few)), tuple(rows))


def times_table(batch: int) -> Table:
    rows = []
    for dtype, layout in GROUPS:
        for direction in DIRECTIONS:
            cells = []
            for gpu in GPUS.values():
                if not runs_on(gpu, dtype):
                    cells.append("-")
                    continue
                found = [
                    (predict(gpu, shape)[direction] / floor(gpu, shape, direction), shape)
                    for shape in resnet(batch, dtype, layout)
                ]
                worst, shape = max(found, key=lambda pair: pair[0])
                where = f"{shape.channels}x{math.isqrt(shape.size)}"
                cells.append(f"{mean([ratio for ratio, _ in found]):.2f} ({worst:.2f} {where})")
            rows.append((f"{dtype}, {layout}, {direction}", *cells))
    return Table(f"Predicted time over the floor, batch {batch}", ("", *GPUS), tuple(rows))


def fit_table() -> Table:
    found = over_measured()
    rows = []
    for dtype, layout in GROUPS:
        cells = [
            f"{mean(found[dtype, layout, d]):.2f} "
            f"({min(found[dtype, layout, d]):.2f} to {max(found[dtype, layout, d]):.2f})"
            for d in DIRECTIONS
        ]
        rows.append((f"{dtype}, {layout}", str(len(found[dtype, layout, "forward"])), *cells))
    return Table("Predicted over measured, H100", ("", "shapes", *DIRECTIONS), tuple(rows))


def plan_table() -> Table:
    rows = []
    for dtype in ("float32", "float16"):
        for layout, form in LAYOUTS.items():
            for step in STEPS:
                cells = []
                for gpu in GPUS.values():
                    runs = [launch(gpu, shape, step) for shape in resnet(256, dtype, layout)]
                    resident = sorted({run.resident for run in runs})
                    used = min(run.used(gpu) for run in runs)
                    cells.append(f"{' or '.join(map(str, resident))}, {100 * used:.0f}")
                rows.append((f"{form}, {dtype}: {step}", *cells))
    title = "Blocks on a multiprocessor at once; share of these places that is used, at least, %"
    return Table(title, ("", *GPUS), tuple(rows))


@contextmanager
def planned(planes: int, rows: dict[int, int]) -> Iterator[None]:
    """`grid.py` wants so many blocks of a reduction per multiprocessor."""
    before = grid.PLANE_BLOCKS, grid.ROW_BLOCKS
    grid.PLANE_BLOCKS, grid.ROW_BLOCKS = planes, rows
    grid._reduction.cache_clear()
    try:
        yield
    finally:
        grid.PLANE_BLOCKS, grid.ROW_BLOCKS = before
        grid._reduction.cache_clear()


PLANS = (1, 2, 3, 4, 5, 6, 8)


def reduction_times(gpu: Gpu, dtype: str, layout: str) -> float:
    """Mean time of the reductions of a layer, batch 256 and 32."""
    return mean(
        [
            sum(seconds(gpu, launch(gpu, shape, step))["all"] for step in ("moments", "reduce"))
            for batch in (256, 32)
            for shape in resnet(batch, dtype, layout)
        ]
    )


def plans_table() -> Table:
    rows = []
    for layout in LAYOUTS:
        for dtype in ("float32", "float16"):
            for blocks in PLANS:
                cells = []
                for gpu in GPUS.values():
                    now = reduction_times(gpu, dtype, layout)
                    with planned(blocks, dict.fromkeys(grid.ROW_BLOCKS, blocks)):
                        cells.append(f"{reduction_times(gpu, dtype, layout) / now:.2f}")
                rows.append((f"{LAYOUTS[layout]}, {dtype}: {blocks}", *cells))
    title = "Time of reductions by blocks per multiprocessor, over that of today's plan"
    return Table(title, ("", *GPUS), tuple(rows))


def device_table(gpu: Gpu) -> Table:
    """A kernel a row: largest shares of the limits, and time over that of its bytes."""
    rows = []
    for dtype, layout in GROUPS:
        for step in STEPS if runs_on(gpu, dtype) else ():
            shapes = resnet(256, dtype, layout)
            every = [shares(gpu, shape, step) for shape in shapes]
            binds = sorted({binding(gpu, shape, step) for shape in shapes})
            times = []
            for shape in shapes:
                found = seconds(gpu, launch(gpu, shape, step))
                times.append((found["all"] / found["bandwidth"], shape))
            worst, where = max(times, key=lambda pair: pair[0])
            rows.append(
                (
                    f"{LAYOUTS[layout]}, {dtype}: {step}",
                    *(f"{100 * max(s[name] for s in every):.0f}" for name in LIMITS[1:]),
                    ", ".join(binds),
                    f"{mean([time for time, _ in times]):.2f}",
                    f"{worst:.2f} at {where}".removesuffix(f" {dtype} {layout}"),
                )
            )
    header = ("", *(f"{name}, %" for name in LIMITS[1:]), "binds", "time over bytes", "worst")
    return Table(f"{gpu.name}, batch 256, by the model", header, tuple(rows))


def docs_tables() -> list[Table]:
    """Those of docs/internals/gpu-model.md."""
    tables = [fit_table(), limits_table(), float64_table()]
    return [*tables, times_table(256), times_table(32), plan_table(), plans_table()]


# --------------------------------------------------------------------------------- picture


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 9), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    for axis, dtype in ((left, "float32"), (middle, "float16")):
        rows = [(kind, step) for kind in KINDS if kind[2] == dtype for step in STEPS]
        cells = [[nearest(gpu, kind, step) for gpu in GPUS.values()] for kind, step in rows]
        axis.imshow(
            [[min(share, 1.5) for share, _ in row] for row in cells],
            cmap="Greys",
            vmin=0,
            vmax=1.6,
            aspect="auto",
        )
        for y, row in enumerate(cells):
            for x, (share, name) in enumerate(row):
                axis.text(
                    x,
                    y,
                    f"{100 * share:.0f} {name[0]}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if share > 0.95 else "black",
                    weight="bold" if share > 1 else "normal",
                )
        for y in range(len(STEPS), len(rows), len(STEPS)):
            axis.axhline(y - 0.5, color="black", linewidth=1)
        axis.set_xticks(range(len(GPUS)), [name.removeprefix("RTX ") for name in GPUS], fontsize=9)
        names = [
            f"{LAYOUTS[kind[0]]}, {kind[1].replace(' to 112x112', ' and up')}" for kind, _ in rows
        ]
        labels = [
            f"{name}:  {step}" if not y % len(STEPS) else step
            for y, (name, (_, step)) in enumerate(zip(names, rows, strict=True))
        ]
        axis.set_yticks(range(len(rows)), labels if axis is left else [""] * len(rows), fontsize=8)
        axis.set_title(f"{dtype}: % of the time at full bandwidth", fontsize=10)
        axis.set_xlabel("i: issue slots, f: float64, c: conversions", fontsize=9)

    cases = [(shape, times, predict(GPUS["H100"], shape)) for shape, times in measured()]
    looks = {"forward": ("o", "tab:blue"), "backward": ("^", "tab:orange")}
    for direction, (marker, color) in looks.items():
        right.scatter(
            [shape.nbytes / 1e6 for shape, _, _ in cases],
            [found[direction] / times[direction] for _, times, found in cases],
            s=18,
            marker=marker,
            facecolors="none" if direction == "forward" else color,
            edgecolors=color,
            linewidths=0.8,
            label=direction,
        )
    right.axhline(1, color="black", linewidth=1)
    right.set_xscale("log")
    right.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    right.set_xlabel("activation, MB")
    right.set_ylabel("predicted / measured time")
    right.set_title("the model beside an H100", fontsize=10)
    right.legend(fontsize=9)
    figure.suptitle(
        "A model, not a measurement: which rate is nearest to bind, batch 256, worst shape"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print the tables of the docs")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the H100 again")
    options = parser.parse_args()
    if options.fit:
        fitted = fit()
        print(f"{fitted}: error {error(fitted):.4f}; {CALIBRATED}: {error(CALIBRATED):.4f}")
    elif options.markdown:
        print("\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in docs_tables()))
    elif not options.picture:
        for table in (*map(device_table, GPUS.values()), *docs_tables()):
            gpu_report.table(table.title, table.header, table.rows)
    if options.picture:
        plot(options.picture)


if __name__ == "__main__":
    main()
