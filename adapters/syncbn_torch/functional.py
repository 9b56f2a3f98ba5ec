"""The autograd graph of batch normalization over one member or over many.

Statistics are shared by all members, so are the two sums of backward. A barrier inside
backward would deadlock: one `backward()` runs every replica of a device on one autograd thread.
So the graph itself synchronizes:

    x_i -> Local_i -> edge_i ─┐                    ┌─> edge ─┐
    x_j -> Local_j -> edge_j ─┴─> Merge (one node) ┴─> edge ─┴─> Norm_k(x_k) -> y_k

The edges are empty tensors: they order the nodes, and numbers travel in the `Call` that the
members share, backward in a `Pass` of their own. There `Norm` leaves dy and
`[sum(dy), sum(dy * xhat)] * weight`; `Merge` adds up; `Local` writes
`dx = invstd * (weight * dy - sum_dy / n - xhat * sum_dy_xhat / n)` in one pass. Nothing waits, a
loss may use any of the outputs, and only x and O(C) numbers are kept.

With one member per process `Alone` does all that in one node, with the collective in backward.

Gradients of gradients take plain differentiable operations instead (`plain.py`), and so does what
forward-mode AD and function transforms hand in (`transforms.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from syncbn_core.comm import Communicator
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import ShapeError, StateError
from syncbn_core.moments import Moments, merge_all, require_more_than_one_value
from syncbn_torch import arithmetic, plain
from syncbn_torch.arithmetic import Statistics
from syncbn_torch.cuda import CudaStatistics
from syncbn_torch.handover import Handover
from syncbn_torch.statistics import (
    Channelwise,
    RunningStatistics,
    Sums,
    parameter_gradients,
    silent,
    tensor_of,
)
from syncbn_torch.torch_kernel import saving_runs_hooks
from syncbn_torch.transforms import beyond_memory, refuse_over_processes

__all__ = [
    "Call",
    "Member",
    "batch_norm",
    "batch_norm_eval",
    "measure",
    "merge_members",
    "needed_gradients",
    "normalize",
    "on_the_way",
    "require_savable",
]


class Pass:
    """What the nodes of one call hand each other in one backward pass."""

    __slots__ = ("__weakref__", "given", "sums")

    beginning = threading.Lock()  # the threads of several devices may be in one pass

    def __init__(self) -> None:
        # Of each member whose y is part of the loss: dy, weight, weighted sums (2, C).
        self.given: dict[Member, tuple[Tensor, Tensor | None, Handover]] = {}
        self.sums: Handover  # over all members


def _end(current: Pass) -> None:
    """End a pass: what its nodes left there is no longer needed."""
    current.given.clear()


class Call:
    """One exchange of statistics: settings, members in order, and what came out."""

    __slots__ = (
        "communicator",
        "context",
        "eps",
        "eps_mode",
        "invstd",
        "members",
        "passes",
        "places",
        "total",
    )

    def __init__(self, eps: float, eps_mode: str, communicator: Communicator | None) -> None:
        self.eps = eps
        self.eps_mode = eps_mode
        self.communicator = communicator
        self.context: Any = None  # of the forward of replicas
        self.members: list[Member] = []
        self.total: Moments
        self.invstd: Channelwise  # on the host
        self.places: dict[Any, Tensor]  # packed moments on each device
        self.passes: dict[int, weakref.ref[Pass]] = {}

    def current_pass(self) -> Pass:
        """The backward pass that this thread is in. It is dropped when that pass ends or fails.

        Passes over one graph may come one after the other, may stop half way (gradients of the
        weight alone), and may run at the same time in several threads.
        """
        if self.context is not None and not self.context.is_over():
            raise StateError(
                f"expected the backward of {self.context.name} after the forward of all replicas, "
                "got one inside a replica (autograd.grad or backward() in forward), which can't be "
                "synchronized; compute gradients outside of DataParallelWithCallback"
            )
        task = torch._C._current_graph_task_id()
        passes = self.passes
        with Pass.beginning:
            known = passes.get(task)
            current = None if known is None else known()
            if current is None:
                current = Pass()
                passes[task] = weakref.ref(current, lambda _: passes.pop(task, None))
                # Only the engine's own task holds it, by this callback, which is never called
                # when the task fails.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(_end, current))
        return current

    def merge(self, parts: Sequence[Moments], shape: Sequence[int]) -> None:
        """Settle the moments of all parts, over all processes."""
        home = arithmetic.home_of(parts[0])
        total = merge_all([arithmetic.moved(part, home) for part in parts])
        if self.communicator is not None:
            total = self.communicator.merge_moments(total)
        self.settle(total, parts, shape)

    def settle(self, total: Moments, parts: Sequence[Moments], shape: Sequence[int]) -> None:
        """Set `total` and `invstd`; `BatchSizeError` for one value per channel.

        Not where only a device knows the count, over GPUs of several processes: asking waits.
        """
        if total.known_count is not None:
            require_more_than_one_value(total.known_count, shape)
        self.total = total
        if isinstance(total, DeviceMoments):
            # Here, in the thread whose streams all that has been computed so far is on.
            devices = {total.parts.device, *(arithmetic.home_of(part) for part in parts)}
            parts_of_all = total.parts.contiguous()
            self.places = {device: parts_of_all.to(device) for device in devices}
        else:
            self.invstd = arithmetic.invstd(total, self.eps, self.eps_mode)

    def statistics(self, x: Tensor) -> Statistics:
        """Statistics where x is."""
        total = self.total
        if isinstance(total, DeviceMoments):
            return CudaStatistics(self.places[x.device], self.eps, self.eps_mode)
        return arithmetic.statistics_of(x, total, self.invstd, self.eps, self.eps_mode)

    def plain_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(mean, invstd)` as tensors where x is.

        With gradients on, as a function of every member's x that has a graph.
        """
        parts = [self.total]
        if torch.is_grad_enabled():
            known = [(member.live_x(), member.part) for member in self.members]
            parts = [part if live is None else plain.moments(live) for live, part in known]
        total = merge_all(
            [
                Moments(part.count, *(tensor_of(v).to(x.device) for v in (part.mean, part.m2)))
                for part in parts
            ]
        )
        return total.mean, plain.invstd_from_var(total.var, self.eps, self.eps_mode)

    def reduce(self, sums: Channelwise) -> Channelwise:
        """`sums` added up over the processes of the group, if there is one."""
        if self.communicator is None:
            return sums
        if torch.is_grad_enabled():
            raise StateError(
                "second derivatives (create_graph=True) don't go through a process group; "
                "compute them in one process, or use layers without process_group there"
            )
        return self.communicator.all_reduce_sums(sums)

    def takes_plain(self, *tensors: Any) -> bool:
        """Whether a step of backward on `tensors` has to take plain operations.

        `StateError` for what can't be sent to other processes.
        """
        beyond = beyond_memory(*tensors)
        if beyond and self.communicator is not None:
            refuse_over_processes("the backward of a layer")
        return beyond or torch.is_grad_enabled()

    def means(self, sums: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """`sums` (2, C) over the count, for passes that have a graph themselves."""
        mean_dy, mean_dy_xhat = sums.to(x.device) / max(self.total.count, 1)
        if self.eps_mode == "clamp":
            clamped = tensor_of(self.total.var < self.eps).to(x.device)
            mean_dy_xhat = mean_dy_xhat.masked_fill(clamped, 0.0)
        return mean_dy, mean_dy_xhat


class Member:
    """One member's share in a call."""

    __slots__ = ("call", "local", "part", "plain", "statistics")

    def __init__(self) -> None:
        self.call: Call
        self.part: Moments
        self.statistics: Statistics
        self.local: weakref.ref[Any] | None = None  # ctx of the node that has x
        self.plain = False  # its forward is made of torch's operations, without these nodes

    def live_x(self) -> Tensor | None:
        """x with its graph, or None where no gradient flows to it."""
        ctx = None if self.local is None else self.local()
        return None if ctx is None else ctx.saved_tensors[0]


class Local(Function):
    """x -> an edge; its moments go into the member."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, member: Member) -> Tensor:
        ctx.save_for_backward(x)
        ctx.member = member
        member.local = weakref.ref(ctx)
        member.part = arithmetic.moments(x, parallel=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, edge: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        member: Member = ctx.member
        call = member.call
        current = call.current_pass()
        dy, weight, _ = current.given.pop(member, (None, None, None))
        if dy is None:  # this member's y is not part of the loss, but its x shaped the others'
            dy = torch.zeros_like(x)
        sums = current.sums.on(x.device)
        if call.takes_plain(dy, sums):
            statistics = call.plain_statistics(x)
            means = call.means(sums, x)
            return plain.backward_input(x, dy, *statistics, weight, *means), None
        dx = member.statistics.backward_input(x, dy, weight, sums, parallel=True)
        return dx, None


class Merge(Function):
    """An edge from every member -> an edge to every member."""

    @staticmethod
    def forward(ctx: Any, call: Call, *edges: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.edges = [edge.detach() for edge in edges]
        return tuple(edge.new_empty(0) for edge in edges)

    @staticmethod
    def backward(ctx: Any, *edges: Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        current = call.current_pass()
        given = [current.given[member][2] for member in call.members if member in current.given]
        if any(isinstance(sums.value, Tensor) for sums in given):
            given = [one if one.stream else Handover(tensor_of(one.value)) for one in given]
        with given[0].current(), silent():
            total = given[0].value
            for sums in given[1:]:
                total = total + (sums.on(total.device) if isinstance(total, Tensor) else sums.value)
            current.sums = Handover(call.reduce(total))
        return None, *ctx.edges


class Norm(Function):
    """x (detached), an edge, weight, bias -> y; a kernel may update `running` on its way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        member: Member,
        running: RunningStatistics | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.member = member
        member.statistics = member.call.statistics(x)
        return member.statistics.normalize(x, weight, bias, running, parallel=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        member: Member = ctx.member
        if member.call.takes_plain(dy):
            if torch.is_grad_enabled():
                live = member.live_x()
                x = x if live is None else live
            statistics = member.call.plain_statistics(x)
            sums = _differentiable_sums(x, dy, *statistics, weight)
        else:
            sums = member.statistics.backward_reduce(x, dy, weight, parallel=True)
        edge = None
        if ctx.needs_input_grad[1]:
            member.call.current_pass().given[member] = (dy, weight, Handover(sums.exchange))
            edge = dy.new_empty(0)
        return None, edge, *needed_gradients(ctx, 2, sums), None, None


class Alone(Function):
    """x, weight, bias -> y, for one member per process; as for `Norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        member: Member,
        running: RunningStatistics | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.member = member
        call = member.call
        done = None
        if call.communicator is None:
            require_more_than_one_value(x.numel() // max(x.shape[1], 1), x.shape)
            done = arithmetic.forward_alone(x, weight, bias, call.eps, call.eps_mode)
        if done is not None:
            alone, call.total, call.invstd = done
            member.statistics = call.statistics(x)
            return alone
        call.merge([arithmetic.moments(x, parallel=True)], x.shape)
        member.statistics = call.statistics(x)
        return member.statistics.normalize(x, weight, bias, running, parallel=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call, known = ctx.member.call, ctx.member.statistics
        plainly = call.takes_plain(dy)
        if not plainly and call.communicator is None and ctx.needs_input_grad[0]:
            done = known.backward_alone(x, dy, weight)
            if done is not None:
                sums, dx = done
                return dx, *needed_gradients(ctx, 1, sums), None, None
        if plainly:
            part = plain.moments(x)
            mean, invstd = part.mean, plain.invstd_from_var(part.var, call.eps, call.eps_mode)
            sums = _differentiable_sums(x, dy, mean, invstd, weight)
        else:
            sums = known.backward_reduce(x, dy, weight, parallel=True)
        dx = None
        # The collective takes place whether or not this member needs its result: others do.
        if ctx.needs_input_grad[0] or call.communicator is not None:
            total = call.reduce(sums.exchange)
            if plainly:
                dx = plain.backward_input(x, dy, mean, invstd, weight, *call.means(total, x))
            else:
                dx = known.backward_input(x, dy, weight, total, parallel=True)
        return dx, *needed_gradients(ctx, 1, sums), None, None


def _differentiable_sums(
    x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> Sums:
    sums = torch.stack(plain.backward_reduce(x, dy, mean, invstd))
    weighted = sums if weight is None else sums * weight
    return Sums(weighted, *parameter_gradients(sums, x, weight))


def needed_gradients(ctx: Any, first: int, sums: Sums) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by weight and bias, inputs `first` and `first + 1` of a node, where needed."""
    by_weight, by_bias = ctx.needs_input_grad[first : first + 2]
    return sums.by_weight if by_weight else None, sums.by_bias if by_bias else None


def on_the_way(running: RunningStatistics | None) -> RunningStatistics | None:
    """What a kernel may update; nothing where saving for backward may still fail after it."""
    return None if saving_runs_hooks() else running


def require_savable(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raise `StateError` for what torch would refuse to save for backward, when all is done."""
    if not (x.is_inference() or (weight is not None and weight.is_inference())):
        return
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        raise StateError(
            "expected tensors that can be saved for backward, got one made in "
            "torch.inference_mode(); clone() it outside, or run the layer in torch.no_grad()"
        )


def measure(x: Tensor, plainly: bool = False) -> tuple[Member, Tensor]:
    """First half of a member's forward: its moments, and the edge to the merging node.

    `plainly`, the same for all members: in differentiable operations, whose graph needs no edges.
    """
    member = Member()
    if plainly:
        member.plain = True
        member.part = plain.moments(x)
        return member, x.new_empty(0)
    edge: Tensor = Local.apply(x, member)
    return member, edge


def merge_members(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """Master callback of a layer: `(member, edge, call, shape)` from each, an edge to each.

    The call of the first message, the master's, becomes that of every member. Raises
    `BatchSizeError` for one value per channel in all, `ShapeError` for unequal channels.
    """
    members: list[Member] = [message[0] for _, message in messages]
    _, _, call, shape = messages[0][1]
    channels = {identifier: message[3][1] for identifier, message in messages}
    if len(set(channels.values())) > 1:
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    call.merge([member.part for member in members], shape)
    call.members = members
    for member in members:
        member.call = call
    edges = Merge.apply(call, *(message[1] for _, message in messages))
    return [(identifier, edge) for (identifier, _), edge in zip(messages, edges, strict=True)]


def normalize(
    x: Tensor,
    edge: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    member: Member,
    running: RunningStatistics | None = None,
) -> Tensor:
    """Second half of a member's forward, once its call is merged: y. Updates `running`."""
    if member.plain:
        return _normalize_plainly(x, weight, bias, member.call, running)
    y: Tensor = Norm.apply(x.detach(), edge, weight, bias, member, on_the_way(running))
    if running is not None:
        member.statistics.update(running)
    return y


def _normalize_plainly(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    call: Call,
    running: RunningStatistics | None,
) -> Tensor:
    y = plain.normalize(x, call.total.mean.to(x.device), call.invstd.to(x.device), weight, bias)
    if running is not None:
        running.update(call.total)
    return y


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    eps_mode: str,
    communicator: Communicator | None = None,
    running: RunningStatistics | None = None,
    plainly: bool = False,
) -> tuple[Tensor, Moments]:
    """`(y, moments of the whole batch)` for the one member of this process; updates `running`.

    x (N, C, *spatial) and y of one dtype; weight, bias (C,) or None; moments float64. `plainly`: in
    differentiable operations, for a process alone. Raises `BatchSizeError` for one value per
    channel over the group.
    """
    member = Member()
    member.call = call = Call(eps, eps_mode, communicator)
    if plainly:
        call.merge([plain.moments(x)], x.shape)
        return _normalize_plainly(x, weight, bias, call, running), call.total
    y: Tensor = Alone.apply(x, weight, bias, member, on_the_way(running))
    if running is not None:
        member.statistics.update(running)
    return y, call.total


def batch_norm_eval(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    eps_mode: str,
) -> Tensor:
    """y by running statistics, on torch's own kernel.

    "clamp" is the same kernel with the clamped variance and an eps that vanishes beside it.
    """
    if eps_mode == "clamp":
        running_var = running_var.clamp(min=eps)
        eps = eps * 1e-30
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
