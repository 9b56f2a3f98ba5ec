"""The batch of all replicas of a layer: their parts, joined, are computed like a layer alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from syncbn_core import order
from syncbn_core.errors import CommAborted, ShapeError, StateError
from syncbn_core.steps import Norm
from syncbn_torch import forward, node
from syncbn_torch._torch_private import (
    raise_sequence_number,
    saving_runs_hooks,
    without_dispatch_modes,
)
from syncbn_torch.activations import NONE, Activation, activated
from syncbn_torch.backends import plain
from syncbn_torch.data_parallel.contexts import Place
from syncbn_torch.plan import host_steps
from syncbn_torch.streams import of_replicas

STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class PartOfReplica(NamedTuple):
    """What a replica gives the master.

    `state`: the `STATE` of its `layer`. `graph`, `inference`: its modes. `hooked`: whether it has
    hooks for saved tensors; then `kept` is the ctx of a node that has saved x for its graph, if
    any. `stream`: that of its GPU on which it computes x, and goes on with y; None on a host.
    `nodes`: how many nodes of autograd its thread has made.
    """

    layer: Any
    place: Place
    x: Tensor
    mask: Tensor | None
    state: Sequence[Tensor | None]
    graph: bool
    inference: bool
    hooked: bool
    kept: Any
    stream: Any
    nodes: int


Group = Sequence[PartOfReplica]
Groups = Sequence[tuple[torch.memory_format, Group]]  # each of one kind, and its layout
# by the id of each part: y, or an error; the activation that y lacks; the norm of the node
Results = dict[int, tuple[Tensor | Exception, Activation, Norm | None]]


def of_all_replicas(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback: a reply for each `PartOfReplica`.

    That is its `Results`, whether other parts are on its device, and how many nodes autograd has.

    In all replicas nodes made before have lower sequence numbers than the node of the layer, and
    those made after it higher ones, as if one thread had run the model. So the backwards of layers
    in branches run in one order on all ranks.
    """
    parts: Group = [part for _, part in messages]
    place = parts[0].place
    # When a forward is given up, all slaves are forgotten; a master that comes then would be alone.
    if place.forward.closed:
        raise CommAborted(f"{place.name}: the forward of this replica has ended")
    with (
        of_replicas([part.stream for part in parts]) as record,
        # not in the modes of any one replica
        torch.inference_mode(False not in [part.inference for part in parts]),
        torch.set_grad_enabled(True in [part.graph for part in parts]),
        without_dispatch_modes(),
    ):
        raise_sequence_number(max([part.nodes for part in parts]))
        results = _batch_norm(place, parts)
        record([results[id(part)][0] for part in parts])
    nodes, devices = raise_sequence_number(), [part.x.device for part in parts]
    return [
        (identifier, (*results[id(part)], devices.count(part.x.device) > 1, nodes))
        for identifier, part in messages
    ]


def _batch_norm(place: Place, parts: Group) -> Results:
    layer, groups = parts[0].layer, _of_one_kind(parts)
    xs = [_joined(group, layout) for layout, group in groups]
    processes, found = forward.members_of(layer, xs[0]), [forward.operations_for(x) for x in xs]
    do = found[0]
    if len(xs) > 1 and (do is None or len({*found}) > 1):  # those of a CPU are for one kind of x
        do = plain.OPERATIONS
    hooked = True in [part.hooked for part in parts]
    made: list[order.Part] = []
    with _saving(place, groups if hooked else [], xs):
        for (_, group), x in zip(groups, xs, strict=True):
            own, mask = group[0].layer, _joined_mask(group)
            try:
                part, steps = forward.checked_part(own, x, processes, mask, do)
            except forward.ERRORS_OF_INPUT as error:
                others = CommAborted(f"{place.name}: another replica has failed")
                return {id(p): (error if p is group[0] else others, NONE, None) for p in parts}
            if made and group[0].state[2] is parts[0].state[2]:  # updated once
                part = part._replace(running=None)
            made.append(part)
        if len({x.shape[1] for x in xs}) > 1:
            channels = [part.x.shape[1] for part in parts]
            raise ShapeError(f"expected equally many channels in all replicas, got {channels}")
        # the node leaves what a checkpoint will need
        by_node = len(made) > 1 or hooked or mask is not None or processes is not None
        by_node = by_node or forward.takes_node(layer, x)
        y = None if by_node else forward.by_kernel_of_torch(part, layer.eps)
        if y is not None:
            left = layer._activation
            if left[0] in ("silu", "hardswish"):  # others keep results, which may be overwritten
                y, left = activated(y, left), NONE
            return _results(place, groups, [y], left, [None])
        ys, known = node.batch_norm(steps or host_steps(part), made, layer._rule, processes)
        return _results(place, groups, ys, NONE, known.norms)


def _results(
    place: Place,
    groups: Groups,
    ys: Sequence[Tensor],
    left: Activation,
    norms: Sequence[Norm | None],
) -> Results:
    """Those of all parts. They are no views of `ys`, so that a replica may overwrite its own."""
    results: Results = {}
    for (_, parts), y, norm in zip(groups, ys, norms, strict=True):
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(partial(_check_over, place))
        sizes = [len(part.x) for part in parts]
        split = torch.unsafe_split_with_sizes(y, sizes) if len(parts) > 1 else [y]
        for part, own in zip(parts, split, strict=True):
            results[id(part)] = own if part.graph else own.detach(), left, norm
    return results


def _of_one_kind(parts: Group) -> Groups:
    """The parts, in groups that can be one tensor, for one layer."""
    full = next(iter([part.x for part in parts if part.x.numel()]), parts[0].x)
    groups: dict[Any, Group] = {}
    for part in parts:
        x = part.x
        shown = x if x.numel() or x.shape[1:] != full.shape[1:] else full
        layout = torch.contiguous_format if shown.is_contiguous() else _layout(shown)
        kind = layout, type(x), x.dtype, x.device, x.shape[1:], *map(id, part.state)
        groups[kind] = [*groups.get(kind, ()), part]
    return [(kind[0], group) for kind, group in groups.items()]


def _layout(x: Tensor) -> torch.memory_format:
    """That of x, or the contiguous one for any other."""
    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def _joined(parts: Group, layout: torch.memory_format) -> Tensor:
    xs = [part.x if part.graph else part.x.detach() for part in parts]
    if len(xs) == 1 or not xs[0].dim():
        return xs[0].clone() if xs[0].is_inference() else xs[0]  # which a node can't save
    x = torch.cat(xs)
    # an empty part may have made it contiguous
    return x if layout is torch.contiguous_format else x.contiguous(memory_format=layout)


def _joined_mask(parts: Group) -> Tensor | None:
    """The masks of the parts; a part without one has only valid elements."""
    given = [part.mask for part in parts if part.mask is not None]
    if not given:
        return None
    shape = torch.broadcast_shapes(*[mask.shape[1:] for mask in given])
    every = given[0].new_ones(())
    masks = [(every if p.mask is None else p.mask).expand(len(p.x), *shape) for p in parts]
    return torch.cat(masks)


def _check_over(place: Place, gradients: Any) -> None:
    """Called before the backward of a layer."""
    if not place.forward.is_over():
        raise StateError(
            f"expected the backward of {place.name} after the forward of all replicas, "
            "got autograd.grad or backward() inside a replica, which can't be synchronized; "
            "compute gradients outside of DataParallelWithCallback"
        )


def _saving(place: Place, hooked: Groups, xs: Sequence[Tensor]) -> Any:
    """In place of the hooks for saved tensors of the master's own thread: save what is given.

    But the x of `hooked` groups, the first `xs`, is joined again from what each replica has saved.
    """
    if not (hooked or saving_runs_hooks()):
        return nullcontext()
    parts_of = {
        x.data_ptr(): [p.kept or (p.x.detach(), _version(p.x)) for p in group]
        for (_, group), x in zip(hooked, xs, strict=False)
        if x.numel()
    }

    def pack(tensor: Tensor) -> Any:
        return parts_of.get(tensor.data_ptr()) or (tensor, _version(tensor))

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, list):
            return torch.cat([unpack(p) if type(p) is tuple else p.saved_tensors[0] for p in saved])
        tensor: Tensor = saved[0]
        if _version(tensor) != saved[1]:
            raise StateError(  # torch does not see it past hooks
                f"expected the weight and input of {place.name} as they were in forward, "
                "one has been modified by an inplace operation; do that after backward"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been written in place."""
    return None if tensor.is_inference() else tensor._version
