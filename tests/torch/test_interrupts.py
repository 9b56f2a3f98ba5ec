"""Ctrl-C in a model of replicas: the caller is back at once, and nothing is torn."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncbn_core.errors import CommAborted
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d

LONG = 60.0  # seconds; nobody may wait so long
ENVIRONMENT = {**os.environ, "SYNCBN_TIMEOUT": "600", "PYTHONPATH": os.pathsep.join(sys.path)}
STORM = Path(__file__).with_name("interrupted.py")


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_storms_of_interrupts_tear_nothing_and_leave_nobody_waiting() -> None:
    """`dev.py soak` sends thousands."""
    assert "100 interrupts" in run(str(STORM), "100")


@pytest.mark.parametrize("training", [True, False])
def test_a_replica_that_is_left_to_itself_writes_nothing_and_ends_at_its_next_layer(
    training: bool,
) -> None:
    outcome: list[Any] = []
    passed, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SynchronizedBatchNorm1d(3), SynchronizedBatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            if threading.current_thread().name == "replica 0":
                # In eval mode nobody waits in the first layer: the replica might not be past it.
                assert passed.wait(LONG)
                os.kill(os.getpid(), signal.SIGINT)  # arrives in the main thread
                return y
            passed.set()
            go_on.wait(LONG)
            try:
                outcome.append(self.second(y))
            except BaseException as error:
                outcome.append(error)
                raise
            finally:
                ended.set()
            return y

    model = DataParallelWithCallback(Model(), replicas=2).train(training)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(6, 3))
    assert not ended.is_set(), "the caller has waited for the replica"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    go_on.set()
    assert ended.wait(LONG)
    assert isinstance(outcome[0], CommAborted)
    assert "second" in str(outcome[0])
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


EXIT = """
import os, signal, sys, threading
import torch
from torch import nn
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4)

    def forward(self, x):
        y = self.bn(x)
        if threading.current_thread().name == "replica 1":
            a = torch.randn(1500, 1500)
            a = (a @ a)[:99, :99]  # meanwhile the other ends, and the caller waits for this one
            signal.raise_signal(signal.SIGINT)  # does not wake the thread that waits
            while True:
                a = torch.tanh(a @ a)
        return y

try:
    DataParallelWithCallback(Model(), replicas=2)(torch.randn(6, 4))
except KeyboardInterrupt:
    print("back")
"""


@pytest.mark.slow
def test_the_exit_of_the_interpreter_does_not_wait_for_a_replica_that_computes() -> None:
    assert run("-c", EXIT) == "back\n"
