"""`python -m syncbn_torch doctor`: what this machine has, and whether the layers are right on it.

Each check compares a batch in parts with the formulas of `syncbn_core.doctor` in float64. Ranks are
processes of their own; each writes its results into a folder, and one that dies or hangs is named.
"""

from __future__ import annotations

import copy
import datetime
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_core import doctor
from syncbn_core.doctor import PARTS, Case, Check, Difference, Facts, Missing, Skipped, refuse
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm, convert_model
from syncbn_torch.forward import always_ours, goes_to_kernels

__all__ = ["checks", "facts", "in_ranks", "timing"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
TURNS = 15  # of the timing
DEADLINE = 300.0  # seconds for the ranks of a check: they import torch, and may compile kernels
GRACE = 5.0  # seconds for ranks that run on after another has failed
# The 53 layers of ResNet-50 for images of 224 x 224: channels, height and width, how many.
RESNET50 = (
    *((64, 112, 1), (64, 56, 6), (256, 56, 4), (128, 56, 1), (128, 28, 7), (512, 28, 5)),
    *((256, 28, 1), (256, 14, 11), (1024, 14, 7), (512, 14, 1), (512, 7, 5), (2048, 7, 4)),
)
ROUNDS = {"cpu": 3, "cuda": 10}
IMAGES = {"cpu": 2, "cuda": 32}  # of a rank
WAYS: dict[str, Callable[[int], nn.Module]] = {
    "syncbn": SyncBatchNorm,
    "torch.nn.SyncBatchNorm": nn.SyncBatchNorm,
    "without synchronization": nn.BatchNorm2d,
}
TRAINING = "five steps under DistributedDataParallel"

_ABSENT = "not in this torch"

Work = Callable[[int, int, str, Path], None]


def facts() -> Facts:
    """Those of the core, and what torch has."""
    found = doctor.facts()
    found["versions"] |= {"torch": torch.__version__, **doctor.versions(("triton", "apex"))}
    found["machine"]["torch"] = f"{torch.get_num_threads()} threads"
    found["arrays"]["torch, CPU"] = found["arrays"]["NumPy"]
    found["arrays"]["torch, CUDA"] = (
        doctor.found(doctor.cuda_takes)
        if torch.cuda.is_available()
        else "this torch finds no device"
    )
    available = dist.is_available()
    found["engines"] = {
        "gloo": "found" if available and dist.is_gloo_available() else _ABSENT,
        "NCCL": doctor.found(_nccl) if available and dist.is_nccl_available() else _ABSENT,
        "MPI": doctor.version_of("mpi4py"),
    }
    return found


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def checks(pretended: int = 0) -> Iterator[Check]:
    """All that this machine allows.

    `pretended`: a number of GPUs in whose place CPU and gloo are checked, to try these checks.
    """
    for device in devices():
        for case in cases():
            yield Check(f"a layer on {device}, {case.name}", partial(alone, case, device))
    for case in cases():
        name = f"4 replicas in threads, {case.name}"
        yield Check(name, partial(in_replicas, case, ["cpu"] * 4))
    yield from over_ranks("2 processes over gloo", "cpu", 2)
    count = pretended or torch.cuda.device_count()
    kind, engine = ("cpu", "gloo") if pretended else ("cuda", "NCCL")
    if count == 1:
        yield Check("several GPUs", partial(refuse, Skipped("this machine has one GPU")))
    if count > 1:
        for case in cases():
            places = ["cpu"] * count if pretended else devices()[1:]
            yield Check(
                f"{count} GPUs as replicas, {case.name}", partial(in_replicas, case, places)
            )
        yield from over_ranks(f"{count} GPUs over {engine}", kind, count)


def devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def cases() -> Iterator[Case]:
    """Every dtype in NCHW, and float32 in the other layouts."""
    for dtype in DTYPES:
        for layout in doctor.LAYOUTS if dtype == "float32" else ("NCHW",):
            yield Case(dtype, layout)


# ------------------------------------------------------------------------- in this process


def alone(case: Case, device: str) -> Difference:
    """A layer without other parts, by our kernels."""
    layer = layer_of(case, device)
    with always_ours():
        return case.difference(step(case, layer, layer, slice(None), device))


def in_replicas(case: Case, devices: Sequence[str]) -> Difference:
    layer = layer_of(case, devices[0])
    model = DataParallelWithCallback(layer, device_ids=list(devices))
    return case.difference(step(case, layer, model, slice(None), devices[0]))


def layer_of(case: Case, device: str) -> SyncBatchNorm:
    kept = torch.float64 if case.dtype == "float64" else torch.float32
    layer = SyncBatchNorm(doctor.CHANNELS, device=device, dtype=kept)
    with torch.no_grad():
        for parameter, values in ((layer.weight, case.weight), (layer.bias, case.bias)):
            parameter.copy_(torch.as_tensor(values))
    return layer


def step(
    case: Case, layer: SyncBatchNorm, model: nn.Module, part: slice, device: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Results of a forward and backward of `model`, which has the one layer, as float64."""
    dtype = getattr(torch, case.dtype)
    x, dy = (torch.as_tensor(v[part]).to(device, dtype) for v in (case.x, case.dy))
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    results: dict[str, Tensor | None] = {"y": y, "dx": x.grad}
    results |= {"weight.grad": layer.weight.grad, "bias.grad": layer.bias.grad}
    results |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
    return {
        name: values.detach().double().cpu().numpy()
        for name, values in results.items()
        if values is not None
    }


_of_ranks: dict[str, str] = {}  # times that checks of processes have taken


def timing() -> Facts:
    """Of a middle layer on each device; of the layers of ResNet-50 over the processes checked."""
    return {"timing": _of_ranks | {d: doctor.found(partial(timing_on, d)) for d in devices()}}


def timing_on(device: str) -> str:
    """Forward and backward of a middle layer by our kernels and by torch's, in milliseconds."""
    x = torch.randn(32, 64, 28, 28, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    layer = SyncBatchNorm(64, device=device)
    ways: dict[str, tuple[nn.Module, bool]] = {
        "ours": (layer, True),
        "torch's": (nn.BatchNorm2d(64, device=device), False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (model, ours) in ways.items():
            _wait(x)
            begin = time.perf_counter()
            with always_ours(ours):
                model(x).backward(dy)
            _wait(x)
            seconds[name].append(time.perf_counter() - begin)
    each = ", ".join(f"{name} {1e3 * median(turns):.2f} ms" for name, turns in seconds.items())
    takes = "ours" if goes_to_kernels(layer, x) else "torch's"
    return f"{tuple(x.shape)} float32, forward and backward: {each}; a layer alone takes {takes}"


# -------------------------------------------------------------------------------- processes


def over_ranks(name: str, kind: str, size: int) -> Iterator[Check]:
    """Checks of `size` processes, which start once, with the first check."""
    outcomes: list[dict[str, Difference] | Exception] = []

    def run(check: str) -> Difference:
        if not outcomes:
            try:
                outcomes.append(_over_ranks(name, kind, size))
            except Exception as error:  # not again for each case: it may have taken minutes
                outcomes.append(error)
        (outcome,) = outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[check]

    for each in (*(case.name for case in cases()), TRAINING):
        yield Check(f"{name}, {each}", partial(run, each))


def _over_ranks(name: str, kind: str, size: int) -> dict[str, Difference]:
    """The largest difference of each case over the ways to part the batch; notes the times."""
    if not dist.is_available():
        raise Missing("this torch has no torch.distributed")
    if kind == "cpu" and not dist.is_gloo_available():
        raise Missing("this torch has no gloo, over which processes talk on CPU")
    if kind == "cuda" and not dist.is_nccl_available():
        raise Missing("this torch has no NCCL, over which GPUs talk")
    with tempfile.TemporaryDirectory(prefix="syncbn-doctor-") as folder:
        in_ranks(take_part, size, kind, Path(folder))
        _of_ranks[name] = Path(folder, "times.txt").read_text(encoding="utf-8")
        saved = [dict(np.load(Path(folder, f"{rank}.npz"))) for rank in range(size)]
    found = {
        case.name: max(
            case.difference(_joined(saved, f"{case.name}, {parts}", rank))
            for parts in PARTS
            for rank in range(size)
        )
        for case in cases()
    }
    training = float(np.max([results[TRAINING] for results in saved]))  # NaN, if there is one
    return found | {TRAINING: Difference(training, "parameters", 2**-36)}


def _joined(saved: Sequence[Any], name: str, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Results of the whole batch; running statistics are those of `rank`."""
    of_ranks = {
        key: [results[f"{name}, {key}"] for results in saved]
        for key in ("y", "dx", "weight.grad", "bias.grad", "running_mean", "running_var")
    }
    whole = {key: np.concatenate(of_ranks.pop(key)) for key in ("y", "dx")}
    whole |= {key: np.sum(of_ranks.pop(key), 0) for key in ("weight.grad", "bias.grad")}
    return whole | {key: values[rank] for key, values in of_ranks.items()}


def in_ranks(work: Work, size: int, kind: str, folder: Path, deadline: float = DEADLINE) -> None:
    """Call `work(rank, size, kind, folder)` in `size` new processes, and wait for them.

    Raises `RuntimeError` that names the ranks that failed, and those that did not end: in
    `deadline` seconds, or soon after another rank failed. These are killed.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(work, rank, size, kind, folder), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + deadline
    running = list(ranks)
    while running and time.monotonic() < end:
        connection.wait([process.sentinel for process in running], end - time.monotonic())
        if any(process.exitcode for process in running):
            end = min(end, time.monotonic() + GRACE)
        running = [process for process in running if process.is_alive()]
    failures = [
        text for rank, process in enumerate(ranks) if (text := _failure(rank, process, folder))
    ]
    for process in running:
        process.kill()
        process.join()
    if failures:
        raise RuntimeError("; ".join(failures))


def _failure(rank: int, process: BaseProcess, folder: Path) -> str:
    """What went wrong on a rank; "" if it ended well."""
    log = folder / f"{rank}.txt"
    if log.exists():
        return f"rank {rank}: {log.read_text(encoding='utf-8')}"
    if process.exitcode is None:
        return f"rank {rank} did not end, and was killed"
    return f"rank {rank} ended with status {process.exitcode}" if process.exitcode else ""


def _rank(work: Work, rank: int, size: int, kind: str, folder: Path) -> None:
    try:
        work(rank, size, kind, folder)
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()
        (folder / f"{rank}.txt").write_text(text, encoding="utf-8")
        sys.exit(1)


def take_part(rank: int, size: int, kind: str, folder: Path) -> None:
    """One rank: steps with all cases and parts, whose results it saves."""
    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"cuda:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE / 2),
    )
    saved: dict[str, np.ndarray[Any, Any]] = {}
    for case in cases():
        for parts, bounds_of in PARTS.items():
            layer, bounds = layer_of(case, device), bounds_of(size)
            results = step(case, layer, layer, slice(*bounds[rank : rank + 2]), device)
            saved |= {f"{case.name}, {parts}, {name}": v for name, v in results.items()}
    saved[TRAINING] = np.array(training_differs(rank, size, device))
    np.savez(folder / f"{rank}.npz", **cast(Any, saved))
    times = doctor.found(partial(times_of_layers, kind, device))
    if rank == 0:
        (folder / "times.txt").write_text(times, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def training_differs(rank: int, size: int, device: str) -> float:
    """How far parameters are from those of one process after five steps in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()
    batches = [torch.randn(2 * size, 3, 12, 12).double() for _ in range(5)]
    labels = torch.arange(2 * size) % 5
    ours = convert_model(copy.deepcopy(net)).to(device)
    wrapped = DistributedDataParallel(ours, [device] if device != "cpu" else None)
    own = slice(2 * rank, 2 * rank + 2)
    for model, part, place in ((net, slice(None), "cpu"), (wrapped, own, device)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            y = model(batch[part].to(place))
            nn.functional.cross_entropy(y, labels[part].to(place)).backward()
            optimizer.step()
    pairs = zip(ours.state_dict().values(), net.state_dict().values(), strict=True)
    shares = [float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return float(np.max(shares))  # NaN, if there is one


def times_of_layers(kind: str, device: str) -> str:
    """Median times of forward and backward of all layers of ResNet-50, one by one, in turn."""
    ways = dict(WAYS)
    if kind == "cpu":
        del ways["torch.nn.SyncBatchNorm"]  # which refuses it
    layers = {
        way: [
            (make(channels).to(device), (IMAGES[kind], channels, size, size), count)
            for channels, size, count in RESNET50
        ]
        for way, make in ways.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS[kind]):
        for way, each in layers.items():
            dist.barrier()
            seconds[way].append(0.0)
            for layer, shape, count in each:
                x = torch.randn(shape, device=device, requires_grad=True)
                dy = torch.randn_like(x)
                _wait(x)
                begin = time.perf_counter()
                for _ in range(count):
                    layer(x).backward(dy)
                _wait(x)
                seconds[way][-1] += time.perf_counter() - begin
    times = ", ".join(f"{way} {1e3 * median(turns):.0f} ms" for way, turns in seconds.items())
    return f"layers of ResNet-50, {IMAGES[kind]} images of 224 x 224 per process: {times}"


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
