"""The exchange of a layer as torch.compile can trace it: a collective of a process group.

A compiled graph can hold collectives of torch, but no Python. So each direction of the exchange is
a collective over a process group of our own. It has one rank and sends nothing itself: it calls
`Exchange` with the communicator of the layer. So ranks that run compiled graphs send the same
messages, labels included, as ranks that don't, raise the same errors and get the same bits.
Inductor keeps all collectives of a graph in their order.

What the group must know as a constant comes in its name, see `group_for`, the rest in tensors.
Where the host gets the message anyway, it also computes what is per channel, in NumPy: in the graph
that would be eighty operations in float64 for each layer, which take longer to compile than the
passes over x. Tensors are then, of float64 but the numbers and the running statistics, where `...`
is a place that nothing reads:

    forward    shift, sum and sum of squares of x - shift, weight, bias, with a mask what x is
               filled with (C,); values per channel, those that count, number of the layer
               numbers of `PlainOperations.of_forward` (3, C); running statistics
          ->   table (3 C + 1,), ..., number of the call and of the layer; numbers; new ones
    backward   sum_dy, sum(dy * (x - a)), weight (C,); table, number of the call and of the layer
               numbers of `PlainOperations.of_backward` (4, C)
          ->   sum_dy, sum_dy_xhat, ...; numbers

A device computes what is per channel in the graph, and sends rows of float64:

    moments    count, mean (C,), m2 (C,), any         ->  those of all, number of the call
    sums       two sums (C,), number of the call      ->  the sums of all, undefined

The number of the layer is data, because a constant would need a graph for each layer, also where
torch.compile is called on each of many equal blocks. Only on a CPU can the host read it; elsewhere
errors don't name the layer.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.backends import operations_for
from syncbn_core.backends.plain_numpy import OPERATIONS as PLAIN
from syncbn_core.comm import Communicator
from syncbn_core.exchange import Exchange
from syncbn_core.labels import FORWARD, FORWARD_IN_GRAPH
from syncbn_core.masks import without_filled
from syncbn_core.moments import (
    EpsMode,
    Moments,
    NormRule,
    Statistics,
    merged_rows,
    require_more_than_one_value,
)
from syncbn_core.steps import Affine, Norm, RunningStatistics
from syncbn_torch._torch_private import (
    active_ddp,
    finished_work,
    has_group,
    register_group,
    resolve_group,
)
from syncbn_torch.layer_state import layer_of
from syncbn_torch.process_group import communicator_for, group_of
from syncbn_torch.processes import exchange_of


def group_for(
    process_group: Any,
    on_cpu: bool,
    place: int,
    dtype: torch.dtype,
    rule: tuple[float, EpsMode],
    momentum: float | None,
) -> str:
    """The group by which a graph exchanges, for x of `dtype` in a layer with this `process_group`.

    Returns a name; collectives use it behind a direction, such as "forward NAME". "" for a single
    process. `place`: which of the graph's layers this is. Raises the errors of `communicator_for`.
    """
    # while torch traces, a group may be a stand-in that has only its name
    over = str(group_of(process_group).group_name)
    communicator = communicator_for(resolve_group(over))
    if communicator is None:
        return ""
    on_host = _on_host(on_cpu, communicator)
    settings = str(dtype).removeprefix("torch."), NormRule(*rule), momentum, over
    own = f"{'host' if on_host else 'device'} {place} {settings}"
    with _registering:
        for direction in ("forward", "backward") if on_host else ("moments", "sums"):
            name = f"{direction} {own}"
            if not has_group(name):  # torch forgets all names when the world ends
                _registered[name] = _Exchange(direction, settings)
                register_group(name, _registered[name])
    return own


_LAYERS = 1 << 24  # more than there are numbers of layers
_registered: dict[str, _Exchange] = {}  # torch holds them weakly
_registering = threading.Lock()


class _Exchange(dist.ProcessGroup):
    """A process group of one rank, whose collective exchanges with the ranks of `over`."""

    def __init__(self, direction: str, settings: tuple[str, NormRule, float | None, str]) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._direction = direction
        self._dtype, self._rule, self._momentum, self._over = settings

    def getBackendName(self) -> str:  # noqa: N802 - called by torch
        return "syncbn"

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        if self._direction in ("moments", "sums"):
            getattr(self, f"_{self._direction}")(*tensors)
            return finished_work(tensors)
        wide = [t.float() if t.dtype is torch.bfloat16 else t for t in tensors]  # NumPy has none
        held = [tensor.cpu() for tensor in wide]
        with np.errstate(invalid="ignore", over="ignore"):
            getattr(self, f"_{self._direction}")(*[tensor.numpy() for tensor in held])
        for tensor, own in zip(tensors, held, strict=True):
            if own is not tensor:
                tensor.copy_(own)
        return finished_work(tensors)

    def _forward(self, message: Any, numbers: Any, *running: Any) -> None:
        (_, channels), (count, valid, layer) = numbers.shape, map(int, message[-3:].tolist())
        rows = message[:-3].reshape(-1, channels)
        own = PLAIN.moments_of_sums(count, rows[0], rows[1], rows[2])
        if len(rows) > 5:
            own = without_filled(np, own, valid, rows[5])
        sender, steps = self._sender(layer), operations_for(message)
        total, call = sender.moments(own, sender.begin(channels, None, self._kind()))
        require_more_than_one_value(total.count)
        statistics = steps.statistics(total, self._rule)
        norm = Norm(statistics, Affine(rows[3], rows[4]), self._rule)
        numbers[...] = PLAIN.of_forward(norm, numbers.dtype)
        message[: len(statistics.table)] = statistics.table
        message[-1] = call * _LAYERS + layer
        mean, var = running[:2] if len(running) > 1 else (None, None)
        counter = running[-1] if len(running) % 2 else None
        steps.update_running(RunningStatistics(mean, var, counter, self._momentum), statistics)

    def _backward(self, message: Any, numbers: Any) -> None:
        channels = numbers.shape[1]
        rows = message[: 3 * channels].reshape(3, channels)
        call, layer = divmod(int(message[-1]), _LAYERS)
        statistics = Statistics(message[3 * channels : -1], None)
        norm, dtype = Norm(statistics, Affine(rows[2]), self._rule), numbers.dtype
        sums, sender = PLAIN.of_sums(norm, rows[0], rows[1], dtype), self._sender(layer)
        sent = sums * rows[2]
        total = sender.sums(sent, sender.begin_sums(sent, call))
        numbers[...] = PLAIN.of_backward(norm, total, dtype)
        rows[:2] = sums

    def _moments(self, values: Tensor) -> None:
        sender, own = self._sender(), Moments(values.clone()[None], None)
        message = sender.begin(own.num_features, values, self._kind())
        own.rows[:, -1:].fill_(message.label)
        total, number = sender.moments(own, message)
        if total.labels is not None:
            total.labels.check_rows(total.rows)
        values[:-1] = torch.cat(merged_rows(total.rows))
        values[-1:].fill_(number)

    def _sums(self, values: Tensor) -> None:
        total = self._sender().sums_of_graph(values.clone())
        values[:-1] = torch.where(total[-1:] == 0, total[:-1], float("nan"))

    def _sender(self, number: int = 0) -> Exchange:
        """What sends the messages of the layer with this number."""
        communicator = communicator_for(resolve_group(self._over))
        assert communicator is not None
        layer = layer_of(number)
        if layer is None:
            return Exchange(communicator, lambda: "a layer in a compiled graph", self._dtype)
        return exchange_of(layer, communicator, self._dtype)

    def _kind(self) -> int:
        """FORWARD_IN_GRAPH where the other ranks have to be in a graph too.

        `DistributedDataParallel` without a graph reduces its gradients between the messages of
        layers; a graph sends all of those first. In one group one would be taken for the other.
        """
        around = active_ddp()
        if around is None or not around.require_backward_grad_sync:
            return FORWARD
        same = around.process_group is resolve_group(self._over)
        return FORWARD_IN_GRAPH if same else FORWARD


def _on_host(on_cpu: bool, communicator: Communicator) -> bool:
    return on_cpu or not getattr(communicator, "on_device", False)
