"""A process that dies, stops, raises, skips a layer, calls one twice or takes another branch into
its loss: nobody waits for ever, and nobody goes on with wrong numbers.

Random models, ranks and moments, in real processes over gloo; `python3 dev.py soak` makes hundreds
of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import enter_world, hosts_apart, log_of, needs_gloo, set_timeout, start_world

from syncbn_torch import SynchronizedBatchNorm2d, convert_model

ENDING = ("is killed", "stops", "exits", "raises")  # this rank makes no more calls
CALLS = ("skips a layer", "calls a layer twice")  # this rank makes one call less or more
FAULTS = (*ENDING, *CALLS, "takes another branch", "does nothing wrong")
RUNS = int(os.environ.get("SYNCBN_FAULT_RUNS", "16"))
TOGETHER = 6  # worlds at a time: they wait more than they work
DEADLINE = 5.0  # seconds, of the process groups
LIMIT = 100.0  # seconds that a world may take on a busy machine


# -------------------------------------------------------------------------- what a rank does


def twofold(forward: Any, other: bool, x: Tensor) -> Tensor:
    """Of two branches with equal channels one rank takes the other one into its loss."""
    ys: list[Tensor] = [forward(x), forward(x.sin())]
    if other:
        print("FAULT", flush=True)
    return ys[other]


def faulty_rank(
    rank: int, size: int, folder: Path, store: str, apart: bool, *arguments: Any
) -> None:
    """What a process does; its log ends with a line FAULT, ERROR class: message, or DONE."""
    if apart:
        hosts_apart()
    enter_world(rank, size, store)
    try:
        steps_with_a_fault(rank, *arguments)
    except BaseException as error:
        print(f"ERROR {type(error).__name__}: {error}", flush=True)
        sys.stderr.flush()
        os._exit(1)
    print("DONE", flush=True)
    os._exit(0)


def steps_with_a_fault(
    rank: int, seed: int, fault: str, culprit: int, at: int, ddp: bool, seconds: float
) -> None:
    """Steps of a random model, where rank `culprit` goes wrong as it begins its call `at`."""
    choice = random.Random(seed)
    channels = [choice.choice((4, 4, 7)) for _ in range(5)]
    layers: list[nn.Module] = []
    for before, after in zip([3, *channels], channels, strict=False):
        layers += [nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.Tanh()]
    torch.manual_seed(seed)
    plain = convert_model(nn.Sequential(*layers))
    model: nn.Module = DistributedDataParallel(plain) if ddp else plain
    x = torch.randn(2, 3, 4, 4)
    model(x).square().mean().backward()  # loads the kernels
    dist.barrier()  # all have: from here on the deadline is short
    set_timeout(seconds)
    calls = 0

    def counted(layer: nn.Module, given: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == culprit and calls == at:
            print("FAULT", flush=True)
            if fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "exits":
                os._exit(0)
            if fault == "raises":
                raise ZeroDivisionError("a fault of this rank's own")
            if fault == "calls a layer twice":
                layer.forward(*given)

    for layer in plain:
        if isinstance(layer, SynchronizedBatchNorm2d):
            if rank == culprit and fault == "skips a layer" and at % 5 == calls:
                layer.forward = lambda x: x  # type: ignore[method-assign]
                print("FAULT", flush=True)
            if fault == "takes another branch" and at % 5 == calls:
                layer.forward = partial(twofold, layer.forward, culprit == rank)  # type: ignore[method-assign]
            calls += 1
            layer.register_forward_pre_hook(counted)
    calls = 0
    for _ in range(3):
        model(x).square().mean().backward()


# ------------------------------------------------------------------- worlds, and what they say


@dataclass
class World:
    """One run: what goes wrong in it, and its processes."""

    seed: int
    size: int
    fault: str
    culprit: int
    at: int
    ddp: bool
    apart: bool
    ranks: list[Any]
    folder: Path
    begin: float

    def lines(self, rank: int) -> list[str]:
        log = log_of(self.folder, rank)
        return log.read_text(errors="replace").splitlines() if log.exists() else []


def free_port() -> int:
    """Below the ports that the system gives to anybody who asks for one."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def begin(seed: int, folder: Path) -> World:
    choice = random.Random(seed)
    size, fault = choice.choice((2, 3, 4)), FAULTS[seed % len(FAULTS)]
    culprit, at = choice.randrange(size), choice.randrange(1, 15)
    ddp, apart = choice.random() < 0.3, choice.random() < 0.3
    folder = folder / str(seed)
    folder.mkdir()
    # the store of a rank dies with it, a file does not
    by_file = choice.random() < 0.5
    store = (folder / "store").as_uri() if by_file else f"tcp://127.0.0.1:{free_port()}"
    given = (apart, seed, fault, culprit, at, ddp, DEADLINE)
    ranks = start_world(faulty_rank, size, folder, store, *given)
    return World(seed, size, fault, culprit, at, ddp, apart, ranks, folder, time.monotonic())


def ended(world: World) -> bool:
    """Whether all processes have ended, but for one that was stopped for ever."""
    stopped = world.fault == "stops"
    waited = [p for rank, p in enumerate(world.ranks) if not (stopped and rank == world.culprit)]
    return all(process.exitcode is not None for process in waited)


def check(world: World) -> None:
    """Who was left alone says where; who is alone to blame fails by itself."""
    said = [world.lines(rank) for rank in range(world.size)]
    told = f"{world}\n{said}"
    unlike_sizes = any(process.exitcode == -signal.SIGABRT for process in world.ranks)
    for rank, (lines, process) in enumerate(zip(said, world.ranks, strict=True)):
        last = lines[-1] if lines else ""
        if world.fault == "does nothing wrong":
            assert last == "DONE", told
        elif rank == world.culprit and world.fault in ENDING:
            assert "FAULT" in lines, told
        elif process.exitcode == -signal.SIGABRT:  # gloo, where messages of unlike sizes meet
            assert world.apart, told
            assert world.fault in CALLS, told
        else:
            assert last.startswith("ERROR"), told
            kind = last.split()[1].rstrip(":")
            if kind == "RuntimeError":  # in a collective of DistributedDataParallel's own
                assert world.ddp, told
            elif kind == "ProtocolError":
                assert world.fault in (*CALLS, "takes another branch"), told
                named = last.count("(SynchronizedBatchNorm2d)")
                assert named >= (1 if unlike_sizes else world.size), told
            else:
                assert kind in ("CommTimeout", "CommAborted"), told
                assert "call " in last, told
                assert "(SynchronizedBatchNorm2d)" in last, told
    if world.fault == "takes another branch":
        kinds = [lines[-1].split()[1] for lines in said]
        assert kinds == ["ProtocolError:"] * world.size, told


@pytest.mark.slow
@needs_gloo
@pytest.mark.timeout(100 + 6 * RUNS)
def test_no_rank_waits_for_ever_or_goes_on_with_wrong_numbers(tmp_path: Path) -> None:
    waiting, running, done = list(range(RUNS)), [], 0
    try:
        while waiting or running:
            # the first one alone: it may have to compile the kernels
            while waiting and len(running) < (TOGETHER if done else 1):
                running.append(begin(waiting.pop(0), tmp_path))
            for world in list(running):
                if ended(world):
                    running.remove(world)
                    for process in world.ranks:
                        process.kill()
                    check(world)
                    done += 1
                else:
                    said = [world.lines(rank) for rank in range(world.size)]
                    assert time.monotonic() - world.begin < LIMIT, f"{world} hangs: {said}"
            time.sleep(0.01)
    finally:
        for world in running:
            for process in world.ranks:
                process.kill()
    assert done == RUNS
