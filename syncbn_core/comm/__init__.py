"""Communication between the members of a group; knows nothing of layers or kernels.

`master_slave` is generic: use it for anything. `communicator` is what the layers use.
"""

from syncbn_core.comm.communicator import (
    Communicator,
    SingleCommunicator,
    ThreadCommunicator,
    thread_group,
)
from syncbn_core.comm.deadline import get_default_timeout, set_default_timeout
from syncbn_core.comm.master_slave import FutureResult, SlavePipe, SyncMaster
from syncbn_core.comm.processes import Call, ProcessCommunicator, Site, Transport, located
from syncbn_core.comm.threads import run_in_threads

__all__ = [
    "Call",
    "Communicator",
    "FutureResult",
    "ProcessCommunicator",
    "SingleCommunicator",
    "Site",
    "SlavePipe",
    "SyncMaster",
    "ThreadCommunicator",
    "Transport",
    "get_default_timeout",
    "located",
    "run_in_threads",
    "set_default_timeout",
    "thread_group",
]
