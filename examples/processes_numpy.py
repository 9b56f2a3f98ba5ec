"""The same as `mpi_numpy.py` in plain processes of one host: no framework, no MPI.

    python examples/processes_numpy.py

Needs the extra `examples`. The main process starts four, and gives each its rank and the id by
which they find each other. It ends with status 1 if one of them does.
"""

import multiprocessing
import sys

from mpi_numpy import compare

from syncbn_core.comm import LocalCommunicator

RANKS = 4


def in_process(rank: int, identifier: bytes) -> None:
    sys.exit(compare(LocalCommunicator(rank, RANKS, identifier)))


def main() -> int:
    identifier = LocalCommunicator.new_id()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=in_process, args=(rank, identifier), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
