"""The layers: `torch.nn.BatchNorm*d` with statistics over all replicas and processes.

    y = activation((x - mean) / sqrt(var + eps) * weight + bias)

mean and (biased) var are per channel, over the whole batch: that of all replicas inside
`DataParallelWithCallback`, and of all processes if `torch.distributed` is initialized. Otherwise a
layer computes what the torch layer does.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_core.checks import check_activation, check_eps, check_eps_mode, check_momentum
from syncbn_core.errors import ShapeError, StateError
from syncbn_core.moments import ActivationName, EpsMode
from syncbn_torch._torch_private import untraced
from syncbn_torch.activations import runs_hooks
from syncbn_torch.conversion.replacement import ModuleT, modules_of
from syncbn_torch.conversion.report import ConversionReport
from syncbn_torch.conversion.rules import synchronize
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.contexts import CallbackContext, place_of
from syncbn_torch.data_parallel.replica_sync import ReplicaSync, Unconnected
from syncbn_torch.forward import batch_norm, uses_running_statistics
from syncbn_torch.layer_state import LayerState, give_number, set_sbn_eps_mode
from syncbn_torch.process_group import checked_process_group, communicator_for
from syncbn_torch.traced import traced_batch_norm

__all__ = [
    "LazySynchronizedBatchNorm1d",
    "LazySynchronizedBatchNorm2d",
    "LazySynchronizedBatchNorm3d",
    "SyncBatchNorm",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "set_process_group",
    "set_sbn_eps_mode",
]

LayerT = TypeVar("LayerT", bound=type)


class _SynchronizedBatchNorm(LayerState, _BatchNorm):
    """Base class of the layers."""

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
        activation: ActivationName | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        newer: dict[str, Any] = {} if bias else {"bias": False}  # new in torch 2.13
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
        give_number(self)
        self.process_group: Any = checked_process_group(process_group)
        self.eps_mode: EpsMode | None = None if eps_mode is None else check_eps_mode(eps_mode)
        self._activation = check_activation(activation, negative_slope)

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        original = self._original
        replica.__dict__.update(  # `nn.Module.__setattr__` is slow
            _copied_from=weakref.ref(original), _replica_sync=Unconnected(original)
        )
        return replica

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script`."""
        raise StateError(
            "expected a model without synchronized layers, because torch.jit.script can't compile "
            f"{type(self).__name__}; pass revert_model(copy.deepcopy(model))"
        )

    def __data_parallel_replicate__(self, context: CallbackContext, copy_id: int) -> None:
        """Connect this replica with the others; called by `execute_replication_callbacks`.

        `context` may be any object that all copies share: wrappers of other projects call this too.
        Raises `ArgumentError` for one on which no attributes can be set.
        """
        place = place_of(context, self._original)
        alone = place.forward.size == 1 and (
            not self.training or communicator_for(self.process_group) is None
        )
        self._replica_sync = None if alone else ReplicaSync(place, copy_id)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `input` (N, C, *spatial); the result has its shape, dtype and memory layout.

        `mask`: bool, (N,), (N, *spatial) or (N, 1, *spatial), where each axis may be 1. The
        statistics are those of the elements where it is True, over all members; elsewhere the
        result and the gradient by `input` are 0, whatever is there.

        Alone this is torch's layer, with its errors. With other members, `input` has the device and
        dtype of the layer, or float16 or bfloat16 for a float32 layer; else `ShapeError`,
        `DTypeError` or `DeviceError`. In training: `BatchSizeError` for one value per channel in
        the whole batch, `StateError` for running statistics that can't be written, errors of
        `syncbn_core.comm` for missing members; after any of these errors the running statistics
        are unchanged. In a replica: `CommAborted` if its forward was given up, `StateError` if the
        layer is not part of the replicated model.
        """
        if isinstance(input, fx.Proxy):
            return self._recorded_by_fx(input, mask=mask)
        if self._replica_sync is not None:
            self._replica_sync.check()
        elif originals.active:
            return self._beside_replicas(input, mask)
        if torch.compiler.is_compiling():
            return traced_batch_norm(self, input, mask)
        return batch_norm(self, input, mask)

    def _recorded_by_fx(self, input: fx.Proxy, forward: Any = None, mask: Any = None) -> Any:
        """Add one graph node for this layer, as torch.fx does for torch's layers.

        `forward`: that of the calling subclass, if it overrides ours.
        """
        tracer: Any = input.tracer
        path = tracer.path_of_module(self)
        if self._runs_other_code(forward):
            raise StateError(
                f"expected a layer without hooks and without a forward of its own, got {path} "
                f"({type(self).__name__}): torch.fx would trace that code, and run it again in "
                "the layer; trace with a Tracer whose is_leaf_module is true for this layer"
            )
        named = {} if mask is None else {"mask": mask}
        return tracer.create_proxy("call_module", path, (input,), named)

    def _runs_other_code(self, forward: Any = None) -> bool:
        """Whether calling the layer runs hooks or a forward that is neither ours nor `forward`."""
        return (
            type(self).forward is not (forward or _SynchronizedBatchNorm.forward)
            or "forward" in self.__dict__
            or runs_hooks(self)
        )

    @untraced("only Python can look up whether the layer runs beside replicas")
    def _beside_replicas(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Forward of a layer of the original model while replicas run, maybe in this thread."""
        if not uses_running_statistics(self):
            originals.check_alone(self)
        return batch_norm(self, input, mask)


_ARGUMENTS = """

    Args:
        num_features: the number of channels C.
        eps: added to the variance; > 0.
        momentum: weight of the new batch in the running statistics; None averages all batches.
        affine: have a weight and a bias.
        track_running_stats: keep running statistics; if False, eval uses those of the batch.
        bias: False leaves out the bias.
        device, dtype: of parameters and buffers.
        process_group: a `torch.distributed` group to synchronize over, a one-dimensional
            `DeviceMesh`, a `DistributedCommunicator`, or None for the default group, if any.
        eps_mode: "plus", "clamp", or None for the mode of `set_sbn_eps_mode` (default "plus").
        activation: of y: None, "relu", "leaky_relu", "silu", "hardswish" or "relu6".
        negative_slope: that of "leaky_relu"; >= 0.

    Raises `ArgumentError` for an invalid eps, momentum, process_group, eps_mode or activation.
    """


def _documented(kind: LayerT) -> LayerT:
    kind.__doc__ = (kind.__doc__ or "").rstrip() + _ARGUMENTS
    return kind


@_documented
class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the whole batch: input (N, C) or (N, C, L)."""


@_documented
class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the whole batch: input (N, C, H, W)."""


@_documented
class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the whole batch: input (N, C, D, H, W)."""


@_documented
class SyncBatchNorm(_SynchronizedBatchNorm):
    """`nn.SyncBatchNorm`, also on CPU and in replicas: input `(N, C, *spatial)`.

    This is not a subclass of `nn.SyncBatchNorm`, which `DistributedDataParallel` rejects on CPU.
    So code that looks for that class, such as detectron2's `convert_frozen_batchnorm`, does not
    find it; use `SynchronizedBatchNorm2d` there, which is a subclass of `nn.BatchNorm2d`.
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
        activation: ActivationName | None = None,
        negative_slope: float = 0.01,
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
            activation=activation,
            negative_slope=negative_slope,
        )

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ShapeError(
                f"expected at least 2D input (N, C, *spatial), got shape {tuple(input.shape)}"
            )

    @classmethod
    def convert_sync_batchnorm(cls, module: ModuleT, process_group: Any = None) -> ModuleT:
        """Replace every `nn.BatchNorm*d` and `nn.SyncBatchNorm` in `module` by this class.

        Other layers are converted as by `convert_model`, which documents the result, warnings and
        errors. All synchronized layers get `process_group`. As in torch, a model without batch
        norms gives no warning. `revert_model` undoes the conversion.
        """
        checked_process_group(process_group)
        extra: dict[type[nn.Module], Any] = dict.fromkeys(_TORCHS_OWN, cls)
        extra[nn.DataParallel] = None
        report, name = ConversionReport(), f"{cls.__name__}.convert_sync_batchnorm"
        result = synchronize(module, extra, report, _SynchronizedBatchNorm, name)
        set_process_group(result, process_group)
        report.warn(name)
        return result


def set_process_group(model: nn.Module, process_group: Any) -> None:
    """Let all synchronized layers of `model` synchronize over `process_group`.

    Raises `ArgumentError` if it has the wrong type.
    """
    checked_process_group(process_group)
    for layer in modules_of(model):
        if isinstance(layer, _SynchronizedBatchNorm):
            layer.process_group = process_group


_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        self.process_group: Any = checked_process_group(process_group)
        self.eps_mode: EpsMode | None = None if eps_mode is None else check_eps_mode(eps_mode)

    def initialize_parameters(self, input: Tensor, mask: Tensor | None = None) -> None:
        super().initialize_parameters(input)  # type: ignore[misc]
        if self.num_features == 0:  # load_state_dict set the parameters; torch leaves 0
            self.num_features = input.shape[1]


class LazySynchronizedBatchNorm1d(_Arguments, nn.LazyBatchNorm1d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm1d` that becomes a `SynchronizedBatchNorm1d`."""

    cls_to_become: Any = SynchronizedBatchNorm1d


class LazySynchronizedBatchNorm2d(_Arguments, nn.LazyBatchNorm2d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm2d` that becomes a `SynchronizedBatchNorm2d`."""

    cls_to_become: Any = SynchronizedBatchNorm2d


class LazySynchronizedBatchNorm3d(_Arguments, nn.LazyBatchNorm3d, _SynchronizedBatchNorm):
    """`nn.LazyBatchNorm3d` that becomes a `SynchronizedBatchNorm3d`."""

    cls_to_become: Any = SynchronizedBatchNorm3d
