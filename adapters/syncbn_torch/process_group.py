"""`DistributedCommunicator`: a `Communicator` over a torch.distributed group, for tensors too."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    ProcessCommunicator,
    SingleCommunicator,
)
from syncbn_core.comm.local import LocalTransport, local_transport
from syncbn_core.comm.process_group import describe_other_ranks, grace_after, reports_of_others
from syncbn_core.errors import ArgumentError, CommAborted, CommError, CommTimeout
from syncbn_torch._torch_private import default_group, profiled, timeout_of
from syncbn_torch.arrays import as_tensor

Values = Any  # numpy.ndarray or Tensor

_making = threading.RLock()

if dist.is_available() and not dist.is_initialized():
    # DistributedDataParallel imports this module too. Its functions have the default group of that
    # moment as a default argument. If a group exists by then, it outlives destroy_process_group(),
    # and its threads can abort the process as it exits.
    import_module("torch.distributed.nn")


class DistributedCommunicator(ProcessCommunicator):
    """A process group as a communicator, for NumPy arrays and for tensors on any device.

    Args:
        group: a `torch.distributed` process group, a `DeviceMesh` of one dimension
            (`mesh["data"]`), or None for the default group.

    Raises `CommError` if this process is not in the group or torch.distributed is not
    initialized, `ArgumentError` for any other group. A call raises `CommTimeout` after the
    group's own timeout and `CommAborted` as soon as a connection breaks; both name the call and
    the ranks that did not answer. (With NCCL, torch's watchdog ends the process instead.)

    If all ranks are on one host, arrays of the host go by `syncbn_core.comm.local`, also in a group
    of NCCL; else by the group's backend.
    """

    def __init__(self, group: Any = None) -> None:
        self._of_group = _transport_of(group_of(group))
        super().__init__(self._of_group)

    @property
    def is_local(self) -> bool | None:
        """Whether arrays of the host go by connections of this host; None before the first call."""
        local = self._of_group._local
        return None if local is NotImplemented else local is not None


class _GroupTransport:
    """Collectives on tensors and arrays over a process group, held by a weak reference."""

    def __init__(self, group: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        if self.rank < 0:
            raise CommError(
                f"expected a process_group that this process belongs to, got one without rank "
                f"{dist.get_rank()} of the world; give each process its own group"
            )
        self._group = weakref.ref(group)
        with suppress(Exception):  # there is no store, or none that forgets
            # torchrun may keep the store over restarts
            group.get_group_store().delete_key(_report_of(group, self.rank))
        types = getattr(group, "_device_types", None) or ()
        self._types = {device.type for device in types}
        # gloo copies arrays of a device to the host
        self.on_device = "cuda" in self._types and "cuda:gloo" not in _backends_of(group)
        self._local: Any = NotImplemented  # None: the group's backend sends all
        self.lock = threading.RLock()  # of all communicators of the group

    @profiled("syncbn.exchange")
    def all_gather(self, values: Values, call: CollectiveCall) -> Values:
        group = self._alive(call)
        local = self._local_for(values, group, call)
        if local is None:
            return self._gathered(values, group, call)
        return _by_arrays(local.all_gather, values, call)

    @profiled("syncbn.exchange")
    def all_reduce(self, values: Values, call: CollectiveCall) -> Values:
        group = self._alive(call)
        local = self._local_for(values, group, call)
        if local is not None:
            return _by_arrays(local.all_reduce, values, call)
        total = self._wire(values).contiguous()
        self._run(_reduce, call, total, group)
        return total if total is values else _like(total, values)

    def connect(self, call: CollectiveCall) -> None:
        self._local_for(None, self._alive(call), call)

    @profiled("syncbn.exchange")
    def gather_in_place(self, rows: Tensor, row: Tensor, call: CollectiveCall) -> None:
        self._run(_gather, call, rows, row, self._alive(call))

    def _gathered(self, values: Values, group: Any, call: CollectiveCall) -> Values:
        """`all_gather` by the group's own backend."""
        tensor = self._wire(values)
        rows = tensor.new_zeros(self.size * tensor.numel())  # gloo may fill only a part of them
        # gloo checks that the axes fit
        self._run(_gather, call, rows, tensor.contiguous().view(-1), group)
        return _like(rows.view(self.size, *tensor.shape), values)

    def _local_for(self, values: Values, group: Any, call: CollectiveCall) -> LocalTransport | None:
        """What sends `values` if all ranks are on this host; the first call finds that out."""
        if self.on_device and getattr(values, "is_cuda", False):
            return None
        if self._local is NotImplemented:
            self._local, weak = None, self._group
            if any(name in _backends_of(group) for name in ("gloo", "nccl")):  # of real ranks
                self._local = local_transport(
                    self.rank,
                    self.size,
                    lambda: timeout_of(weak()),
                    lambda row: self._gathered(row, group, call),
                    call,
                    lambda rank: _in_world(weak(), rank),
                )
        return self._local  # type: ignore[no-any-return]

    def _wire(self, values: Values) -> Tensor:
        """`values` as a tensor on a device that the group's backend supports."""
        tensor = values if isinstance(values, Tensor) else _tensor_of(values)
        if not self._types or tensor.device.type in self._types:
            return tensor
        # messages are small, so copying them there and back is cheap
        return tensor.to("cpu" if "cpu" in self._types else min(self._types))

    def _alive(self, call: CollectiveCall) -> Any:
        group = self._group()
        if group is None:
            raise CommError(
                f"expected a process group in {call}, got one that was destroyed; call "
                "destroy_process_group after the last step"
            )
        return group

    def _run(self, collective: Any, call: CollectiveCall, *arguments: Any) -> None:
        begin = time.monotonic()
        try:
            collective(*arguments)
        except (RuntimeError, ValueError) as error:
            group = arguments[-1]
            text = str(error).partition("\n")[0]
            who = f"rank {self.rank} of {self.size}{_in_world(group, self.rank)}"
            seconds = time.monotonic() - begin
            where = _where_others_are(group, self.rank, self.size, call, grace_after(seconds))
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise CommTimeout(f"{who} waited {seconds:.3g} s in {call}; {where}") from error
            raise CommAborted(f"{who} lost its group in {call}: {text}; {where}") from error


_transports: weakref.WeakKeyDictionary[Any, _GroupTransport] = weakref.WeakKeyDictionary()


def _transport_of(group: Any) -> _GroupTransport:
    """That of all communicators of a group: ranks may take different ones."""
    if isinstance(group, int):  # this process is not a member
        return _GroupTransport(group)  # raises
    with _making:  # replica threads may get here at the same time
        found = _transports.get(group)
        if found is None:
            found = _transports[group] = _GroupTransport(group)
        return found


def _backends_of(group: Any) -> str:
    """Such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(group))


def _gather(rows: Tensor, tensor: Tensor, group: Any) -> None:
    # newer torch has renamed this function and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, tensor, group=group)


def _reduce(total: Tensor, group: Any) -> None:
    dist.all_reduce(total, group=group)


def _by_arrays(collective: Any, values: Values, call: CollectiveCall) -> Values:
    """The result of a collective for NumPy arrays."""
    if isinstance(values, np.ndarray):
        return collective(values, call)
    own = values.float() if values.dtype is torch.bfloat16 else values
    return torch.from_numpy(collective(own.numpy(force=True), call)).to(values)


def _tensor_of(values: np.ndarray[Any, Any]) -> Tensor:
    """A tensor, which shares memory with a C-contiguous, writable array."""
    if not values.flags.carray:
        values = np.array(values, order="C")
    return as_tensor(values)


def _like(result: Tensor, values: Values) -> Values:
    """`result` as a NumPy array if `values` is one, otherwise on the device of `values`."""
    if isinstance(values, np.ndarray):
        return result.cpu().numpy()
    return result.to(values.device)


def _in_world(group: Any, rank: int) -> str:
    """The rank's number in the world as text, or "" if it is the same."""
    try:
        in_world = dist.get_global_rank(group, rank)
    except (RuntimeError, ValueError):
        return ""
    return "" if in_world == rank else f" (rank {in_world} of the world)"


def _where_others_are(group: Any, rank: int, size: int, call: CollectiveCall, grace: float) -> str:
    """Text that says which ranks report the failure in the group's store in time, and where."""

    def tell() -> None:
        group.get_group_store().set(_report_of(group, rank), str(call))

    def read(other: int) -> str | None:
        store, key = group.get_group_store(), _report_of(group, other)
        return store.get(key).decode() if store.check([key]) else None

    reports = reports_of_others(tell, read, [r for r in range(size) if r != rank], grace)
    if reports is None:
        return "the missing ranks are not known, because the group's store is gone too"
    names = {f"{other}{_in_world(group, other)}": text for other, text in reports.items()}
    return describe_other_ranks(call, names)


def _report_of(group: Any, rank: int) -> str:
    """The key in the group's store under which a rank says in which call it has failed."""
    return f"syncbn/{group.group_name}/{rank}"


def group_of(process_group: Any) -> Any:
    """The `ProcessGroup` of the argument: a group, a one-dimensional mesh, or None (default)."""
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CommError(
                "expected an initialized torch.distributed, got none; call init_process_group first"
            )
        return dist.group.WORLD
    if hasattr(process_group, "get_group") and hasattr(process_group, "ndim"):  # a DeviceMesh
        if process_group.ndim != 1:
            raise ArgumentError(
                f"expected a DeviceMesh of one dimension, got {process_group}; take one of its "
                f'dimensions, as in mesh["{(process_group.mesh_dim_names or ("name",))[0]}"]'
            )
        return process_group.get_group()
    is_group = isinstance(process_group, dist.ProcessGroup)
    if not is_group and process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "expected process_group to be a torch.distributed group, one dimension of a "
            f"DeviceMesh, a DistributedCommunicator or None, got {process_group!r}"
        )
    return process_group


_communicators: weakref.WeakKeyDictionary[Any, DistributedCommunicator] = (
    weakref.WeakKeyDictionary()
)


def communicator_for(process_group: Any) -> Communicator | None:
    """The communicator of a layer with this `process_group`; None for a single process.

    All layers share one communicator per group, which numbers their calls.
    """
    if process_group is None:
        group = default_group()
        if group is None:
            return None
    else:
        kind: type = type(process_group)
        if _is_communicator(kind):
            return None if kind is SingleCommunicator else process_group
        group = group_of(process_group)
    if isinstance(group, int):
        return DistributedCommunicator(group)  # raises
    found = _communicators.get(group)
    if found is None:
        with _making:
            found = _communicators.get(group)
            if found is None:
                found = _communicators[group] = DistributedCommunicator(group)
    return found if found.size > 1 else None


def is_communicator(kind: type) -> bool:
    """Whether `kind` is a class of communicators, ours or the user's; torch's groups are not."""
    return hasattr(kind, "all_gather") and hasattr(kind, "all_reduce")


_is_communicator = cache(is_communicator)


def checked_process_group(process_group: Any) -> Any:
    """`process_group`, which may be that of a layer; else `ArgumentError`."""
    if process_group is not None and not is_communicator(type(process_group)):
        group_of(process_group)
    return process_group


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the world into groups of `group_size` consecutive ranks; return this process's group.

    Pass the result as `process_group` of layers, for example to synchronize within each node.
    Every process of the world must call it. As in apex, 0 means the whole world and returns None.
    Raises `ArgumentError` if `group_size` does not divide the number of processes.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if not 1 <= group_size <= world or world % group_size:
        raise ArgumentError(
            f"expected a group_size that divides the number of processes, {world}, "
            f"got {group_size!r}; use 0 for a single group"
        )
    group, _ = dist.new_subgroups(group_size=group_size)
    return group
