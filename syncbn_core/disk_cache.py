"""Files of compiled CUDA kernels, which many processes may read and write at the same time."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

__all__ = ["on_rank", "read_checked", "write_checked"]

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # torchrun, MPI, Slurm


def on_rank() -> str:
    """Such as " on rank 3", for warnings of one process among many; "" outside of a launcher."""
    for name in _RANKS:
        if os.environ.get(name, "").isdigit():
            return f" on rank {os.environ[name]}"
    return ""


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` has written; None if the file is missing, damaged or unreadable."""
    with suppress(OSError, ValueError):
        checksum, content = path.read_bytes().split(b"\n", 1)
        if checksum == _checksum(content):
            return content
    return None


def write_checked(path: Path, content: bytes) -> None:
    """Write a file, with a checksum, under its name only when it is whole. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:16]}.tmp")
    try:
        temporary.write_bytes(_checksum(content) + b"\n" + content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # it may have its new name already
            temporary.unlink()
        raise


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
