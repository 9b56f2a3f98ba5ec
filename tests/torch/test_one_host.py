"""Groups whose ranks share a host: connections that outlive nothing and that no fork keeps open."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from world import (
    close,
    enter_world,
    hosts_apart,
    log_of,
    needs_gloo,
    on_ranks,
    raises,
    rows_of,
    start_world,
    whole_batch,
)

from syncbn_core.comm import local, run_in_threads
from syncbn_core.errors import CommAborted, CommError, ProtocolError, ShapeError
from syncbn_torch import DistributedCommunicator, SynchronizedBatchNorm2d, convert_model

pytestmark = pytest.mark.skipif(
    not local.host_name(), reason="this system has no local connections"
)
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@on_ranks(3)
def test_tensors_and_arrays_go_one_way_and_results_are_those_of_the_group(
    rank: int, size: int
) -> None:
    here = DistributedCommunicator()
    assert here.is_local is None
    ways = [here]
    here.all_gather(torch.ones(1))
    assert here.is_local
    hosts_apart()
    ways.append(DistributedCommunicator(dist.new_group()))
    for shape in ((), (0, 2), (2, 3)):
        for dtype in DTYPES:
            values = (torch.arange(6.0).resize_(shape) + rank).to(dtype).requires_grad_(False)
            rows = [way.all_gather(values) for way in ways]
            close(*rows, rtol=0, atol=0)
            if dtype is not torch.bool:
                close(*[way.all_reduce(values) for way in ways], rtol=0, atol=0)
    assert not ways[1].is_local
    own = torch.full((3,), float(rank))  # a tensor on one rank, an array on the others
    rows = here.all_gather(own if rank == 0 else own.numpy())
    assert rows.tolist() == [[other] * 3 for other in range(size)]


@on_ranks(2)
def test_layers_of_unlike_channels_are_told_with_both_names_on_both_ranks(
    rank: int, size: int
) -> None:
    """Over gloo this ends a process."""
    names, widths = ("first", "second"), (3, 5)
    model = convert_model(nn.ModuleDict(zip(names, map(nn.BatchNorm2d, widths), strict=True)))
    model["first"](torch.randn(2, 3, 4, 4))
    name, width = names[rank], widths[rank]
    call = lambda: model[name](torch.randn(2, width, 4, 4))  # noqa: E731
    raises(ProtocolError, "(forward of first (", "(forward of second (", call=call)
    layer = SynchronizedBatchNorm2d(width, process_group=dist.new_group())
    words = ("same number of channels", ": 8 numbers", ": 12 numbers")
    raises(ShapeError, *words, call=lambda: layer(torch.randn(2, width, 4, 4)))


@on_ranks(4)
def test_threads_with_a_group_each_and_groups_in_turn(rank: int, size: int) -> None:
    x, _ = whole_batch((8, 3, 4, 4))
    groups = [dist.new_group() for _ in range(2)]
    groups += [dist.new_subgroups(2)[0], None]
    mine = rows_of(rank, (0, 1, 4, 4, 8))
    pairs = x[:4] if rank < 2 else x[4:]
    layers = [SynchronizedBatchNorm2d(3, process_group=group).double() for group in groups]

    def many(layer: nn.Module, whole: Any) -> None:
        expected = nn.BatchNorm2d(3).double()(whole)
        lower = 0 if whole is x or rank < 2 else 4
        for _ in range(30):
            close(layer(x[mine]), expected[mine.start - lower : mine.stop - lower])

    run_in_threads([lambda layer=layer: many(layer, x) for layer in layers[:2]])
    for _ in range(3):
        for layer, group in zip(layers, groups, strict=True):
            whole = pairs if group is groups[2] else x
            lower = 0 if whole is x or rank < 2 else 4
            expected = nn.BatchNorm2d(3).double()(whole)
            close(layer(x[mine]), expected[mine.start - lower : mine.stop - lower])


@on_ranks(2)
def test_interrupting_one_rank_tells_the_other(rank: int, size: int) -> None:
    layer, x = SynchronizedBatchNorm2d(3), torch.randn(2, 3, 4, 4)
    layer(x)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["interrupted"])
        # what rank 1 had sent already completes a call
        words = ("lost rank 1", "forward of SynchronizedBatchNorm2d")
        raises(CommAborted, *words, call=lambda: (layer(x), layer(x)))
    else:
        main = threading.main_thread().ident

        def interrupt() -> None:
            while sys._current_frames()[main].f_code.co_filename != local.__file__:  # type: ignore[index]
                pass
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        raises(KeyboardInterrupt, call=lambda: layer(x))
        raises(CommError, "failed before", call=lambda: layer(x))
        store.set("interrupted", "")


def forked(rank: int, size: int, folder: Path) -> None:
    """Rank 1 forks a process that outlives it, as a worker of a DataLoader may, and is killed."""
    enter_world(rank, size, (folder / "store").as_uri())
    layer, x = SynchronizedBatchNorm2d(3), torch.randn(2, 3, 4, 4)
    layer(x)
    if rank == 1:
        ended, alive = os.pipe()
        child = os.fork()
        if child == 0:
            raises(CommError, "got a fork of it", call=lambda: layer(x))
            os.write(alive, b"!")
            signal.pause()
        os.read(ended, 1)
        (folder / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    raises(CommAborted, "lost rank 1", "forward of SynchronizedBatchNorm2d", call=lambda: layer(x))
    print("told", flush=True)
    os._exit(0)


@needs_gloo
def test_a_killed_rank_is_told_although_a_process_that_it_has_forked_lives(tmp_path: Path) -> None:
    ranks = start_world(forked, 3, tmp_path)
    for rank in ranks:
        rank.join(100)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    said = [log_of(tmp_path, rank).read_text() for rank in range(3)]
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL, 0], said
    assert all(text.endswith("told\n") for text in said[::2]), said


@on_ranks(2)
def test_ranks_may_reach_a_group_by_different_communicators(rank: int, size: int) -> None:
    x, _ = whole_batch((4, 3, 4, 4))
    group = DistributedCommunicator() if rank else None
    layer = SynchronizedBatchNorm2d(3, process_group=group).double()
    mine = slice(2 * rank, 2 * rank + 2)
    close(layer(x[mine]), nn.BatchNorm2d(3).double()(x)[mine])


@on_ranks(2)
def test_two_threads_of_a_rank_are_right_or_every_rank_is_told(rank: int, size: int) -> None:
    whole, _ = whole_batch((4, 3, 4, 4))
    wholes = whole, 5 * whole + 9
    mine = slice(2 * rank, 2 * rank + 2)
    wanted = [nn.BatchNorm2d(3).double()(x)[mine].detach() for x in wholes]
    told: list[Exception] = []
    wrong: list[BaseException] = []
    for _ in range(15):
        kinds = {"one": nn.BatchNorm2d(3), "other": nn.BatchNorm2d(3)}
        model = convert_model(nn.ModuleDict(kinds)).double()
        layers = [*model.values()]

        def call(n: int, layers: Any = layers) -> None:
            try:
                with torch.no_grad():
                    close(layers[n](wholes[n][mine]), wanted[n])
            except ProtocolError as error:
                told.append(error)
            except BaseException as error:
                wrong.append(error)

        for _ in range(2):  # the first call of each layer, and a later one
            threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
                if rank == 0:  # one after the other
                    thread.join()
            for thread in threads:
                thread.join()
        assert not wrong, wrong
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, len(told))
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("way", ["refused", "off"])
def test_without_local_connections_of_one_rank_the_group_sends(way: str, tmp_path: Path) -> None:
    ranks = start_world(without_connections, 2, tmp_path, way)
    for rank in ranks:
        rank.join(100)
    said = [log_of(tmp_path, rank).read_text() for rank in range(2)]
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    reason = "rank 1 of 2 could not connect with the others in call 1 "
    assert (reason in said[0] and "Operation not permitted" in said[0]) == (way == "refused"), said
    assert said[1] == "", said


def without_connections(rank: int, size: int, folder: Path, way: str) -> None:
    logging.getLogger("syncbn").setLevel(logging.WARNING)
    local.SOON = 0.5
    enter_world(rank, size, (folder / "store").as_uri())
    if rank == 1 and way == "off":
        os.environ["SYNCBN_LOCAL"] = "off"
    elif rank == 1:  # as a sandbox does

        class Refusing(socket.socket):
            def __init__(self, family: int = -1, *arguments: Any, **named: Any) -> None:
                if family == socket.AF_UNIX:
                    raise PermissionError(1, "Operation not permitted")
                super().__init__(family, *arguments, **named)

        socket.socket = Refusing  # type: ignore[misc]
    x, _ = whole_batch((4, 3, 4, 4))
    layer = SynchronizedBatchNorm2d(3).double()
    close(layer(x[2 * rank :][:2]), nn.BatchNorm2d(3).double()(x)[2 * rank :][:2])
    assert not DistributedCommunicator().is_local
    dist.barrier()
    dist.destroy_process_group()
