"""The autograd nodes of replicas that share a process.

All replicas share the statistics, and in backward the two sums. A barrier inside backward would
deadlock, because autograd runs all replicas of a device on one thread. So the order of the graph's
nodes synchronizes them:

    x_i -> LocalMoments_i -> edge_i ─┐              ┌─> edge_i -> Normalize_i(x_i) -> y_i
    x_j -> LocalMoments_j -> edge_j ─┴─> AllReduce ─┴─> edge_j -> Normalize_j(x_j) -> y_j

The edges are empty tensors that only order the nodes. The numbers are in the `StatisticsExchange`
that the replicas share and, during backward, in its `BackwardPass`. There `Normalize` puts dy and
`[sum(dy), sum(dy * xhat)] * weight`, `AllReduce` adds up the sums, and `LocalMoments` computes
`dx = invstd * (weight * dy - sum_dy / n - xhat * sum_dy_xhat / n)`. No thread waits, a loss may
use any of the outputs, and only x and O(C) numbers are saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from syncbn_core.backends.base import Affine, Operations, RunningStatistics, Sums
from syncbn_core.comm.waits import note_arrivals
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import ShapeError, StateError
from syncbn_core.moments import Moments, NormRule, Statistics, require_more_than_one_value
from syncbn_torch._torch_private import saving_runs_hooks
from syncbn_torch.autograd.differentiable_exchange import sum_over_processes, total_moments
from syncbn_torch.autograd.exchange import (
    BackwardPass,
    BackwardPasses,
    Processes,
    check_unchanged,
    needs_plain_backward,
    wanted_gradients,
)
from syncbn_torch.autograd.stream_handoff import StreamHandoff
from syncbn_torch.backends import plain
from syncbn_torch.backends.memory import as_tensor

__all__ = ["ReplicaRecord", "StatisticsExchange", "measure", "merge_replicas", "normalize"]


class ReplicaRecord:
    """What one replica contributes to an exchange and gets from it.

    Attributes:
        operations: the implementation for its x.
        shape: of x.
        part: the moments of x; set by `measure`.
        exchange, statistics: set by `settle`; statistics is what backward needs besides x.
    """

    __slots__ = ("_node", "exchange", "operations", "part", "shape", "statistics")

    def __init__(self, operations: Operations, x: Tensor) -> None:
        self.operations = operations
        self.shape = tuple(x.shape)
        self.part: Any
        self.exchange: StatisticsExchange
        self.statistics: Any
        self._node: weakref.ref[Any] | None = None

    def measure(self, x: Tensor, node: Any = None) -> None:
        """Compute the moments of x. `node`: the ctx of the `LocalMoments` that saves x."""
        self._node = None if node is None else weakref.ref(node)
        self.part = self.operations.serial.moments(x)

    def settle(self, exchange: StatisticsExchange, statistics: Any) -> None:
        """Store the results of the forward."""
        self.exchange = exchange
        self.statistics = statistics

    def live_x(self) -> Tensor | None:
        """x as part of its autograd graph, or None if no gradient flows to it."""
        node = None if self._node is None else self._node()
        return None if node is None else node.saved_tensors[0]


class StatisticsExchange:
    """One completed exchange of statistics between replicas.

    Attributes:
        rule, processes, context: those of the layer in this forward.
        records: of all replicas, in their order.
        total: moments of the whole batch.
        call: the number of the exchange over processes, 0 for none.
    """

    __slots__ = (
        "_passes",
        "_statistics_by_device",
        "call",
        "context",
        "processes",
        "records",
        "rule",
        "total",
    )

    def __init__(
        self,
        records: Sequence[ReplicaRecord],
        rule: NormRule,
        processes: Processes | None,
        context: Any,
    ) -> None:
        self.records = list(records)
        self.rule = rule
        self.processes = processes
        self.context = context
        self._passes = BackwardPasses()
        operations = records[0].operations
        total = operations.merge([record.part for record in records])
        self.call = 0
        if processes is not None:
            one = operations.one_row(total)
            (total,), self.call = processes.exchange_moments([one], operations.with_kernels)
        require_more_than_one_value(total.known_count, records[0].shape)
        self.total: Moments | DeviceMoments = total
        # Copy to all devices here: the current streams of this thread have computed the totals.
        self._statistics_by_device: dict[Any, Any] = {}
        if isinstance(total, DeviceMoments):
            devices = {total.rows.device, *(record.part.rows.device for record in records)}
            rows = total.rows.contiguous()
            self._statistics_by_device = {
                device: total.with_rows(rows.to(device), total.known_count) for device in devices
            }
        else:
            self._statistics_by_device[None] = operations.statistics(total, rule)

    def statistics_for(self, x: Tensor) -> Any:
        """Statistics of the whole batch on the device of x."""
        if isinstance(self.total, DeviceMoments):
            return self._statistics_by_device[x.device]
        known: Statistics = self._statistics_by_device[None]
        if isinstance(known.invstd, Tensor) and known.invstd.device != x.device:
            return plain.plain_statistics(known, x.device)
        return known

    def plain_statistics_for(self, x: Tensor) -> Statistics:
        """The same as tensors; with gradients on, computed from each x by autograd operations."""
        total = self.total
        if torch.is_grad_enabled():
            current = self.current_pass()
            with current.making:  # one for all replicas, whose GPUs have a thread each
                if current.moments is None:
                    current.moments = self._differentiable_moments(x.device)
                total = current.moments
        return plain.DIFFERENTIABLE.statistics(_on(total, x.device), self.rule)

    def _differentiable_moments(self, device: torch.device) -> Moments:
        """The moments of the whole batch as a function of each x."""
        operations, known = plain.DIFFERENTIABLE, [(r.live_x(), r.part) for r in self.records]
        parts = [part if live is None else operations.moments(live) for live, part in known]
        part = operations.merge([_on(part, device) for part in parts])
        if self.processes is None:
            return part
        return total_moments(part, _on(self.total, device), self.processes, self.call, True)

    def current_pass(self) -> BackwardPass:
        """The backward pass that this thread runs; `StateError` before the forward has ended."""
        if self.context is not None and not self.context.is_over():
            raise StateError(
                f"expected the backward of {self.context.name} after the forward of all replicas, "
                "got autograd.grad or backward() inside a replica, which can't be synchronized; "
                "compute gradients outside of DataParallelWithCallback"
            )
        return self._passes.current()

    def all_reduce(self, sums: Any) -> Any:
        """The sums of all replicas, added up over the processes if there are any."""
        if self.processes is None:
            return sums
        if torch.is_grad_enabled():
            return sum_over_processes(_as_tensor(sums), self.processes, self.call)
        return self.processes.all_reduce(sums, self.call)


class LocalMoments(Function):
    """x -> an edge; stores the moments of x in the record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: ReplicaRecord) -> Tensor:
        ctx.save_for_backward(x)
        ctx.record = record
        record.measure(x, ctx)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, edge: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        record: ReplicaRecord = ctx.record
        exchange = record.exchange
        current = exchange.current_pass()
        dy, affine, _ = current.pending_grads.pop(record, (None, Affine(), None))
        if dy is None:  # the loss doesn't use this replica's y, but other y depend on its x
            dy = torch.zeros_like(x)
        check_unchanged(x, dy)
        total = current.total.on(x.device)
        operations, statistics = record.operations, record.statistics
        if needs_plain_backward(exchange.processes, dy, total):
            operations, statistics = plain.DIFFERENTIABLE, exchange.plain_statistics_for(x)
            total = _as_tensor(total).to(x.device)
        dx = operations.backward_input(x, dy, statistics, affine, exchange.rule, total)
        return dx, None


class AllReduce(Function):
    """An edge from every replica -> an edge to every replica."""

    @staticmethod
    def forward(ctx: Any, exchange: StatisticsExchange, *edges: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.edges = [edge.detach() for edge in edges]
        return tuple(edge.new_empty(0) for edge in edges)

    @staticmethod
    def backward(ctx: Any, *edges: Tensor) -> tuple[Any, ...]:
        exchange: StatisticsExchange = ctx.exchange
        current = exchange.current_pass()
        pending = current.pending_grads
        left = [pending[record][2] for record in exchange.records if record in pending]
        if any(isinstance(sums.value, Tensor) for sums in left):
            left = [one if one.stream else StreamHandoff(_as_tensor(one.value)) for one in left]
        with left[0].current(), np.errstate(invalid="ignore", over="ignore"):
            total = left[0].value
            for sums in left[1:]:
                total = total + (sums.on(total.device) if isinstance(total, Tensor) else sums.value)
            current.total = StreamHandoff(exchange.all_reduce(total))
        return None, *ctx.edges


class Normalize(Function):
    """x (detached), an edge, weight, bias -> y; updates `running` if given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        record: ReplicaRecord,
        exchange: StatisticsExchange,
        running: RunningStatistics | None,
    ) -> Tensor:
        known, affine = exchange.statistics_for(x), Affine(weight, bias)
        ctx.save_for_backward(x, *affine.for_backward(exchange.rule))
        ctx.record = record
        done = record.operations.serial.forward(x, known, affine, exchange.rule, running)
        record.settle(exchange, done.statistics)
        y: Tensor = done.y
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        check_unchanged(x, dy)
        affine = Affine(*parameters)
        record: ReplicaRecord = ctx.record
        exchange = record.exchange
        operations, statistics = record.operations, record.statistics
        if needs_plain_backward(exchange.processes, dy):
            if torch.is_grad_enabled():
                live = record.live_x()
                x = x if live is None else live
            operations, statistics = plain.DIFFERENTIABLE, exchange.plain_statistics_for(x)
        sums: Sums = operations.backward_reduce(x, dy, statistics, affine, exchange.rule)
        edge = None
        if ctx.needs_input_grad[1]:
            left = (dy, affine, StreamHandoff(sums.exchange))
            exchange.current_pass().pending_grads[record] = left
            edge = dy.new_empty(0)
        gradients = wanted_gradients(ctx, 2, sums.grad_weight, sums.grad_bias)
        return None, edge, *gradients, None, None, None


def measure(operations: Operations, x: Tensor) -> tuple[ReplicaRecord, Tensor]:
    """First half of a replica's forward: `(record with the moments of x, edge to AllReduce)`.

    With differentiable operations torch builds the graph, and the edge is unused.
    """
    record = ReplicaRecord(operations, x)
    if operations is plain.DIFFERENTIABLE:
        record.measure(x)
        return record, x.new_empty(0)
    edge: Tensor = LocalMoments.apply(x, record)
    return record, edge


class ReplicaMessage(NamedTuple):
    """What a replica sends to the master in the exchange of a layer."""

    record: ReplicaRecord
    edge: Tensor
    rule: NormRule
    processes: Processes | None
    context: Any
    arrived: float | None = None  # for `waits`


def merge_replicas(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback: turns each `ReplicaMessage` into `(edge, exchange)`.

    Settings come from the first message, the master's. Raises `BatchSizeError` for one value
    per channel in all, `ShapeError` for unequal channels.
    """
    first: ReplicaMessage = messages[0][1]
    channels = {identifier: message.record.shape[1] for identifier, message in messages}
    if len(set(channels.values())) > 1:
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    if first.arrived is not None:
        note_arrivals(
            "replica", f"forward of {first.context.name}", [m.arrived for _, m in messages]
        )
    records = [message.record for _, message in messages]
    exchange = StatisticsExchange(records, first.rule, first.processes, first.context)
    edges = AllReduce.apply(exchange, *(message.edge for _, message in messages))
    return [
        (identifier, (edge, exchange))
        for (identifier, _), edge in zip(messages, edges, strict=True)
    ]


def normalize(
    x: Tensor,
    edge: Tensor,
    affine: Affine,
    record: ReplicaRecord,
    exchange: StatisticsExchange,
    running: RunningStatistics | None,
) -> Tensor:
    """Second half of a replica's forward, after the exchange: y; updates `running` if given."""
    operations = record.operations
    if operations is plain.DIFFERENTIABLE:
        known = exchange.statistics_for(x)
        y: Tensor = operations.forward(x, known, affine, exchange.rule, running).y
        return y
    in_forward = None if saving_runs_hooks() else running  # hooks may raise after the forward
    y = Normalize.apply(x.detach(), edge, *affine, record, exchange, in_forward)
    if running is not None and in_forward is None:
        operations.update_running(running, record.statistics)
    return y


def _on(part: Any, device: torch.device) -> Moments:
    """`part` as tensors on `device`."""
    return plain.plain_moments(part.wait() if isinstance(part, DeviceMoments) else part, device)


def _as_tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else as_tensor(values)
