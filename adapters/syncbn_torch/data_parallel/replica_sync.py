"""The link from a replica of a layer to the other replicas, for one forward of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from syncbn_core.comm import SyncMaster
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import CheckpointError, CommAborted, StateError
from syncbn_torch._torch_private import saving_runs_hooks, watch_saving
from syncbn_torch.arrays import empty_like
from syncbn_torch.autograd.node import Keep, Recomputed, normalize_replicas
from syncbn_torch.autograd.steps import Part
from syncbn_torch.autograd.streams import stream_of
from syncbn_torch.data_parallel.contexts import SharedForward, open_forward_of
from syncbn_torch.module_names import name_of

__all__ = ["ReplicaSync", "Unconnected", "shared_forward"]

# Numbers in a part from which on its replica computes moments and y on a CPU, beside the others.
# Below, the master is quicker with all parts than the replicas with waking up.
APART = 1 << 16

_OURS = "master of the layer"  # among the attributes of a context: no name that one could have


class ReplicaSync:
    """The link of a replica in `DataParallelWithCallback` or a wrapper of another project."""

    def __init__(self, shared: SharedForward, copy_id: int) -> None:
        self.shared = shared
        self.is_master = copy_id == 0
        if self.is_master:
            self.master = SyncMaster(_of_all_replicas, name=shared.name)
            shared.begin(_OURS, self.master)
        else:
            self.pipe = shared.master(_OURS).register_slave(copy_id)
        self._history: list[tuple[Any, Any, bool]] = []
        self._index = 0  # of this replica's part among all

    def check(self) -> None:
        """Raise `CommAborted` if the caller has given up this replica's forward."""
        if self.shared.disowned:
            raise CommAborted(
                f"{self.shared.name}: the forward that this replica belonged to was given up: "
                f"{self.shared.disowned}"
            )

    def recomputes(self) -> bool:
        """Whether a forward now repeats one for a checkpoint, around the replicas or inside."""
        return self.shared.recomputes or self.shared.is_over()

    def forward(self, part: Part) -> Tensor:
        """y by the statistics of all replicas; each updates its own running statistics."""
        operations, x, affine, running, rule, _, graph, *_ = part
        over = self.shared.is_over()
        in_thread = operations.serial
        if over:
            with torch.no_grad():
                moments = in_thread.moments(x)
            call = self._earlier_exchange(moments)
            known = call.by_device[x.device]
            if running is not None:  # before x is saved, where a checkpoint may end
                in_thread.update_running(running, known)
        kept: list[Any] = [] if graph and saving_runs_hooks() else [None]
        if not kept:
            x = Keep.apply(x, kept)
        ctx = kept[0] if x.requires_grad else None
        if over:
            part = part._replace(context=self.shared)
            recomputed: Tensor = Recomputed.apply(x, *affine, known, part)
            # a GPU of one replica alone has a generator of its own, which the checkpoint restores
            shared = len(call.by_device) < len(call.parts)
            devices = [torch.device("cpu"), *[x.device] * shared]
            states = _random_states(devices)
            watch_saving(lambda: self._check_random_states(states, devices))
            return recomputed
        apart = in_thread is not operations and x.numel() >= APART
        moments = room = None
        if apart:
            with torch.no_grad():
                moments = in_thread.moments(x)
            room = empty_like(x)
        part = part._replace(
            x=x,
            inference=torch.is_inference_mode_enabled(),
            context=self.shared,
            kept=ctx,
            moments=moments,
            y=room,
            stream=stream_of(x),
        )
        exchange = self.master.run_master if self.is_master else self.pipe.run_slave
        result: tuple[Tensor, Any, int] = exchange(part)
        y, call, self._index = result
        if apart and call.operations is operations:
            known = call.by_device[x.device]
            with torch.no_grad():
                in_thread.forward(x, known, affine, rule, running, out=y)
        self._history.append((call.parts[self._index], call, graph))
        return y

    def _check_random_states(self, states: list[Tensor], devices: list[torch.device]) -> None:
        """Raise `CheckpointError` if random numbers were drawn since `states`.

        The generator is that of all replicas, so the forward has drawn others.
        """
        if not all(map(torch.equal, states, _random_states(devices))):
            raise CheckpointError(
                f"expected no random operations (dropout) beside {self.shared.name} in what a "
                "checkpoint repeats within replicas: the replicas of a device share one random "
                "number generator, so the recomputation draws other numbers than the forward; "
                "move them out of the checkpoint, or use one replica per process"
            )

    def _earlier_exchange(self, part: Any) -> Any:
        found = [(one, graph) for seen, one, graph in self._history if _same_bits(seen, part)]
        if not found:
            raise CheckpointError(
                f"{self.shared.name} of a replica was called after the forward of its "
                "DataParallelWithCallback, with a new input; call the wrapped model instead. If "
                "this is a checkpoint, remove random operations (dropout) from it: replicas share "
                "one random number generator"
            )
        if torch.is_grad_enabled() and not all(graph for _, graph in found):
            raise CheckpointError(
                f"{self.shared.name} was recomputed by a reentrant checkpoint, which runs one "
                "replica at a time and can't be synchronized; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        exchange: Any = found[0][0]
        if part.known_count == 0:  # for an empty part any statistics are right
            return exchange
        if not all(_same_bits(exchange.total, other.total) for other, _ in found):
            raise CheckpointError(
                f"{self.shared.name} was recomputed with an input that this replica had in "
                "several calls with different statistics over all replicas; use a separate layer "
                "for each of these calls, or do not checkpoint them"
            )
        return exchange


def _of_all_replicas(messages: Sequence[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """The `SyncMaster` callback.

    When a forward is given up, all slaves are forgotten; a master that comes then would be alone.
    """
    context = messages[0][1].context
    if context.closed:
        raise CommAborted(f"{context.name}: the forward of this replica has ended")
    return normalize_replicas(messages)


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    """The states of the random number generators of these devices."""
    return [
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        for device in devices
    ]


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two moments have the same type and bits, so that NaN equals NaN."""
    if type(a) is not type(b) or a.known_count != b.known_count:
        return False
    if isinstance(a, DeviceMoments):
        pairs = [tuple(one.rows[:, :-1].contiguous() for one in (a, b))]  # without labels
    else:
        pairs = [(a.mean, b.mean), (a.m2, b.m2)]
    return all(
        p.shape == q.shape
        and (
            torch.equal(p.view(torch.uint8), q.view(torch.uint8))
            if isinstance(p, Tensor)
            else p.tobytes() == q.tobytes()
        )
        for p, q in pairs
    )


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


def shared_forward(context: Any, layer: nn.Module) -> SharedForward:
    """The forward that the copies of `layer` share by `context`, which may be any object."""
    return open_forward_of(context, _LazyName(layer))
