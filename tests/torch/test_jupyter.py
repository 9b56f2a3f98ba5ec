"""Interrupting a cell of a notebook: the kernel is back at once, and the next cell is right.

Needs ipykernel; `dev.py soak` installs it.
"""

import os
import queue
import sys
from collections.abc import Iterator
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="needs ipykernel")

LONG = 60  # seconds; nobody may wait so long

MODEL = """
import threading, torch
from torch import nn
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d
stuck = threading.Event()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(3)
        self.wait = False

    def forward(self, x):
        if self.wait and threading.current_thread() is not threading.main_thread():
            print("waiting", flush=True)
            stuck.wait()
        return self.bn(x)

model = DataParallelWithCallback(Model(), replicas=2)
x = torch.randn(6, 3)
before = model(x)
model.module.wait = True
"""


@pytest.fixture
def kernel() -> Iterator[Any]:
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(env={**os.environ, "SYNCBN_TIMEOUT": "600"})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LONG)
    manager.client_of_test = client
    yield manager
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def heard(client: Any, message: str, until: str | None = None) -> str:
    """What a cell prints or raises, up to its end or to the text `until`."""
    said = ""
    while until is None or until not in said:
        try:
            reply = client.get_iopub_msg(timeout=LONG)
        except queue.Empty:
            raise AssertionError(f"the kernel hangs after {said!r}") from None
        if reply["parent_header"].get("msg_id") == message:
            content = reply["content"]
            said += content.get("text", "") + content.get("ename", "")
            if content.get("execution_state") == "idle":
                break
    return said


def test_an_interrupted_cell_leaves_the_kernel_usable(kernel: Any) -> None:
    client = kernel.client_of_test
    assert heard(client, client.execute(MODEL)) == ""
    cell = client.execute("model(x)")
    assert heard(client, cell, until="waiting") == "waiting\n"
    kernel.interrupt_kernel()
    assert heard(client, cell) == "KeyboardInterrupt"
    cell = client.execute("model.module.wait = False; print(torch.equal(model(x), before))")
    assert heard(client, cell) == "True\n"
