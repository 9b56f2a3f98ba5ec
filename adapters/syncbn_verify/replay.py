"""Call a batch norm layer by itself with the input of all parts, and compare what it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_verify.figures import (
    Tolerance,
    both_nan,
    buffer_difference,
    difference,
    joined,
    largest,
    scale_of,
    shaken,
    tolerance,
)
from syncbn_verify.prepare import duplicate, make_alone
from syncbn_verify.recording import Call

__all__ = ["KNOWN", "Buffers", "Replay", "replayed"]

Buffers = Sequence[Mapping[str, Tensor]]

KNOWN = (_SynchronizedBatchNorm, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Replay:
    """Differences of a layer to its replay over the joined input, and their limit.

    `separate`: how far the output would be off if each part used its own statistics; 0 for
    classes that are known to synchronize. `frozen`: whether the layer computes with its running
    statistics also in training mode; asked only where `separate` is small. `nan`: whether some
    values can't be compared, since they are NaN in both.
    """

    output: float
    gradient: float | None
    running: float | None
    separate: float
    limit: float
    frozen: bool = False
    nan: bool = False

    @property
    def right(self) -> bool:
        figures = (self.output, self.gradient, self.running)
        return all(figure is None or figure <= self.limit for figure in figures)


def replayed(layer: nn.Module, calls: Sequence[Sequence[Call]], buffers: Buffers) -> Replay:
    """Call the layer with the joined input of all parts, once for each call of the parts.

    A second copy gets inputs and parameters with small changes, to see how far rounding may lead.
    """
    home = next((t.device for t in [*layer.parameters(), *layer.buffers()]), None)
    once, other = make_alone(duplicate(layer)), make_alone(duplicate(layer))
    generator = torch.Generator().manual_seed(3)
    limits = [tolerance(t.dtype) for own in calls for c in own for t in (c.x, c.y) if t is not None]
    allowed = max(limits, key=lambda found: found.layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(shaken(parameter, allowed.shake, generator))
    output, gradient, separate, frozen, nan = 0.0, [], 0.0, False, False
    known = isinstance(layer, KNOWN)
    for own in zip(*calls, strict=True):
        given = joined([call.x for call in own])
        x = given.to(home or given.device)
        dys = [torch.zeros_like(call.x) if call.dy is None else call.dy for call in own]
        before = None if known else duplicate(once)
        y, dx = _run(once, own, x, dys)
        y_other, dx_other = _run(
            other, own, shaken(x, allowed.shake, generator),
            [shaken(dy, allowed.shake, generator) for dy in dys],
        )  # fmt: skip
        scale = scale_of(y, allowed.layer, allowed, y_other)
        actual = joined([call.y for call in own if call.y is not None]).to(y.device)
        output = max(output, difference(actual, y, scale))
        nan = nan or both_nan(actual, y)
        if before is not None:
            apart = _separate(before, own, y, scale)
            separate = max(separate, apart)
            frozen = apart <= 10 * allowed.layer and _is_frozen(before, own, x, allowed)
        dxs = [call.dx for call in own if call.dx is not None]
        if dx is not None and len(dxs) == len(own):
            actual = joined(dxs).to(dx.device)
            gradient.append(difference(actual, dx, scale_of(dx, allowed.layer, allowed, dx_other)))
            nan = nan or both_nan(actual, dx)
    found = (dict(once.named_buffers()), dict(other.named_buffers()))
    running = largest(buffer_difference(b, *found, allowed.layer, allowed) for b in buffers)
    nan = nan or any(
        both_nan(b[name], buffer) for b in buffers for name, buffer in found[0].items() if name in b
    )
    return Replay(output, largest(gradient), running, separate, allowed.layer, frozen, nan)


def _run(
    layer: nn.Module, calls: Sequence[Call], x: Tensor, dys: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Output and gradient of the input for one call with the joined arguments of the parts."""
    x = x.detach().requires_grad_()
    y = _forward(layer, calls, x)
    if not y.requires_grad:
        return y.detach(), None
    (dx,) = torch.autograd.grad(y, x, joined(dys).to(y.device), allow_unused=True)
    return y.detach(), dx


def _forward(layer: nn.Module, calls: Sequence[Call], x: Tensor) -> Tensor:
    """The forward of the layer's class, which was recorded: hooks have run before and after it."""
    first = calls[0]
    vars(layer).update({k: v for k, v in first.settings.items() if k in vars(layer)})
    more = [
        _joined_argument(values, calls, x) for values in zip(*[c.more for c in calls], strict=True)
    ]
    named = {
        name: _joined_argument([c.named.get(name) for c in calls], calls, x) for name in first.named
    }
    y: Tensor = type(layer).forward(layer, x, *more, **named)
    return y


def _joined_argument(values: Sequence[Any], calls: Sequence[Call], x: Tensor) -> Any:
    """A further argument of a call: rows of all parts, or what all of them have got."""
    of_samples = all(
        isinstance(value, Tensor) and value.dim() and len(value) == len(call.x)
        for value, call in zip(values, calls, strict=True)
    )
    if of_samples:
        return torch.cat(list(values)).to(x.device)
    return values[0].to(x.device) if isinstance(values[0], Tensor) else values[0]


def _separate(layer: nn.Module, calls: Sequence[Call], y: Tensor, scale: Tensor) -> float:
    """How far off the output would be if each part were normalized by itself."""
    try:
        with torch.no_grad():
            alone = [_forward(duplicate(layer), [c], c.x.to(y.device)) for c in calls]
            return difference(joined(alone), y, scale)
    except ValueError:  # one value per channel
        return math.inf


def _is_frozen(layer: nn.Module, calls: Sequence[Call], x: Tensor, allowed: Tolerance) -> bool:
    """Whether the layer gives for random values of the shape of x what it gives in eval mode."""
    probe = 3 + 2 * torch.randn_like(x)
    with torch.no_grad():
        training = _forward(duplicate(layer), calls, probe)
        quiet = [replace(c, settings={**c.settings, "training": False}) for c in calls]
        evaluating = _forward(duplicate(layer).eval(), quiet, probe)
    return difference(training, evaluating, scale_of(evaluating, allowed.layer, allowed)) <= (
        allowed.layer
    )
