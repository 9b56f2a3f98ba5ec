"""The public names of syncbn_torch: PyTorch batch normalization over all replicas and processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncbn_core.errors import without_framework

try:
    import torch as _  # noqa: F401  (only to say what is missing)
except ModuleNotFoundError as _error:
    raise without_framework(_error, "torch", "PyTorch") from None

from syncbn_core import __version__
from syncbn_torch.batchnorm import (
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from syncbn_torch.conversion.convert import convert_model, patch_sync_batchnorm, revert_model
from syncbn_torch.conversion.registry import register_conversion
from syncbn_torch.conversion.report import ConversionReport
from syncbn_torch.data_parallel.contexts import CallbackContext
from syncbn_torch.data_parallel.replicate import (
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from syncbn_torch.data_parallel.split import Shared
from syncbn_torch.frozen import freeze, register_frozen, unfreeze
from syncbn_torch.masks import mask_of_lengths
from syncbn_torch.population import update_bn_stats
from syncbn_torch.process_group import DistributedCommunicator, create_syncbn_process_group
from syncbn_torch.reference import BatchNorm2dReimpl
from syncbn_torch.uneven import in_step, mean_over_ranks

if TYPE_CHECKING:
    from syncbn_verify import SyncReport, verify_sync
    from syncbn_verify.parts import PartsReport
    from syncbn_verify.pays import pays

__all__ = [
    "BatchNorm2dReimpl",
    "CallbackContext",
    "ConversionReport",
    "DataParallelWithCallback",
    "DistributedCommunicator",
    "PartsReport",
    "Shared",
    "SyncBatchNorm",
    "SyncReport",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "__version__",
    "convert_model",
    "create_syncbn_process_group",
    "execute_replication_callbacks",
    "freeze",
    "in_step",
    "mask_of_lengths",
    "mean_over_ranks",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "pays",
    "register_conversion",
    "register_frozen",
    "revert_model",
    "set_sbn_eps_mode",
    "unfreeze",
    "update_bn_stats",
    "verify_sync",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import what checks models when it is first used: few programs need it."""
    modules = {"SyncReport": "", "verify_sync": "", "PartsReport": ".parts", "pays": ".pays"}
    if name in modules:
        return getattr(import_module(f"syncbn_verify{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
