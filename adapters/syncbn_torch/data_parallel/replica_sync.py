"""The link from a replica of a layer to the other replicas, for one forward of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from syncbn_core import order
from syncbn_core.comm import SlavePipe, SyncMaster
from syncbn_core.errors import CheckpointError, CommAborted, ShapeError, StateError
from syncbn_core.moments import Moments
from syncbn_core.steps import Norm
from syncbn_torch._torch_private import (
    raise_sequence_number,
    saving_runs_hooks,
    watch_saving,
    without_dispatch_modes,
)
from syncbn_torch.backends import plain
from syncbn_torch.data_parallel.contexts import Place, place_of
from syncbn_torch.module_names import name_of
from syncbn_torch.node import Part, batch_norm
from syncbn_torch.streams import of_replicas, stream_of

__all__ = ["ReplicaSync", "Unconnected", "place_in"]

_KEY_OF_OUR_MASTER = "master of the layer"  # no name that an attribute of a context could have


class _Earlier(NamedTuple):
    """An earlier call of the layer in a replica.

    `shared`: whether other replicas were on its device. `graph`: whether gradients were enabled.
    """

    moments: Moments
    norm: Norm
    shared: bool
    graph: bool


class ReplicaSync:
    """The link of a replica in `DataParallelWithCallback` or a wrapper of another project."""

    def __init__(self, place: Place, copy_id: int) -> None:
        self.place: Place = place
        self.is_master: bool = copy_id == 0
        if self.is_master:
            self.master: SyncMaster = SyncMaster(
                _of_all_replicas, name=place.name, member="replica"
            )
            place.begin(_KEY_OF_OUR_MASTER, self.master)
        else:
            self.pipe: SlavePipe = place.master(_KEY_OF_OUR_MASTER).register_slave(copy_id)
        self._history: list[_Earlier] = []

    def check(self) -> None:
        """Raise `CommAborted` if the caller has given up this replica's forward."""
        if self.place.forward.given_up:
            raise CommAborted(
                f"{self.place.name}: the forward that this replica belonged to was given up: "
                f"{self.place.forward.given_up}"
            )

    def recomputes(self) -> bool:
        """Whether a forward now repeats one for a checkpoint, around the replicas or inside."""
        return self.place.forward.recomputes or self.place.forward.is_over()

    def forward(self, part: Part) -> Tensor:
        """y by the statistics of all replicas; each updates its own running statistics."""
        x, graph, over = part.x, part.graph, self.place.forward.is_over()
        part = part._replace(place=self.place)
        if over:
            with torch.no_grad(), without_dispatch_modes():
                do = part.operations
                own, _, running = do.take(x, part.affine, part.running, part.valid)
                earlier = self._earlier(order.moments_of(do, own, part.valid))
                if running is not None:  # before x is saved, where a checkpoint may end
                    do.update_running(running, earlier.norm.statistics)
        kept: list[Any] = [] if graph and saving_runs_hooks() else [None]
        if not kept:
            x = SaveInput.apply(x, kept)
        if over:
            with without_dispatch_modes():
                recomputed: Tensor = Recomputed.apply(x, *part.affine, earlier.norm, part)
            # a GPU of one replica alone has a generator of its own, which the checkpoint restores
            devices = [torch.device("cpu"), *[x.device] * earlier.shared]
            states = _random_states(devices)
            watch_saving(lambda: self._check_random_states(states, devices))
            return recomputed
        part = part._replace(
            x=x,
            inference=torch.is_inference_mode_enabled(),
            kept=kept[0] if x.requires_grad else None,
            stream=stream_of(x),
            nodes=raise_sequence_number(),
        )
        exchange = self.master.run_master if self.is_master else self.pipe.run_slave
        result: tuple[Tensor, order.Forward, int, int] = exchange(part)
        y, known, index, nodes = result
        raise_sequence_number(nodes)
        norm = known.norms[index]
        shared = len([1 for other in known.norms if other.statistics is norm.statistics]) > 1
        self._history.append(_Earlier(known.moments[index], norm, shared, graph))
        return y

    def _check_random_states(self, states: list[bytes], devices: list[torch.device]) -> None:
        """Raise `CheckpointError` if random numbers were drawn since `states`.

        The generator is that of all replicas, so the forward has drawn others.
        """
        if states != _random_states(devices):
            raise CheckpointError(
                f"expected no random operations (dropout) beside {self.place.name} in what a "
                "checkpoint repeats within replicas: the replicas of a device share one random "
                "number generator, so the recomputation draws other numbers than the forward; "
                "move them out of the checkpoint, or use one replica per process"
            )

    def _earlier(self, moments: Moments) -> _Earlier:
        """The call in which the part of this replica had these moments."""
        found = [one for one in self._history if _same_part(one.moments, moments)]
        if not found:
            raise CheckpointError(
                f"{self.place.name} of a replica was called after the forward of its "
                "DataParallelWithCallback, with a new input; call the wrapped model instead. If "
                "this is a checkpoint, remove random operations (dropout) from it: replicas share "
                "one random number generator"
            )
        if torch.is_grad_enabled() and not all(one.graph for one in found):
            raise CheckpointError(
                f"{self.place.name} was recomputed by a reentrant checkpoint, which runs one "
                "replica at a time and can't be synchronized; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        first = found[0]
        if moments.count == 0:  # for an empty part any statistics are right
            return first
        tables = [one.norm.statistics.table for one in found]
        if not all(_same_bits(tables[0], other) for other in tables[1:]):
            raise CheckpointError(
                f"{self.place.name} was recomputed with an input that this replica had in "
                "several calls with different statistics over all replicas; use a separate layer "
                "for each of these calls, or do not checkpoint them"
            )
        return first


class SaveInput(Function):
    """x -> x; saves x in the thread of its replica, and puts its ctx into `kept`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class Recomputed(Function):
    """x, weight, bias -> y of an earlier call, while a checkpoint fills in what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, norm: Norm, part: Part) -> Any:
        ctx.name = str(part.place.name)
        do = part.operations
        own, affine, _ = do.take(x, part.affine, None, part.valid)
        statistics = do.statistics(norm.statistics.as_moments(), norm.rule)
        return do.forward(own, Norm(statistics, affine, norm.rule))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise CheckpointError(
            f"{ctx.name} was recomputed by a checkpoint, and backward() was called on that "
            "recomputation, which can't be synchronized; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def _of_all_replicas(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback: `(y, what the forward leaves, index, nodes)` for each `Part`.

    Settings come from the first part, the master's. Raises `BatchSizeError` for one value per
    channel in all, `ShapeError` for unequal channels.

    In all replicas nodes made before have lower sequence numbers than the node of the layer, and
    those made after it higher ones, as if one thread had run the model. So the backwards of layers
    in branches run in one order on all ranks.
    """
    parts: list[Part] = [part for _, part in messages]
    place = parts[0].place
    # When a forward is given up, all slaves are forgotten; a master that comes then would be alone.
    if place.forward.closed:
        raise CommAborted(f"{place.name}: the forward of this replica has ended")
    if len({part.x.shape[1] for part in parts}) > 1:
        channels = {identifier: part.x.shape[1] for identifier, part in messages}
        raise ShapeError(f"expected the same number of channels in every replica, got {channels}")
    if any(part.operations is not parts[0].operations for part in parts):
        # such as a tensor of a subclass in one replica
        parts = [part._replace(operations=plain.OPERATIONS) for part in parts]
    # not in the modes of any one replica
    inference, graph = all(part.inference for part in parts), any(part.graph for part in parts)
    with (
        of_replicas([part.stream for part in parts]) as record,
        torch.inference_mode(inference),
        torch.set_grad_enabled(graph),
        without_dispatch_modes(),
        _without_hooks(place),
    ):
        raise_sequence_number(max(part.nodes for part in parts))
        ys, call = batch_norm(parts)
        record(ys)
    nodes = raise_sequence_number()
    indexed = enumerate(zip(messages, ys, strict=True))
    return [(identifier, (y, call.known, n, nodes)) for n, ((identifier, _), y) in indexed]


def _without_hooks(place: Place) -> Any:
    """Save tensors as they are, in place of the hooks of the master's own thread."""

    def pack(tensor: Tensor) -> tuple[Tensor, int | None]:
        return tensor, _version(tensor)

    def unpack(saved: tuple[Tensor, int | None]) -> Tensor:
        tensor, version = saved
        if _version(tensor) != version:
            raise StateError(  # torch does not see it past hooks
                f"expected the weight and input of {place.name} as they were in forward, "
                "one has been modified by an inplace operation; do that after backward"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack) if saving_runs_hooks() else nullcontext()


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been written in place."""
    return None if tensor.is_inference() else tensor._version


def _random_states(devices: list[torch.device]) -> list[bytes]:
    """The states of the random number generators of these devices."""
    states = (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        for device in devices
    )
    return [state.numpy().tobytes() for state in states]  # no operation of torch compares them


def _same_part(a: Moments, b: Moments) -> bool:
    """Whether two moments are alike, labels aside."""
    return a.count == b.count and _same_bits(a.rows[:, :-1], b.rows[:, :-1])


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays have the same type, shape and bits, so that NaN equals NaN."""
    if type(a) is not type(b) or a.shape != b.shape:
        return False
    if isinstance(a, Tensor):
        one, other = (each.contiguous().view(torch.uint8) for each in (a, b))
        return torch.equal(one, other)
    same: bool = a.tobytes() == b.tobytes()
    return same


class Unconnected:
    """The link of a replica before its replication callback; under `nn.DataParallel` none comes."""

    is_master = False

    def __init__(self, original: nn.Module) -> None:
        self.original = original

    def check(self) -> None:
        """Pass: eval works without the other replicas."""

    def recomputes(self) -> bool:
        """False, as the link is new; `forward` raises."""
        return False

    def forward(self, *_: Any) -> NoReturn:
        """Raise `StateError`."""
        raise StateError(
            f"{name_of(self.original)} runs in a replica that is not connected to the others; use "
            "DataParallelWithCallback instead of nn.DataParallel, or call "
            "patch_replication_callback on it"
        )


class _LazyName:
    """The name of a layer, searched only when it is printed, because the search is slow."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __str__(self) -> str:
        return name_of(self.layer)


def place_in(context: Any, layer: nn.Module) -> Place:
    """The place of the copies of `layer` in their forward; `context` may be any object."""
    return place_of(context, _LazyName(layer))
