"""`torchrun --max-restarts`: after a rank has died, training goes on from the checkpoint.

Run by torchrun, this file is the training program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import enter_world, needs_gloo, start_world

from syncbn_torch import convert_model

STEPS = 6
FATAL = 3  # the step in which rank 1 dies


def train(folder: Path, dies: bool) -> int:
    """Train over the default group with a checkpoint after every step; returns the first step.

    Goes on from the checkpoint in `folder`, if there is one. `dies`: this rank kills itself in the
    middle of a forward. At the end each rank saves its state.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)
    model = convert_model(nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    wrapped = DistributedDataParallel(model)
    for step in range(first, STEPS):
        if dies and step == FATAL:
            model[4].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 3, 6, 6, generator=generator)
        dy = torch.randn(7, 5, 4, 4, generator=generator)
        mine = slice(0, step) if rank == 0 else slice(step, 7)  # the first one is empty
        optimizer.zero_grad()
        (wrapped(x[mine]) * dy[mine]).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        if rank == 0:
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(checkpoint)
    torch.save(state, folder / f"rank-{rank}.pt")
    return first


def uninterrupted(rank: int, size: int, folder: Path) -> None:
    enter_world(rank, size, (folder / "store").as_uri())
    train(folder, dies=False)
    dist.destroy_process_group()


def restarted() -> None:
    """What torchrun starts."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder, life = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first = train(folder, dies=life == 0 and dist.get_rank() == 1)
    (folder / f"life-{life}-of-rank-{dist.get_rank()}").write_text(str(first))
    dist.destroy_process_group()


@pytest.mark.slow
@needs_gloo
@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL on Windows")
@pytest.mark.timeout(240)  # five processes import torch
def test_training_that_torchrun_restarts_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    one, two = tmp_path / "uninterrupted", tmp_path / "restarted"
    one.mkdir()
    two.mkdir()
    ranks = start_world(uninterrupted, 2, one)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", __file__, str(two)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # else torchrun keeps its store, in which gloo finds addresses of processes that have ended
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()
    for rank in ranks:
        rank.join()
    ended = {path.name: path.read_text() for path in two.glob("life-*")}
    assert ended == {f"life-1-of-rank-{rank}": str(FATAL) for rank in (0, 1)}
    expected, *others = (torch.load(path / f"rank-{r}.pt") for path in (one, two) for r in (0, 1))
    for state in others:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


if __name__ == "__main__":
    restarted()
