"""Record every call of the batch norm layers of a model: input, output, gradients of both.

A recorded layer has a subclass of its own class, whose forward records. Hooks would miss calls of
`layer.forward`, and see what other hooks have changed.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from syncbn_torch._torch_private import backward_task
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.pytrees import PLAIN

__all__ = ["Call", "Recorder", "is_norm", "norm_layers", "places_of_random_numbers"]


@dataclass
class Call:
    """One call of a layer by one part of the batch; gradients are None until backward.

    `more`, `named`: the arguments after x. `settings`: the layer's numbers and flags at that time,
    as `training` and `momentum`, which the model may set in its forward.
    """

    x: Tensor
    y: Tensor | None = None
    dx: Tensor | None = None
    dy: Tensor | None = None
    more: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def on_cpu(self) -> Call:
        """The same on the CPU, to be sent to other processes."""
        tensors = [None if t is None else t.cpu() for t in (self.x, self.y, self.dx, self.dy)]
        more = tuple(map(_on_cpu, self.more))
        named = {name: _on_cpu(value) for name, value in self.named.items()}
        return Call(*tensors, more, named, self.settings)  # type: ignore[arg-type, call-arg]


class Recorder:
    """The calls of layers, by name of the layer and number of the part.

    Args:
        layers: the layers to record, by name; their class changes.
        remember: what to keep of an input; None keeps input, output and gradients.
        change: what the layers get instead of their inputs; None: these.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        remember: Callable[[Tensor], Tensor] | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.calls: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
        self.begun: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.order: list[str] = []  # of the first calls
        self.depth = 0  # of the calls that run now; without meaning where replicas run
        self._remember = remember
        self._change = change
        self._lock = threading.Lock()
        for name, layer in layers.items():
            layer.__class__ = _recording(type(layer), name, self)

    def call(
        self, name: str, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the forward of a layer and record it."""
        self.depth += 1
        try:
            return self._call(name, layer, run, args, kwargs)
        finally:
            self.depth -= 1

    def _call(
        self, name: str, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        replica = originals.current()
        part = 0 if replica is None else replica.index
        with self._lock:
            self.begun[name][part] += 1
            if name not in self.order:
                self.order.append(name)
        if not args:  # the input by its name?
            first = next(iter(inspect.signature(run).parameters), "")
            if first in kwargs:
                args = (kwargs[first],)
                kwargs = {name: value for name, value in kwargs.items() if name != first}
        if not args or not isinstance(args[0], Tensor):
            return run(*args, **kwargs)
        given = args[0].detach()
        keep = self._remember is None
        call = Call(given.clone() if self._remember is None else self._remember(given))
        if keep:
            call.more = tuple(map(_kept, args[1:]))
            call.named = {name: _kept(value) for name, value in kwargs.items()}
            call.settings = {
                key: value
                for key, value in vars(layer).items()
                if type(value) in PLAIN and not key.startswith("_") and key != "process_group"
            }
        # a view of its own, so that the gradient is that of this call alone
        x = args[0].view_as(args[0]) if self._change is None else self._change(args[0])
        y = run(x, *args[1:], **kwargs)
        if keep and isinstance(y, Tensor):
            call.y = y.detach().clone()
            if x.requires_grad:
                x.register_hook(partial(setattr, call, "dx"))
            if y.grad_fn is not None:
                # what the layer gets in the end: hooks of the user may change the gradient before
                y.grad_fn.register_prehook(partial(_keep_gradient, call, y.output_nr))
        with self._lock:  # replicas may make the same entry at the same time
            self.calls[name][part].append(call)
        return y

    def again(self, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward that a checkpoint repeats.

        Torch's layers update their running statistics once more. In the undivided step, where
        they stand for ours, they must not.
        """
        counter = getattr(layer, "num_batches_tracked", None)
        if self._remember is None or counter is None:
            return run(*args, **kwargs)
        momentum, count = layer.__dict__["momentum"], counter.clone()
        layer.__dict__["momentum"] = 0.0
        try:
            return run(*args, **kwargs)
        finally:
            layer.__dict__["momentum"] = momentum
            counter.copy_(count)


def _keep_gradient(call: Call, number: int, gradients: tuple[Tensor | None, ...]) -> None:
    call.dy = gradients[number]


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    return value if type(value) in PLAIN else None


def _recording(base: type[nn.Module], name: str, recorder: Recorder) -> type[nn.Module]:
    """A subclass of `base` with the same name that records its calls."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(base.forward, self)
        if backward_task() != -1:  # a checkpoint computes the call again
            return recorder.again(self, run, args, kwargs)
        return recorder.call(name, self, run, args, kwargs)

    same = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**same, "forward": forward})


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The batch norm layers by name, also those that the model holds without registering them."""
    return {name: module for module, name in modules_of(model).items() if is_norm(module)}


def is_norm(module: nn.Module) -> bool:
    """Whether a module is batch norm, also of an unknown class; not one of torch.jit."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    tracks = hasattr(module, "running_mean") and hasattr(module, "running_var")
    return isinstance(module, _BatchNorm) or (tracks and not isinstance(module, _InstanceNorm))


def places_of_random_numbers(model: nn.Module) -> tuple[list[str], list[Any]]:
    """`names, handles`: `names` gets the modules that draw random numbers, once the model runs.

    Remove the handles afterwards. A module is named only if none of its submodules is.
    """
    names: list[str] = []
    states: list[Tensor] = []
    handles: list[Any] = []

    def before(*_: Any) -> None:
        states.append(_state())

    def after(name: str, *_: Any) -> None:
        drew = bool(states) and not torch.equal(states.pop(), _state())
        if drew and not any(_is_within(inner, name) for inner in names):
            names.append(name)

    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(partial(after, name or "the model itself")))
    return names, handles


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or outer == "the model itself" or inner.startswith(f"{outer}.")


def _state() -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state().cpu()])
    return torch.get_rng_state()
