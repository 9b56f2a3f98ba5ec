"""Communication between the members of a group; nothing here knows of batch normalization.

`SyncMaster` exchanges arbitrary objects between threads. A `Communicator` gathers and adds up
arrays of threads or processes. `MPICommunicator` and `NCCLCommunicator` are imported on first use,
because mpi4py and CuPy are optional.
"""

from typing import TYPE_CHECKING, Any

from syncbn_core.comm.local import LocalCommunicator
from syncbn_core.comm.master_slave import FutureResult, SlavePipe, SyncMaster
from syncbn_core.comm.process_group import ProcessCommunicator, Transport
from syncbn_core.comm.protocol import (
    CollectiveCall,
    Communicator,
    SingleCommunicator,
)
from syncbn_core.comm.thread_group import ThreadCommunicator, thread_group
from syncbn_core.comm.threads import run_in_threads
from syncbn_core.comm.timeouts import get_default_timeout, set_default_timeout

if TYPE_CHECKING:
    from syncbn_core.comm.mpi import MPICommunicator
    from syncbn_core.comm.nccl import NCCLCommunicator

__all__ = [
    "CollectiveCall",
    "Communicator",
    "FutureResult",
    "LocalCommunicator",
    "MPICommunicator",
    "NCCLCommunicator",
    "ProcessCommunicator",
    "SingleCommunicator",
    "SlavePipe",
    "SyncMaster",
    "ThreadCommunicator",
    "Transport",
    "get_default_timeout",
    "run_in_threads",
    "set_default_timeout",
    "thread_group",
]


def __getattr__(name: str) -> Any:
    if name == "MPICommunicator":
        from syncbn_core.comm.mpi import MPICommunicator

        return MPICommunicator
    if name == "NCCLCommunicator":
        from syncbn_core.comm.nccl import NCCLCommunicator

        return NCCLCommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
