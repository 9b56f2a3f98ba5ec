"""A model of the time of the CUDA kernels on a GPU; `gpu_model.py` shows what it says.

    wave  = max(bandwidth, latency, issue slots, float64, conversions) + start and end of a block
    time  = launch + sum over the waves of thread blocks + merge of partial sums
    floor = 3 B / bandwidth forward, 5 B / bandwidth backward; B: bytes of the activation

It follows the plan of `syncbn_core/backends/cuda/grid.py`. Instructions per byte and per block are
counted (`results/ptx-costs.json`), registers are those of ptxas (`results/ptx-registers.json`),
devices are in `gpu_devices.py`. `CALIBRATED` was fitted to an H100.
docs/internals/gpu-model.md has the assumptions.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpu_devices import GPUS, Gpu

from syncbn_core.backends.cuda import grid
from syncbn_core.kernels.cuda.constants import SIZES, THREADS, UNROLL, VECTOR

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = RESULTS / "gpu-2026-11-22-NVIDIA-H100-80GB-HBM3-809ee92.json"
COSTS = "ptx-costs.json"  # of the kernels as they are
MEASURED_COSTS = "ptx-costs-809ee92.json"  # of those that were measured
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LAYOUTS = {"NCHW": "planes", "channels_last": "rows"}
RATES = ("issue slots", "float64", "conversions")
LIMITS = ("bandwidth", "latency", *RATES)
DIRECTIONS = {"forward": ("moments", "normalize"), "backward": ("reduce", "input")}
STEPS = {
    "moments": grid._MOMENTS,
    "normalize": grid._NORMALIZE,
    "reduce": grid._BACKWARD_REDUCE,
    "input": grid._BACKWARD_INPUT,
}
PASSES = {"moments": 1, "normalize": 2, "reduce": 2, "input": 3}  # over memory, in activations
# Vectors of 16 bytes that a thread has loaded before it waits for the first.
AHEAD = {"moments": UNROLL, "reduce": UNROLL, "normalize": 2, "planes_input": 4, "rows_input": 2}
EDGE = 250  # instructions of a thread for a vector that planes share, by ptxas for sm_90
RESNET = """64,112,112 64,56,56 256,56,56 128,56,56 128,28,28 512,28,28 256,28,28 256,14,14
    1024,14,14 512,14,14 512,7,7 2048,7,7"""
RESNET_SHAPES = [tuple(map(int, shape.split(","))) for shape in RESNET.split()]


@dataclass(frozen=True, slots=True)
class Constants:
    """What was fitted to an H100, and is taken to be the same on every device."""

    reach: float  # share of the data sheet's bandwidth that kernels reach
    cycles: float  # clocks per instruction of a thread that waits for nothing but itself
    launch: float  # seconds from the end of a kernel to the start of the next
    merge: float  # seconds for the last block to add up what the others have left


CALIBRATED = Constants(0.85, 3.3, 2.7e-6, 3.3e-6)
LATENCY = 0.6e-6  # seconds of a load from memory; assumed, not fitted


@dataclass(frozen=True, slots=True)
class Shape:
    """An activation `[batch, channels, size]` in a dtype and layout."""

    batch: int
    channels: int
    size: int
    dtype: str
    layout: str

    @property
    def nbytes(self) -> int:
        return self.batch * self.channels * self.size * SIZES[self.dtype]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`outer, channels, inner` of the view that the kernels get."""
        if self.layout == "NCHW":
            return self.batch, self.channels, self.size
        return self.batch * self.size, self.channels, 1

    def __str__(self) -> str:
        side = math.isqrt(self.size)
        return f"{self.batch}x{self.channels}x{side}x{side} {self.dtype} {self.layout}"


def resnet(batch: int, dtype: str, layout: str) -> list[Shape]:
    return [Shape(batch, c, h * w, dtype, layout) for c, h, w in RESNET_SHAPES]


# ------------------------------------------------------------------------- what is counted


@cache
def _costs(file: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return table["kernels"]


@cache
def _registers() -> dict[tuple[str, str], tuple[int, int]]:
    """Registers per thread and bytes of shared memory, by key of a kernel and architecture."""
    rows = json.loads((RESULTS / "ptx-registers.json").read_text(encoding="utf-8"))
    return {(row["kernel"], row["arch"]): (row["registers"], row["shared"]) for row in rows[1:]}


COUNTED = ("instructions", "float64", "conversions", "conversions64")


@cache
def _per_byte_and_block(key: str, costs: str) -> dict[str, tuple[float, float]]:
    """Of what is counted: how many per byte of x, and how many per block besides."""
    small = _costs(costs)[key]
    large = small["large"]
    nbytes = math.prod(small["shape"]) * SIZES[key.split("-")[1]]
    found = {}
    for name in COUNTED:
        each = nbytes / small["blocks"], 4 * nbytes / large["blocks"]
        per_block = 0.0
        if each[1] > 1.5 * each[0]:  # else blocks of one size, as those of elementwise planes
            whole = small[name] * each[0], large[name] * each[1]
            per_block = max(0.0, whole[0] - (whole[1] - whole[0]) * each[0] / (each[1] - each[0]))
        found[name] = large[name] - per_block / each[1], per_block
    return found


def _rates(key: str, size: int, costs: str) -> dict[str, tuple[float, float]]:
    """Of what is counted: how many per byte and per block, for planes of `size` numbers.

    Those of kernels for ragged planes were counted for planes of 7x7. For longer planes, what they
    have more than the kernels for whole vectors is taken to be per plane. The instructions of
    elementwise kernels are not: there it is per vector. For planes of 14x14 in float16 this agrees
    with the counts within a tenth.
    """
    found = _per_byte_and_block(key, costs)
    if "-ragged" not in key:
        return found
    whole = _per_byte_and_block(key.replace("-ragged", ""), costs)
    share = min(1.0, 49 / size)
    return {
        name: (each, per_block)
        if name == "instructions" and ("normalize" in key or "input" in key)
        else (whole[name][0] + max(0.0, each - whole[name][0]) * share, per_block)
        for name, (each, per_block) in found.items()
    }


# ------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on a device: its grid, how much fits at once, and what it needs in all."""

    key: str
    blocks: int
    resident: int  # blocks on a multiprocessor
    reduces: bool
    merged: int  # levels of partial sums
    moved: float  # bytes of activations from and to memory
    rounds: float  # how often a thread loads and waits
    counts: dict[str, float]
    loop: float  # instructions of a thread in these rounds
    own: float  # and besides, at the start and the end of its block

    def used(self, gpu: Gpu) -> float:
        """Share of the places for blocks that are used, in all waves together."""
        waves = self.blocks / (gpu.multiprocessors * self.resident)
        return waves / math.ceil(waves)


def resident_blocks(gpu: Gpu, key: str) -> int:
    """How many blocks of a kernel fit on a multiprocessor, by its registers and shared memory."""
    registers, shared = _registers()[key, "sm_{}{}".format(*gpu.capability)]
    by_registers = gpu.registers // (-(-registers // 8) * 8 * THREADS)
    reserved = 1024 if gpu.capability >= (8, 0) else 0  # by the system, in each block
    by_shared = gpu.shared // (shared + reserved)
    return max(1, min(gpu.threads // THREADS, gpu.blocks, by_registers, by_shared))


def launch(gpu: Gpu, shape: Shape, step: str, costs: str = COSTS) -> Launch:
    """A step of a shape. No data is taken to be in L2."""
    pair = step in ("reduce", "input")
    offsets = (0,) * (3 if step == "input" else 2 if step != "moments" else 1)
    view = (shape.dtype, *shape.sizes)
    reduces = step in ("moments", "reduce")
    if reduces:
        cut = grid._reduction(STEPS[step], THREADS, gpu.multiprocessors, offsets, *view)
    else:
        cut = grid._elementwise(STEPS[step], THREADS, offsets, *view)
    key, blocks = cut.source.key, math.prod(cut.grid)
    merged = 0
    if reduces and cut.grid[1] > 1:
        splits, group = cut.sizes[-2:]
        merged = 2 if shape.layout != "NCHW" and group < splits else 1

    nbytes = shape.nbytes
    rates = _rates(key, shape.size, costs)
    counts = {name: a * nbytes + b * blocks for name, (a, b) in rates.items()}
    per_byte, own = rates["instructions"][0], rates["instructions"][1] / THREADS
    ahead = AHEAD.get(step) or AHEAD[f"{LAYOUTS[shape.layout]}_{step}"]
    rounds = (2 if pair else 1) * nbytes / blocks / (ahead * VECTOR * THREADS)
    if reduces:  # a round costs a thread the same if it loads less than it could
        rounds = math.ceil(rounds)
    loop = rounds * per_byte * ahead * VECTOR / (2 if pair else 1)
    if reduces and "-ragged" in key:
        edges = math.ceil(2 * shape.batch / cut.grid[1] / THREADS)
        rounds, own = rounds + edges, own + EDGE * edges
    return Launch(
        key,
        blocks,
        resident_blocks(gpu, key),
        reduces,
        merged,
        PASSES[step] * nbytes,
        rounds,
        counts,
        loop,
        own,
    )


def _wave(gpu: Gpu, run: Launch, constants: Constants, blocks: int) -> dict[str, float]:
    """Seconds that each limit allows for `blocks` blocks that run at once."""
    share = blocks / run.blocks
    instructions = run.loop if run.reduces else run.loop + run.own
    loads = run.rounds * LATENCY + instructions * constants.cycles / gpu.clock
    each = -(-blocks // gpu.multiprocessors) / run.blocks / gpu.clock
    conversions64 = run.counts["conversions64"]
    conversions16 = run.counts["conversions"] - conversions64
    return {
        "bandwidth": share * run.moved / (constants.reach * gpu.bandwidth),
        "latency": loads,
        "issue slots": each * run.counts["instructions"] / gpu.issue,
        # one unit for both on devices with few float64 lanes; on others this is too much
        "float64": each * (run.counts["float64"] / gpu.float64 + conversions64 / gpu.conversions64),
        "conversions": each * conversions16 / gpu.conversions16,
    }


def seconds(gpu: Gpu, run: Launch, constants: Constants = CALIBRATED) -> dict[str, float]:
    """The time of a launch by each limit alone, `"all"`: with all of them."""
    slots = gpu.multiprocessors * run.resident
    full, rest = divmod(run.blocks, slots)
    sizes = [(slots, full)] * (full > 0) + [(rest, 1)] * (rest > 0)
    alone = dict.fromkeys(LIMITS, 0.0)
    time = constants.launch + run.merged * constants.merge
    for blocks, times in sizes:
        limits = _wave(gpu, run, constants, blocks)
        for name, value in limits.items():
            alone[name] += times * value
        time += times * max(limits.values())
        if run.reduces:  # in an elementwise kernel other blocks load meanwhile
            time += times * run.own * constants.cycles / gpu.clock
    return alone | {"all": time}


def binding(gpu: Gpu, shape: Shape, step: str) -> str:
    """The limit that takes longest by itself."""
    found = seconds(gpu, launch(gpu, shape, step))
    return max(LIMITS, key=found.__getitem__)


def predict(
    gpu: Gpu, shape: Shape, constants: Constants = CALIBRATED, costs: str = COSTS
) -> dict[str, float]:
    """Seconds of each step, of forward and of backward."""
    runs = {step: launch(gpu, shape, step, costs) for step in STEPS}
    found = {step: seconds(gpu, run, constants)["all"] for step, run in runs.items()}
    return found | {name: sum(found[s] for s in steps) for name, steps in DIRECTIONS.items()}


def floor(gpu: Gpu, shape: Shape, direction: str, constants: Constants = CALIBRATED) -> float:
    """3 B or 5 B at the bandwidth that kernels reach."""
    passes = sum(PASSES[step] for step in DIRECTIONS[direction])
    return passes * shape.nbytes / (constants.reach * gpu.bandwidth)


# ------------------------------------------------------------------------ beside the H100


def measured() -> list[tuple[Shape, dict[str, float]]]:
    """Cases of `gpu.py` on an H100: seconds of forward and backward."""
    results = json.loads(MEASURED.read_text(encoding="utf-8"))
    found = []
    for case in results["cases"]:
        batch, channels, *space = case["shape"]
        if case["layout"] in LAYOUTS and len(space) == 2:
            ours = case["found"]["ours"]
            times = {"forward": ours["forward"], "backward": ours["both"] - ours["forward"]}
            shape = Shape(batch, channels, math.prod(space), DTYPES[case["dtype"]], case["layout"])
            found.append((shape, times))
    return found


def over_measured(constants: Constants = CALIBRATED) -> dict[tuple[str, str, str], list[float]]:
    """Predicted over measured times, by dtype, layout and direction."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for shape, times in measured():
        predicted = predict(GPUS["H100"], shape, constants, MEASURED_COSTS)
        for name, time in times.items():
            group = found.setdefault((shape.dtype, shape.layout, name), [])
            group.append(predicted[name] / time)
    return found


def error(constants: Constants) -> float:
    """Mean of |log(predicted / measured)|."""
    ratios = [ratio for group in over_measured(constants).values() for ratio in group]
    return sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)


def fit(start: Constants = CALIBRATED) -> Constants:
    """The constants with the least error: one after the other is moved, by less and less."""
    best, least, factor = start, error(start), 1.3
    while factor > 1.01:
        moves = [
            replace(best, **{f.name: getattr(best, f.name) * by})
            for f in fields(best)
            for by in (factor, 1 / factor)
        ]
        errors = [error(move) for move in moves]
        if min(errors) < least - 1e-6:
            least = min(errors)
            best = moves[errors.index(least)]
        else:
            factor **= 0.5
    return best
