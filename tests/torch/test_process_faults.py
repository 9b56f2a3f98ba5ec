"""A process that dies, stops, raises, skips a layer, calls one twice or takes another branch into
its loss: nobody waits for ever, and nobody goes on with wrong numbers.

Random models, ranks and moments, in real processes over gloo; `python3 dev.py soak` makes hundreds
of them.
"""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

FAULTS = ("kill", "stop", "exit", "raise", "skip", "again", "branch", "none")
RUNS = int(os.environ.get("SYNCBN_FAULT_RUNS", "16"))
TOGETHER = 6  # worlds at a time: they wait more than they work
DEADLINE = 5.0  # seconds, of the process groups
LIMIT = 100.0  # seconds that a world may take on a busy machine


@dataclass
class World:
    """One run: what goes wrong in it, and its processes."""

    seed: int
    size: int
    fault: str
    culprit: int
    at: int
    check: bool
    ddp: bool
    members: list[Any]
    folder: Path
    begin: float

    def lines(self, rank: int) -> list[str]:
        log = self.folder / f"{rank}.log"
        return log.read_text(errors="replace").splitlines() if log.exists() else []


def free_port() -> int:
    """Below the ports that the system gives to anybody who asks for one."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def begin(seed: int, folder: Path, start_world: Callable[..., list[Any]]) -> World:
    choice = random.Random(seed)
    size, fault = choice.choice((2, 3, 4)), FAULTS[seed % len(FAULTS)]
    culprit, at = choice.randrange(size), choice.randrange(1, 15)
    check, ddp = choice.random() < 0.5, choice.random() < 0.3
    folder = folder / str(seed)
    folder.mkdir()
    # the store of a rank dies with it, a file does not
    by_file = choice.random() < 0.5
    store = (folder / "store").as_uri() if by_file else f"tcp://127.0.0.1:{free_port()}"
    given = (seed, fault, culprit, at, ddp, DEADLINE)
    members = start_world(folder, "faulty", size, store, check, *given)
    return World(seed, size, fault, culprit, at, check, ddp, members, folder, time.monotonic())


def ended(world: World) -> bool:
    """Whether all processes have ended, but for one that was stopped for ever."""
    stopped = world.fault == "stop"
    waited = [m for rank, m in enumerate(world.members) if not (stopped and rank == world.culprit)]
    return all(member.exitcode is not None for member in waited)


def check(world: World) -> None:
    """Who was left alone says where; who is alone to blame fails by itself."""
    said = [world.lines(rank) for rank in range(world.size)]
    told = f"{world}\n{said}"
    for rank, (lines, member) in enumerate(zip(said, world.members, strict=True)):
        last = lines[-1] if lines else ""
        if world.fault == "none":
            assert last == "DONE", told
        elif rank == world.culprit and world.fault in ("kill", "stop", "exit", "raise"):
            assert "FAULT" in lines, told
        elif member.exitcode == -signal.SIGABRT:  # gloo, where messages of unlike sizes meet
            assert world.fault in ("skip", "again"), told
            assert not world.check or world.ddp, told
        else:
            assert last.startswith("ERROR"), told
            kind = last.split()[1].rstrip(":")
            if kind == "RuntimeError":  # in a collective of DistributedDataParallel's own
                assert world.ddp, told
            elif kind == "ProtocolError":
                assert world.fault in ("skip", "again", "branch"), told
                named = last.count("(SynchronizedBatchNorm2d)")
                assert named >= (world.size if world.check else 1), told
            else:
                assert kind in ("CommTimeout", "CommAborted"), told
                assert "call " in last, told
                assert "(SynchronizedBatchNorm2d)" in last, told
    if world.fault == "branch" or (world.fault == "skip" and world.check and not world.ddp):
        kinds = [lines[-1].split()[1] for lines in said]
        assert kinds == ["ProtocolError:"] * world.size, told


@pytest.mark.timeout(100 + 6 * RUNS)
def test_nobody_waits_for_ever(tmp_path: Path, start_world: Callable[..., list[Any]]) -> None:
    waiting, running, done = list(range(RUNS)), [], 0
    try:
        while waiting or running:
            # the first one alone: it may have to compile the kernels
            while waiting and len(running) < (TOGETHER if done else 1):
                running.append(begin(waiting.pop(0), tmp_path, start_world))
            for world in list(running):
                if ended(world):
                    running.remove(world)
                    for member in world.members:
                        member.kill()
                    check(world)
                    done += 1
                else:
                    said = [world.lines(rank) for rank in range(world.size)]
                    assert time.monotonic() - world.begin < LIMIT, f"{world} hangs: {said}"
            time.sleep(0.01)
    finally:
        for world in running:
            for member in world.members:
                member.kill()
    assert done == RUNS
