"""Replicas on several GPUs and streams: each work comes after what it reads, by stand-ins.

A stand-in for a stream knows what has been put on it, and on the streams that it waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncbn_torch import streams


class Stream:
    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)
        self.done: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def put(self, work: str, *after: str) -> None:
        assert self.done.issuperset(after), f"{work} may run before {set(after) - self.done}"
        self.done.add(work)


class Result(SimpleNamespace):
    used: Any = None
    is_cuda = True

    def record_stream(self, stream: Stream) -> None:
        self.used = stream


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Stream]:
    """The current stream of each of three GPUs."""
    current = {torch.device("cuda", n): Stream(n) for n in range(3)}

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before = current[stream.device]
        current[stream.device] = stream
        yield
        current[stream.device] = before

    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    return current


def forward(of: list[Any], current: dict[torch.device, Stream]) -> list[Result]:
    """Work of the master on the streams of its replicas, of which each has computed its x."""
    before, ys = dict(current), [Result() for _ in of]
    for n, stream in enumerate(of):
        stream.put(f"x {n}")
    with streams.of_replicas(of) as record:
        for n, stream in enumerate(of):
            current[stream.device].put(f"y {n}", f"x {n}")
        record(ys)  # type: ignore[arg-type]
    assert current == before
    for n, stream in enumerate(of):
        stream.put(f"next layer {n}", f"y {n}")
    return ys


def test_the_master_works_on_the_stream_of_each_gpu(current: dict[torch.device, Stream]) -> None:
    of = [Stream(0), Stream(1), Stream(2)]
    ys = forward(of, current)
    assert [y.used for y in ys] == [None] * 3
    assert all("y" not in "".join(stream.done) for stream in current.values())


def test_streams_of_one_gpu_wait_for_each_other(current: dict[torch.device, Stream]) -> None:
    of = [Stream(1), Stream(1), Stream(0)]
    ys = forward(of, current)
    assert [y.used for y in ys] == [None, of[1], None], "allocated on the first, used on another"


@pytest.mark.parametrize("devices", [(0, 1, 2), (1, 1, 0), (0, 0)])
def test_backward_comes_after_the_stream_of_its_node(
    devices: tuple[int, ...], current: dict[torch.device, Stream]
) -> None:
    """The engine has made the stream of the first output wait for all dy, as torch's notes say."""
    of = [Stream(number) for number in devices]
    node = current[of[0].device] = of[0]
    for n in range(len(of)):
        node.put(f"dy {n}")
    xs, dys = ([Result(device=stream.device) for stream in of] for _ in range(2))
    with streams.of_node(xs, [*dys[:-1], None]):  # type: ignore[list-item,arg-type]
        for n, stream in enumerate(of):
            current[stream.device].put(f"dx {n}", f"dy {n}")
    node.put("earlier layer", *(f"dx {n}" for n in range(len(of))))
    used = [current[stream.device] for stream in of]
    assert [x.used for x in xs] == used, "allocated on the stream of its replica"
    assert [dy.used for dy in dys] == [*used[:-1], None]
