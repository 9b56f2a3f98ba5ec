"""The layers: `torch.nn.BatchNorm*d` whose batch is that of all replicas and processes.

    y = (x - mean) / sqrt(var + eps) * weight + bias

with mean and (biased) variance per channel over the whole batch. Inside
`DataParallelWithCallback` the batch is that of all replicas; with an initialized
`torch.distributed` it is that of all processes too. Alone, a layer is its torch namesake.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_core.comm import ProcessCommunicator, Site
from syncbn_core.errors import (
    DeviceError,
    DTypeError,
    ShapeError,
)
from syncbn_core.moments import (
    EpsMode,
    check_eps,
    check_eps_mode,
    check_momentum,
)
from syncbn_torch import functional, originals, torch_kernel
from syncbn_torch.communicator import communicator_for
from syncbn_torch.interop import PLAIN, check_storage, has_kernels, huge_pages_on_request, widened
from syncbn_torch.link import Link, Unconnected, adopted
from syncbn_torch.names import name_of
from syncbn_torch.replicate import CallbackContext
from syncbn_torch.statistics import RunningStatistics, recomputing
from syncbn_torch.transforms import needs_plain_forward, transforming

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
    _link: Link | Unconnected | None = None
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
        return {**self.__dict__, "_link": None, "_copied_from": None}

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        original = self._original
        replica._copied_from = weakref.ref(original)
        replica._link = Unconnected(original)
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
        alone = context.size == 1 and self._communicator() is None
        self._link = None if alone else Link(context, copy_id)

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

    def _check(self, input: Tensor) -> None:
        """Raise, before anything happens, what is wrong with `input`."""
        if not isinstance(input, Tensor):
            raise DTypeError(
                f"expected a torch.Tensor, got {type(input).__module__}.{type(input).__name__}; "
                "arrays have a layer of their own, syncbn_core.BatchNorm"
            )
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ShapeError(
                f"expected {self.num_features} channels on axis 1 (num_features="
                f"{self.num_features}), got shape {tuple(input.shape)}; check the layer before"
            )
        if not input.is_floating_point():
            raise DTypeError(
                f"expected a floating dtype, got {input.dtype}; convert it first with input.float()"
            )
        own = self.weight if self.weight is not None else self.running_mean
        if own is None:
            return
        if own.device != input.device:
            raise DeviceError(
                f"expected input on {own.device}, where the layer is, got {input.device}; "
                "move one of them with .to(device)"
            )
        half = input.dtype in (torch.float16, torch.bfloat16)
        if own.dtype != input.dtype and not (half and own.dtype == torch.float32):
            _check_floating(self.weight, self.bias, self.running_mean, self.running_var)
            raise DTypeError(
                f"expected input of dtype {own.dtype}, as the layer's, got {input.dtype}; "
                f"convert one of them with .to({own.dtype}) or layer.to({input.dtype})"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalized `input` (N, C, *spatial), same shape, dtype and memory layout.

        Raises `ShapeError`, `DTypeError`, `DeviceError`; in training torch's ValueError for one
        value per channel in all, `StateError` for running statistics that can't be written, the
        errors of `syncbn_core.comm` when members are missing. Running statistics are then as
        before. In a replica `CommAborted` once its forward has been given up, `StateError` for a
        layer that is no part of the replicated model.
        """
        if self._link is not None:
            self._link.check()
        elif originals.watching:
            if torch.compiler.is_compiling():  # what follows can't be traced
                return torch._dynamo.disable(self._beside_replicas)(input)  # type: ignore[no-any-return]
            return self._beside_replicas(input)
        return self._forward(input)

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
        return self._forward(input)

    def _forward(self, input: Tensor) -> Tensor:
        self._check(input)
        eps_mode = self.effective_eps_mode
        if not self.training:
            mean, var = self.running_mean, self.running_var
            if mean is not None and var is not None:
                weight, bias = self.weight, self.bias
                _check_floating(weight, bias, mean, var)
                return functional.batch_norm_eval(
                    input, mean, var, weight, bias, eps=self.eps, eps_mode=eps_mode
                )
        if torch.compiler.is_compiling() and not (self._alone() and eps_mode == "plus"):
            # kernels and messages are no torch operations: the graph breaks here
            return torch._dynamo.disable(self._by_kernels)(input)  # type: ignore[no-any-return]
        return self._by_kernels(input)

    def _by_kernels(self, input: Tensor) -> Tensor:
        eps_mode = self.effective_eps_mode
        # In eval ranks need not run the same batches; replicas of one forward do.
        communicator = self._communicator()
        if communicator is not None:
            original = self._original
            site = Site(partial(name_of, original), (dtype_name(input),), original)
            communicator = communicator.at(site)
        link = self._link
        if link is None and communicator is None and _torch_is_faster(input, eps_mode):
            return self._by_torch(input)
        weight, bias, running = self._operands(input)
        plainly = transforming() and needs_plain_forward(
            partial(name_of, self), link is not None, communicator is not None, input, weight, bias
        )
        x, weight, bias = widened(input, weight, bias)
        if link is None:
            y, _ = functional.batch_norm(
                x,
                weight,
                bias,
                eps=self.eps,
                eps_mode=eps_mode,
                communicator=communicator,
                running=running,
                plainly=plainly,
            )
        else:
            member, edge = functional.measure(x, plainly)
            learns = any(p is not None and p.requires_grad for p in (weight, bias))
            if communicator is not None and learns and torch.is_grad_enabled():
                # other processes wait for the sums, whether or not x needs a gradient here
                edge.requires_grad_()
            call = functional.Call(self.eps, eps_mode, communicator)
            edge, merged = link.exchange(x, member, edge, call)
            mine = running if merged and link.is_master else None
            y = functional.normalize(x, edge, weight, bias, member, mine)
        return y if y.dtype == input.dtype else y.to(input.dtype)

    def _alone(self) -> bool:
        """Whether there is surely nobody to synchronize with."""
        processes = self.process_group is not None or (
            dist.is_available() and dist.is_initialized()
        )
        return self._link is None and not (self.training and processes)

    def _communicator(self) -> ProcessCommunicator | None:
        return communicator_for(self.process_group) if self.training else None

    def _operands(
        self, input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, RunningStatistics | None]:
        """`(weight, bias, what a batch updates)`, None for the last where it updates nothing.

        Raises what would be wrong with them for kernels, which don't look: sizes, devices.
        """
        weight, bias = self.weight, self.bias  # each costs a search
        mean, var = self.running_mean, self.running_var
        size = (self.num_features,)
        plain = has_kernels(input)
        named = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        for name, own in named.items():
            if own is None:
                continue
            if own.shape != size:
                raise ShapeError(
                    f"expected {name} of shape {size}, as num_features, got {tuple(own.shape)}; "
                    "set num_features with them"
                )
            if own.device != input.device:
                raise DeviceError(
                    f"expected {name} on {input.device}, where the input is, got {own.device}; "
                    "move the layer with .to(device)"
                )
            if not own.is_floating_point():
                raise _not_floating(name, own)
            if plain and type(own) not in PLAIN:
                raise DTypeError(
                    f"expected {name} to be a plain tensor, as the input is, got "
                    f"{type(own).__name__}; convert one of them"
                )
        functional.require_savable(input, weight, bias)
        if not (self.training and self.track_running_stats) or recomputing():
            return weight, bias, None
        running = RunningStatistics(mean, var, self.num_batches_tracked, self.momentum)
        running.check()
        return weight, bias, running

    def _by_torch(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        running = mean = var = None
        if self.training and self.track_running_stats:
            mean, var, counter = self.running_mean, self.running_var, self.num_batches_tracked
            running = RunningStatistics(mean, var, counter, self.momentum)
            running.check()
        _check_floating(weight, bias, mean, var)
        check_storage(input, weight, bias)
        if not torch.compiler.is_compiling():
            functional.require_savable(input, weight, bias)
        return torch_kernel.batch_norm(input, weight, bias, running, self.eps)


def _check_floating(*tensors: Tensor | None) -> None:
    """Raise unless weight, bias, running_mean and running_var are None or real numbers."""
    for index, own in enumerate(tensors):
        if own is not None and not own.is_floating_point():
            name = ("weight", "bias", "running_mean", "running_var")[index]
            raise _not_floating(name, own)


def _not_floating(name: str, own: Tensor) -> DTypeError:
    return DTypeError(
        f"expected {name} of a floating dtype, got {own.dtype}; convert the layer with "
        ".to(torch.float32), or give it real numbers"
    )


def dtype_name(x: Tensor) -> str:
    """`float32`, as NumPy calls it."""
    return str(x.dtype).removeprefix("torch.")


# By measurement (docs/speed.md), forward and backward together, on one thread and on two. Elements
# per thread from which ours is faster for contiguous planes of float32 and float64, and for short
# ones of 16 bits:
KERNEL_SIZE = 150_000
KERNEL_SIZE_16_BITS = 500_000
# Bytes from which it is for any dtype and layout, because our results lie in huge pages where
# they are given on request:
HUGE_SIZE = 24 << 20
SHORT = 64  # elements of a plane


_ours_always: ContextVar[bool] = ContextVar("ours_always", default=False)


@contextmanager
def always_ours(on: bool = True) -> Iterator[None]:
    """Within it, a layer alone uses our kernels for inputs of any size: to compare the two."""
    token = _ours_always.set(on)
    try:
        yield
    finally:
        _ours_always.reset(token)


def _torch_is_faster(x: Tensor, eps_mode: str) -> bool:
    """Whether torch's own kernel does the same on one device, and in less time."""
    if eps_mode != "plus":
        return False
    if torch.compiler.is_compiling() or transforming():
        return True  # a kernel that is no torch operation can't be traced or transformed
    if _ours_always.get():
        return False
    return not (_is_large(x) and has_kernels(x))


def _is_large(x: Tensor) -> bool:
    size, bytes_each = x.numel(), x.element_size()
    if size * bytes_each >= HUGE_SIZE and huge_pages_on_request():
        return True
    if x.dim() < 3 or not x.is_contiguous():
        return False
    if bytes_each > 2:
        return size >= KERNEL_SIZE * torch.get_num_threads()
    short = size <= SHORT * x.shape[0] * x.shape[1]
    return short and size >= KERNEL_SIZE_16_BITS * torch.get_num_threads()


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
        from syncbn_torch.convert import convert_to

        return convert_to(cls, module, process_group)
