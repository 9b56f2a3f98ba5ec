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

Gradients of gradients take plain differentiable operations instead (`plain.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from syncbn_core.comm import Communicator
from syncbn_core.errors import ShapeError, StateError
from syncbn_core.moments import Moments, merge_all, require_more_than_one_value
from syncbn_torch import arithmetic, plain
from syncbn_torch.arithmetic import Channelwise, place_like, silent, tensor_of
from syncbn_torch.interop import as_array

__all__ = [
    "Call",
    "Member",
    "batch_norm",
    "batch_norm_eval",
    "measure",
    "merge_members",
    "normalize",
]


class Pass:
    """What the nodes of one call hand each other in one backward pass."""

    __slots__ = ("given", "sums")

    def __init__(self) -> None:
        # Of each member whose y is part of the loss: dy, weight, weighted sums (2, C).
        self.given: dict[Member, tuple[Tensor, Tensor | None, Channelwise]] = {}
        self.sums: Channelwise = None  # over all members


class Call:
    """One exchange of statistics: settings, members in order, and what came out."""

    __slots__ = ("communicator", "eps", "eps_mode", "invstd", "members", "passes", "total")

    def __init__(self, eps: float, eps_mode: str, communicator: Communicator | None) -> None:
        self.eps = eps
        self.eps_mode = eps_mode
        self.communicator = communicator
        self.members: list[Member] = []
        self.total: Moments
        self.invstd: Channelwise
        self.passes: dict[int, Pass] = {}

    def current_pass(self) -> Pass:
        """The backward pass that this thread is in. It is dropped when that pass ends.

        Passes over one graph may come one after the other, may stop half way (gradients of the
        weight alone), and may run at the same time in several threads.
        """
        task = torch._C._current_graph_task_id()
        new = Pass()
        current = self.passes.setdefault(task, new)
        if current is new:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.passes.pop(task, None))
        return current

    def merge(self, parts: Sequence[Moments], shape: Sequence[int]) -> None:
        """Set `total` and `invstd` from all parts; `BatchSizeError` for one value per channel."""
        total = merge_all(parts)
        if self.communicator is not None:
            total = self.communicator.merge_moments(total)
        require_more_than_one_value(total.count, shape)
        self.total = total
        self.invstd = arithmetic.invstd(total.var, self.eps, self.eps_mode)

    def statistics(self, x: Tensor) -> tuple[Channelwise, Channelwise]:
        """`(mean, invstd)` where x is."""
        return place_like(self.total.mean, x), place_like(self.invstd, x)

    def differentiable_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(mean, invstd)` where x is, as a function of every member's x that has a graph."""
        parts = []
        for member in self.members:
            live = member.live_x()
            part = member.part if live is None else plain.moments(live)
            mean, m2 = (tensor_of(values).to(x.device) for values in (part.mean, part.m2))
            parts.append(Moments(part.count, mean, m2))
        total = merge_all(parts)
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

    def means(self, sums: Channelwise) -> tuple[Channelwise, Channelwise]:
        """`sums` (2, C) over the count; zero where "clamp" made the deviation a constant."""
        mean_dy, mean_dy_xhat = sums / max(self.total.count, 1)
        if self.eps_mode == "clamp":
            clamped = self.total.var < self.eps
            if isinstance(sums, Tensor):
                mean_dy_xhat = mean_dy_xhat.masked_fill(tensor_of(clamped).to(sums.device), 0.0)
            else:
                mean_dy_xhat = np.where(clamped, 0.0, mean_dy_xhat)
        return mean_dy, mean_dy_xhat


class Member:
    """One member's share in a call."""

    __slots__ = ("call", "local", "part")

    def __init__(self) -> None:
        self.call: Call
        self.part: Moments
        self.local: weakref.ref[Any] | None = None  # ctx of the node that has x

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
        means = (place_like(values, x) for values in call.means(current.sums))
        if torch.is_grad_enabled():
            statistics = call.differentiable_statistics(x)
            return plain.backward_input(x, dy, *statistics, weight, *means), None
        statistics = call.statistics(x)
        return arithmetic.backward_input(x, dy, *statistics, weight, *means, parallel=True), None


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
        total = given[0]
        with silent():
            for sums in given[1:]:
                total = total + (sums.to(total.device) if isinstance(sums, Tensor) else sums)
        current.sums = call.reduce(total)
        return None, *ctx.edges


class Norm(Function):
    """x (detached), an edge, weight, bias -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        member: Member,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.member = member
        statistics = member.call.statistics(x)
        return arithmetic.normalize(x, *statistics, weight, bias, parallel=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        member: Member = ctx.member
        if torch.is_grad_enabled():
            live = member.live_x()
            x = x if live is None else live
            statistics = member.call.differentiable_statistics(x)
            sums: Channelwise = torch.stack(plain.backward_reduce(x, dy, *statistics))
        else:
            statistics = member.call.statistics(x)
            sums = arithmetic.backward_reduce(x, dy, *statistics, parallel=True)
        edge = None
        if ctx.needs_input_grad[1]:
            given = (dy, weight, _weighted(sums, weight))
            member.call.current_pass().given[member] = given
            edge = dy.new_empty(0)
        return None, edge, *_parameter_gradients(ctx, 2, sums, weight), None


class Alone(Function):
    """x, weight, bias -> y, for one member per process."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
    ) -> Tensor:
        call.merge([arithmetic.moments(x, parallel=True)], x.shape)
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return arithmetic.normalize(x, *call.statistics(x), weight, bias, parallel=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call: Call = ctx.call
        again = torch.is_grad_enabled()
        if again:
            part = plain.moments(x)
            statistics = (part.mean, plain.invstd_from_var(part.var, call.eps, call.eps_mode))
            sums: Channelwise = torch.stack(plain.backward_reduce(x, dy, *statistics))
        else:
            statistics = call.statistics(x)
            sums = arithmetic.backward_reduce(x, dy, *statistics, parallel=True)
        dx = None
        # The collective takes place whether or not this member needs its result: others do.
        if ctx.needs_input_grad[0] or call.communicator is not None:
            means = call.means(call.reduce(_weighted(sums, weight)))
            if again:
                dx = plain.backward_input(x, dy, *statistics, weight, *means)
            else:
                dx = arithmetic.backward_input(x, dy, *statistics, weight, *means, parallel=True)
        return dx, *_parameter_gradients(ctx, 1, sums, weight), None


def _weighted(sums: Channelwise, weight: Tensor | None) -> Channelwise:
    """`sums` (2, C) times weight (C,)."""
    if weight is None:
        return sums
    if isinstance(sums, Tensor):
        return sums * weight
    with silent():
        return sums * as_array(weight)


def _parameter_gradients(
    ctx: Any, first: int, sums: Channelwise, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by weight and bias, the inputs `first` and `first + 1` of a node."""
    by_weight, by_bias = ctx.needs_input_grad[first : first + 2]
    if not (by_weight or by_bias):
        return None, None
    dtype = ctx.saved_tensors[0].dtype if weight is None else weight.dtype
    sum_dy, sum_dy_xhat = tensor_of(sums).to(dtype).unbind()
    return sum_dy_xhat if by_weight else None, sum_dy if by_bias else None


def measure(x: Tensor) -> tuple[Member, Tensor]:
    """First half of a member's forward: its moments, and the edge to the merging node."""
    member = Member()
    edge: Tensor = Local.apply(x, member)
    return member, edge


def merge_members(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """Master callback of a layer: `(member, edge, call, shape)` from each, an edge to each.

    The call of the first message, the master's, becomes that of every member. Raises
    `BatchSizeError` for one value per channel in all, `ShapeError` for unequal channels.
    """
    members: list[Member] = [message[0] for _, message in messages]
    _, _, call, shape = messages[0][1]
    channels = {identifier: len(message[0].part.mean) for identifier, message in messages}
    if len(set(channels.values())) > 1:
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    parts = [member.part for member in members]
    home = parts[0].mean
    if isinstance(home, Tensor):
        parts = [Moments(p.count, place_like(p.mean, home), place_like(p.m2, home)) for p in parts]
    call.merge(parts, shape)
    call.members = members
    for member in members:
        member.call = call
    edges = Merge.apply(call, *(message[1] for _, message in messages))
    return [(identifier, edge) for (identifier, _), edge in zip(messages, edges, strict=True)]


def normalize(
    x: Tensor, edge: Tensor, weight: Tensor | None, bias: Tensor | None, member: Member
) -> Tensor:
    """Second half of a member's forward, once its call is merged: y."""
    y: Tensor = Norm.apply(x.detach(), edge, weight, bias, member)
    return y


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    eps_mode: str,
    communicator: Communicator | None = None,
) -> tuple[Tensor, Moments]:
    """`(y, moments of the whole batch)` for the one member of this process.

    x (N, C, *spatial) and y of one dtype; weight, bias (C,) or None; moments float64.
    Raises `BatchSizeError` for one value per channel over the group.
    """
    call = Call(eps, eps_mode, communicator)
    y: Tensor = Alone.apply(x, weight, bias, call)
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
