"""The layers: `torch.nn.BatchNorm*d` whose batch is that of all replicas and processes.

    y = (x - mean) / sqrt(var + eps) * weight + bias

with mean and (biased) variance per channel over the whole batch. Inside
`DataParallelWithCallback` the batch is that of all replicas; with an initialized
`torch.distributed` it is that of all processes too. Alone, a layer is its torch namesake.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_core.checks import check_eps, check_eps_mode, check_momentum
from syncbn_core.errors import ShapeError
from syncbn_core.moments import EpsMode
from syncbn_torch import dispatch
from syncbn_torch._torch_private import disable_tracing
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.replica_sync import ReplicaSync, Unconnected, adopted
from syncbn_torch.data_parallel.replicate import CallbackContext
from syncbn_torch.dispatch import always_ours
from syncbn_torch.process_group import communicator_for
from syncbn_torch.replacement import replace_modules, unknown_kind, with_class

__all__ = [
    "SyncBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "always_ours",
    "set_sbn_eps_mode",
]

_default_eps_mode: EpsMode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Set the mode of every layer that was built without an `eps_mode` of its own.

    "plus": `1 / sqrt(var + eps)`, as `nn.BatchNorm2d`. "clamp": `1 / sqrt(max(var, eps))`, for
    checkpoints of Synchronized-BatchNorm-PyTorch; here it holds in training and in eval.
    """
    global _default_eps_mode
    _default_eps_mode = check_eps_mode(mode)


class _SynchronizedBatchNorm(_BatchNorm):
    """What all the layers share."""

    # The ranks that an input may have, also in words; None: any from 2.
    _ranks: ClassVar[tuple[tuple[int, ...], str] | None] = None
    # Defaults for modules that were not built by __init__: converted ones, old pickles.
    process_group: Any = None
    eps_mode: EpsMode | None = None
    _replica_sync: ReplicaSync | Unconnected | None = None
    _copied_from: weakref.ref[nn.Module] | None = None  # of a replica

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        process_group: Any = None,
        eps_mode: EpsMode | None = None,
    ) -> None:
        newer: dict[str, Any] = {} if bias else {"bias": False}  # torch before 2.13 has none
        super().__init__(
            num_features,
            check_eps(eps),
            check_momentum(momentum),
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
            **newer,
        )
        self.process_group = process_group
        self.eps_mode = None if eps_mode is None else check_eps_mode(eps_mode)

    @property
    def effective_eps_mode(self) -> EpsMode:
        """The layer's own mode, or what `set_sbn_eps_mode` says."""
        return self.eps_mode or _default_eps_mode

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a replica stands alone
        return {**self.__dict__, "_replica_sync": None, "_copied_from": None}

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        original = self._original
        replica._copied_from = weakref.ref(original)
        replica._replica_sync = Unconnected(original)
        return replica

    @property
    def _original(self) -> nn.Module:
        """The layer of the model; replicas are new objects in every forward."""
        original = None if self._copied_from is None else self._copied_from()
        return self if original is None else original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        group = self.process_group
        memo[id(group)] = group  # no copy of a layer has processes of its own
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def extra_repr(self) -> str:
        mode = "" if self.eps_mode is None else f", eps_mode={self.eps_mode!r}"
        return f"{super().extra_repr()}{mode}"

    def __data_parallel_replicate__(self, context: CallbackContext, copy_id: int) -> None:
        """Connect this replica with the others; called by `execute_replication_callbacks`.

        Other projects' wrappers call it too, with any object that all copies share as `context`.
        """
        context = adopted(context, self._original)
        alone = context.size == 1 and (
            not self.training or communicator_for(self.process_group) is None
        )
        self._replica_sync = None if alone else ReplicaSync(context, copy_id)

    def _check_input_dim(self, input: Tensor) -> None:
        if self._ranks is None:
            if input.dim() < 2:
                raise ShapeError(
                    f"expected at least 2D input (N, C, *spatial), got shape {tuple(input.shape)}"
                )
        elif input.dim() not in self._ranks[0]:
            raise ShapeError(
                f"expected {self._ranks[1]}, got {input.dim()}D input of shape {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalized `input` (N, C, *spatial), same shape, dtype and memory layout.

        Raises `ShapeError`, `DTypeError`, `DeviceError`; in training torch's ValueError for one
        value per channel in all, `StateError` for running statistics that can't be written, the
        errors of `syncbn_core.comm` when members are missing. Running statistics are then as
        before. In a replica `CommAborted` once its forward has been given up, `StateError` for a
        layer that is no part of the replicated model.
        """
        if self._replica_sync is not None:
            self._replica_sync.check()
        elif originals.watching:
            if torch.compiler.is_compiling():  # what follows can't be traced
                return disable_tracing(self._beside_replicas)(input)  # type: ignore[no-any-return]
            return self._beside_replicas(input)
        return dispatch.forward(self, input)

    def _beside_replicas(self, input: Tensor) -> Tensor:
        """Forward of a layer without a link while replicas run, perhaps in this very thread."""
        replica = originals.copy_of(self)
        if replica is not None:
            # this class's forward, not a subclass's: that one and the hooks are already running
            y = _SynchronizedBatchNorm.forward(cast(Any, replica), input)
            originals.note_reached(self, y)
            return y
        if self.training or self.running_mean is None or self.running_var is None:
            originals.check_alone(self)
        return dispatch.forward(self, input)


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the whole batch: input (N, C) or (N, C, L).

    Args:
        num_features: C.
        eps: added to the variance; > 0.
        momentum: share of the new batch in the running statistics; None averages over all.
        affine: have weight and bias; bias: with affine, have a bias too.
        track_running_stats: keep running statistics; without them eval uses the batch's.
        device, dtype: of parameters and buffers.
        process_group: what to synchronize over besides the replicas: a `torch.distributed` group,
            one dimension of a `DeviceMesh`, a `DistributedCommunicator`; None is the default group
            if there is one.
        eps_mode: "plus", "clamp", or None for what `set_sbn_eps_mode` says ("plus" unless set).
    """

    _ranks = ((2, 3), "2D or 3D input (N, C) or (N, C, L)")


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the whole batch: input (N, C, H, W).

    Arguments are those of `SynchronizedBatchNorm1d`.
    """

    _ranks = ((4,), "4D input (N, C, H, W)")


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the whole batch: input (N, C, D, H, W).

    Arguments are those of `SynchronizedBatchNorm1d`.
    """

    _ranks = ((5,), "5D input (N, C, D, H, W)")


class SyncBatchNorm(_SynchronizedBatchNorm):
    """`nn.SyncBatchNorm`, also on CPU and among replicas: input (N, C, *spatial) of any rank.

    Arguments are those of `nn.SyncBatchNorm`, and `eps_mode`. It is no subclass:
    `DistributedDataParallel` refuses `nn.SyncBatchNorm` on CPU. So code that looks for that class
    passes it by, such as detectron2's `convert_frozen_batchnorm`; it finds
    `SynchronizedBatchNorm2d`, which is an `nn.BatchNorm2d`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        eps_mode: EpsMode | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            bias=bias,
            device=device,
            dtype=dtype,
            process_group=process_group,
            eps_mode=eps_mode,
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`module` with every `nn.BatchNorm*d` in it replaced by this class.

        As `convert_model`, which says what is kept, but any rank fits; `revert_model` gives the
        original classes back.
        """

        def choose(layer: nn.Module) -> nn.Module | str | None:
            if isinstance(layer, _SynchronizedBatchNorm):
                layer.process_group = process_group
            elif type(layer) in _REPLACED:
                new = with_class(cls, layer)
                new.__dict__.update(process_group=process_group, _converted_from=type(layer))
                return new
            return None if type(layer) is nn.DataParallel else unknown_kind(layer)

        return replace_modules(module, choose, f"{cls.__name__}.convert_sync_batchnorm")


_REPLACED = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
