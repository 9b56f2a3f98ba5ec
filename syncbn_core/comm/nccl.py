"""`NCCLCommunicator`: a group of processes with one GPU each, for CuPy arrays, over NCCL.

    identifier = NCCLCommunicator.new_id()  # on rank 0, which sends it to the others
    communicator = NCCLCommunicator(rank, size, identifier)  # on the current device
    total = communicator.all_reduce(cupy.ones(3))

Calls run on the current stream; the host does not wait for them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from syncbn_core.arrays import arrays_of, of_cupy
from syncbn_core.comm.process_group import ProcessCommunicator
from syncbn_core.comm.protocol import CollectiveCall
from syncbn_core.comm.timeouts import PROCESSES, check_timeout, seconds_of
from syncbn_core.errors import (
    ArgumentError,
    BackendError,
    CommAborted,
    CommError,
    CommTimeout,
    DTypeError,
)

Array = Any

POLL_INTERVAL = 1e-3  # seconds between two queries of the device


class NCCLCommunicator(ProcessCommunicator):
    """A rank of a group of GPUs, on the current device. All ranks must make one at the same time.

    Args:
        rank: this process's number, 0 to `size - 1`.
        size: the number of processes in the group.
        identifier: the result of `new_id` (or of CuPy's `get_unique_id`) on rank 0. Send it to the
            other ranks yourself, for example by `bcast` of mpi4py.
        timeout: seconds to wait for the other ranks, here and in `synchronize`; None for
            `syncbn_core.comm.get_default_timeout` (300 unless set).

    Takes CuPy arrays on this device, with a dtype that NCCL knows, else `DTypeError`. NumPy arrays
    are copied to the device and back, so the host waits for the result.

    The constructor raises `BackendError` without CuPy or NCCL, `ArgumentError` for a wrong rank or
    timeout, `CommTimeout` if another rank does not make its communicator in time, and `CommError`
    if NCCL fails.

    Calls don't wait, so a dead rank is noticed only when you wait for the device. Use `synchronize`
    for that, because it has a timeout.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        identifier: Any,
        *,
        timeout: float | None = None,
    ) -> None:
        if timeout is not None:
            check_timeout(timeout)
        if not 0 <= rank < size:
            raise ArgumentError(f"expected a rank from 0 to size - 1, got rank {rank} of {size}")
        self._nccl = _NCCLTransport(rank, size, identifier, timeout)
        super().__init__(self._nccl)

    @staticmethod
    def new_id() -> bytes:
        """A new id of 128 bytes, with which the ranks of one group find each other.

        Raises `BackendError` without CuPy or NCCL.
        """
        made = _import_nccl().get_unique_id()
        # CuPy before version 14 gives a tuple of C's `char`, which may be negative
        return made if isinstance(made, bytes) else bytes(byte % 256 for byte in made)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the device has finished all calls so far.

        `timeout`: seconds; None for the timeout of the group. Raises `CommTimeout` when they have
        passed, `CommAborted` if NCCL reports an error, `ProtocolError` if ranks have added up
        arrays of different calls. After an error the group can't be used any more.
        """
        try:
            self._nccl.wait(timeout)
        except CommError as error:
            self._failure = str(error)
            raise
        self.check_alarm()


class _NCCLTransport:
    on_device = True

    def __init__(self, rank: int, size: int, identifier: Any, timeout: float | None) -> None:
        self._library = _import_nccl()
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._last: tuple[Any, CollectiveCall] | None = None
        self._comm = self._connected(identifier)

    def _connected(self, identifier: Any) -> Any:
        """NCCL's communicator. NCCL waits for all ranks without a timeout, so a thread makes it."""
        import cupy

        if isinstance(identifier, bytes) and int(cupy.__version__.partition(".")[0]) < 14:
            identifier = tuple((byte + 128) % 256 - 128 for byte in identifier)
        device = cupy.cuda.Device()
        results: list[Any] = []

        def connect() -> None:
            try:
                with device:
                    made = self._library.NcclCommunicator(self.size, identifier, self.rank)
                results.append(made)
            except Exception as error:  # raised below, in the calling thread
                results.append(error)

        thread = threading.Thread(target=connect, name="NCCL", daemon=True)
        thread.start()
        seconds = seconds_of(self._timeout, PROCESSES)
        thread.join(seconds)
        if not results:
            raise CommTimeout(
                f"rank {self.rank} of {self.size} waited {seconds:g} s for all ranks to make their "
                "NCCLCommunicator; look at the others for the first error"
            )
        if isinstance(results[0], Exception):
            raise CommError(f"expected NCCL to make a group, got: {results[0]}") from results[0]
        return results[0]

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        import cupy

        own = cupy.ascontiguousarray(cupy.asarray(values))
        rows = cupy.empty((self.size, *own.shape), own.dtype)
        self.gather_in_place(rows, own, call)
        return self._like(rows, values)

    def gather_in_place(self, rows: Array, row: Array, call: CollectiveCall) -> None:
        arguments = row.data.ptr, rows.data.ptr, row.size, self._code(row, call)
        self._call(self._comm.allGather, call, *arguments)

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        import cupy

        own = cupy.ascontiguousarray(cupy.asarray(values))
        code, operation = self._code(own, call), self._library.NCCL_SUM
        arguments = (own.data.ptr, own.data.ptr, own.size, code, operation)
        self._call(self._comm.allReduce, call, *arguments)
        return self._like(own, values)

    def _code(self, values: Array, call: CollectiveCall) -> int:
        code: int | None = getattr(self._library, f"NCCL_{values.dtype.name.upper()}", None)
        if code is None:
            raise DTypeError(f"expected a dtype that NCCL can add in {call}, got {values.dtype}")
        return code

    def _call(self, collective: Any, call: CollectiveCall, *arguments: Any) -> None:
        import cupy

        stream = cupy.cuda.get_current_stream()
        try:
            collective(*arguments, stream.ptr)
        except self._library.NcclError as error:
            raise CommAborted(f"NCCL failed in {call}: {error}") from error
        if not _is_captured():
            self._last = (stream.record(), call)

    def _like(self, result: Array, values: Array) -> Array:
        """`result`, copied to the host if `values` are there, which waits for the device."""
        if arrays_of(values) is of_cupy():
            return result
        self.wait(None)
        return np.asarray(result.get())

    def wait(self, timeout: float | None) -> None:
        """Wait for the last call, and for what comes after it on the current stream."""
        import cupy

        if self._last is None:
            return
        called, call = self._last
        stream = cupy.cuda.get_current_stream()
        events = [called] if _is_captured() else [called, stream.record()]
        seconds = seconds_of(self._timeout if timeout is None else timeout, PROCESSES)
        deadline = time.monotonic() + seconds
        try:
            while not all(event.done for event in events):
                self._comm.check_async_error()
                if time.monotonic() > deadline:
                    raise CommTimeout(
                        f"rank {self.rank} of {self.size} waited {seconds:g} s for {call} or an "
                        "earlier one; look at the other ranks for the first error"
                    )
                time.sleep(POLL_INTERVAL)
        except BaseException as error:
            self._comm.abort()  # else NCCL's kernels keep running and the process can't end
            if isinstance(error, self._library.NcclError):
                raise CommAborted(f"NCCL failed in {call} or an earlier one: {error}") from error
            raise


def _is_captured() -> bool:
    """Whether the current stream is being captured; the host must not query it then."""
    import cupy

    return of_cupy().is_captured(cupy.cuda.runtime.getDevice())


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise BackendError(
            "expected CuPy, got none; pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        ) from error
    if not nccl.available:
        raise BackendError(
            "expected NCCL, got none; pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13"
        )
    return nccl
