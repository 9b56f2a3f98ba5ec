"""The autograd node of the replicas of one process: all parts in, all results out.

    x_1 ... x_N, weight_1 ... weight_N, bias_1 ... bias_N  ->  y_1 ... y_N

Each replica leaves its operands with the master, which applies the node, and gets its y. Backward
gets all dy at once, so that no replica waits there. A loss may use any of the outputs. Over several
processes the node exchanges one message per direction for all its replicas.

Hooks on saved tensors belong to the thread of a replica. Where it has some, `Keep` saves x there.
In forward-mode AD plain operations take the place of the node, and torch differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from syncbn_core.backends.base import Affine, Operations, RunningStatistics, Sums
from syncbn_core.comm.waits import note_arrivals
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import CheckpointError, ShapeError, StateError
from syncbn_core.moments import Moments, NormRule, require_more_than_one_value
from syncbn_torch._torch_private import saving_runs_hooks
from syncbn_torch.autograd.differentiable_exchange import sum_over_processes, total_moments
from syncbn_torch.autograd.exchange import Processes, check_unchanged, needs_plain_backward
from syncbn_torch.autograd.streams import of_node, of_replicas
from syncbn_torch.backends import plain
from syncbn_torch.backends.memory import as_tensor

__all__ = ["APART", "Deposit", "JointCall", "Keep", "Recomputed", "normalize_all"]


# Numbers in a part from which on its replica computes moments and y on a CPU, beside the others.
# Below, the master is quicker with all parts than the replicas with waking up.
APART = 1 << 16


class Deposit(NamedTuple):
    """What a replica leaves with the master.

    `graph`: whether gradients are enabled in its thread. `kept`: the ctx of its `Keep`, if it has
    one. `part`, `y`: the moments of x, and memory for y, if it computes both itself. `stream`: that
    of its GPU on which it computes x, and goes on with y; None on a host. `context` is the forward
    that replicas share; `arrived` is for `waits`.
    """

    operations: Operations
    x: Tensor
    affine: Affine
    running: RunningStatistics | None
    rule: NormRule
    processes: Processes | None
    context: Any
    graph: bool
    kept: Any = None
    part: Any = None
    y: Any = None
    stream: Any = None
    arrived: float | None = None


class Keep(Function):
    """x -> x; saves x in the thread of its replica, and puts its ctx into `kept`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class JointCall:
    """One call of a layer in all its replicas.

    Attributes:
        operations, rule, processes, context: those of the first part, and so of all.
        streams: those of each part.
        parts: the moments of each part.
        total: those of the whole batch.
        number: of the exchange over processes, 0 for none.
        statistics: for each part, what backward needs besides x.
    """

    __slots__ = (
        "_by_device",
        "context",
        "number",
        "operations",
        "parts",
        "processes",
        "rule",
        "statistics",
        "streams",
        "total",
    )

    def __init__(self, deposits: Sequence[Deposit]) -> None:
        first = deposits[0]
        self.operations = first.operations
        self.streams = [deposit.stream for deposit in deposits]
        self.rule, self.processes, self.context = first.rule, first.processes, first.context
        xs, parts = ([getattr(d, name) for d in deposits] for name in ("x", "part"))
        missing = [part is None for part in parts]
        others = _of_some(missing, first.operations.moments_of_parts, xs)
        both = zip(parts, others, strict=True)
        self.parts = [other if part is None else part for part, other in both]
        self.total: Any = first.operations.merge(self.parts)
        self.number = 0
        if first.processes is not None:
            with_kernels = first.operations.with_kernels
            (self.total,), self.number = first.processes.exchange_moments(
                [first.operations.one_row(self.total)], with_kernels
            )
        require_more_than_one_value(self.total.known_count, first.x.shape)
        # copied to all devices here, where the streams of all replicas are current
        known = first.operations.statistics(self.total, first.rule)
        self._by_device = {d.x.device: _on_device(known, d.x.device) for d in deposits}
        self.statistics = [self.statistics_for(deposit.x) for deposit in deposits]

    def statistics_for(self, x: Tensor) -> Any:
        """Those of the whole batch on the device of x, for `forward`."""
        return self._by_device[x.device]

    def forward(
        self, deposits: Sequence[Deposit], xs: Sequence[Tensor], affines: Sequence[Affine]
    ) -> list[Tensor]:
        """y of each part, after updating its running statistics; or memory for y."""
        of_master = [deposit.y is None for deposit in deposits]
        running = [deposit.running for deposit in deposits]
        compute = partial(self.operations.forward_of_parts, rule=self.rule)
        results = _of_some(of_master, compute, xs, self.statistics, affines, running)
        ys = [deposit.y for deposit in deposits]
        for index, result in enumerate(results):
            if result is not None:
                ys[index], self.statistics[index], _ = result
        return ys

    def check_over(self) -> None:
        """Raise `StateError` before the forward of the model has ended."""
        if not self.context.is_over():
            raise StateError(
                f"expected the backward of {self.context.name} after the forward of all replicas, "
                "got autograd.grad or backward() inside a replica, which can't be synchronized; "
                "compute gradients outside of DataParallelWithCallback"
            )

    def backward(
        self,
        xs: Sequence[Tensor],
        dys: Sequence[Tensor | None],
        affines: Sequence[Affine],
        by_x: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Sums | None]]:
        """dx of each part that needs one, and the sums of each part that has a dy."""
        do, statistics, rule = self.operations, self.statistics, self.rule
        if needs_plain_backward(self.processes, *dys):
            do, known = plain.DIFFERENTIABLE, self._plain_statistics(xs)
            statistics = [plain.plain_statistics(known, x.device) for x in xs]
        for x, dy in zip(xs, dys, strict=True):
            if dy is not None:
                check_unchanged(x, dy)
        given = [dy is not None for dy in dys]
        reduce = partial(do.backward_reduce_of_parts, rule=rule)
        sums: list[Sums | None] = _of_some(given, reduce, xs, dys, statistics, affines)
        total = self._all_reduced(_added([one.exchange for one in sums if one is not None]))
        # the loss may not use a y while others depend on its x
        filled = [torch.zeros_like(x) if dy is None else dy for x, dy in zip(xs, dys, strict=True)]
        totals = [total.to(x.device) if isinstance(total, Tensor) else total for x in xs]
        compute = partial(do.backward_input_of_parts, rule=rule)
        return _of_some(by_x, compute, xs, filled, statistics, affines, totals), sums

    def _all_reduced(self, sums: Any) -> Any:
        """The sums of all replicas, added up over the processes if there are any."""
        if self.processes is None:
            return sums
        if torch.is_grad_enabled():
            return sum_over_processes(_as_tensor(sums), self.processes, self.number)
        return self.processes.all_reduce(sums, self.number)

    def _plain_statistics(self, xs: Sequence[Tensor]) -> Any:
        """As tensors; with gradients on, computed from each x by autograd operations."""
        do, device = plain.DIFFERENTIABLE, xs[0].device
        if torch.is_grad_enabled():
            total = part = do.merge([do.moments(x) for x in xs])
            if self.processes is not None:
                total = total_moments(
                    part, _as_moments(self.total, device), self.processes, self.number, True
                )
        else:
            total = _as_moments(self.total, device)
        return do.statistics(total, self.rule)


class JointBatchNorm(Function):
    """x of each replica, then each weight, then each bias -> y of each replica."""

    @staticmethod
    def forward(
        ctx: Any, call: JointCall, deposits: Sequence[Deposit], *operands: Any
    ) -> tuple[Tensor, ...]:
        count = len(deposits)
        xs, weights, biases = (operands[n * count : (n + 1) * count] for n in range(3))
        affines = list(map(Affine, weights, biases))
        ctx.call, ctx.kept = call, [deposit.kept for deposit in deposits]
        ctx.set_materialize_grads(False)
        own = [x for x, kept in zip(xs, ctx.kept, strict=True) if kept is None]
        saved = (*own, *[a.for_backward(call.rule).weight for a in affines])
        ctx.save_for_backward(*saved)
        ctx.versions = _versions(saved)
        ys = call.forward(deposits, xs, affines)
        without = [y for y, deposit in zip(ys, deposits, strict=True) if not deposit.graph]
        ctx.mark_non_differentiable(*without)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        call: JointCall = ctx.call
        call.check_over()
        count = len(dys)
        needs = [ctx.needs_input_grad[2 + n * count : 2 + (n + 1) * count] for n in range(3)]
        if all(dy is None for dy in dys):
            return (None,) * (2 + 3 * count)
        saved = ctx.saved_tensors
        if _versions(saved) != ctx.versions:  # which torch does not see past the hooks `_same`
            raise StateError(
                f"expected the weight and input of {call.context.name} as they were in forward, "
                "one has been modified by an inplace operation; do that after backward"
            )
        own, weights = iter(saved[:-count]), saved[-count:]
        xs = [next(own) if kept is None else kept.saved_tensors[0] for kept in ctx.kept]
        with of_node(call.streams, xs, dys):
            dxs, sums = call.backward(xs, dys, list(map(Affine, weights)), needs[0])
        of_weights, of_biases = (
            [one[n] if one and need else None for one, need in zip(sums, needs[n], strict=True)]
            for n in (1, 2)
        )
        return None, None, *dxs, *of_weights, *of_biases


class Recomputed(Function):
    """x, weight, bias -> y of an earlier call, while a checkpoint fills in what it has saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, statistics: Any, deposit: Deposit
    ) -> Tensor:
        ctx.name = str(deposit.context.name)
        rule, do = deposit.rule, deposit.operations
        y: Tensor = do.serial.forward(x, statistics, Affine(weight, bias), rule, None).y
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise CheckpointError(
            f"{ctx.name} was recomputed by a checkpoint, and backward() was called on that "
            "recomputation, which can't be synchronized; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def normalize_all(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback: turns each `Deposit` into `(y, call, index of its part)`.

    Settings come from the first deposit, the master's. Raises `BatchSizeError` for one value
    per channel in all, `ShapeError` for unequal channels.
    """
    deposits: list[Deposit] = [deposit for _, deposit in messages]
    first = deposits[0]
    if len({deposit.x.shape[1] for deposit in deposits}) > 1:
        channels = {identifier: deposit.x.shape[1] for identifier, deposit in messages}
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    if first.arrived is not None:
        note_arrivals("replica", f"forward of {first.context.name}", [d.arrived for d in deposits])
    if any(deposit.operations is not first.operations for deposit in deposits):
        # such as a tensor of a subclass in one replica
        own: dict[str, Any] = {"operations": plain.OPERATIONS, "part": None, "y": None}
        deposits = [deposit._replace(**own) for deposit in deposits]
    with of_replicas([deposit.stream for deposit in deposits]) as record:
        call, ys = _forward(deposits)
        record(ys)
    indexed = enumerate(zip(messages, ys, strict=True))
    return [(identifier, (y, call, index)) for index, ((identifier, _), y) in indexed]


def _forward(deposits: Sequence[Deposit]) -> tuple[JointCall, Sequence[Tensor]]:
    xs = [deposit.x if deposit.graph else deposit.x.detach() for deposit in deposits]
    affines = [deposit.affine for deposit in deposits]
    graph = any(deposit.graph for deposit in deposits)
    if deposits[0].operations is plain.DIFFERENTIABLE:  # of all: they have one dual level
        with torch.set_grad_enabled(graph):
            call = JointCall(deposits)
            return call, call.forward(deposits, [deposit.x for deposit in deposits], affines)
    with torch.no_grad():
        call = JointCall(deposits)
        if not graph:
            return call, call.forward(deposits, xs, affines)
    operands = *xs, *[a.weight for a in affines], *[a.bias for a in affines]
    with torch.enable_grad():
        if saving_runs_hooks():  # those of the master's own thread
            with saved_tensors_hooks(_same, _same):
                ys = JointBatchNorm.apply(call, deposits, *operands)
        else:
            ys = JointBatchNorm.apply(call, deposits, *operands)
    return call, ys


def _of_some(wanted: Sequence[bool], compute: Callable[..., Any], *columns: Any) -> list[Any]:
    """`compute(*columns)` for the wanted parts, each result in its place; None for the others."""
    if not any(wanted):
        return [None] * len(wanted)
    results = iter(compute(*[[*compress(column, wanted)] for column in columns]))
    return [next(results) if one else None for one in wanted]


def _same(saved: Any) -> Any:
    return saved


def _versions(tensors: Sequence[Any]) -> list[int | None]:
    """How often each has been written in place."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]


def _as_tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else as_tensor(values)


def _added(values: Sequence[Any]) -> Any:
    """The sums of all parts, in their order; as tensors of the first's device if some are."""
    if any(isinstance(value, Tensor) for value in values):
        tensors = list(map(_as_tensor, values))
        values = [value.to(tensors[0].device) for value in tensors]
    total = values[0]
    with np.errstate(invalid="ignore", over="ignore"):
        for value in values[1:]:
            total = total + value
    return total


def _on_device(known: Any, device: torch.device) -> Any:
    """What `statistics` returned, on `device`."""
    if isinstance(known, DeviceMoments):
        return known.with_rows(known.rows.contiguous().to(device), known.known_count)
    if isinstance(known.invstd, Tensor) and known.invstd.device != device:
        return plain.plain_statistics(known, device)
    return known


def _as_moments(total: Any, device: torch.device) -> Moments:
    """Moments of any kind as tensors on `device`."""
    return plain.plain_moments(total.wait() if isinstance(total, DeviceMoments) else total, device)
