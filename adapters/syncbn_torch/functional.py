"""The autograd graph of batch normalization over one member or over many.

Statistics are shared by all members, so are the two sums of backward. A barrier inside
backward would deadlock: one `backward()` runs every replica of a device on one autograd thread.
So the graph itself synchronizes:

    x_i -> Local_i -> [mean, m2]_i ─┐                    ┌─> [mean, m2] ─┐
    x_j -> Local_j -> [mean, m2]_j ─┴─> Merge (one node) ┴─> [mean, m2] ─┴─> Norm_k(x_k) -> y_k

What flows back along these edges is not the derivative but what dx needs:
`Norm` sends `[sum(dy), sum(dy * xhat)] * weight` and leaves dy in its `Member`; `Merge` adds up;
`Local` writes `dx = invstd * (weight * dy - sum_dy / n - xhat * sum_dy_xhat / n)` in one pass.
Nothing waits, a loss may use any of the outputs, and only x and O(C) numbers are kept.

With one member per process `Alone` does all that in one node, with the collective in backward.

Gradients of gradients take plain differentiable operations instead (`plain.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from syncbn_core.comm import Communicator
from syncbn_core.errors import ShapeError, StateError
from syncbn_core.moments import Moments, merge_all, require_more_than_one_value
from syncbn_torch import arithmetic, plain

__all__ = ["Call", "Member", "batch_norm", "batch_norm_eval", "merge_members", "normalize_member"]


class Call:
    """One exchange of statistics: settings, members in order, and what came out."""

    __slots__ = ("communicator", "eps", "eps_mode", "members", "total")

    def __init__(self, eps: float, eps_mode: str, communicator: Communicator | None) -> None:
        self.eps = eps
        self.eps_mode = eps_mode
        self.communicator = communicator
        self.members: list[Member] = []
        self.total: Moments

    def invstd(self, m2: Tensor) -> Tensor:
        """`(C,)`, from the merged m2 on any device."""
        return plain.invstd_from_var(m2 / max(self.total.count, 1), self.eps, self.eps_mode)

    def means(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """`sums` (2, C) over the count; zero where "clamp" made the deviation a constant."""
        mean_dy, mean_dy_xhat = sums / max(self.total.count, 1)
        if self.eps_mode == "clamp":
            clamped = self.total.m2.to(sums.device) < self.eps * self.total.count
            mean_dy_xhat = torch.where(clamped, 0.0, mean_dy_xhat)
        return mean_dy, mean_dy_xhat

    def reduce(self, sums: Tensor) -> Tensor:
        """`sums` added up over the processes of the group, if there is one."""
        if self.communicator is None:
            return sums
        if torch.is_grad_enabled():
            raise StateError(
                "second derivatives (create_graph=True) don't go through a process group; "
                "compute them in one process, or use layers without process_group there"
            )
        total: Tensor = self.communicator.all_reduce_sums(sums)
        return total

    def differentiable(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`(mean, invstd)` as a function of every member's x that has a graph."""
        parts = []
        for member in self.members:
            x = member.live_x()
            if x is None:
                parts.append(member.part)
            else:
                parts.append(Moments(member.part.count, *plain.moments(x)))
        home = parts[0].mean.device
        total = merge_all([Moments(p.count, p.mean.to(home), p.m2.to(home)) for p in parts])
        return total.mean.to(device), self.invstd(total.m2).to(device)


class Member:
    """What the nodes of one member hand each other in one backward pass."""

    __slots__ = ("call", "dy", "local", "part", "weight")

    def __init__(self) -> None:
        self.call: Call
        self.part: Moments
        self.local: weakref.ref[Any] | None = None  # ctx of the node that has x
        self.dy: Tensor | None = None
        self.weight: Tensor | None = None

    def live_x(self) -> Tensor | None:
        """x with its graph, or None where no gradient flows to it."""
        ctx = None if self.local is None else self.local()
        return None if ctx is None else ctx.saved_tensors[0]


class Local(Function):
    """x -> its own `[mean, m2]` (2, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, member: Member, parallel: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.member = member
        member.local = weakref.ref(ctx)
        stats = arithmetic.moments(x, parallel=parallel)
        member.part = Moments(_count(x), *stats.detach())
        return stats

    @staticmethod
    def backward(ctx: Any, sums: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        member: Member = ctx.member
        dy, weight = member.dy, member.weight
        member.dy = member.weight = None  # activation-sized: not longer than needed
        call = member.call
        mean_dy, mean_dy_xhat = call.means(sums)
        if dy is None:  # this member's y is not part of the loss, but its x shaped the others'
            dy = torch.zeros_like(x)
        if torch.is_grad_enabled():
            mean, invstd = call.differentiable(x.device)
            per_channel = (mean, invstd, weight, mean_dy, mean_dy_xhat)
            return plain.backward_input(x, dy, *per_channel), None, None
        mean = call.total.mean.to(x.device)
        invstd = call.invstd(call.total.m2.to(x.device))
        per_channel = (mean, invstd, weight, mean_dy, mean_dy_xhat)
        return arithmetic.backward_input(x, dy, *per_channel, parallel=True), None, None


class Merge(Function):
    """Every member's `[mean, m2]` -> the merged one, once per member, on its own device."""

    @staticmethod
    def forward(ctx: Any, call: Call, *stats: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        home = stats[0].device
        parts = [
            Moments(member.part.count, *own.to(home))
            for member, own in zip(call.members, stats, strict=True)
        ]
        total = merge_all(parts)
        if call.communicator is not None:
            total = call.communicator.merge_moments(total)
        call.total = total
        merged = torch.stack([total.mean, total.m2])
        return tuple(merged.to(own.device, copy=True) for own in stats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        for member, grad in zip(call.members, grads, strict=True):
            if grad is None:  # left by a pass that never came here; not of this loss
                member.dy = member.weight = None
        present = [grad for grad in grads if grad is not None]
        home = present[0].device
        sums = present[0]
        for grad in present[1:]:
            sums = sums + grad.to(home)
        sums = call.reduce(sums)
        return None, *(sums.to(member.part.mean.device) for member in call.members)


class Norm(Function):
    """x (detached), merged `[mean, m2]`, weight, bias -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        merged: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        member: Member,
        parallel: bool,
    ) -> Tensor:
        mean, m2 = merged.detach()
        invstd = member.call.invstd(m2)
        ctx.save_for_backward(x, weight)
        ctx.member, ctx.mean, ctx.invstd = member, mean, invstd
        return arithmetic.normalize(x, mean, invstd, weight, bias, parallel=parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        member: Member = ctx.member
        if torch.is_grad_enabled():
            live = member.live_x()
            x = x if live is None else live
            sums = plain.backward_reduce(x, dy, *member.call.differentiable(x.device))
        else:
            sums = arithmetic.backward_reduce(x, dy, ctx.mean, ctx.invstd, parallel=True)
        carried = None
        if ctx.needs_input_grad[1]:
            member.dy, member.weight = dy, weight
            carried = torch.stack(sums)
            if weight is not None:
                carried = carried * weight
        return None, carried, *_parameter_gradients(ctx, 2, sums, weight), None, None


class Alone(Function):
    """x, weight, bias -> y, for one member per process."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
    ) -> Tensor:
        total = Moments(_count(x), *arithmetic.moments(x, parallel=True))
        if call.communicator is not None:
            total = call.communicator.merge_moments(total)
        require_more_than_one_value(total.count, x.shape)
        call.total = total
        ctx.save_for_backward(x, weight)
        ctx.call = call
        ctx.invstd = call.invstd(total.m2)
        return arithmetic.normalize(x, total.mean, ctx.invstd, weight, bias, parallel=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call: Call = ctx.call
        again = torch.is_grad_enabled()
        mean, invstd = call.total.mean, ctx.invstd
        if again:
            stats = plain.moments(x)
            mean, invstd = stats[0], call.invstd(stats[1])
            sums = plain.backward_reduce(x, dy, mean, invstd)
        else:
            sums = arithmetic.backward_reduce(x, dy, mean, invstd, parallel=True)
        dx = None
        # The collective takes place whether or not this member needs its result: others do.
        if ctx.needs_input_grad[0] or call.communicator is not None:
            carried = torch.stack(sums)
            if weight is not None:
                carried = carried * weight
            means = call.means(call.reduce(carried))
            if again:
                dx = plain.backward_input(x, dy, mean, invstd, weight, *means)
            else:
                dx = arithmetic.backward_input(x, dy, mean, invstd, weight, *means, parallel=True)
        return dx, *_parameter_gradients(ctx, 1, sums, weight), None


def _count(x: Tensor) -> int:
    return x.numel() // x.shape[1] if x.shape[1] else 0


def _parameter_gradients(
    ctx: Any, first: int, sums: tuple[Tensor, Tensor], weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by weight and bias, the inputs `first` and `first + 1` of a node."""
    sum_dy, sum_dy_xhat = sums
    by_weight, by_bias = ctx.needs_input_grad[first : first + 2]
    dtype = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy_xhat.to(dtype) if by_weight else None, sum_dy.to(dtype) if by_bias else None


def merge_members(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """Master callback of a layer: `(member, stats, call, shape)` from each, merged stats to each.

    The call of the first message, the master's, becomes that of every member. Raises
    `BatchSizeError` for one value per channel in all, `ShapeError` for unequal channels.
    """
    _, (_, _, call, shape) = messages[0]
    members: list[Member] = [message[0] for _, message in messages]
    channels = {identifier: message[1].shape[1] for identifier, message in messages}
    if len(set(channels.values())) > 1:
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    if call.communicator is None:
        require_more_than_one_value(sum(member.part.count for member in members), shape)
    call.members = members
    for member in members:
        member.call = call
    merged = Merge.apply(call, *(message[1] for _, message in messages))
    require_more_than_one_value(call.total.count, shape)
    return [(identifier, own) for (identifier, _), own in zip(messages, merged, strict=True)]


def normalize_member(
    x: Tensor, merged: Tensor, weight: Tensor | None, bias: Tensor | None, member: Member
) -> Tensor:
    """y of one member, once its statistics are merged; keeps to the calling thread."""
    y: Tensor = Norm.apply(x.detach(), merged, weight, bias, member, False)
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
