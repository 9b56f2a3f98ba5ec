"""Files of compiled CUDA kernels, which many processes read and make at the same time.

`load_or_claim` lets one process make a file while the others wait for it. Who makes one holds a
lock of the operating system, which ends with its process, however that ends. Where a folder has no
locks (some network folders) every process makes the file itself.

What is in these files runs in the process. So a file is read only if it and its folder belong to
the user or to root, and nobody else can change them. Files and folders that are made here are
private; those of root can be read by everybody, for images of containers and shared caches.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

__all__ = [
    "load_or_claim",
    "on_rank",
    "read_checked",
    "read_own",
    "write_atomically",
    "write_checked",
]

WAIT = 60.0  # seconds; then a process makes the file itself: the other one may have been stopped
POLL = 0.02
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # not on Windows
LOCK_FILE = "compiling.lock"  # holds nothing; each name locks one byte of it

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # torchrun, MPI, Slurm

T = TypeVar("T")

_warned: list[Path] = []  # folders whose files are not loaded; the first is named, once


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
) -> tuple[T | None, Callable[[], None]]:
    """What `load()` finds, or None if this process is to make it; and a function to call then.

    If another process is making it, wait until `load()` finds it, or that process ends or gives up,
    for at most `WAIT` seconds. `load` returns None for a file that is
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
    _make_folder(folder)
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | _NO_LINK, _mode(0o600))


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
    """What `write_checked` has written; None if the file is missing, damaged or unreadable.

    None too, and one warning, if another user could have written it.
    """
    with suppress(OSError, ValueError):
        checksum, content = read_own(path).split(b"\n", 1)
        if checksum == _checksum(content):
            return content
    return None


def read_own(path: Path) -> bytes:
    """The content of a file; empty, with one warning, if another user could have written it."""
    with path.open("rb") as file:
        if _others_can_change(path.parent.stat()):
            _warn_of_others(path.parent, "this folder")
        elif _others_can_change(os.fstat(file.fileno())):
            _warn_of_others(path.parent, path.name)
        else:
            return file.read()
    return b""


def _others_can_change(status: os.stat_result) -> bool:
    """Whether a user beside this one and root can change a file, or the files of a folder."""
    if sys.platform == "win32":  # where a user's folders are closed to others
        return False
    mode = status.st_mode
    # with the sticky bit, as in /tmp, only the owner of a file can replace it
    sticky = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    written_by_others = mode & 0o022 and not sticky
    return bool(written_by_others) or status.st_uid not in (0, os.geteuid())


def _warn_of_others(folder: Path, what: str) -> None:
    if _warned:
        return
    _warned.append(folder)
    warnings.warn(
        f"syncbn does not load compiled kernels from {folder}{on_rank()}: other users can change "
        f"{what}, and kernels run with your rights; delete the folder, or set SYNCBN_CACHE_DIR to "
        "a folder that only you can write",
        RuntimeWarning,
        stacklevel=2,
    )


def _mode(private: int) -> int:
    """The mode of a new file or folder: everybody may read what root has made."""
    if sys.platform != "win32" and os.geteuid() == 0:
        return private | (private & 0o500) >> 3 | (private & 0o500) >> 6
    return private


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(_mode(0o700), exist_ok=True)


def write_checked(path: Path, content: bytes) -> None:
    """Write a file, with a checksum, by `write_atomically`."""
    write_atomically(path, _checksum(content) + b"\n" + content)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that other processes may be reading or writing. Raises `OSError`."""
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:16]}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, _mode(0o600)), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # it may have its new name already
            temporary.unlink()
        raise
