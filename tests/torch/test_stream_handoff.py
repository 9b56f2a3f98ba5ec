"""Copies between GPUs wait for the stream that writes.

A CPU tensor that says it is on a GPU stands for a tensor there.
"""

import contextlib

import numpy as np
import pytest
import torch

from syncbn_torch.autograd.stream_handoff import StreamHandoff

log: list[str] = []


class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]

    def record_stream(self, stream):  # type: ignore[override,no-untyped-def]
        log.append(f"used on {stream}")

    def to(self, device):  # type: ignore[override,no-untyped-def]
        log.append(f"copy to {device}")
        return "copy"


@pytest.fixture
def streams(monkeypatch):
    log.clear()
    names = {torch.device("cuda", 1): "s1"}

    @contextlib.contextmanager
    def stream(name):
        log.append(f"on {name}")
        yield
        log.append(f"off {name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: names[device])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return names


def test_a_copy_runs_on_the_stream_that_wrote(streams) -> None:
    tensor = torch.Tensor._make_subclass(OnGpu, torch.ones(2))
    handoff = StreamHandoff(tensor)
    streams.clear()  # another thread has other current streams
    assert handoff.on(torch.device("cuda", 0)) == "copy"
    assert log == ["on s1", "copy to cuda:0", "off s1"]


def test_another_stream_of_the_device_waits(streams) -> None:
    class Stream(str):
        def wait_stream(self, other) -> None:  # type: ignore[no-untyped-def]
            log.append(f"{self} waits for {other}")

    tensor = torch.Tensor._make_subclass(OnGpu, torch.ones(2))
    handoff = StreamHandoff(tensor)
    streams[torch.device("cuda", 1)] = Stream("s2")
    assert handoff.on(torch.device("cuda", 1)) is tensor
    assert log == ["s2 waits for s1", "used on s2"]


def test_nothing_is_copied_on_one_device_or_from_the_host(streams) -> None:
    tensor, array, host = (
        torch.Tensor._make_subclass(OnGpu, torch.ones(2)),
        np.ones(2),
        torch.ones(2),
    )
    assert StreamHandoff(tensor).on(torch.device("cuda", 1)) is tensor
    assert StreamHandoff(array).on(torch.device("cuda", 0)) is array
    assert StreamHandoff(host).on(torch.device("cuda", 0)) is host
    assert log == []
