"""Communication between the members of a group; knows nothing of layers or kernels.

`master_slave` is generic: use it for anything. `communicator` is what the layers use.
`MPICommunicator` and `NCCLCommunicator` are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

from syncbn_core.comm.communicator import (
    Communicator,
    SingleCommunicator,
    ThreadCommunicator,
    thread_group,
)
from syncbn_core.comm.master_slave import FutureResult, SlavePipe, SyncMaster
from syncbn_core.comm.process_group import Call, ProcessCommunicator, Transport
from syncbn_core.comm.rounds import Siblings
from syncbn_core.comm.site import Site, forward_call, located
from syncbn_core.comm.threads import run_in_threads
from syncbn_core.comm.timeouts import get_default_timeout, set_default_timeout

if TYPE_CHECKING:
    from syncbn_core.comm.mpi import MPICommunicator
    from syncbn_core.comm.nccl import NCCLCommunicator

__all__ = [
    "Call",
    "Communicator",
    "FutureResult",
    "MPICommunicator",
    "NCCLCommunicator",
    "ProcessCommunicator",
    "Siblings",
    "SingleCommunicator",
    "Site",
    "SlavePipe",
    "SyncMaster",
    "ThreadCommunicator",
    "Transport",
    "forward_call",
    "get_default_timeout",
    "located",
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
