"""`DataParallelWithCallback`: replicas of a model in threads, and their replication callbacks.

On several GPUs it works like `nn.DataParallel`. On one device (the CPU or one GPU) it runs N
replicas in N threads that share the parameters. In both cases it calls
`__data_parallel_replicate__(context, copy_id)` of each submodule that has it before the replicas
run, and no replica waits forever when another one fails.
"""

from __future__ import annotations

import contextvars
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_core.comm import run_in_threads
from syncbn_core.errors import ArgumentError, CommError, StateError
from syncbn_torch._torch_private import (
    HOOK_OPTIONS,
    HOOKS,
    records_a_graph,
    untraced,
)
from syncbn_torch.conversion.registry import conversions
from syncbn_torch.conversion.replacement import class_of, modules_of
from syncbn_torch.conversion.scripted import name_of_scripted, uses_batch
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.contexts import CallbackContext, Place, ReplicatedForward
from syncbn_torch.data_parallel.joined import STATE
from syncbn_torch.data_parallel.split import (
    BatchSizes,
    Parts,
    check_batch_sizes,
    join,
    split,
    to_device,
)


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> list[CallbackContext]:
    """Call `__data_parallel_replicate__(context, copy_id)` on every submodule that has it.

    `modules`: copies of one model, the master copy first; its callbacks run first. Submodules at
    the same position in `modules()` get the same context. Returns the contexts in that order.
    Raises `CommError` if the copies differ in their number of submodules.

    Call it before each forward of the copies. If one of them fails, call `abort(error)` of all
    contexts: then the others stop at once, else they wait until the deadline.
    """
    if not modules:
        return []
    copies = [list(module.modules()) for module in modules]
    contexts = _execute(copies, ReplicatedForward(len(copies)))
    return [
        contexts.get(i) or CallbackContext(name or type(modules[0]).__name__, len(copies))
        for i, (name, _) in enumerate(modules[0].named_modules())
    ]


def _execute(
    copies: Sequence[Sequence[nn.Module]], forward: ReplicatedForward
) -> dict[int, CallbackContext]:
    """Call the callbacks of all copies, which are lists of modules; contexts by place in these."""
    first, size = copies[0][0], len(copies[0])
    contexts: dict[int, CallbackContext] = {}
    for place, (name, module) in enumerate(first.named_modules()):
        if hasattr(module, "__data_parallel_replicate__"):
            kind = type(first).__name__
            where = Place(forward, place, f"layer '{name}'" if name else kind)
            contexts[place] = CallbackContext(name or kind, len(copies), place=where)
    for copy_id, submodules in enumerate(copies):
        if len(submodules) != size:
            raise CommError(
                f"expected copies of one model with {size} modules each, got "
                f"{len(submodules)} in copy {copy_id}; pass replicas of the same module"
            )
        for place, context in contexts.items():
            callback = getattr(submodules[place], "__data_parallel_replicate__", None)
            if callback is not None:
                callback(context, copy_id)
    return contexts


class _Replicas(list[nn.Module]):
    """Copies of one model, and the forward that they share."""

    def __init__(self, modules: Sequence[nn.Module], forward: ReplicatedForward) -> None:
        super().__init__(modules)
        self.forward = forward


def _replicate_on_one_device(modules: Sequence[nn.Module], copies: int) -> list[list[nn.Module]]:
    """`copies` replicas of a model on its own device, which share its parameters.

    Each replica is the list of its modules, in the order of `modules`.

    Replica 0 shares the buffers too, so its in-place updates stay; the other replicas have copies
    of the buffers, as under `nn.DataParallel`, but share those of synchronized layers.
    """
    index = {original: i for i, original in enumerate(modules)}
    replicas = []
    for copy_id in range(copies):
        buffers: dict[int, Tensor] = {}  # by id: the hash of a tensor is slow
        made: list[Any] = list(map(_copy_of, modules))
        for original, replica in zip(modules, made, strict=True):
            if replica is original:
                continue
            replica.__dict__["_parameters"] = original._parameters.copy()
            shared = STATE if replica.__dict__.get("_replica_sync") else ()
            for key, buffer in original._buffers.items() if copy_id > 0 else ():
                if buffer is not None and key not in shared:
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = buffer.clone()
                    replica._buffers[key] = buffers[id(buffer)]
            for key, child in original._modules.items():
                replica._modules[key] = None if child is None else made[index[child]]
        replicas.append(made)
    return replicas


def _copy_of(module: Any) -> Any:
    """`module._replicate_for_data_parallel()`; a scripted module itself."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    kind: Any = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return module._replicate_for_data_parallel()
    # that of torch sets attributes, which a compiled module sets on the module within
    replica = kind.__new__(kind)
    copies = {name: module.__dict__[name].copy() for name in ("_buffers", "_modules")}
    attributes = module.__dict__ | copies | {"_parameters": {}, "_is_replica": True}
    object.__setattr__(replica, "__dict__", attributes)
    return replica


def _separate_hooks(copies: Sequence[Sequence[nn.Module]]) -> None:
    """Let each replica register hooks on itself only.

    Torch makes replicas share these dictionaries. Models of transformers register hooks in their
    first forward; with shared dictionaries each replica would run the hooks of all replicas.
    """
    for submodules in copies:
        for module in submodules:
            if not isinstance(module, torch.jit.ScriptModule):
                attributes = module.__dict__
                for name in (*HOOKS, *HOOK_OPTIONS):
                    hooks = attributes.get(name)
                    if hooks is not None:
                        attributes[name] = hooks.copy() if hooks else OrderedDict()


def _stays_on_purpose(layer: nn.Module) -> bool:
    """Whether the user registered that `convert_model` leaves layers of this class alone."""
    conversion = conversions.get(class_of(layer))
    return conversion is not None and conversion.to is None


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether a layer of torch, scripted ones too, would take statistics of its input now."""
    if not isinstance(module, _BatchNorm):
        return uses_batch(module)
    return (
        (module.training or module.running_mean is None)
        and not hasattr(module, "__data_parallel_replicate__")
        and not _stays_on_purpose(module)
    )


def _warn_of_plain_layers(model: nn.Module) -> None:
    """Warn if torch's layers in `model` would take statistics of one replica's part each."""
    plain = [
        f"{name or 'the model itself'} ({name_of_scripted(module)})"
        for module, name in modules_of(model).items()
        if _is_plain_layer(module)
    ]
    if plain:
        more = f" and {len(plain) - 1} more layers" if len(plain) > 1 else ""
        warnings.warn(
            f"{plain[0]}{more} do{'' if more else 'es'} not synchronize: each replica takes the "
            "statistics of its own part of the batch; convert_model(model) converts "
            f"{'them' if more else 'it'}, or says why not",
            UserWarning,
            stacklevel=7,  # the caller of the wrapper
        )


class DataParallelWithCallback(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` with replication callbacks, also for CPU.

    Args:
        module: the model.
        device_ids: different GPUs as in `nn.DataParallel`, or one device several times, such as
            `["cpu"] * 4`, for threads that share parameters. None: all GPUs, or no replicas.
        output_device: where outputs are joined; default is the first of `device_ids`.
        dim: the axis along which tensors are split and joined.
        replicas: short for `device_ids=[device of the module] * replicas`.
        batch_sizes: the numbers of samples that the replicas get: "even", a list such as [8, 4],
            or a function from the number of samples to such a list. It makes every list in
            arguments and results a list of samples. None: as `torch.chunk`. You may set this
            attribute between forwards.

    Warns (`UserWarning`) if `device_ids` names several GPUs and torch finds none, once at the
    first forward in training if layers of torch would take statistics of one replica each, and
    once if every replica gets the whole of a list that has an entry for each sample.

    Raises `ArgumentError` for both `device_ids` and `replicas`, for a number as `device_ids`, for
    less than 1 replica, for bad `batch_sizes` and for CPU mixed with GPUs.

    torch.compile of the wrapper has no effect on several replicas. A compiled part of the model
    raises `StateError` in them in training.

    Arguments of forward may nest containers: tuples, lists, mappings, dataclasses, and what is
    registered with torch's pytree. Their tensors are split; other objects, and what is wrapped in
    `Shared(...)`, go to every replica. A batch smaller than the number of replicas uses fewer
    replicas. Raises `ShapeError`, with the path to the value, for objects with tensors that can't
    be split or joined, and if arguments or outputs don't fit together. If a replica raises, the
    others stop, and a note on the error names the replica; the next forward works.

    Inside a replica of another wrapper the module runs without new replicas: the batch is already
    split, and the layers synchronize over all of it.
    """

    batch_sizes: BatchSizes = None  # also of wrappers that `__init__` did not make
    _checked_layers = False  # set at the first forward in training with several replicas
    _warned_of_lists = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        batch_sizes: BatchSizes = None,
    ) -> None:
        check_batch_sizes(batch_sizes)
        self.batch_sizes = batch_sizes
        if replicas is not None:
            if device_ids is not None:
                raise ArgumentError("expected device_ids or replicas, got both; leave one out")
            if not isinstance(replicas, int) or replicas < 1:
                raise ArgumentError(f"expected 1 or more replicas, got {replicas!r}")
            home = next((t.device for t in _tensors(module)), torch.device("cpu"))
            device_ids = [home] * replicas
        if isinstance(device_ids, int):
            raise ArgumentError(
                f"expected a list as device_ids, got {device_ids}; for {device_ids} replicas on "
                f"one device pass replicas={device_ids}"
            )
        if device_ids is None or not _one_device(device_ids):
            if device_ids is not None and any(_device(d).type == "cpu" for d in device_ids):
                raise ArgumentError(
                    f"expected replicas on CPU or on GPUs, got both in device_ids={device_ids!r}; "
                    "use one kind"
                )
            super().__init__(module, cast(Any, device_ids), cast(Any, output_device), dim)
            if device_ids is not None and len(device_ids) > 1 and not self.device_ids:
                warnings.warn(
                    f"torch finds no GPU, so device_ids={list(device_ids)!r} has no effect: the "
                    "model runs as one replica, where it is; for replicas in threads on the CPU "
                    f"pass replicas={len(device_ids)}",
                    UserWarning,
                    stacklevel=2,
                )
            return
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids: Any = [_device(d) for d in device_ids]
        self.src_device_obj: torch.device = _device(device_ids[0])
        self.output_device: Any = (
            self.src_device_obj if output_device is None else _device(output_device)
        )
        module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in replicas and join their outputs on `output_device`."""
        if not self.device_ids:
            inputs, kwargs = to_device(inputs, None), to_device(kwargs, None)
        if len(self.device_ids) < 2:
            return super().forward(*inputs, **kwargs)
        if records_a_graph():
            raise StateError(
                f"expected no torch.jit.trace or make_fx around {len(self.device_ids)} replicas, "
                "which are new objects in each forward and run in threads; trace the model "
                "without the wrapper (wrapper.module)"
            )
        if torch.compiler.is_compiling():
            return self._without_a_graph(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    @untraced("replicas are new objects in each forward, which run in threads")
    def _without_a_graph(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)

    def _within_replica(self) -> bool:
        """Whether another wrapper has already split the batch."""
        marks = ["_is_replica" in vars(module) for module in self.modules()]
        return originals.current() is not None or True in marks

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Replicas of `module`, one per device, after their replication callbacks."""
        if self._within_replica():
            return [module]  # its layers, or their copies, are already connected
        if module.training and len(device_ids) > 1 and not self._checked_layers:
            self._checked_layers = True
            _warn_of_plain_layers(module)
        modules = list(module.modules())
        if _one_device(device_ids):
            copies = _replicate_on_one_device(modules, len(device_ids))
        else:
            replicas = super().replicate(module, device_ids)
            copies = [list(replica.modules()) for replica in replicas]
        _separate_hooks(copies)
        forward = ReplicatedForward(len(copies), ends=True, modules=modules)
        _execute(copies, forward)
        return _Replicas([made[0] for made in copies], forward)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Split the arguments: `(positional arguments, keyword arguments)` by replica."""
        if self._within_replica():
            device_ids = device_ids[:1]
        devices = [_device(d) for d in device_ids]
        parts, keywords = split(inputs, kwargs or {}, self.dim, devices, self.batch_sizes)
        if parts.whole and not self._warned_of_lists:
            self._warned_of_lists = True
            warnings.warn(
                f"{parts.whole} has as many entries as the batch has samples, but every replica "
                'gets all of it; if it holds an entry per sample, set batch_sizes="even", or pass '
                "a tensor; if not, wrap it in syncbn_torch.Shared(...)",
                UserWarning,
                stacklevel=6,  # the caller of the wrapper
            )
        return parts, keywords

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica in its own thread; return their outputs in order."""
        # within a replica of another wrapper, `replicate` has given the module itself
        forward: ReplicatedForward = getattr(replicas, "forward", None) or ReplicatedForward(1)

        def member(index: int) -> Callable[[], Any]:
            call: Callable[[], Any] = partial(replicas[index], *inputs[index], **kwargs[index])
            if forward.size == 1:
                return call
            call = _as_here(call, _device(self.device_ids[index]))
            replica = originals.Replica(index, forward)
            # Only one thread at a time can enter a context, so each replica gets a copy.
            return partial(contextvars.copy_context().run, replica.run, call)

        try:
            outputs = run_in_threads(
                [member(index) for index in range(len(replicas))],
                abort=forward.abort,
                leave=forward.leave,
                describe="replica",
            )
            return Parts(outputs, getattr(inputs, "sizes", None))
        except BaseException as error:
            forward.give_up(error)
            raise
        finally:
            forward.close()

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the outputs of all replicas on `output_device`."""
        sizes = getattr(outputs, "sizes", None)
        return join(outputs, self.dim, _device(output_device), sizes)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _device(device: int | str | torch.device) -> torch.device:
    """`device` as a `torch.device`: a number is a GPU, even without GPUs; "cpu:0" is "cpu"."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cpu" else device


def _one_device(device_ids: Sequence[Any]) -> bool:
    """Whether all replicas are on one device and share the parameters; one GPU alone is not."""
    devices = {_device(d) for d in device_ids}
    return len(devices) == 1 and (len(device_ids) > 1 or devices.pop().type == "cpu")


def patch_replication_callback(data_parallel: nn.DataParallel[nn.Module]) -> None:
    """Turn an existing `nn.DataParallel` into a `DataParallelWithCallback`, in place.

    An object of a subclass keeps its own methods, such as `scatter` and `gather`, but can't be
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
        data_parallel.__class__ = type(kind.__name__, (kind, DataParallelWithCallback), {})


def _as_here(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`call` for another thread, with the modes and the stream of this one, on `device`."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if on_gpu else None
    autocast = {
        kind: torch.autocast(
            kind,
            enabled=torch.is_autocast_enabled(kind),
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    }

    def run() -> Any:
        # no ExitStack: it assigns `__traceback__`, which some errors forbid
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            autocast["cpu"],
            autocast.get("cuda", nullcontext()),
            torch.cuda.device(device) if on_gpu else nullcontext(),
            torch.cuda.stream(stream) if on_gpu else nullcontext(),
        ):
            return call()

    return run
