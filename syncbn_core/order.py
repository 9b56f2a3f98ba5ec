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

from syncbn_core.arrays import near
from syncbn_core.exchange import Exchange
from syncbn_core.labels import Labels
from syncbn_core.masks import Valid, filled, without_filled
from syncbn_core.moments import Moments, NormRule, require_more_than_one_value
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

Array = Any


class Part(NamedTuple):
    """One part of the batch.

    Attributes:
        x: `(N, C, *spatial)`.
        affine, running: as in `steps`, on the device of x; a running of None is not updated.
        mask: bool, `(N, 1, *spatial)` or 1 for any axis, or None: of the elements that count; y and
            dx are 0 elsewhere. A copy, which nobody writes to.
        out: where to write y, or None; may be x.
        device: where x is, if parts are on several.
        valid: what is known of x if that is filled, see `filled_part`.
    """

    x: Array
    affine: Affine = Affine()
    running: RunningStatistics | None = None
    mask: Array | None = None
    out: Array | None = None
    device: Any = None
    valid: Valid | None = None


class Forward(NamedTuple):
    """What a forward leaves for its backward, besides x.

    Attributes:
        steps, exchange: those of all parts.
        norms: of each part.
        number: of the exchange, which the sums of backward carry; 0 without one.
        scale: `(2, C)`, for layers in place, else None. Backward multiplies weight and `sum(dy)` by
            `scale[0]`, and `sum(dy * xhat)` by `scale[1]`, before it computes dx.
        constant: whether statistics were constants, without a gradient.
        masks: of each part, or () for none.
    """

    steps: Operations
    norms: Sequence[Norm]
    exchange: Any = None  # an `Exchange`, or what has its `begin_sums` and `sums`
    number: int = 0
    scale: Array | None = None
    constant: bool = False
    masks: Sequence[Array | None] = ()


def forward(
    steps: Operations, parts: Sequence[Part], rule: NormRule, exchange: Exchange | None = None
) -> tuple[list[Array], Forward]:
    """`(y of each part, what backward needs)`; updates running statistics.

    Raises `BatchSizeError` for one value per channel in the whole batch, and the errors of
    `Operations.take` and of the exchange, before it writes anything.
    """
    first, number, members = parts[0].x, 0, 1
    masked = [part for part in parts if part.mask is not None]
    if masked and not steps.takes_masks:
        parts = [filled_part(steps, part) for part in parts]
    taken = [steps.take(part.x, part.affine, part.running, part.mask) for part in parts]

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
    totals, tables = {parts[0].device: total}, {parts[0].device: steps.statistics(total, rule)}
    for part in parts[1:]:
        if part.device not in tables:
            totals[part.device] = own = total._replace(rows=near(total.rows, part.x))
            tables[part.device] = steps.statistics(own, rule)

    # y of each part; each updates its running statistics last.
    ys, norms = [], []
    for (x, affine, running), part in zip(taken, parts, strict=True):
        norm = Norm(tables[part.device], affine, rule)
        ys.append(steps.forward(x, norm, running, part.out, totals[part.device]))
        norms.append(norm)
    if masked and not steps.takes_masks:
        ys = [zeroed(steps, y, part.mask, part.out) for y, part in zip(ys, parts, strict=True)]
    masks = [part.mask for part in parts] if masked else ()
    return ys, Forward(steps, norms, exchange, number, masks=masks)


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
    masks = () if steps.takes_masks else saved.masks
    if masks:
        xs = [zeroed(steps, *own) for own in zip(xs, masks, strict=True)]
        dys = [zeroed(steps, *own) for own in zip(dys, masks, strict=True)]
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
    if masks:
        dxs = [zeroed(steps, *own, out) for own in zip(dxs, masks, strict=True)]
    return dxs, sums


def filled_part(steps: Operations, part: Part) -> Part:
    """The part; with a filled x if it has a mask and the steps take none, see `masks`."""
    if part.mask is None or steps.takes_masks:
        return part
    x, valid = filled(steps.arrays, part.x, part.mask)
    return part._replace(x=x, valid=valid)


def zeroed(steps: Operations, values: Array, mask: Array | None, out: Array | None = None) -> Array:
    """`values`, 0 where the mask is False, unless the steps see to that; in `out` if given."""
    if values is None or mask is None or steps.takes_masks:
        return values
    new = steps.arrays.select(mask, values, 0)
    if out is None:
        return new
    out[...] = new
    return out


def moments_of(
    steps: Operations, x: Any, valid: Valid | None = None, labels: Labels | None = None
) -> Moments:
    """Those of x, which `steps` has taken; of its valid values if it was filled."""
    part = steps.moments(x, labels)
    return part if valid is None else without_filled(steps.arrays.xp, part, *valid)


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
