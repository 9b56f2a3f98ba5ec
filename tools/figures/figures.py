"""The sentences and rows of README and docs whose figures come from JSON files in `results`.

    python tools/figures/figures.py

computes each figure anew and prints what a page lacks. A figure that is changed in a page, or a
file of results that is exchanged, shows here. The tables of `gpu_plot.py` have tests of their own.
What a page says to be measured by hand has no JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_report import faster_than, total_of_resnet50

ROOT = Path(__file__).parents[2]
CPU = "cpu-2026-11-23.json"
NETS = {threads: f"nets-2026-11-30-{threads}.json" for threads in (1, 2)}
FUSED = {threads: f"activations-2026-11-30-{threads}.json" for threads in (1, 2)}
H100 = "gpu-2026-11-22-NVIDIA-H100-80GB-HBM3-809ee92.json"
H200 = "gpu-2026-11-27-NVIDIA-H200-24254b2.json"
COLD = "cold-2026-11-29.json"
COMPILED = "compiled-2026-11-29.json"
REPLICAS = "replicas-2026-11-29.json"
DDP = "ddp-2026-11-29.json"
STUDY = "study-2026-11-27.jsonl"
PAYS = "pays-2026-11-30.json"
MASKS = "masks-2026-11-30.json"
SCALING = "scaling-2026-11-28.json"
LAYOUTS = ("NCHW", "channels_last")
MIB = 1 << 20

Row = dict[str, Any]


@cache
def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def span(values: Iterable[float], digits: int = 2, joint: str = " to ") -> str:
    """The least and the largest."""
    known = sorted(values)
    return f"{known[0]:.{digits}f}{joint}{known[-1]:.{digits}f}"


# --------------------------------------------------------------------------------- CPU


def of_layers(layout: str, threads: int, least: int = 0) -> dict[tuple[int, ...], float]:
    """Times as fast as nn.BatchNorm in float32, by shape."""
    return {
        tuple(row["shape"]): row["found"]["shipped"]["both"]["faster"]
        for row in read(CPU)["layers"]
        if (row["dtype"], row["layout"], row["threads"]) == ("float32", layout, threads)
        and row["bytes"] >= least
    }


def on_threads(layout: str, least: int = 0, joint: str = " / ") -> str:
    """Geometric means on one thread and on two."""
    means = (geometric_mean(of_layers(layout, threads, least).values()) for threads in (1, 2))
    return joint.join(f"{mean:.1f}x" for mean in means)


def worst(layout: str, least: int = 0) -> tuple[float, tuple[int, ...]]:
    return min((v, s) for t in (1, 2) for s, v in of_layers(layout, t, least).items())


def readme() -> Iterator[str]:
    nets = span([*of_nets(1).values(), *of_nets(2).values()])
    yield f"steps of seven networks of timm are {nets} times as fast with our layers as with"
    means = [f"{geometric_mean(fused(threads, 'NCHW', False)):.1f}" for threads in (1, 2)]
    yield f"layers with an activation {means[0]} times on one thread and {means[1]} times on two"
    yield f"steps of three networks take {span(cost(2).values())} times as long as without"
    compiled = [net["over_unsynchronized"]["one graph"] for net in read(COMPILED)["nets"]]
    yield f"two take {span(compiled, joint=' and ')} times as long"
    over = [
        resnet50_over("torch sync", (32, 256), ("fp32", "fp16", "bf16"), layout).split(" to ")
        for layout in LAYOUTS
    ]
    ends = sorted(float(value) for pair in over for value in pair)
    yield (
        f"On an H100 the kernels of ResNet-50's layers are {ends[0]} to {ends[-1]} times as fast "
        "as those of `torch.nn.SyncBatchNorm`, with batches of 32 and 256"
    )


def speed_cpu() -> Iterator[str]:
    value, shape = worst("NCHW")
    count = len(of_layers("NCHW", 1))
    yield f"| float32 NCHW | {count} | {on_threads('NCHW')} | {value:.2f}x {shape} |"
    least, count = MIB, len(of_layers("NCHW", 1, MIB))
    mean = on_threads("NCHW", least)
    yield f"| the same, over 1 MiB | {count} | {mean} | {worst('NCHW', least)[0]:.1f}x |"
    count, mean = len(of_layers("channels_last", 1)), on_threads("channels_last")
    yield f"| float32 channels_last | {count} | {mean} | {worst('channels_last')[0]:.2f}x |"
    yield f"| the same, from 24 MiB | | {on_threads('channels_last', 24 * MIB)} | |"
    memory = {row["name"]: row for row in read(CPU)["memory"]}
    peak = {name: f"{row['peak']:.1f}" for name, row in memory.items()}
    assert peak["ours"] == peak["torch"]
    yield f"{peak['ours']} activations at most, as torch (plain operations: {peak['plain']})"
    kept = {name: f"{row['activations']:.2f}" for name, row in memory.items()}
    yield f"{kept['ours']} activations (plain operations: {kept['plain']})"
    seconds = [case["syncbn"]["seconds"] for case in read(COLD)["cases"].values()]
    yield f"{span(seconds, 1)} s of CPU time"


def replicas_cpu() -> Iterator[str]:
    """Of docs/speed.md."""
    faster = [row["faster"] for row in read(REPLICAS)["nets"]]
    mean = f"{geometric_mean(faster):.2f} times on average"
    yield f"Synchronized-BatchNorm-PyTorch take {span(faster)} times as much CPU time, {mean}"


def of_nets(threads: int) -> dict[str, float]:
    """Training steps with converted layers: times as fast as with the networks' own."""
    return {row["net"]: row["faster"] for row in read(NETS[threads])["nets"]}


def nets_cpu() -> Iterator[str]:
    one, two = of_nets(1), of_nets(2)
    for row in read(NETS[2])["nets"]:
        net, kept = row["net"], {who: f"{mib:.0f}" for who, mib in row["kept_mib"].items()}
        memory = f"{kept['ours']} instead of {kept['torch']}"
        if kept["ours"] == kept["torch"]:
            memory = f"{kept['ours']}, as torch"
        yield f"| {net} | {one[net]:.2f}x | {two[net]:.2f}x | {memory} |"
    means = [geometric_mean(steps.values()) for steps in (one, two)]
    yield "| geometric mean | {:.2f}x | {:.2f}x | |".format(*means)
    for in_place, name in ((False, ""), (True, "`InPlaceABN`, ")):
        for kind, layout in (("NCHW", "NCHW"), ("NHWC", "channels_last")):
            ratios = [fused(threads, kind, in_place) for threads in (1, 2)]
            means = [f"{geometric_mean(faster):.2g}x" for faster in ratios]
            yield f"| {name}{layout} | {' | '.join(means)} | {min(map(min, ratios)):.2f}x |"


def fused(threads: int, layout: str, in_place: bool) -> list[float]:
    """Layers with an activation: times as fast as torch's two, of shapes that take our kernels."""
    return [
        row["faster"]
        for row in read(FUSED[threads])["layers"]
        if (row["layout"], row["in place"]) == (layout, in_place) and prod(row["shape"]) > 1e6
    ]


# -------------------------------------------------------------------------------- H100


def resnet50_over(rival: str, batches: Iterable[int], dtypes: Iterable[str], layout: str) -> str:
    """All 53 layers: a rival's time over ours, from least to most."""
    results = read(H100)
    values = []
    for batch in batches:
        for dtype in dtypes:
            ours, theirs = (
                total_of_resnet50(results, batch, dtype, layout, who) for who in ("ours", rival)
            )
            if ours and theirs:
                values.append(theirs / ours)
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def speed_h100() -> Iterator[str]:
    results = read(H100)
    yield f"speed of a device copy in the same run, {results['bandwidth'] / 1e12:.2f} TB/s;"
    host = {
        name: span([row["found"][name]["host"] * 1e3 for row in results["host"]])
        for name in ("ours", "torch sync", "torch cudnn")
    }
    yield (
        f"{host['ours']} ms; torch's SyncBatchNorm without communication {host['torch sync']} ms; "
        f"`torch.batch_norm` {host['torch cudnn']} ms"
    )
    time = {
        (case["dtype"], who): f"{case['found'][who]['both'] * 1e6:.0f}"
        for case in results["cases"]
        for who in ("ours", "torch sync")
        if case["shape"] == [2, 2048, 7, 7] and case["layout"] == "NCHW"
    }
    yield (
        f"(2, 2048, 7, 7) {time['fp16', 'ours']} us against {time['fp16', 'torch sync']} in 16 "
        f"bits, {time['fp32', 'ours']} against {time['fp32', 'torch sync']} in float32."
    )
    ratios = [
        min(faster_than(case, rival) or 0 for rival in ("torch cudnn", "torch native"))
        for case in results["cases"]
        if case["nbytes"] >= 192 * MIB and takes_our_kernels(case)
    ]
    low, high = min(ratios), max(ratios)
    yield f"On an H100 they are then {low:.1f} to {high:.0f} times as fast as torch's."


def speed_h200() -> Iterator[str]:
    results = read(H200)
    yield f"{results['bandwidth'] / 1e12:.2f} TB/s), of {len(results['cases'])} cases"
    walls: dict[tuple[int, bool], list[float]] = {}
    for group in results["session"]["processes"]:
        for case in group["rows"]:
            for name, row in case["found"].items():
                walls.setdefault((group["ranks"], name == "ours"), []).append(row["wall"] * 1e3)
    one, two = ([span(walls[ranks, ours]) for ours in (True, False)] for ranks in (1, 2))
    yield f"takes {one[0]} ms, the function of `nn.SyncBatchNorm` {one[1]} ms"
    yield f"Two ranks that share the GPU take {two[0]} ms and {two[1]} ms."


def takes_our_kernels(case: Row) -> bool:
    """A layer alone, from 192 MiB: planes of 28x28 or more; for bfloat16 channels_last too."""
    if case["layout"] == "NCHW":
        _, _, height, width = case["shape"]
        return bool(height * width >= 784)
    return bool(case["dtype"] == "bf16")


# ----------------------------------------------------------- processes, compiled kernels

ENGINES = ("one host", "gloo", "mpi")
SIZES = ("2", "4", "8")


def scaling() -> Iterator[str]:
    results = read(SCALING)
    measured = results["measured"]
    for label, entry in {
        "all_gather, 256 channels": "all_gather 256",
        "all_reduce, 256 channels": "all_reduce 256",
        "exchange of a layer, Python included": "merge_moments 256",
    }.items():
        cells = [measured[e][size][entry]["median"] * 1e6 for e in ENGINES for size in SIZES]
        yield f"| {label} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |"
    longer = [
        found[f"{name} 2048"]["median"] / found[f"{name} 4"]["median"]
        for found in measured["gloo"].values()
        for name in ("all_gather", "all_reduce")
    ]
    yield f"over gloo, 2,048 channels take {span(longer, 1)} times as long as 4"
    host, gloo = (
        [measured[engine][size]["all_gather 256"]["median"] for size in SIZES]
        for engine in ENGINES[:2]
    )
    first, second, third = (f"{g / h:.1f}" for h, g in zip(host, gloo, strict=True))
    yield f"local connections are {first}, {second} and {third} times as fast as gloo"
    waits = {(size, jitter): wait for size, jitter, wait in results["simulated"]}
    for size in (8, 64, 1024):
        yield f"| {size:,} | " + " | ".join(f"{waits[size, j]:.2f}x" for j in (0.01, 0.05, 0.2))


def steps_of_graphs() -> Iterator[str]:
    for net in read(COMPILED)["nets"]:
        for way, seconds in net["step"].items():
            over = [net[name][way] for name in ("over_eager", "over_unsynchronized")]
            cells = [f"{seconds * 1e3:.0f}", *(f"{ratio:.2f}" for ratio in over)]
            cells += [f"{net['first'][way]:.0f}", str(net["graphs"][way])]
            yield f"| {net['net']} | {way} | {' | '.join(cells)} |"


def cost(ranks: int, kind: str = "cost") -> dict[str, float]:
    """Steps with synchronization, or with waiting alone, over those without, by network."""
    return {row["net"]: row[kind] for row in read(DDP)["nets"] if row["ranks"] == ranks}


def cost_of_networks() -> Iterator[str]:
    layers = {"resnet18": 20, "resnet50": 53, "mobilenetv3_large_100": 46}
    rows = [row for row in read(DDP)["nets"] if row["ranks"] == 2]
    added = [
        (row["cost"] - 1) * row["step"]["unsynchronized"] * 1e3 / layers[row["net"]] for row in rows
    ]
    yield f"each layer adds {span(added, 1)} ms to a step"
    for net, two in cost(2).items():
        waits = " | ".join(f"{cost(ranks, 'waiting')[net]:.2f}x" for ranks in (2, 4))
        yield f"| {net} | {two:.2f}x | {cost(4)[net]:.2f}x | {waits} |"


def study() -> Iterator[str]:
    text = (ROOT / "benchmarks" / "results" / STUDY).read_text(encoding="utf-8")
    errors: dict[str, dict[str, list[float]]] = {}
    for run in map(json.loads, text.splitlines()):
        errors.setdefault(run["task"], {}).setdefault(run["way"], []).append(100 * run["error"])
    for task, ways in errors.items():
        found = [f"{mean(e):.1f} ({min(e):.1f} to {max(e):.1f})" for e in ways.values()]
        yield f"| {task} | {' | '.join(found)} |"


def masks() -> Iterator[str]:
    rows = read(MASKS)["rows"]
    faster = span([1 / row["over"]["torch"] for row in rows], 1)
    yield f"takes {span([row['over']['without'] for row in rows])} times as long as without a mask"
    yield f"{faster} times as fast as `nn.BatchNorm1d`"


def conclusions_of_pays() -> Iterator[str]:
    """What `pays` says of the study's tasks, of which two gain by synchronization."""
    rows = read(PAYS)["tasks"]
    gains = {row["name"]: row["name"].endswith(("camera per part", "1 per part")) for row in rows}
    known = {"one sample": True, "unlike": True, "alike": False}
    said = [known.get(row["conclusion"]) for row in rows]
    right = sum(pays is gains[row["name"]] for pays, row in zip(said, rows, strict=True))
    yield f"{right} of {len(rows)} conclusions are those of the trainings"
    yield f"and {said.count(None)} leave it open"
    off = {
        row["samples"]: f"{row['off']:.2f}"
        for row in read(PAYS)["networks"]
        if row["name"] == "torchvision resnet50, both photographs per part"
    }
    yield (
        f"one has {off[16]} with 16 random crops of two photographs per part, {off[8]} with 8, "
        f"{off[2]} with 2"
    )


PAGES: dict[str, tuple[Callable[[], Iterable[str]], ...]] = {
    "README.md": (readme,),
    "docs/is-it-for-me.md": (study, conclusions_of_pays, cost_of_networks),
    "docs/layers.md": (masks,),
    "docs/speed.md": (speed_cpu, replicas_cpu, nets_cpu, steps_of_graphs, speed_h100, speed_h200),
    "docs/scaling.md": (scaling,),
}


def lacking(page: str, text: str) -> list[str]:
    """What the text of a page should say and does not, however its lines are broken."""
    said = " ".join(text.split())
    wanted = [sentence for sentences in PAGES[page] for sentence in sentences()]
    return [sentence for sentence in wanted if " ".join(sentence.split()) not in said]


if __name__ == "__main__":
    status = 0
    for page in PAGES:
        for sentence in lacking(page, (ROOT / page).read_text(encoding="utf-8")):
            print(f"{page} lacks:\n    {sentence}")
            status = 1
    sys.exit(status)
