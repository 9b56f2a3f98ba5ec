"""The link from a replica of a layer to the other replicas, for one forward of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function

from syncbn_core import order
from syncbn_core.comm import SyncMaster
from syncbn_core.errors import CheckpointError, CommAborted, StateError
from syncbn_core.moments import Moments
from syncbn_core.steps import Norm, Operations
from syncbn_torch._torch_private import (
    backward_task,
    raise_sequence_number,
    saving_runs_hooks,
    transforming,
    watch_saving,
    without_dispatch_modes,
)
from syncbn_torch.activations import activated
from syncbn_torch.arrays import as_tensor
from syncbn_torch.checks import refuse_transforms
from syncbn_torch.data_parallel.contexts import Place
from syncbn_torch.data_parallel.joined import STATE, PartOfReplica, of_all_replicas
from syncbn_torch.forward import checked_part, refuse_kind
from syncbn_torch.masks import checked_mask
from syncbn_torch.module_names import name_of
from syncbn_torch.plan import host_steps
from syncbn_torch.streams import stream_of

_KEY_OF_OUR_MASTER = "master of the layer"  # no name that an attribute of a context could have


class ReplicaSync:
    """The link of a replica in `DataParallelWithCallback` or a wrapper of another project."""

    def __init__(self, place: Place, copy_id: int) -> None:
        self.place: Place = place
        self.is_master: bool = copy_id == 0
        self._exchange: Callable[[PartOfReplica], Any]
        if self.is_master:
            master = SyncMaster(of_all_replicas, name=place.name, member="replica")
            place.begin(_KEY_OF_OUR_MASTER, master)
            self._exchange = master.run_master
        else:
            pipe = place.master(_KEY_OF_OUR_MASTER).register_slave(copy_id)
            self._exchange = pipe.run_slave
        # calls that a checkpoint may repeat: their norms, and whether others were on the device
        self._history: dict[bytes, list[tuple[Norm, bool]]] = {}

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

    def forward(self, layer: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        """y by the statistics of all replicas."""
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            refuse_kind(layer, x)
            checked_part(layer, x, None)  # raises
        state = [getattr(layer, name) for name in STATE]
        if transforming():
            refuse_transforms(partial(name_of, layer._original), x, *state)
        if mask is not None:
            mask = checked_mask(mask, x)
        hooked = saving_runs_hooks()
        if self.place.forward.is_over():
            return self._recomputed(layer, x, mask, hooked)
        kept: list[Any] = []
        if hooked:
            with torch.no_grad(), without_dispatch_modes():
                part, steps = checked_part(layer, x, None, mask)
                moments = _bits(_taken(steps or host_steps(part), part)[1].rows[:, :-1])
            x = SaveInput.apply(x, kept)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooked
        saved = kept[0] if kept and x.requires_grad else None
        own = layer, self.place, x, mask, state, *modes, saved, stream_of(x)
        result = self._exchange(PartOfReplica(*own, raise_sequence_number()))
        y, left, norm, shared, nodes = result
        raise_sequence_number(nodes)
        if isinstance(y, Exception):
            raise y
        if hooked:
            self._history.setdefault(moments, []).append((norm, shared))
        return activated(y, left)

    def _recomputed(self, layer: Any, x: Tensor, mask: Tensor | None, hooked: bool) -> Tensor:
        """y of an earlier call, which a checkpoint repeats with the same x."""
        if not hooked and backward_task() != -1:
            raise CheckpointError(
                f"{self.place.name} was recomputed by a reentrant checkpoint, which runs one "
                "replica at a time and can't be synchronized; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        with torch.no_grad(), without_dispatch_modes():
            part, steps = checked_part(layer, x, None, mask)
            do = steps or host_steps(part)
            (own, affine, running), moments = _taken(do, part)
            norm, shared = self._earlier(moments)
            # before x is saved, where a checkpoint may end
            if running is not None and self.is_master:
                do.update_running(running, norm.statistics)
            total = norm.statistics.as_moments()
            here = Norm(do.statistics(total, norm.rule), affine, norm.rule)
            y = do.forward(own, here, None, None, total)
            y = order.zeroed(do, y, part.mask)
        x = SaveInput.apply(x, [])
        with without_dispatch_modes():
            recomputed: Tensor = Recomputed.apply(y, self.place.name, x, *part.affine)
        # a GPU of one replica alone has a generator of its own, which the checkpoint restores
        devices = [torch.device("cpu"), *[x.device] * shared]
        states = _random_states(devices)
        watch_saving(lambda: self._check_random_states(states, devices))
        return recomputed

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

    def _earlier(self, moments: Moments) -> tuple[Norm, bool]:
        """What the call has left in which the part of this replica had these moments."""
        found = self._history.get(_bits(moments.rows[:, :-1]))
        if found is None:
            raise CheckpointError(
                f"{self.place.name} of a replica was called after the forward of its "
                "DataParallelWithCallback, with a new input; call the wrapped model instead. If "
                "this is a checkpoint, remove random operations (dropout) from it: replicas share "
                "one random number generator"
            )
        tables = {_bits(norm.statistics.table) for norm, _ in found}
        if len(tables) > 1 and moments.rows[0, 0] != 0:  # for an empty part all are right
            raise CheckpointError(
                f"{self.place.name} was recomputed with an input that this replica had in "
                "several calls with different statistics over all replicas; use a separate layer "
                "for each of these calls, or do not checkpoint them"
            )
        return found[0]


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
    """y of an earlier call, x, weight, bias -> y, for a checkpoint, which drops the result."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, name: Any, *operands: Any) -> Tensor:
        ctx.name = name
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise CheckpointError(
            f"{ctx.name} was recomputed by a checkpoint, and backward() was called on that "
            "recomputation, which can't be synchronized; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def _taken(steps: Operations, part: order.Part) -> tuple[Any, Moments]:
    """The operands of a part as the steps take them, and its moments."""
    part = order.filled_part(steps, part)
    taken = steps.take(part.x, part.affine, part.running, part.mask)
    return taken, order.moments_of(steps, taken[0], part.valid)


def _random_states(devices: list[torch.device]) -> list[bytes]:
    """The states of the random number generators of these devices."""
    states = (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        for device in devices
    )
    return [state.numpy().tobytes() for state in states]  # no operation of torch compares them


def _bits(values: Any) -> bytes:
    """Those of an array, so that NaN equals NaN."""
    return as_tensor(values).cpu().numpy().tobytes()


class Unconnected:
    """The link of a replica before its replication callback; under `nn.DataParallel` none comes."""

    is_master = False

    def __init__(self, original: nn.Module) -> None:
        self.original = original

    def check(self) -> None:
        """Pass: eval works without the other replicas."""

    def forward(self, *_: Any) -> NoReturn:
        """Raise `StateError`."""
        raise StateError(
            f"{name_of(self.original)} runs in a replica that is not connected to the others; use "
            "DataParallelWithCallback instead of nn.DataParallel, or call "
            "patch_replication_callback on it"
        )
