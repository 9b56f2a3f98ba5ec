"""Tables and targets from what `gpu.py` has measured.

python benchmarks/gpu_report.py benchmarks/results/gpu-....json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TORCH = ("torch cudnn", "torch native", "torch sync")
RIVALS = (*TORCH, "plain operations", "apex", "apex (formula)")
FLOOR = 1.10  # times the floor, at most, geometric mean of the large cases
LEAST = {"NCHW": 1.5, "channels_last": 1.15}  # times as fast as torch, geometric mean
DIRECTIONS = ("forward", "backward")

# How many of ResNet-50's 53 layers have so many channels and planes of this height.
LAYERS_OF_RESNET50 = {
    (64, 112): 1, (64, 56): 6, (256, 56): 4, (128, 56): 1, (128, 28): 7, (512, 28): 5,
    (256, 28): 1, (256, 14): 11, (1024, 14): 7, (512, 14): 1, (512, 7): 5, (2048, 7): 4,
}  # fmt: skip


def as_lines(results: Row) -> str:
    """JSON with a line per entry, and per row of an entry that is a list."""

    def entry(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value, default=str)
        return "[\n" + ",\n".join(json.dumps(row, default=str) for row in value) + "\n]"

    entries = (f"{json.dumps(key)}: {entry(value)}" for key, value in results.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def file_name(machine: Row) -> str:
    """That of the results of a machine."""
    name = f"gpu-{machine['date'][:10]}-{machine['device']}-{machine['commit']}.json"
    return name.replace(" ", "-")


def process_label(case: Row) -> str:
    """Of a case of `gpu_processes.py`."""
    shape = "x".join(map(str, case["shape"]))
    return f"{case.get('net', 'layer')} {shape} {case['dtype']}"


def label(case: Row) -> str:
    return f"{'x'.join(map(str, case['shape']))} {case['dtype']} {case['layout']}"


def line(case: Row) -> str:
    """What forward and backward together took, us."""
    found = case["found"].items()
    times = {name: "failed" if "error" in v else f"{v['both'] * 1e6:.1f}" for name, v in found}
    return ", ".join(f"{name} {time}" for name, time in times.items()) + " us"


def over_floor(case: Row, direction: str) -> float | None:
    """Device time of ours over the floor; backward is a difference where it wasn't timed alone."""
    ours = case["found"]["ours"]
    time = ours.get(direction, ours.get(f"{direction}_difference"))
    return None if time is None else time / case["floor"][direction]


def faster_than(case: Row, rival: str) -> float | None:
    """Device time of forward + backward: the rival's over ours."""
    ours, theirs = (case["found"].get(name, {}).get("both") for name in ("ours", rival))
    return theirs / ours if ours and theirs else None


def of_resnet50(case: Row) -> int:
    """How many layers of ResNet-50 have this activation, whatever the batch."""
    channels, *plane = case["shape"][1:]
    return LAYERS_OF_RESNET50.get((channels, plane[0]), 0) if len(plane) == 2 else 0


def total_of_resnet50(results: Row, batch: int, dtype: str, layout: str, who: str) -> float | None:
    """Seconds of forward + backward of all 53 layers; None if a shape was not measured."""
    wanted = (dtype, layout, batch)
    cases = [c for c in results["cases"] if (c["dtype"], c["layout"], c["shape"][0]) == wanted]
    layers = [(of_resnet50(c), c["found"].get(who, {}).get("both")) for c in cases]
    layers = [(number, time) for number, time in layers if number and time]
    if sum(number for number, _ in layers) != sum(LAYERS_OF_RESNET50.values()):
        return None
    return sum(number * time for number, time in layers)


def collect(cases: Iterable[Row], ratio: Callable[[Row], float | None]) -> list[tuple[float, str]]:
    pairs = [(ratio(case), label(case)) for case in cases]
    return sorted((value, name) for value, name in pairs if value is not None)


def mean_of(pairs: Sequence[tuple[float, str]]) -> float:
    return statistics.geometric_mean([value for value, _ in pairs])


def groups(results: Row, *keys: str, large: bool = False) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for case in results["cases"]:
        if not large or case["nbytes"] >= results["large"]:
            found.setdefault(tuple(case[key] for key in keys), []).append(case)
    return found


# ----------------------------------------------------------------------------- targets


def target(name: str, value: float, limit: float, *, most: bool, note: str = "") -> Row:
    """`most`: the value shall not exceed the limit, else not fall below it."""
    met = value <= limit if most else value >= limit
    return {"target": name, "value": value, "limit": limit, "met": met, "note": note} | {
        "off_by": 0.0 if met else abs(value / limit - 1)
    }


def targets(results: Row) -> list[Row]:
    """Every target that was measured, and by how much it is missed."""
    rows = []
    for (layout, dtype), cases in groups(results, "layout", "dtype", large=True).items():
        for direction in DIRECTIONS:
            pairs = collect(cases, lambda case, d=direction: over_floor(case, d))
            if pairs:
                worst = f"worst {pairs[-1][0]:.2f} at {pairs[-1][1]}; {len(pairs)} cases"
                name = f"{direction} / floor, large, {layout} {dtype}"
                rows.append(target(name, mean_of(pairs), FLOOR, most=True, note=worst))
    for (layout,), cases in groups(results, "layout").items():
        for rival in TORCH:
            pairs = collect(cases, lambda case, r=rival: faster_than(case, r))
            if pairs:
                name, note = f"{rival} / ours, {layout}", f"{len(pairs)} cases"
                if layout in LEAST:
                    rows.append(target(name, mean_of(pairs), LEAST[layout], most=False, note=note))
                slower = sum(value < 1 for value, _ in pairs)
                note = f"at {pairs[0][1]}; below 1 in {slower} of {len(pairs)}"
                rows.append(target(f"{name}, worst", pairs[0][0], 1.0, most=False, note=note))
    for case in results["host"]:
        times = {name: row["host"] for name, row in case["found"].items() if "host" in row}
        for rival in [name for name in times if name.startswith("torch sync")]:
            if "ours" in times:
                name = f"host time / {rival}, {label(case)}"
                rows.append(target(name, times["ours"] / times[rival], 1.0, most=True))
    return rows


# ------------------------------------------------------------------------------ tables


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """By rich, or plainly where it isn't installed."""
    if not rows:
        return
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        for row in (header, *rows):
            print("  ".join(f"{cell:<18}" for cell in row).rstrip())
        return
    drawn = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(header):
        drawn.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(f"\n[bold]{title}[/]")
    console.print(drawn)


def cell(pairs: Sequence[tuple[float, str]], worst: int) -> str:
    return f"{mean_of(pairs):.2f} ({pairs[worst][0]:.2f})" if pairs else "-"


def show_session(session: Row) -> None:
    """What the stages of `gpu_session.py` besides the benchmark came to."""
    rows = []
    for stage in session["stages"]:
        went = f"status {stage['status']}" if stage["status"] else "ok"
        rows.append([stage["name"], went, f"{stage['seconds']} s", stage["last"]])
    table("Stages", ["", "", "time", "last line"], rows)
    for stage in session["stages"]:
        found = session.get(stage["name"])
        for name in found.get("failures", []) if isinstance(found, dict) else []:
            print(f"{stage['name']}: failed: {name}")
    rows = []
    for group in session.get("processes", []):
        where = f"{group['backend']}, {group['ranks']}"
        if "error" in group:
            rows.append([where, "refused", group["error"]])
        for case in group["rows"]:
            times = [
                f"{name} " + (row.get("error") or f"{row['wall'] * 1e6:.0f} us")
                for name, row in case["found"].items()
            ]
            rows.append([where, process_label(case), ", ".join(times)])
    table("Process groups: backend and ranks, wall time per step", ["", "case", ""], rows)


def show(results: Row) -> None:
    if "session" in results:
        show_session(results["session"])
    if "cases" not in results:
        print("the benchmark has left no results")
        return
    machine, dry = results["machine"], results["dry_run"]
    loud = "*** DRY RUN on CPU: NO GPU FIGURE WAS MEASURED, no number here means anything ***"
    mark = "DRY RUN, no GPU: " if dry else ""
    print("\n" + (loud if dry else f"{machine['device']}, driver {machine['driver']}"))
    print(f"torch {machine['torch']}, CUDA {machine['cuda']}, commit {machine['commit']}")
    if "bandwidth" in results:
        after = results.get("bandwidth_after", float("nan")) / 1e12
        print(f"device copy {results['bandwidth'] / 1e12:.3f} TB/s, at the end {after:.3f}")
    directions = {d: (lambda case, d=d: over_floor(case, d)) for d in DIRECTIONS}
    named = {name for case in results["cases"] for name in case["found"]}
    rivals = {r: (lambda case, r=r: faster_than(case, r)) for r in RIVALS if r in named}
    large, every = (groups(results, "layout", "dtype", large=size) for size in (True, False))
    rows = []
    for key, cases in sorted(every.items()):
        floor = [cell(collect(large.get(key, []), ratio), -1) for ratio in directions.values()]
        speed = [cell(collect(cases, ratio), 0) for ratio in rivals.values()]
        rows.append([" ".join(key), f"{len(large.get(key, []))}/{len(cases)}", *floor, *speed])
    title = "Device time, geometric mean (worst): ours / floor from {} MB; other / ours, both ways"
    header = ["", "large/all", "forward/floor", "backward/floor", *(f"{r}/ours" for r in rivals)]
    table(mark + title.format(f"{results['large'] / 1e6:g}"), header, rows)

    names = list(results["host"][0]["found"]) if results["host"] else []
    rows = [
        [label(case)]
        + [
            f"{row['host'] * 1e6:.0f} ({row['wall'] * 1e6:.0f})" if "host" in row else "failed"
            for row in case["found"].values()
        ]
        for case in results["host"]
    ]
    table(mark + "Eager forward + backward, host us per call (wall us)", ["", *names], rows)

    worst: dict[tuple[str, str, str], dict[str, float]] = {}
    for case in results["errors"]:
        for name, errors in case["found"].items():
            kept = worst.setdefault((case["dtype"], f"{case['mean']:g}", name), {})
            for key, value in errors.items():
                if key == "error":
                    value = float("nan")
                kept[key] = value if value != value else max(kept.get(key, 0.0), value)
    keys = ("y", "dx", "dweight", "dbias")
    rows = [
        [*key, *(f"{kept[k]:.1e}" if k in kept else "failed" for k in keys)]
        for key, kept in sorted(worst.items())
    ]
    table(mark + "Largest error relative to the largest value", ["dtype", "mean", "", *keys], rows)

    rows = [
        [
            row["target"],
            f"{row['value']:.2f}",
            f"{row['limit']:.2f}",
            "met" if row["met"] else f"missed by {row['off_by']:.0%}",
            row["note"],
        ]
        for row in results["targets"]
    ]
    table(mark + "Targets", ["", "value", "limit", "", "note"], rows)
    met = sum(row["met"] for row in results["targets"])
    print(f"{met} of {len(results['targets'])} targets met")
    failures = {
        (name, row["error"])
        for case in results["cases"] + results["errors"] + results["host"]
        for name, row in case["found"].items()
        if "error" in row
    }
    found = [pair for case in results["cases"] for pair in case["found"].items()]
    eager = Counter(name for name, row in found if not row.get("graph", True))
    for name, error in sorted(failures):
        print(f"failed: {name}: {error}")
    for name, times in eager.items() if not dry else ():
        print(f"{name}: not captured in a graph, so timed eagerly, in {times} cases")
    warm = sum(not case["cold"] for case in results["cases"])
    print(f"{len(results['cases'])} cases measured, {warm} of them with buffers below 3x L2")
    if results["skipped"]:
        print(
            f"skipped for lack of time: {len(results['skipped'])}: {', '.join(results['skipped'])}"
        )
    if results["aborted"]:
        print(f"ABORTED: {results['aborted']}")
    if dry:
        print(loud)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    show(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
