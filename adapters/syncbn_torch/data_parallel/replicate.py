"""Replicas of a model in threads, and callbacks that let their submodules find each other.

`DataParallelWithCallback` on several GPUs is `nn.DataParallel`; on one device (CPU, or one
GPU) it runs N replicas in N threads, sharing the parameters. In both cases each submodule that
has `__data_parallel_replicate__(context, copy_id)` is called before the replicas run, and no
replica is left waiting when another one fails.
"""

from __future__ import annotations

import contextvars
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from syncbn_core.comm import Siblings, SyncMaster, run_in_threads
from syncbn_core.errors import ArgumentError, CommError, StateError
from syncbn_torch._torch_private import disable_tracing
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.scatter_gather import join, split
from syncbn_torch.data_parallel.thread_modes import call_within, modes_of_caller, place_of

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "execute_replication_callbacks",
    "patch_replication_callback",
]


class CallbackContext:
    """What the copies of one submodule share during one forward; set any attribute on it.

    Attributes:
        name: the submodule's name in the model, for error messages.
        size: the number of copies.
        sync_master: a `SyncMaster` that copy 0 puts here begins a new round, so that it may be
            kept from forward to forward, and is aborted when a replica fails.
        closed: True once the forward is over and the other copies can't be reached.
        disowned: the error with which the forward was given up, as text; "" if it was not. A
            copy may still be running then; its results go nowhere.
    """

    def __init__(self, name: str = "", size: int = 0) -> None:
        self.name = name
        self.size = size
        self.closed = False
        self.disowned = ""
        self._sync_master: SyncMaster | None = None
        self._siblings: Siblings | None = None  # of all submodules in one forward

    @property
    def sync_master(self) -> SyncMaster:
        if self._sync_master is None:
            raise AttributeError(f"no copy has put a SyncMaster on the context of {self.name!r}")
        return self._sync_master

    @sync_master.setter
    def sync_master(self, master: SyncMaster) -> None:
        # forget those of the last forward: there may be fewer this time
        master.clear_slaves(self._siblings)
        self._sync_master = master

    def abort(self, error: BaseException) -> None:
        """Release every copy that waits: one of them failed with `error`."""
        if self._sync_master is not None:
            self._sync_master.abort(error)

    def close(self) -> None:
        """The forward is over for all copies. Errors of it are forgotten: they keep its frames."""
        self.closed = True
        self._siblings = None
        if self._sync_master is not None:
            self._sync_master.clear_slaves()

    def disown(self, error: BaseException) -> None:
        """The caller goes on without the forward; copies that still run must not."""
        # as text: its traceback would keep the frames of the forward
        self.disowned = traceback.format_exception_only(error)[0].strip()

    def is_over(self) -> bool:
        """Whether what runs now is a recomputation after the forward."""
        return self.closed

    def leave(self, copy_id: int) -> None:
        """A copy's forward is over; release who waits for it."""
        if self._sync_master is not None:
            self._sync_master.leave(copy_id)


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> list[CallbackContext]:
    """Call `__data_parallel_replicate__(context, copy_id)` on every submodule that has it.

    `modules`: copies of one model, the master copy first. The copies of a submodule, found by
    position in `modules()`, get the same context; the master copy's callbacks come first.
    Returns the contexts, in the order of positions.
    """
    if not modules:
        return []
    return _execute(modules[0], [list(module.modules()) for module in modules])


def _execute(first: nn.Module, copies: Sequence[Sequence[nn.Module]]) -> list[CallbackContext]:
    """Call back the submodules of each copy; `first` is copy 0, which has the names."""
    names = [name or type(first).__name__ for name, _ in first.named_modules()]
    contexts = [CallbackContext(name, len(copies)) for name in names]
    siblings = Siblings()
    for context in contexts:
        context._siblings = siblings
    for copy_id, submodules in enumerate(copies):
        if len(submodules) != len(contexts):
            raise CommError(
                f"expected copies of one model with {len(contexts)} modules each, got "
                f"{len(submodules)} in copy {copy_id}"
            )
        for context, submodule in zip(contexts, submodules, strict=True):
            callback = getattr(submodule, "__data_parallel_replicate__", None)
            if callback is not None:
                callback(context, copy_id)
    return contexts


class _Replicas(list[nn.Module]):
    """Copies of one model with what their submodules share."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        contexts: list[CallbackContext],
        found: list[originals.Replica],
    ) -> None:
        super().__init__(modules)
        self.contexts = contexts
        self.found = found


def _share(module: nn.Module, copies: int) -> list[nn.Module]:
    """`copies` replicas of `module` on its own device: the same parameters, own structure.

    Replica 0 has the buffers themselves, so what it writes in place stays; the others have
    copies of them, as under `nn.DataParallel`.
    """
    modules = list(module.modules())
    index = {original: i for i, original in enumerate(modules)}
    replicas: list[list[nn.Module]] = []
    for copy_id in range(copies):
        buffers: dict[Tensor, Tensor] = {}
        made = []
        for original in modules:
            if isinstance(original, torch.jit.ScriptModule):
                made.append(cast(nn.Module, original))
                continue
            replica = cast(nn.Module, original._replicate_for_data_parallel())
            replica._parameters = dict(original._parameters)
            if copy_id > 0:
                for key, buffer in original._buffers.items():
                    if buffer is not None:
                        replica._buffers[key] = buffers.setdefault(buffer, buffer.clone())
            made.append(replica)
        for original, replica in zip(modules, made, strict=True):
            if replica is not original:
                for key, child in original._modules.items():
                    replica._modules[key] = None if child is None else made[index[child]]
        replicas.append(made)
    return [made[0] for made in replicas]


def _check_not_compiled(model: nn.Module) -> None:
    """Raise for a compiled module: what it has compiled calls the original, not a replica."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    optimized = getattr(dynamo, "OptimizedModule", ())
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or isinstance(module, optimized):
            which = name or "the model itself"
            raise StateError(
                f"expected a model to replicate that is not compiled, got {which} "
                f"({type(module).__name__}) compiled; wrap first, then compile the wrapper: "
                "torch.compile(DataParallelWithCallback(model))"
            )


class DataParallelWithCallback(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` with replication callbacks, which runs on CPU too.

    Args:
        module: the model.
        device_ids: where the replicas run. Different GPUs: as `nn.DataParallel`. The same
            device several times, for example `["cpu"] * 4`: as many threads, which share the
            parameters. None: all GPUs, or the plain model where there are none.
        output_device: where outputs are joined; default the first of `device_ids`.
        dim: the axis by which tensors are split and joined.
        replicas: short for `device_ids=[device of the module] * replicas`.

    Positional and keyword arguments may nest tuples, lists and dictionaries; tensors in them
    are split like `torch.chunk`, other objects are shared. A batch smaller than the number of
    replicas uses fewer of them.

    When a replica raises, the others are released and the error is raised again, with a note
    that says which replica it was; the next forward works.

    Within a replica of another one it runs its module as it is: the batch has been split, and the
    layers synchronize over all of it. Compile the wrapper, not the model: several replicas run
    eagerly, and refuse compiled modules with `StateError`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
    ) -> None:
        if replicas is not None:
            if device_ids is not None:
                raise ArgumentError("expected device_ids or replicas, got both; leave one out")
            if not isinstance(replicas, int) or replicas < 1:
                raise ArgumentError(f"expected 1 or more replicas, got {replicas!r}")
            home = next((t.device for t in _tensors(module)), torch.device("cpu"))
            device_ids = [home] * replicas
        if device_ids is None or not _one_device(device_ids):
            if device_ids is not None and any(_device(d).type == "cpu" for d in device_ids):
                raise ArgumentError(
                    f"expected replicas on CPU or on GPUs, got both in device_ids={device_ids!r}"
                )
            super().__init__(module, cast(Any, device_ids), cast(Any, output_device), dim)
            if len(self.device_ids) > 1:
                _check_not_compiled(module)
            return
        if len(device_ids) > 1:
            _check_not_compiled(module)
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids = cast(Any, [_device(d) for d in device_ids])
        self.src_device_obj = _device(device_ids[0])
        self.output_device = cast(
            Any, self.src_device_obj if output_device is None else _device(output_device)
        )
        module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns, from all replicas."""
        if len(self.device_ids) < 2:
            return super().forward(*inputs, **kwargs)
        run = super().forward
        if torch.compiler.is_compiling():  # replicas are new objects in every forward: run eagerly
            run = disable_tracing(run)
        return run(*inputs, **kwargs)

    def _within_replica(self) -> bool:
        """Whether another wrapper has split the batch already."""
        return originals.current() is not None or getattr(self, "_is_replica", False)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copies of `module`, one per device, with their callbacks done."""
        if self._within_replica():
            return [module]  # its layers have their links, or copies that have
        _check_not_compiled(module)
        if _one_device(device_ids):
            replicas = _share(module, len(device_ids))
        else:
            replicas = super().replicate(module, device_ids)
        copies = [list(replica.modules()) for replica in replicas]
        contexts = _execute(replicas[0], copies)
        found = originals.replicas_of(list(module.modules()), copies)
        return _Replicas(replicas, contexts, found)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Arguments of each replica."""
        if self._within_replica():
            device_ids = device_ids[:1]
        if not _one_device(device_ids):
            return super().scatter(inputs, kwargs, device_ids)  # type: ignore[no-any-return]
        device = _device(device_ids[0])
        parts = split((inputs, kwargs or {}), len(device_ids), self.dim, device)
        return [part[0] for part in parts], [part[1] for part in parts]

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run every replica in a thread of its own; results in their order."""
        contexts: list[CallbackContext] = getattr(replicas, "contexts", [])
        found: list[originals.Replica] = getattr(replicas, "found", [])
        siblings = contexts[0]._siblings if contexts else None
        modes = modes_of_caller()
        places = [place_of(_device(d)) for d in self.device_ids[: len(replicas)]]

        def member(index: int) -> Callable[[], Any]:
            # A context can be entered by one thread at a time: each gets a copy.
            variables = contextvars.copy_context()

            def call() -> Any:
                run = partial(replicas[index], *inputs[index], **kwargs[index])
                own = modes if index > 0 else []  # replica 0 runs in the caller's thread
                if siblings is not None:
                    siblings.enter(index)
                return call_within([*own, *places[index]], run)

            if not found:
                return lambda: variables.run(call)
            return lambda: variables.run(found[index].run, call)

        def leave(index: int) -> None:
            for context in contexts:
                context.leave(index)

        def abort(error: BaseException) -> None:
            for context in contexts:
                context.abort(error)

        try:
            return run_in_threads(
                [member(index) for index in range(len(replicas))],
                abort=abort,
                leave=leave,
                describe="replica",
            )
        except BaseException as error:
            for context in contexts:
                context.disown(error)
            originals.give_up(found)
            raise
        finally:
            for context in contexts:
                context.close()

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Outputs of all replicas, joined."""
        if not _one_device(self.device_ids):
            return super().gather(outputs, output_device)
        return join(outputs, self.dim, _device(output_device))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _device(device: int | str | torch.device) -> torch.device:
    """`device`; a number is a GPU, whether there is one or not, and there is only one CPU."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cpu" else device


def _one_device(device_ids: Sequence[Any]) -> bool:
    """Whether all replicas live on the same device, so that they share the parameters."""
    devices = {_device(d) for d in device_ids}
    return len(devices) == 1 and (len(device_ids) > 1 or devices.pop().type == "cpu")


def patch_replication_callback(data_parallel: nn.DataParallel[nn.Module]) -> None:
    """Give an existing `nn.DataParallel` the callbacks: it becomes a `DataParallelWithCallback`.

    The object stays the same one. One of a subclass keeps that class's methods too, but can't be
    pickled any more. Raises `TypeError` for anything but an `nn.DataParallel`.
    """
    kind = type(data_parallel)
    if issubclass(kind, DataParallelWithCallback):
        return
    if not issubclass(kind, nn.DataParallel):
        raise TypeError(f"expected an nn.DataParallel, got {kind.__name__}")
    if kind is nn.DataParallel:
        data_parallel.__class__ = DataParallelWithCallback
    else:
        data_parallel.__class__ = type(kind.__name__, (DataParallelWithCallback, kind), {})
