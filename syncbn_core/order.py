"""The order of the steps, for the parts of a batch that one process holds.

    forward    x, weight, bias, running statistics as the steps take them
               moments of each part, merged in one row; the rows of all members
               statistics of the whole batch; y of each part, running statistics last
    backward   x and dy as the steps take them
               two sums of each part, added; the sums of all members
               dx of each part

A layer alone and a rank have one part; replicas, which are threads of a process, have one on each
device. A graph of torch.compile (`syncbn_torch.traced`) and JAX have orders of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.arrays import arrays_of, near
from syncbn_core.exchange import Exchange
from syncbn_core.labels import Labels
from syncbn_core.masks import Valid, without_filled
from syncbn_core.moments import Moments, NormRule, require_more_than_one_value
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

Array = Any


class Part(NamedTuple):
    """One part of the batch.

    Attributes:
        x: `(N, C, *spatial)`.
        affine, running: as in `steps`, on the device of x; a running of None is not updated.
        valid: with a mask, that itself if the steps take it, else what is known of x (`masks`).
        out: where to write y, or None; may be x.
        device: where x is, if parts are on several.
    """

    x: Array
    affine: Affine = Affine()
    running: RunningStatistics | None = None
    valid: Valid | Array | None = None
    out: Array | None = None
    device: Any = None


class Forward(NamedTuple):
    """What a forward leaves for its backward, besides x.

    Attributes:
        steps, exchange: those of all parts.
        norms: of each part.
        number: of the exchange, which the sums of backward carry; 0 without one.
        scale: `(2, C)`, for layers in place, else None. Backward multiplies weight and `sum(dy)` by
            `scale[0]`, and `sum(dy * xhat)` by `scale[1]`, before it computes dx.
        constant: whether statistics were constants, without a gradient.
    """

    steps: Operations
    norms: Sequence[Norm]
    exchange: Any = None  # an `Exchange`, or what has its `begin_sums` and `sums`
    number: int = 0
    scale: Array | None = None
    constant: bool = False


def forward(
    steps: Operations, parts: Sequence[Part], rule: NormRule, exchange: Exchange | None = None
) -> tuple[list[Array], Forward]:
    """`(y of each part, what backward needs)`; updates running statistics.

    Raises `BatchSizeError` for one value per channel in the whole batch, and the errors of
    `Operations.take` and of the exchange, before it writes anything.
    """
    first, number, members = parts[0].x, 0, 1
    taken = [steps.take(part.x, part.affine, part.running, part.valid) for part in parts]

    # One row of this process. Its label is known before its moments are.
    message = None if exchange is None else exchange.begin(first.shape[1], first)
    labels = None if message is None else message.labels
    if len(parts) == 1:
        total = moments_of(steps, taken[0][0], parts[0].valid, labels)
    else:
        pairs = zip(taken, parts, strict=True)
        total = steps.merge([moments_of(steps, x, part.valid) for (x, *_), part in pairs], labels)

    # The rows of all members.
    if exchange is not None and message is not None:
        total, number = exchange.moments(total, message)
        members = exchange.communicator.size
    if total.count == 1:
        require_more_than_one_value(total.count, first.shape, members)

    # A table on each device, all before the first y: here the streams of all replicas are current.
    tables = {parts[0].device: steps.statistics(total, rule)}
    for part in parts[1:]:
        if part.device not in tables:
            rows = near(total.rows, part.x)
            tables[part.device] = steps.statistics(total._replace(rows=rows), rule)

    # y of each part; each updates its running statistics last.
    ys = [
        steps.forward(x, Norm(tables[part.device], affine, rule), running, part.out)
        for (x, affine, running), part in zip(taken, parts, strict=True)
    ]
    known = {device: table._replace(rows=None, labels=None) for device, table in tables.items()}
    norms = [
        Norm(known[part.device], affine, rule)
        for (_, affine, _), part in zip(taken, parts, strict=True)
    ]
    return ys, Forward(steps, norms, exchange, number)


def backward(
    saved: Forward,
    xs: Sequence[Array],
    dys: Sequence[Array],
    needed: Sequence[bool] = (True,),
    out: Array | None = None,
) -> tuple[list[Array | None], list[Sums]]:
    """`(dx of each part, or None where it is not needed; the sums of each part)`.

    `xs`: those of the forward. `out`: where to write the dx of the only part, or None.
    """
    steps, norms, exchange = saved.steps, saved.norms, saved.exchange
    message = labels = None
    if exchange is not None:
        message = exchange.begin_sums(norms[0].statistics.table, saved.number)
        labels = message.labels if len(xs) == 1 else None
    pairs = [steps.take_pair(x, dy, n.affine) for x, dy, n in zip(xs, dys, norms, strict=True)]

    # The sums of each part, which are the gradients of its weight and bias; then of all.
    sums = [
        steps.backward_reduce(*pair, norm, labels) for pair, norm in zip(pairs, norms, strict=True)
    ]
    total = None
    if not saved.constant:
        total = sums[0].exchange
        if len(sums) > 1:
            total = _added([one.exchange for one in sums])
    if exchange is not None and message is not None:
        total = exchange.sums(total, message)
        if labels is not None and not needed[0] and len(total.shape) == 1:
            labels.check_total(total)  # else `backward_input` does

    if saved.scale is not None:
        total = total * saved.scale
        norms = [_scaled(norm, saved.scale[0]) for norm in norms]
    dxs = []
    for x, pair, norm, by in zip(xs, pairs, norms, needed, strict=True):
        own = total if len(xs) == 1 else near(total, x)
        dxs.append(steps.backward_input(*pair, norm, own, out, labels) if by else None)
    return dxs, sums


def moments_of(
    steps: Operations, x: Any, valid: Any = None, labels: Labels | None = None
) -> Moments:
    """Those of x, which `steps` has taken; of its valid values if there was a mask."""
    part = steps.moments(x, labels)
    if valid is None or steps.takes_masks:
        return part
    count, fill = valid
    return without_filled(arrays_of(part.rows).xp, part, count, fill)


def _scaled(norm: Norm, scale: Array) -> Norm:
    affine = norm.affine
    return norm._replace(affine=affine._replace(weight=affine.weight * scale))


def _added(sums: Sequence[Array]) -> Array:
    """Those of all parts, in their order, on the device of the first."""
    total = sums[0]
    with np.errstate(invalid="ignore", over="ignore"):
        for other in sums[1:]:
            total = total + near(other, total)
    return total
