"""The public names of syncbn_torch: PyTorch batch normalization over all replicas and processes."""

from syncbn_core import __version__
from syncbn_torch.batchnorm import (
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from syncbn_torch.convert import convert_model, patch_sync_batchnorm, revert_model
from syncbn_torch.data_parallel.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from syncbn_torch.data_parallel.scatter import Shared
from syncbn_torch.forward_together import forward_together
from syncbn_torch.process_group import DistributedCommunicator, create_syncbn_process_group
from syncbn_torch.reference import BatchNorm2dReimpl

__all__ = [
    "BatchNorm2dReimpl",
    "CallbackContext",
    "DataParallelWithCallback",
    "DistributedCommunicator",
    "Shared",
    "SyncBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "__version__",
    "convert_model",
    "create_syncbn_process_group",
    "execute_replication_callbacks",
    "forward_together",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
]
