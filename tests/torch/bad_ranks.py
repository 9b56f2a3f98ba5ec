"""What ranks do in test_doctor.py: new processes import it by its name."""

import os
import time


def one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(1000)


def one_raises(rank: int) -> None:
    if rank == 1:
        raise OSError("no network")


def one_hangs(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)
