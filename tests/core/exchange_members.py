"""Members that merge the same moments over some engine, for `test_exchange.py`.

Each writes the bits of what it got to a file SIZE.RANK. "alone" is one process without a group.

    python exchange_members.py alone FOLDER
    python exchange_members.py threads FOLDER
    mpirun -n 9 python exchange_members.py mpi FOLDER
    python exchange_members.py gloo FOLDER RANK
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from syncbn_core.backends.reference import OPERATIONS as REFERENCE
from syncbn_core.comm import Communicator, local, run_in_threads, thread_group
from syncbn_core.exchange import Exchange
from syncbn_core.moments import Moments, merged_rows

CHANNELS = (1, 2, 7, 64, 1000)
SIZES = (3, 9)


def part_of(rank: int, channels: int) -> Moments:
    """Uneven parts: an empty one, one of a single value, means that differ by much."""
    count = (3, 0, 1000, 1, 77, 5, 12345, 2, 31)[rank]
    if count == 0:
        return Moments.of(0, *np.zeros((2, channels)))
    rng = np.random.default_rng(100 * rank + channels)
    spread = 0.0 if count == 1 else 1.0
    mean = rng.normal(3, 10.0 ** rng.integers(-3, 6, channels))
    return Moments.of(count, mean, spread * rng.uniform(0.1, 3, channels) * count)


def bits_of(totals: list[Any]) -> bytes:
    return b"".join(
        np.float64(total.count).tobytes() + total.mean.tobytes() + total.m2.tobytes()
        for total in totals
    )


def take_part(communicator: Communicator) -> bytes:
    """The bits of the totals of all sizes."""
    exchange = Exchange(communicator, lambda: "bn", "float32")
    sums = np.arange(6.0).reshape(2, 3) + communicator.rank  # small integers: exact in any order
    size = communicator.size
    total = exchange.sums(sums, exchange.begin_sums(sums, 7))
    np.testing.assert_array_equal(total, (sums - communicator.rank + (size - 1) / 2) * size)
    parts = [part_of(communicator.rank, channels) for channels in CHANNELS]
    messages = (exchange.begin(part.num_features) for part in parts)
    totals = [exchange.moments(*each)[0] for each in zip(parts, messages, strict=True)]
    return bits_of([Moments.of(total.count, *merged_rows(total.rows)[1:]) for total in totals])


def alone(folder: Path) -> None:
    for size in SIZES:
        of_all = [[part_of(rank, channels) for rank in range(size)] for channels in CHANNELS]
        (folder / f"{size}.0").write_bytes(bits_of([REFERENCE.merge(parts) for parts in of_all]))


def threads(folder: Path) -> None:
    for size in SIZES:
        group = thread_group(size, timeout=60)
        members = [lambda own=own: take_part(own) for own in group]
        for rank, bits in enumerate(run_in_threads(members, abort=group[0].abort)):
            (folder / f"{size}.{rank}").write_bytes(bits)


def mpi(folder: Path) -> None:
    from mpi4py import MPI

    from syncbn_core.comm import MPICommunicator

    world = MPI.COMM_WORLD
    for size in SIZES:
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            bits = take_part(MPICommunicator(comm, timeout=60))
            (folder / f"{size}.{world.rank}").write_bytes(bits)


def gloo(folder: Path) -> None:
    import torch.distributed as dist

    from syncbn_torch import DistributedCommunicator

    rank, size = int(sys.argv[3]), SIZES[0]
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    bits = take_part(DistributedCommunicator())
    local.host_name = lambda: str(rank)  # now by gloo alone
    assert take_part(DistributedCommunicator(dist.new_group())) == bits
    (folder / f"{size}.{rank}").write_bytes(bits)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    engines = {"alone": alone, "threads": threads, "mpi": mpi, "gloo": gloo}
    engines[sys.argv[1]](Path(sys.argv[2]))
