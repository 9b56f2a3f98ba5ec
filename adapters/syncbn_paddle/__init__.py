"""syncbn for PaddlePaddle: `SyncBatchNorm` on a CPU, where Paddle's own has no kernel.

    paddle.distributed.init_parallel_env()
    model = SyncBatchNorm.convert_sync_batchnorm(model)

y = (x - mean) / sqrt(var + epsilon) * weight + bias, with the statistics of all processes. Their
parts may have any sizes, also none. Formulas and errors are those of `syncbn_core.functional`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from syncbn_core.errors import without_framework

try:
    import paddle
except ModuleNotFoundError as error:
    raise without_framework(error, "paddle", "PaddlePaddle") from None

import numpy as np
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.jit.sot import psdb
from paddle.nn.layer.norm import _BatchNormBase

from syncbn_core import batch_norm_backward, batch_norm_forward
from syncbn_core.comm import CollectiveCall, ProcessCommunicator, get_default_timeout
from syncbn_core.comm.local import local_transport
from syncbn_core.comm.timeouts import PROCESSES
from syncbn_core.errors import CommError, ProtocolError, StateError
from syncbn_core.exchange import Exchange

__all__ = ["PaddleCommunicator", "SyncBatchNorm"]

Array = np.ndarray[Any, Any]


class PaddleCommunicator(ProcessCommunicator):
    """A group of `paddle.distributed`, None for all processes, as a communicator of the core.

    Takes NumPy arrays. If all processes are on one host, they send them by local connections, with
    the errors of `syncbn_core.comm.local` and `get_default_timeout(300)` seconds to wait. Else by
    Paddle's gloo, which ends the process if arrays differ in length: so the lengths go first.
    Raises `ProtocolError` if they differ, and `CommError` where Paddle's collective fails.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__(_PaddleTransport(group))


class _PaddleTransport:
    on_device = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._local: Any = NotImplemented  # None: Paddle sends all

    @property
    def rank(self) -> int:
        return int(dist.get_rank(self._group))

    @property
    def size(self) -> int:  # 1 before `init_parallel_env`
        return int(dist.get_world_size(self._group))

    def all_gather(self, values: Array, call: CollectiveCall) -> Array:
        if self._local is NotImplemented:
            given = self.rank, self.size, lambda: get_default_timeout(PROCESSES)
            self._local = local_transport(*given, lambda row: self._gathered(row, call), call)
        if self._local is not None:
            rows: Array = self._local.all_gather(values, call)
            return rows
        sizes = self._gathered(np.array([values.size]), call)[:, 0].tolist()
        if len(set(sizes)) > 1:
            raise ProtocolError(
                f"expected {values.size} numbers from every process in {call}, got {sizes}; all "
                "have to run the same layers in the same order"
            )
        return self._gathered(values, call)

    def all_reduce(self, values: Array, call: CollectiveCall) -> Array:
        return np.asarray(self.all_gather(values, call).sum(0, dtype=values.dtype))

    def _gathered(self, values: Array, call: CollectiveCall) -> Array:
        parts: list[Any] = []
        tensor = paddle.to_tensor(np.ascontiguousarray(values), place=paddle.CPUPlace())
        try:
            dist.all_gather(parts, tensor, group=self._group)
        except (RuntimeError, OSError, ValueError) as error:
            raise CommError(f"paddle.distributed failed in {call}: {error}") from error
        return np.stack([part.numpy() for part in parts])


@cache
def _communicator(group: Any) -> PaddleCommunicator:
    """One for each group, because it counts the calls of all layers."""
    return PaddleCommunicator(group)


class SyncBatchNorm(paddle.nn.SyncBatchNorm):  # type: ignore[misc]
    """`paddle.nn.SyncBatchNorm`, also on a CPU: its arguments, attributes and state dictionary.

    Input `(N, C, *spatial)`, or channels last by `data_format`; float64, float32, float16 or
    bfloat16, which is computed in float32. In training on a CPU with several processes it
    synchronizes over `group`, an attribute, None for all processes; on another device it is
    Paddle's layer, and in one process, in eval and with `use_global_stats` Paddle's BatchNorm.

    As in Paddle, `momentum` is the share that running statistics keep, and `_variance` is biased.
    Raises the errors of `syncbn_core.batch_norm_forward`, with the running statistics unchanged.
    """

    group: Any = None

    @paddle.jit.not_to_static  # type: ignore[untyped-decorator]
    def forward(self, x: Any) -> Any:
        self._check_data_format()
        if self.training and not self._use_global_stats:
            psdb.fallback(recursive=True)  # to_static runs the model without a graph
        communicator = _communicator(self.group)
        if not self.training or self._use_global_stats or communicator.size == 1:
            return paddle.nn.functional.batch_norm(
                x,
                self._mean,
                self._variance,
                self.weight,
                self.bias,
                training=self.training,
                momentum=self._momentum,
                epsilon=self._epsilon,
                data_format=self._data_format,
                use_global_stats=self._use_global_stats,
            )
        if not paddle.in_dynamic_mode():
            raise StateError(
                "expected a dynamic graph, got a static one, in which the layer can't synchronize; "
                "train without paddle.jit.to_static(full_graph=True)"
            )
        if not x.place.is_cpu_place():
            return super().forward(x)
        dtype = x.dtype
        if dtype == paddle.bfloat16:
            x = x.astype("float32")
        last = self._data_format == "NHWC"
        y = _Synchronized.apply(
            paddle.moveaxis(x, -1, 1) if last else x, self.weight, self.bias, self, communicator
        )
        return (paddle.moveaxis(y, 1, -1) if last else y).astype(dtype)

    def _update(self, saved: Any) -> None:
        """Blend the statistics of the batch into the running ones."""
        if saved.count:
            known, keep = saved.statistics, self._momentum
            var = known.m2 / saved.count
            for own, new in ((self._mean, known.mean), (self._variance, var)):
                own.set_value((keep * own.numpy() + (1 - keep) * new).astype(own.numpy().dtype))

    @classmethod
    def convert_sync_batchnorm(cls, layer: Any) -> Any:
        """Make every `BatchNorm1D`, `2D`, `3D` and `SyncBatchNorm` in `layer` one of these.

        In place: parameters, statistics, hooks and the layers themselves stay. Returns `layer`.
        """
        for found in layer.sublayers(include_self=True):
            if isinstance(found, _BatchNormBase):
                found.__class__ = cls
        return layer


class _Synchronized(PyLayer):  # type: ignore[misc]
    """x, weight, bias -> y; one exchange in each direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, layer: SyncBatchNorm, communicator: Any
    ) -> Any:
        exchange = partial(Exchange, communicator, layer.full_name, layer=layer)
        affine = [None if own is None else own.detach() for own in (weight, bias)]
        settings = {"eps": layer._epsilon, "communicator": communicator, "exchange": exchange}
        y, saved = batch_norm_forward(x.detach(), *affine, **settings)
        layer._update(saved)
        ctx.kept = saved, communicator, exchange
        # of an operand that is None Paddle takes no gradient, of one that needs none a None
        ctx.needs = [None if t is None else not t.stop_gradient for t in (x, weight, bias)]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        saved, communicator, exchange = ctx.kept
        gradients = batch_norm_backward(
            dy.detach(), saved, communicator=communicator, exchange=exchange
        )
        pairs = zip(gradients, ctx.needs, strict=True)
        return tuple(gradient if needs else None for gradient, needs in pairs if needs is not None)
