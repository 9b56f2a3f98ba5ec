"""`python -m syncbn_torch doctor`: what this machine has, and whether layers are right on it.

Each check is `verify_sync` of a small network, in replicas or over processes.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from syncbn_core import doctor
from syncbn_core.comm.local import host_name
from syncbn_core.doctor import Check, Difference, Facts, Outcome, refuse
from syncbn_torch import convert_model
from syncbn_verify import verify_sync

DTYPES = ("float64", "float32", "bfloat16", "float16")
TURNS = 15  # of the timing
DEADLINE = 300.0  # seconds for the ranks: they import torch, and may compile kernels


def facts() -> Facts:
    """Those of the core, and what torch has."""
    found = doctor.facts()
    found["versions"] |= {"torch": torch.__version__, **doctor.versions(("triton", "apex"))}
    found["machine"]["torch"] = f"{torch.get_num_threads()} threads"
    no_device = "this torch finds no device"
    found["arrays"] |= {
        "torch, CPU": found["arrays"]["NumPy"],
        "torch, CUDA": doctor.found(doctor.cuda_takes) if torch.cuda.is_available() else no_device,
    }
    mpi = doctor.versions(("mpi4py",)).get("mpi4py", "not installed")
    absent = "not in this torch"
    found["engines"] = {
        "gloo": "found" if _has("gloo") else absent,
        "connections of a host": "found" if host_name() else "not on this system: gloo sends all",
        "NCCL": doctor.found(_nccl) if _has("nccl") else absent,
        "MPI": mpi,
    }
    return found


def _has(engine: str) -> bool:
    return dist.is_available() and bool(getattr(dist, f"is_{engine}_available")())


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def checks(pretended: int = 0) -> Iterator[Check]:
    """All that this machine allows.

    `pretended`: a number of GPUs in whose place CPU and gloo are checked, to try these checks.
    """
    count = pretended or torch.cuda.device_count()
    for device in devices():
        for dtype in DTYPES:
            run = partial(differs, device, dtype, replicas=4)
            yield Check(f"4 replicas in threads on {device}, {dtype}", run)
    yield from over_ranks("2 processes over gloo", "gloo", 2)
    if count == 1:
        alone = Outcome("skipped", "this machine has one GPU")
        yield Check("several GPUs", partial(refuse, alone))
    if count > 1:
        engine = "gloo" if pretended else "nccl"
        yield from over_ranks(f"{count} GPUs over {engine}", engine, count)


def devices() -> list[str]:
    """The names of all devices of this machine, the CPU first."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def network(kind: Callable[[int], nn.Module] = nn.BatchNorm2d, width: int = 8) -> nn.Module:
    """A small one with layers of `kind`, the same in each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        kind(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2),
        kind(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 5),
    )


def differs(device: str, dtype: str, **parts: Any) -> Difference:
    """The largest difference of the network's layers between the split and the whole batch."""
    samples = 10 if "replicas" in parts else 2 * dist.get_world_size() + 1
    batch = torch.randn(samples, 3, 12, 12, device=device)
    report = verify_sync(
        convert_model(network().to(device)), batch, dtype=getattr(torch, dtype), **parts
    )
    if report.conclusion == "failed":
        raise Outcome("failed", f"could not be judged: {report.error}")
    if report.conclusion == "wrong" or any(layer.verdict != "ok" for layer in report.layers):
        raise Outcome("WRONG", str(report))
    results = ("output", "gradient", "running")
    found = [(getattr(layer, each) or 0.0, each) for layer in report.layers for each in results]
    return Difference(*max(found), float("inf"))  # `verify_sync` judges


# -------------------------------------------------------------------------------- processes

_of_ranks: dict[str, str] = {}  # times that checks of processes have taken


def over_ranks(name: str, engine: str, size: int) -> Iterator[Check]:
    """Checks of `size` processes, which start once, with the first check."""
    outcomes: list[Any] = []

    def run(dtype: str) -> Difference:
        if not outcomes:
            try:
                with tempfile.TemporaryDirectory(prefix="syncbn-doctor-") as folder:
                    _start(engine, size, Path(folder))
                    outcomes.append(json.loads(Path(folder, "found.json").read_text()))
                _of_ranks[name] = outcomes[0]["step"]
            except Exception as error:  # not again for each dtype: it may have taken minutes
                outcomes.append(error)
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        found = outcomes[0][dtype]
        return refuse(Outcome(*found)) if isinstance(found[0], str) else Difference(*found)

    for dtype in DTYPES:
        yield Check(f"{name}, {dtype}", partial(run, dtype))


def _start(engine: str, size: int, folder: Path) -> None:
    if not _has(engine):
        raise Outcome("missing", f"this torch has no {engine}, over which processes talk")
    in_ranks(take_part, (size, engine, folder), size)


def in_ranks(work: Any, args: tuple[Any, ...], size: int, deadline: float = DEADLINE) -> None:
    """Call `work(rank, *args)` in `size` new processes, and wait for them.

    Raises torch's errors, which name a rank that failed, or `TimeoutError`; all ranks have ended.
    """
    ranks: Any = start_processes(work, args, size, join=False, start_method="spawn")
    end = time.monotonic() + deadline
    try:
        while not ranks.join(max(end - time.monotonic(), 0.0)):  # whenever one has ended
            if time.monotonic() >= end:
                running = [i for i, each in enumerate(ranks.processes) if each.is_alive()]
                raise TimeoutError(
                    f"ranks {running} did not end in {deadline:g} s, and were killed"
                )
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def take_part(rank: int, size: int, engine: str, folder: Path) -> None:
    """One rank; rank 0 writes what was found."""
    torch.set_num_threads(1)
    device = "cpu" if engine == "gloo" else f"cuda:{rank}"
    if engine == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        engine,
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE / 2),
    )
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        try:
            found[dtype] = differs(device, dtype, process_group=dist.group.WORLD)
        except Outcome as wrong:  # the same on all ranks
            found[dtype] = wrong.verdict, str(wrong)
    found["step"] = time_of_steps(engine, device)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------- times


def timing() -> Facts:
    """Of a network over the processes checked."""
    return {"timing": dict(_of_ranks)}


def time_of_steps(engine: str, device: str) -> str:
    """A step of a network under DistributedDataParallel with each kind of layer."""
    x = torch.randn(8, 3, 64, 64, device=device)

    def step(model: nn.Module) -> None:
        model(x).square().sum().backward()

    nets = {"without synchronization": network(width=32)}
    nets["syncbn"] = convert_model(network(width=32))
    if engine == "nccl":  # torch's refuses a CPU
        nets["torch.nn.SyncBatchNorm"] = network(nn.SyncBatchNorm, width=32)
    wrapped = {name: DistributedDataParallel(net.to(device)) for name, net in nets.items()}
    times = medians({name: partial(step, net) for name, net in wrapped.items()}, x)
    return (
        f"steps of a network with two layers, 8 images of 64 x 64 per process: {times}; a layer "
        "adds its messages, and the wait for the slowest process: docs/scaling.md"
    )


def medians(ways: dict[str, Callable[[], None]], x: Tensor) -> str:
    """Of `TURNS` steps that take turns, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS + 2):
        for name, step in ways.items():
            begin = time.perf_counter()
            step()
            if x.is_cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return ", ".join(f"{name} {1e3 * median(turns[2:]):.2f} ms" for name, turns in seconds.items())
