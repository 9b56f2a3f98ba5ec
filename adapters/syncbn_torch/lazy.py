"""`nn.LazyBatchNorm1d/2d/3d` that synchronize: the first input tells the number of channels.

The first forward makes them `SynchronizedBatchNorm1d/2d/3d`. `convert_model` and
`patch_sync_batchnorm` use these classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from syncbn_core.checks import check_eps_mode
from syncbn_core.moments import EpsMode
from syncbn_torch.batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    _SynchronizedBatchNorm,
)

__all__ = [
    "LazySynchronizedBatchNorm1d",
    "LazySynchronizedBatchNorm2d",
    "LazySynchronizedBatchNorm3d",
]


class _Arguments:
    """Adds `process_group` and `eps_mode` to the arguments of torch's lazy layers."""

    num_features: int
    process_group: Any
    eps_mode: EpsMode | None

    def __init__(
        self,
        *args: Any,
        process_group: Any = None,
        eps_mode: EpsMode | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group
        self.eps_mode = None if eps_mode is None else check_eps_mode(eps_mode)

    def initialize_parameters(self, input: Tensor) -> None:
        super().initialize_parameters(input)  # type: ignore[misc]
        if self.num_features == 0:  # a state dictionary gave the parameters; torch leaves 0
            self.num_features = input.shape[1]


class LazySynchronizedBatchNorm1d(_Arguments, nn.LazyBatchNorm1d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm1d` that becomes a `SynchronizedBatchNorm1d`."""

    cls_to_become = SynchronizedBatchNorm1d  # type: ignore[assignment]


class LazySynchronizedBatchNorm2d(_Arguments, nn.LazyBatchNorm2d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm2d` that becomes a `SynchronizedBatchNorm2d`."""

    cls_to_become = SynchronizedBatchNorm2d  # type: ignore[assignment]


class LazySynchronizedBatchNorm3d(_Arguments, nn.LazyBatchNorm3d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm3d` that becomes a `SynchronizedBatchNorm3d`."""

    cls_to_become = SynchronizedBatchNorm3d  # type: ignore[assignment]
