"""A layer that keeps plans of its calls computes what one that decides each call anew computes.

Each way to change a layer or a call is tried after calls that have left a plan. All that comes out
is compared by its bits: y, gradients, buffers, versions, texts of errors, labels of messages.
"""

import copy
import inspect
import os
import pickle
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from syncbn_core.comm import ProcessCommunicator
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    arrays,
    checks,
    forward,
    freeze,
    inplace,
    plan,
    set_sbn_eps_mode,
    unfreeze,
)
from syncbn_torch.backends import cpu
from syncbn_torch.inplace import ABN, InPlaceABNSync

pytestmark = pytest.mark.filterwarnings("ignore")
C = 6
Layer = Any
Call = Callable[[Layer, Tensor], Any]
Change = Callable[[Layer], Call | None]  # how it is called from then on; None: as before


class Twice:
    """A transport for a rank beside which another one has the same batch."""

    rank, size, on_device = 0, 2, False

    def __init__(self) -> None:
        self.labels: list[float] = []

    def all_gather(self, values: Any, call: Any) -> Any:
        self.labels.append(float(values[-1]))
        return np.stack([values, values])

    def all_reduce(self, values: Any, call: Any) -> Any:
        return values * 2


def group() -> Any:
    return ProcessCommunicator(Twice())


class UserGroup:
    """A communicator to which there is no weak reference."""

    __slots__ = ()
    rank, size = 0, 2

    def all_gather(self, values: Any, call: Any = None) -> Any:
        return np.stack([values, values])

    def all_reduce(self, values: Any, call: Any = None) -> Any:
        return values * 2


def a_layer(kind: type = SynchronizedBatchNorm2d, **settings: Any) -> Layer:
    torch.manual_seed(3)
    layer = kind(C, **settings)
    layer.process_group = group()
    if layer.weight is not None:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


# --------------------------------------------------------------------- changes


def attribute(name: str, make: Any) -> Change:
    """`make`: of the old value, unless it is a value itself."""

    def change(layer: Layer) -> None:
        setattr(layer, name, make(getattr(layer, name)) if callable(make) else make)

    return change


def data(make: Callable[[Tensor], Tensor], name: str = "weight") -> Change:
    def change(layer: Layer) -> None:
        getattr(layer, name).data = make(getattr(layer, name).detach())

    return change


def of_x(make: Callable[[Tensor], Any]) -> Change:
    return lambda layer: lambda layer, x: layer(make(x))


def within(context: Callable[[], AbstractContextManager[Any]]) -> Change:
    def call(layer: Layer, x: Tensor) -> Tensor:
        with context():
            y: Tensor = layer(x)
        return y

    return lambda layer: call


def does(function: Callable[[Layer], Any]) -> Change:
    """`function` of the layer, whatever it returns."""

    def change(layer: Layer) -> None:
        function(layer)

    return change


def called(call: Call) -> Change:
    return lambda layer: call


def negated(t: Tensor) -> Tensor:
    return torch.complex(t, t).conj().imag


def shortened(t: Tensor) -> Tensor:
    t = t.detach().clone()
    t.untyped_storage().resize_(8)
    return t


def unaligned(t: Tensor) -> Tensor:
    given = t.detach().numpy()
    moved = np.zeros(given.nbytes + 1, np.uint8)[1:].view(given.dtype).reshape(given.shape)
    moved[...] = given
    return torch.from_numpy(moved)


class Halved(SynchronizedBatchNorm2d):
    """Its weight is half of what it holds."""

    @property
    def weight(self) -> Any:
        return self._parameters["weight"] / 2  # type: ignore[operator]

    @weight.setter
    def weight(self, value: Any) -> None: ...


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(layer: Layer) -> None:
    parametrize.register_parametrization(layer, "weight", Double())


def without(*names: str) -> Change:
    def change(layer: Layer) -> None:
        for name in names:
            setattr(layer, name, None)

    return change


class Sparse(torch.autograd.Function):
    """Gives a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy.to_sparse()


class Named(Tensor):
    """A subclass."""


def as_class(kind: type) -> Change:
    return does(lambda layer: setattr(layer, "__class__", kind))


def in_a_dictionary(layer: Layer) -> None:
    """As the hooks of the old `weight_norm` leave a weight."""
    weight = layer.weight.detach() * 3
    del layer.weight
    layer.weight = weight


def copied_by(function: Callable[[Layer], Layer]) -> Change:
    def change(layer: Layer) -> Call:
        other = function(layer)
        other.eps = 0.5
        return lambda layer, x: layer(x) + other(x.detach() * 2)

    return change


def pickled(layer: Layer) -> Layer:
    layer.process_group, kept = None, layer.process_group
    other = pickle.loads(pickle.dumps(layer))
    layer.process_group = other.process_group = kept
    return other


def hooked(layer: Layer) -> None:
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    layer.register_forward_hook(lambda _, args, y: y + 1)


def second_derivative(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return dx * y


def batched_gradients(layer: Layer, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    return y


def changed_between(change: Callable[[Tensor], Any]) -> Change:
    def call(layer: Layer, x: Tensor) -> Tensor:
        held = x * 1
        y: Tensor = layer(held)
        change(held)
        return y

    return lambda layer: call


def replaced(x: Tensor) -> None:
    x.data = torch.ones(2, C, 3)


def dual(layer: Layer, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y: Tensor = layer(forward_ad.make_dual(x, x))
    return y


def weight_of_inference(layer: Layer) -> Call:
    """First without gradients, where such a weight may be used."""
    with torch.inference_mode():
        weight = torch.arange(float(C))
    del layer.weight
    layer.register_buffer("weight", None)
    layer._buffers.pop("weight")
    layer._parameters["weight"] = weight
    with torch.no_grad():
        for _ in range(3):
            layer(an_x())
    return lambda layer, x: layer(x)


def statistics_of_inference(layer: Layer) -> Call:
    """First in that mode, where such statistics may be written."""
    with torch.inference_mode():
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            layer._buffers[name] = layer._buffers[name] + 0
        layer.weight = layer.bias = None
        x = an_x() + 0
        for _ in range(3):
            layer(x)

    def call(layer: Layer, _: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    return call


def tracked_after_all(layer: Layer) -> None:
    layer.track_running_stats = False
    for _ in range(3):
        layer(an_x() * 1)
    layer.track_running_stats = True
    layer(an_x((3, C, 5, 5)) * 1)


def tracked_again(layer: Layer) -> Call:
    def call(layer: Layer, x: Tensor) -> Tensor:
        layer.track_running_stats = not layer.track_running_stats
        layer(x.detach())
        y: Tensor = layer(x)
        return y

    return call


def averaged_without_a_counter(layer: Layer) -> None:
    layer.num_batches_tracked = None
    for _ in range(2):
        layer(an_x() * 1)
    layer.momentum = None


def bare(layer: Layer) -> None:
    """Without parameters and statistics only `num_features` says how many channels there are."""
    layer.weight = layer.bias = layer.running_mean = layer.running_var = None
    layer.num_batches_tracked = None
    for _ in range(3):
        layer(an_x() * 1)
    layer.num_features = C - 1


def masked(layer: Layer, x: Tensor) -> Tensor:
    mask = torch.tensor([True, False, True, True])
    y: Tensor = layer(x.contiguous(memory_format=torch.channels_last), mask)
    mask.fill_(True)
    return y


def both_masked(layer: Layer) -> Call:
    for _ in range(2):
        layer(an_x().contiguous(memory_format=torch.channels_last))
    return masked


def of_pieces(layer: Layer, x: Tensor) -> Tensor:
    return torch.cat([layer(x[:3]), layer(x[3:]), layer(x[:3])])


def bare_in_replicas(layer: Layer) -> Call:
    bare(layer)
    layer.num_features = C
    for _ in range(2):
        layer(an_x((2, C, 5, 5)) * 1)
    return by_replicas


def alone(layer: Layer) -> None:
    layer.process_group, layer.eps_mode = None, "clamp"


def alone_then_eval(layer: Layer) -> None:
    alone(layer)
    for _ in range(2):
        layer(an_x() * 1)
    layer.eval()


def in_another_group(layer: Layer) -> None:
    """In which another layer was the first."""
    other = a_layer()
    other(an_x())
    layer.process_group = other.process_group


def tracked_and_recomputed(layer: Layer) -> Call:
    def call(layer: Layer, x: Tensor) -> Tensor:
        layer.track_running_stats = False
        layer(x.detach())
        layer.track_running_stats = True
        y: Tensor = checkpoint(layer, x, use_reentrant=False)
        return y

    return call


def by_replicas(layer: Layer, x: Tensor) -> Tensor:
    y: Tensor = DataParallelWithCallback(layer, replicas=2)(x)
    return y


CHANGES: dict[str, Change] = {
    "nothing": does(lambda layer: None),
    "assigned": does(
        lambda layer: layer.load_state_dict(
            {k: v * 2 for k, v in layer.state_dict().items()}, assign=True
        )
    ),
    "loaded": does(
        lambda layer: layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()})
    ),
    "data": data(lambda t: t * 3),
    "data, float64": data(torch.Tensor.double),
    "data, longer": data(lambda t: torch.cat([t, t])),
    "data, strided": data(lambda t: torch.stack([t, t], 1)[:, 0]),
    "data, negative": data(negated),
    "data, unaligned": data(unaligned),
    "data of running_mean": data(lambda t: t + 5, "running_mean"),
    "data of running_var, half": data(lambda t: t.half(), "running_var"),
    "data of the counter": data(lambda t: t + 5, "num_batches_tracked"),
    "double": does(lambda layer: layer.double()),
    "half": does(lambda layer: layer.half()),
    "bfloat16": does(lambda layer: layer.to(torch.bfloat16)),
    "meta": does(lambda layer: layer.to("meta")),
    "parametrized": does(parametrized),
    "functional_call": called(
        lambda layer, x: functional_call(layer, {"weight": torch.arange(6.0)}, x)
    ),
    "functional_call, buffers": called(
        lambda layer, x: functional_call(
            layer, {"running_mean": torch.ones(C), "running_var": torch.ones(C)}, x
        )
    ),
    "functional_call, longer": called(
        lambda layer, x: functional_call(layer, {"weight": torch.arange(7.0)}, x)
    ),
    "freed": does(lambda layer: layer.weight.untyped_storage().resize_(0)),
    "shortened": does(lambda layer: layer.weight.untyped_storage().resize_(8)),
    "freed bias": does(lambda layer: layer.bias.untyped_storage().resize_(0)),
    "freed running_mean": does(lambda layer: layer.running_mean.untyped_storage().resize_(0)),
    "freed counter": does(lambda layer: layer.num_batches_tracked.untyped_storage().resize_(0)),
    "swapped": does(
        lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.arange(6.0)))
    ),
    "weight of inference": weight_of_inference,
    "statistics of inference": statistics_of_inference,
    "deepcopy": copied_by(copy.deepcopy),
    "copy": copied_by(copy.copy),
    "pickle": copied_by(pickled),
    "frozen": does(freeze),
    "frozen and not": does(lambda layer: (freeze(layer), unfreeze(layer))),
    "eps": attribute("eps", 0.5),
    "eps_mode": attribute("eps_mode", "clamp"),
    "mode of all layers": does(lambda layer: set_sbn_eps_mode("clamp")),
    "momentum": attribute("momentum", 0.7),
    "momentum None": attribute("momentum", None),
    "momentum None without a counter": averaged_without_a_counter,
    "another group": in_another_group,
    "a group without references": attribute("process_group", lambda _: UserGroup()),
    "no group": attribute("process_group", None),
    "a wrong group": attribute("process_group", 5),
    "activation": attribute("_activation", ("relu", 0.01)),
    "slope": attribute("_activation", ("leaky_relu", 0.3)),
    "alone, then eval": does(alone_then_eval),
    "eval": does(lambda layer: layer.eval()),
    "tracks nothing": attribute("track_running_stats", False),
    "tracks again": tracked_again,
    "tracks after all": tracked_after_all,
    "no running_mean": attribute("running_mean", None),
    "no statistics": without("running_mean", "running_var"),
    "no counter": attribute("num_batches_tracked", None),
    "counter, int32": attribute("num_batches_tracked", Tensor.int),
    "counter, float": attribute("num_batches_tracked", Tensor.float),
    "no weight": attribute("weight", None),
    "no bias": attribute("bias", None),
    "no parameters": without("weight", "bias"),
    "num_features": attribute("num_features", C - 1),
    "num_features of a bare layer": bare,
    "statistics require a gradient": does(lambda layer: layer.running_mean.requires_grad_()),
    "expanded statistics": attribute("running_mean", lambda t: t[:1].expand(C)),
    "weight without gradient": does(lambda layer: layer.weight.requires_grad_(False)),
    "hooks": does(hooked),
    "a weight that is computed": as_class(Halved),
    "a weight in the dictionary": does(in_a_dictionary),
    "a class for five axes": as_class(SynchronizedBatchNorm3d),
    "no_grad": within(torch.no_grad),
    "inference mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu")),
    "a dispatch mode": within(lambda: FlopCounterMode(display=False)),
    "x, other shape": of_x(lambda x: x[:3]),
    "x, shapes in turn": called(of_pieces),
    "x, other channels": of_x(lambda x: x[:, :5]),
    "x, 3 axes": of_x(lambda x: x[0]),
    "x, channels_last": of_x(lambda x: x.to(memory_format=torch.channels_last)),
    "x, gaps": of_x(lambda x: x[:, :, ::2]),
    "x, offset": of_x(lambda x: torch.cat([x, x])[4:]),
    "x, expanded": of_x(lambda x: x[:1].expand(4, C, 5, 5)),
    "x, float64": of_x(lambda x: x.double()),
    "x, half": of_x(lambda x: x.half()),
    "x, bfloat16": of_x(lambda x: x.bfloat16()),
    "x, empty": of_x(lambda x: x[:0]),
    "x, negative": of_x(negated),
    "x, zeros without memory": of_x(lambda x: torch._efficientzerotensor(x.shape)),
    "x, meta": of_x(lambda x: x.to("meta")),
    "x, sparse": of_x(lambda x: x.to_sparse()),
    "x, nested": of_x(lambda x: torch.nested.nested_tensor([x[0].detach(), x[1].detach()])),
    "x, a parameter": of_x(lambda x: nn.Parameter(x.detach())),
    "x, a subclass": of_x(lambda x: x.as_subclass(Named)),
    "x, a list": of_x(lambda x: x.tolist()),
    "x, shortened": of_x(shortened),
    "x, unaligned": of_x(unaligned),
    "x, of inference": called(lambda layer, x: layer(torch.inference_mode()(lambda: x * 2)())),
    "dual": called(dual),
    "vmap": called(lambda layer, x: torch.func.vmap(layer)(x[None])[0]),
    "trace": called(lambda layer, x: torch.jit.trace(layer, (x,), check_trace=False)(x)),
    "second derivative": called(second_derivative),
    "batched gradients": called(batched_gradients),
    "checkpoint": called(lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
    "checkpoint, reentrant": called(lambda layer, x: checkpoint(layer, x, use_reentrant=True)),
    "x replaced before backward": changed_between(replaced),
    "x freed before backward": changed_between(lambda x: x.untyped_storage().resize_(0)),
    "x written before backward": changed_between(lambda x: x.detach().zero_()),
    "dy expanded": called(lambda layer, x: layer(x).sum().expand(4, C, 5, 5)),
    "dy, channels_last": called(lambda layer, x: layer(x).clone(memory_format=torch.channels_last)),
    "dy sparse": called(lambda layer, x: Sparse.apply(layer(x))),
    "no dy": called(lambda layer, x: layer(x) * 0 + x),
    "a mask": called(masked),
    "a mask, and none before": both_masked,
    "a mask of another shape": called(lambda layer, x: layer(x, torch.ones(3, dtype=torch.bool))),
    "threads": does(lambda layer: torch.set_num_threads(1)),
    "in replicas": called(by_replicas),
    "a bare layer in replicas": bare_in_replicas,
    "tracks again, recomputed": tracked_and_recomputed,
    "an activation of ABN": attribute("activation", "elu"),
}


def an_x(shape: tuple[int, ...] = (4, C, 5, 5)) -> Tensor:
    return (torch.randn(shape) * 3 + 7).requires_grad_()


def outcome(name: str, where: str = "ranks") -> list[Any]:
    """All that a layer gives in calls before and after a change, by its bits."""
    layer = a_layer(ABN if name == "an activation of ABN" else SynchronizedBatchNorm2d)
    if where == "in place":
        layer = a_layer(InPlaceABNSync)
    elif where == "alone":
        alone(layer)
    change, found = CHANGES[name], []

    def step(call: Call) -> None:
        x = an_x()
        try:
            y = call(layer, x)
            found.extend([y, y.stride() if y.layout is torch.strided else None])
            if y.requires_grad:
                y.backward(torch.randn(y.shape).to(y))
                found.extend([x.grad, x.grad is not None and x.grad.stride()])
        except Exception as error:
            found.append(f"{type(error).__name__} {re.sub('0x[0-9a-f]+', '', str(error))[:300]}")
        for t in (*layer._parameters.values(), *layer._buffers.values()):
            version = None if t is None or t.is_inference() else t._version
            found.extend([t, t is not None and t.grad, version])

    call: Call = lambda layer, x: layer(x * 1)  # noqa: E731
    threads, own = torch.get_num_threads(), layer.process_group
    for _ in range(3):
        step(call)
    call = change(layer) or call
    for _ in range(3):
        step(call)
    set_sbn_eps_mode("plus")
    torch.set_num_threads(threads)
    found += [
        getattr(getattr(g, "transport", None), "labels", None) for g in (own, layer.process_group)
    ]
    return [bits(value) for value in found]


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_meta or value.layout is not torch.strided:
        return str(value)
    if value.untyped_storage().nbytes() < value.nbytes:
        return f"{value.shape} {value.dtype} of no memory"
    plain = value.detach().as_subclass(Tensor).resolve_neg().contiguous()
    if plain._is_zerotensor():
        plain = plain.clone()
    return str(value.dtype), tuple(value.shape), plain.flatten().view(torch.uint8).numpy().tobytes()


def decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forward, inplace):
        monkeypatch.setattr(module, "planned", lambda layer, x, mask: None)


@pytest.mark.parametrize("where", ["ranks", "alone", "in place"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_gives_what_a_new_decision_gives(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "in place" and name in ("freed", "shortened"):
        pytest.skip("torch itself reads the weight, and takes its absolute value")
    by_plan = outcome(name, where)
    decided_anew(monkeypatch)
    assert by_plan == outcome(name, where)


# --------------------------------------------------------------------- the key

# each line of `plan.call_of` that decides, and a change which goes wrong without it
NOTICED_BY = {
    "not isinstance(x, Tensor)": "x, a list",
    'own.get("_frozen") is not None': "frozen",
    'own.get("_replica_sync") is not None': "a bare layer in replicas",
    "layer._last_forward_tracked is not layer.track_running_stats": "tracks again, recomputed",
    "backward_task() != -1": "checkpoint",
    "is_watched()": "dual",
    "not _holds_its_tensors(kind)": "a weight that is computed",
    "not own.keys().isdisjoint(_NAMES)": "a weight in the dictionary",
    "kind,": "a class for five axes",
    "torch.is_grad_enabled(),": "weight of inference",
    "mask is None,": "a mask, and none before",
    "layer.training,": "alone, then eval",
    "layer.num_features,": "num_features of a bare layer",
    "layer.track_running_stats,": "tracks after all",
    "*map(is_, state, repeat(None)),": "no bias",
}


def mutants() -> dict[str, str]:
    """The source of `plan.call_of` without each of these lines."""
    lines = inspect.getsource(plan.call_of).splitlines()
    conditions, key = lines.index("    if ("), lines.index("    key = (")
    found = {}
    for begin, end in ((conditions, "    ):"), (key, "    )")):
        for n in range(begin + 1, lines.index(end, begin)):
            text = lines[n].split("  #")[0].strip().removeprefix("or ")
            instead = ["        False"] if n == conditions + 1 else []
            found[text] = "\n".join([*lines[:n], *instead, *lines[n + 1 :]])
    return found


def test_each_element_of_the_key_has_a_change() -> None:
    assert list(mutants()) == list(NOTICED_BY)


@pytest.mark.parametrize("left_out", NOTICED_BY)
def test_without_an_element_of_the_key_a_change_goes_wrong(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, name = vars(plan).copy(), NOTICED_BY[left_out]
    code = "from __future__ import annotations\n" + mutants()[left_out]
    exec(compile(code, "call_of", "exec"), space)
    monkeypatch.setattr(plan, "call_of", space["call_of"])
    mutated = outcome(name)
    decided_anew(monkeypatch)
    assert mutated != outcome(name)


def test_what_the_tensors_of_a_plan_are_like_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "like", lambda tensors: lambda *others: True)
    mutated = outcome("data, float64")
    decided_anew(monkeypatch)
    assert mutated != outcome("data, float64")


READ_IN_EACH_CALL = {  # by `plan.planned`
    "training",
    "momentum",
    "process_group",
    "eps",
    "eps_mode",
    "effective_eps_mode",
    "_activation",
    "_rule",
    "_agreed",
    "_original",
    "_copied_from",
}
OF_THE_KEY = {  # by what the key holds: the class, and the tensors
    "_check_input_dim",
    "_parameters",
    "_buffers",
    "_modules",
    *plan._NAMES,
}


def test_the_key_holds_all_that_is_read_to_make_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    reading = False

    class Watched(SynchronizedBatchNorm2d):
        def __getattribute__(self, name: str) -> Any:
            if reading:
                read.add(name)
            return super().__getattribute__(name)

    layer = a_layer(Watched)
    decided_anew(monkeypatch)
    layer(an_x())
    source = inspect.getsource(plan.call_of)
    monkeypatch.setattr(plan, "call_of", lambda *_: None)
    reading = True
    forward.batch_norm(layer, an_x())
    reading = False
    held = set(re.findall(r'(?:layer\.|own\[?(?:\.get\()?")(\w+)', source))
    unknown = (
        {name for name in read if not name.startswith("__")} - held - READ_IN_EACH_CALL - OF_THE_KEY
    )
    assert unknown == {"_plans"}


# --------------------------------------------------------------------- hits and misses


KINDS: dict[str, tuple[Change, Callable[[Tensor], Tensor]]] = {
    "planes": (CHANGES["nothing"], lambda x: x),
    "channels_last": (CHANGES["nothing"], lambda x: x.to(memory_format=torch.channels_last)),
    "(N, C)": (as_class(SynchronizedBatchNorm1d), lambda x: x[:, :, 0, 0].contiguous()),
    "float64": (CHANGES["double"], lambda x: x.double()),
    "float16": (CHANGES["nothing"], lambda x: x.half()),
    "bfloat16": (CHANGES["nothing"], lambda x: x.bfloat16()),
    "no parameters": (CHANGES["no parameters"], lambda x: x),
    "no statistics": (CHANGES["no statistics"], lambda x: x),
    "tracks nothing": (CHANGES["tracks nothing"], lambda x: x),
    "momentum None": (CHANGES["momentum None"], lambda x: x),
    "activation": (CHANGES["activation"], lambda x: x),
    "clamp": (CHANGES["eps_mode"], lambda x: x),
    "alone": (does(alone), lambda x: x),
    "in place": (CHANGES["nothing"], lambda x: x),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_needs_neither_checks_nor_routes(
    kind: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = kind == "in place"
    layer = a_layer(InPlaceABNSync) if in_place else a_layer()
    change, make = KINDS[kind]
    change(layer)
    masks = [torch.tensor([True, False, True, True])] if masked and not in_place else []

    def step() -> None:
        y = layer(make(an_x().detach()).requires_grad_() * 1, *masks)
        y.backward(torch.randn(y.shape).to(y).as_strided(y.shape, y.stride()))

    step()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("decided again")

    for module, name in [
        (forward, "checked_part"),
        (inplace, "checked_part"),
        (forward, "check_operands"),
        (forward, "checked_running"),
        (forward, "operations_for"),
        (forward, "kept_steps"),
        (forward, "members_of"),
        (checks, "check_operands"),
        *([] if in_place else [(cpu.TensorSteps, "__init__")]),
        (arrays, "_in_form"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    step()


def test_a_layer_keeps_a_few_plans_and_no_tensor() -> None:
    layer = a_layer()
    for n in range(2, 30):
        for _ in range(2):
            layer(an_x((n, C, 5, 5)))
    assert 2 <= len(layer._plans) <= 8
    x = an_x((3, C, 5, 5))
    kept = weakref.ref(x)
    layer(x)
    layer(x)
    del x
    assert kept() is None
    gone = weakref.ref(layer)
    del layer
    assert gone() is None


def test_copies_and_pickles_have_no_plans() -> None:
    layer = a_layer()
    for _ in range(3):
        layer(an_x())
    assert layer._plans
    assert not copy.deepcopy(layer)._plans
    assert not copy.copy(layer)._plans
    assert not pickled(layer)._plans


def test_threads_share_the_plans_of_a_layer() -> None:
    layer, failed = a_layer().eval().train(), []
    layer.process_group = ProcessCommunicator(Twice())
    shapes = [(n, C, 5, 5) for n in range(2, 14)]
    given = {shape: torch.randn(shape) for shape in shapes}
    layer.momentum = 0.0
    expected = {shape: layer(x).detach() for shape, x in given.items()}

    def run(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(100):
            shape = order.choice(shapes)
            if not torch.equal(layer(given[shape]), expected[shape]):
                failed.append(shape)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --------------------------------------------------------------------- many changes in turn


def wanted(layer: Layer, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx of the batch twice, in float64, by torch."""
    wide = x.detach().double().requires_grad_()
    weight, bias = [None if t is None else t.detach().double() for t in (layer.weight, layer.bias)]
    y = torch.nn.functional.batch_norm(
        torch.cat([wide, wide.detach()]), None, None, weight, bias, True, 0.0, layer.eps
    )
    # the other rank has the same dy: its x gets no gradient, but its sums count
    both = torch.cat([wide, wide])
    z = torch.nn.functional.batch_norm(both, None, None, weight, bias, True, 0.0, layer.eps)
    (dx,) = torch.autograd.grad(z, wide, torch.cat([dy, dy]).double())
    return y[: len(x)], dx / 2


STEPS: list[Change] = [
    attribute("eps", lambda eps: 1e-5 if eps > 1e-3 else 0.01),
    attribute("momentum", lambda m: None if m else 0.3),
    attribute("process_group", lambda _: group()),
    attribute("track_running_stats", lambda tracks: not tracks),
    data(lambda t: t * (1.5 if t.abs().max() < 8 else 0.1)),
    data(lambda t: torch.stack([t, t], 1)[:, 0], "bias"),
    does(lambda layer: layer.double() if layer.weight.dtype is torch.float32 else layer.float()),
    does(lambda layer: layer.weight.requires_grad_(not layer.weight.requires_grad)),
    does(lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)),
    attribute("bias", lambda bias: nn.Parameter(torch.randn_like(bias))),
    does(lambda layer: (layer.eval(), layer(an_x().to(layer.weight.dtype)), layer.train())),
    does(lambda layer: torch.set_num_threads(3 - torch.get_num_threads())),
]


@pytest.mark.timeout(300)  # many kernels to compile, on a fresh machine
def test_random_changes_and_calls_give_what_float64_gives() -> None:
    seed = int(os.environ.get("SEED", "1"))
    chosen, torch_threads = random.Random(seed), torch.get_num_threads()
    torch.set_num_threads(2)
    layer, end = a_layer(), time.monotonic() + float(os.environ.get("SECONDS", "0"))
    number = 0
    while number < 150 or time.monotonic() < end:
        number += 1
        if chosen.random() < 0.4:
            chosen.choice(STEPS)(layer)
        shape = (chosen.choice((2, 3)), C, *chosen.choice(((4, 4), (7, 1), (90, 90))))
        x = an_x(shape).detach().to(layer.weight.dtype)
        if chosen.random() < 0.3:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        before = copy.deepcopy(layer.state_dict())
        y, dy = layer(x), torch.randn(shape).to(x.dtype)
        y.backward(dy)
        expected = wanted(layer, x, dy)
        rtol = 1e-5 if x.dtype is torch.float32 else 1e-10
        for found, right in zip((y, x.grad), expected, strict=True):
            atol = 20 * rtol * (1 + float(layer.weight.abs().max()))
            torch.testing.assert_close(found.double(), right, rtol=rtol, atol=atol)
        counted = layer.num_batches_tracked - before["num_batches_tracked"]
        assert int(counted) == int(layer.track_running_stats)
    torch.set_num_threads(torch_threads)
