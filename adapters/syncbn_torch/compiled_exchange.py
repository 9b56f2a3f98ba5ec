"""The exchange of a layer as torch.compile can trace it: a collective of a process group.

A compiled graph can hold collectives of torch, but no Python. So each direction of the exchange is
an `all_reduce` over a process group of our own. It has one rank and sends nothing itself: it calls
`Exchange` with the communicator of the layer. So ranks that run compiled graphs send the same
messages, labels included, as ranks that don't, raise the same errors and get the same bits.
Inductor keeps all collectives of a graph in their order.

What the group must know comes in its name (the direction, the dtype of x, the group that the layer
synchronizes over) and at the end of the array, float64 (2 C + 2):

    moments: count, mean (C,), m2 (C,), place -> those of all, number of the call
    sums: two sums (C,), number of the call, place -> the sums of all, undefined

A place is the number of the layer and, as a fraction, which of the graph's layers this is: torch
would merge equal collectives into one. The number is data, because a constant would need a graph
for each layer, also where torch.compile is called on each of many equal blocks. Only on a CPU can
the host read it; elsewhere a place is the fraction alone, and errors don't name the layer.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.comm import Communicator
from syncbn_core.exchange import Exchange
from syncbn_core.labels import FORWARD, FORWARD_IN_GRAPH
from syncbn_core.moments import Moments, merged_rows, require_more_than_one_value
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


def group_for(process_group: Any, dtype: torch.dtype) -> str:
    """The group by which a graph exchanges, for x of `dtype` in a layer with this `process_group`.

    Returns a name; collectives use it with a prefix: "moments NAME" or "sums NAME". "" for a single
    process. Raises the errors of `communicator_for`.
    """
    # while torch traces, a group may be a stand-in that has only its name
    over = str(group_of(process_group).group_name)
    if communicator_for(resolve_group(over)) is None:
        return ""
    dtype_name = str(dtype).removeprefix("torch.")
    with _registering:
        for direction in ("moments", "sums"):
            name = f"{direction} {dtype_name} {over}"
            if not has_group(name):  # torch forgets all names when the world ends
                _registered[name] = _Exchange(direction, dtype_name, over)
                register_group(name, _registered[name])
    return f"{dtype_name} {over}"


_registered: dict[str, _Exchange] = {}  # torch holds them weakly
_registering = threading.Lock()


class _Exchange(dist.ProcessGroup):
    """A process group of one rank, whose `all_reduce` exchanges with the ranks of `group`."""

    def __init__(self, direction: str, dtype: str, group: str) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._moments = direction == "moments"
        self._dtype = dtype
        self._group = group

    def getBackendName(self) -> str:  # noqa: N802 - called by torch
        return "syncbn"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        (values,) = tensors
        communicator = communicator_for(resolve_group(self._group))
        assert communicator is not None
        if _on_host(values, communicator):
            row = values.cpu().numpy().copy()
            sender = _exchange_of(communicator, int(row[-1]), self._dtype)
            row = _moments(row, sender, _kind(self._group)) if self._moments else _sums(row, sender)
            values.copy_(torch.from_numpy(row))
        else:
            sender = _exchange_of(communicator, 0, self._dtype)
            if self._moments:
                _moments_on_device(values, sender, _kind(self._group))
            else:
                total = sender.sums_of_graph(values[:-1].clone())
                values[:-2] = torch.where(total[-1:] == 0, total[:-1], float("nan"))
        return finished_work(tensors)


def _exchange_of(communicator: Communicator, number: int, dtype: str) -> Exchange:
    layer = layer_of(number)
    if layer is None:
        return Exchange(communicator, lambda: "a layer in a compiled graph", dtype)
    return exchange_of(layer, communicator, dtype)


def _kind(group: str) -> int:
    """FORWARD_IN_GRAPH where the other ranks have to be in a graph too.

    `DistributedDataParallel` without a graph reduces its gradients between the messages of
    layers; a graph sends all of those first. In one group one would be taken for the other.
    """
    around = active_ddp()
    if around is None or not around.require_backward_grad_sync:
        return FORWARD
    return FORWARD_IN_GRAPH if around.process_group is resolve_group(group) else FORWARD


def _moments(row: Any, sender: Exchange, kind: int) -> Any:
    own = Moments(row[None], int(row[0]))
    total, number = sender.moments(own, sender.begin(own.num_features, None, kind))
    require_more_than_one_value(total.count)
    count, mean, m2 = merged_rows(total.rows)
    return np.concatenate([count, mean, m2, [number]])


def _sums(row: Any, sender: Exchange) -> Any:
    sums = row[:-2].reshape(2, -1)
    row[:-2] = sender.sums(sums, sender.begin_sums(sums, int(row[-2]))).reshape(-1)
    return row


def _moments_on_device(values: Tensor, sender: Exchange, kind: int) -> None:
    own = Moments(values.clone()[None], None)
    message = sender.begin(own.num_features, values, kind)
    own.rows[:, -1:].fill_(message.label)
    total, number = sender.moments(own, message)
    if total.labels is not None:
        total.labels.check_rows(total.rows)
    values[:-1] = torch.cat(merged_rows(total.rows))
    values[-1:].fill_(number)


def _on_host(values: Tensor, communicator: Communicator) -> bool:
    return values.is_cpu or not getattr(communicator, "on_device", False)
