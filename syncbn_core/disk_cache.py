"""Files of compiled kernels, which many processes read and make at the same time.

`load_or_claim` lets one process make a file while the others wait for it. Who makes one holds a
lock of the operating system, which ends with its process, however that ends. Where a folder has no
locks (some network folders) every process makes the file itself.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

__all__ = ["load_or_claim", "on_rank", "read_checked", "write_atomically", "write_checked"]

WAIT = 60.0  # seconds; then a process makes the file itself: the other one may have been stopped
POLL = 0.02
LOCK_FILE = "compiling.lock"  # holds nothing; each name locks one byte of it

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # torchrun, MPI, Slurm

T = TypeVar("T")


def on_rank() -> str:
    """Such as " on rank 3", for warnings of one process among many; "" outside of a launcher."""
    for name in _RANKS:
        if os.environ.get(name, "").isdigit():
            return f" on rank {os.environ[name]}"
    return ""


def load_or_claim(
    folder: Path | None,
    name: str,
    load: Callable[[], T | None],
    waiting: Callable[[], None] = lambda: None,
) -> tuple[T | None, Callable[[], None]]:
    """What `load()` finds, or None if this process is to make it; and a function to call then.

    If another process is making it, wait until `load()` finds it, or that process ends or gives up,
    for at most `WAIT` seconds; `waiting()` is called first. `load` returns None for a file that is
    missing or damaged. `folder`: of the lock; None for no lock. Never raises because of the disk.

    Locks are between processes: of one process, only one thread may ask for a name at a time.
    """
    found = load()
    if found is not None or folder is None:
        return found, _nothing
    place = zlib.crc32(name.encode()) >> 1
    deadline = None
    while True:
        try:
            file = _lock_file(folder)
            locked = _try_lock(file, place)
        except OSError:  # no such folder, or no locks
            return None, _nothing
        found = load()  # even with the lock: it may have been made in between
        if locked and found is None:
            return None, partial(_release, file, place)
        if locked:
            _release(file, place)
        if found is not None:
            return found, _nothing
        if deadline is None:
            deadline = time.monotonic() + WAIT
            waiting()
        if time.monotonic() > deadline:
            return None, _nothing
        time.sleep(POLL)


def _nothing() -> None:
    pass


def _release(file: int, place: int) -> None:
    with suppress(OSError):
        _unlock(file, place)


@cache
def _lock_file(folder: Path) -> int:
    """A file descriptor, which stays open: to close it would release all locks of the process."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)


if sys.platform == "win32":
    import msvcrt

    _seeking = threading.Lock()

    def _try_lock(file: int, place: int) -> bool:
        with _seeking:
            os.lseek(file, place, os.SEEK_SET)
            try:
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            except PermissionError:
                return False
            return True

    def _unlock(file: int, place: int) -> None:
        with _seeking:
            os.lseek(file, place, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    # `lockf`, not `flock`: a forked child would keep the lock of `flock` when its parent dies

    def _try_lock(file: int, place: int) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(file: int, place: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` has written; None if the file is missing, damaged or unreadable."""
    with suppress(OSError, ValueError):
        checksum, content = path.read_bytes().split(b"\n", 1)
        if checksum == _checksum(content):
            return content
    return None


def write_checked(path: Path, content: bytes) -> None:
    """Write a file, with a checksum, by `write_atomically`."""
    write_atomically(path, _checksum(content) + b"\n" + content)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that other processes may be reading or writing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not by `tempfile`, whose files other users can't read
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:16]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # it may have its new name already
            temporary.unlink()
        raise
