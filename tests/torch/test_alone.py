"""A layer alone is torch's layer: the same bits, errors and texts, whatever a program does with it.

With an activation, a large one computes by our kernels, and gives the same numbers to rounding.
"""

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call as call_with
from torch.func import stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from syncbn_torch import (
    SyncBatchNorm,
    SynchronizedBatchNorm2d,
    convert_model,
    forward,
)

CHANNELS = 4
SMALL, LARGE = (2, CHANNELS, 3, 3), (36, CHANNELS, 60, 60)
Change = Callable[[Any, Tensor], Any]
Program = Callable[[Any, Tensor], Any]


def set_data(name: str) -> Change:
    def change(layer: Any, x: Tensor) -> None:
        own = getattr(layer, name)
        own.data = torch.rand_like(own) if own.is_floating_point() else own + 5

    return change


def new_buffer(name: str) -> Change:
    def change(layer: Any, x: Tensor) -> None:
        setattr(layer, name, torch.rand(CHANNELS) if name != "num_batches_tracked" else None)

    return change


def set_to(**values: Any) -> Change:
    def change(layer: Any, x: Tensor) -> None:
        for name, value in values.items():
            setattr(layer, name, value)

    return change


def requires_grad(name: str, required: bool) -> Change:
    def change(layer: Any, x: Tensor) -> None:
        getattr(layer, name).requires_grad_(required)

    return change


def shares(layer: Any, x: Tensor) -> None:
    layer.running_var.data = layer.running_mean.data


def strided(layer: Any, x: Tensor) -> None:
    layer.running_mean.data = torch.rand(2 * CHANNELS)[::2]
    layer.weight.data = torch.rand(3 * CHANNELS)[::3]


def expanded(layer: Any, x: Tensor) -> None:
    layer.running_mean.data = torch.rand(1).expand(CHANNELS)


def halved_vectors(layer: Any, x: Tensor) -> None:
    layer.running_mean = layer.running_mean.to(torch.bfloat16)
    layer.running_var = layer.running_var.double()
    layer.num_batches_tracked = layer.num_batches_tracked.to(torch.int16)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Mine(Tensor):
    """A subclass without code of its own."""


class Watched(nn.Parameter):
    """A parameter that has a say in what torch's functions do with it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result + 1 if function is F.batch_norm else result


def of_class(**properties: Callable[[Any], Any]) -> Change:
    """The layer gets a class that overrides these attributes."""

    def change(layer: Any, x: Tensor) -> None:
        own = {name: property(read) for name, read in properties.items()}
        layer.__class__ = type("Overrides", (type(layer),), own)

    return change


def in_dict(name: str) -> Change:
    """The attribute is a plain one, which comes before parameters and buffers."""

    def change(layer: Any, x: Tensor) -> None:
        layer.__dict__[name] = torch.linspace(1, 2, CHANNELS)

    return change


def as_other_kind(layer: Any, x: Tensor) -> None:
    del layer.weight, layer.running_mean
    layer.register_buffer("weight", torch.linspace(1, 2, CHANNELS))
    layer.running_mean = nn.Parameter(torch.ones(CHANNELS), requires_grad=False)


def parametrized(layer: Any, x: Tensor) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


def scripted_hook(layer: Any, x: Tensor) -> None:
    layer.register_forward_hook(lambda module, inputs, y: 2 * y)


def input_made(make: Callable[[Tensor], Any]) -> Change:
    return lambda layer, x: make(x)


def negative(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag


CHANGES: dict[str, Change] = {
    "nothing": lambda layer, x: None,
    **{f"{n} with new data": set_data(n) for n in ("weight", "bias", "running_mean")},
    "counter with new data": set_data("num_batches_tracked"),
    "another running mean": new_buffer("running_mean"),
    "no counter": new_buffer("num_batches_tracked"),
    "no running mean": set_to(running_mean=None),
    "no running statistics": set_to(running_mean=None, running_var=None),
    "no weight": set_to(weight=None),
    "another bias": set_to(bias=nn.Parameter(torch.ones(CHANNELS))),
    "momentum None": set_to(momentum=None),
    "momentum 1": set_to(momentum=1),
    "another eps": set_to(eps=0.1),
    "not tracking": set_to(track_running_stats=False),
    "eval": lambda layer, x: layer.eval() and None,
    "double": lambda layer, x: layer.double() and None,
    "half": lambda layer, x: layer.half() and None,
    "meta": lambda layer, x: layer.to("meta") and None,
    "vectors of other dtypes": halved_vectors,
    "strided vectors": strided,
    "expanded running mean": expanded,
    "overlapping statistics": shares,
    "running mean with gradients": requires_grad("running_mean", True),
    "weight without gradients": requires_grad("weight", False),
    "parametrized": parametrized,
    "weight of a property": of_class(weight=lambda layer: 1 + layer._parameters["weight"]),
    "bias of a property": of_class(bias=lambda layer: 2 * layer._parameters["bias"]),
    "running mean of a property": of_class(running_mean=lambda layer: torch.ones(CHANNELS)),
    **{f"{n} in __dict__": in_dict(n) for n in ("weight", "bias", "running_mean", "running_var")},
    "weight a buffer, running mean a parameter": as_other_kind,
    "weight of a subclass": set_to(weight=Watched(torch.linspace(1, 2, CHANNELS))),
    "hook": scripted_hook,
    "double input": input_made(Tensor.double),
    "bfloat16 input": input_made(Tensor.bfloat16),
    "complex input": input_made(lambda x: x.to(torch.complex64)),
    "integer input": input_made(lambda x: x.detach().to(torch.int32)),
    "channels_last input": input_made(
        lambda x: x.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ),
    "input with gaps": input_made(lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
    "expanded input": input_made(lambda x: x[:1].expand_as(x)),
    "part of a tensor": input_made(lambda x: torch.cat([x, x])[len(x) :]),
    "negated input": input_made(lambda x: negative(x.detach())),
    "input without gradients": input_made(Tensor.detach),
    "input of a subclass": input_made(lambda x: x.detach().as_subclass(Mine)),
    "parameter as input": input_made(lambda x: nn.Parameter(x.detach())),
    "sparse input": input_made(lambda x: x.detach().to_sparse()),
    "meta input": input_made(lambda x: x.to("meta")),
    "nested input": input_made(lambda x: torch.nested.nested_tensor([x[0], x[1]])),
    "rows": input_made(lambda x: x.flatten(1)[:, :CHANNELS]),
    "five axes": input_made(lambda x: x[..., None]),
    "one axis": input_made(Tensor.flatten),
    "empty batch": input_made(lambda x: x[:0]),
    "one value per channel": input_made(lambda x: x[:1, :, :1, :1]),
}


def hooked() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(Tensor.double, Tensor.float)


class Doubles(TorchFunctionMode):
    """Replaces `F.batch_norm`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        y = function(*args, **(kwargs or {}))
        return 2 * y if function is F.batch_norm else y


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "saved-tensor hooks": hooked,
    "a mode": lambda: FlopCounterMode(display=False),
    "a function mode": Doubles,
    "a default device": lambda: torch.device("cpu"),
    "profiler": torch.profiler.profile,
    "anomaly": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu"),
}


def loss(layer: Any, x: Tensor) -> Tensor:
    return (layer(x) * torch.linspace(-1, 1, x.numel()).view(x.shape)).pow(2).sum()


def second(layer: Any, x: Tensor) -> Any:
    (dx,) = torch.autograd.grad(loss(layer, x), x, create_graph=True)
    return torch.autograd.grad(dx.pow(2).sum(), [x, layer.weight])


def batched(layer: Any, x: Tensor) -> Any:
    y = layer(x)
    torch.manual_seed(2)
    dys = torch.randn(3, *y.shape)
    return torch.autograd.grad(y, [x, layer.weight, layer.bias], dys, is_grads_batched=True)


def vmapped_gradient(layer: Any, x: Tensor) -> Any:
    y = layer(x)
    torch.manual_seed(2)

    def gradient(dy: Tensor) -> Any:
        return torch.autograd.grad(y, [x, layer.bias], dy, retain_graph=True)

    return torch.func.vmap(gradient)(torch.randn(3, *y.shape))


def twice_with_retained_graph(layer: Any, x: Tensor) -> Any:
    y = loss(layer, x)
    first = torch.autograd.grad(y, [x, layer.weight], retain_graph=True)
    return *first, *torch.autograd.grad(y, [layer.bias])


def tangent(layer: Any, x: Tensor) -> Any:
    return torch.func.jvp(lambda v: layer(v), (x.detach(),), (torch.ones_like(x),))


def functional_gradient(layer: Any, x: Tensor) -> Any:
    return (torch.func.grad(partial(loss, layer))(x.detach()),)


def functional_call_with_computed_weight(layer: Any, x: Tensor) -> Any:
    source = torch.ones(CHANNELS, requires_grad=True)
    y = torch.func.functional_call(layer, {"weight": 2 * source}, (x,))
    return torch.autograd.grad(y.pow(3).sum(), [source, x])


def functional_call(layer: Any, x: Tensor) -> Any:
    values = {"weight": torch.ones(CHANNELS), "running_mean": torch.zeros(CHANNELS)}
    return torch.func.functional_call(layer, values, (x,)), values["running_mean"]


def swept_dy(layer: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Any:
    y = layer(x)
    torch.manual_seed(3)
    return torch.autograd.grad(y, [x, layer.weight], make(torch.randn_like(y)))


def written_in_between(layer: Any, x: Tensor) -> Any:
    y = (x + 1) * layer.running_mean.view(1, -1, 1, 1)  # saves the running mean
    layer(x)
    y.sum().backward()
    return []


def weight_written_before_backward(layer: Any, x: Tensor) -> Any:
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    y.sum().backward()
    return []


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "second derivative": second,
    "is_grads_batched": batched,
    "vmap of backward": vmapped_gradient,
    "retain_graph": twice_with_retained_graph,
    "jvp": tangent,
    "torch.func.grad": functional_gradient,
    "functional_call": functional_call,
    "functional_call with a computed weight": functional_call_with_computed_weight,
    "expanded dy": partial(swept_dy, make=lambda dy: dy[:1].expand_as(dy)),
    "channels_last dy": partial(swept_dy, make=lambda dy: dy.to(memory_format=torch.channels_last)),
    "negated dy": partial(swept_dy, make=negative),
    "dy of a subclass": partial(swept_dy, make=lambda dy: dy.as_subclass(Mine)),
    "running mean saved before": written_in_between,
    "weight written before backward": weight_written_before_backward,
}


def forward_and_backward(layer: Any, x: Any) -> list[Any]:
    y = layer(x)
    if isinstance(y, Tensor) and y.requires_grad and not y.is_meta:
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
    return [y.detach(), x.grad if x.is_leaf else None]


def changed(change: Change) -> Program:
    def program(layer: Any, x: Tensor) -> list[Any]:
        made = change(layer, x)
        made = x if made is None else made
        if made.is_leaf and made.is_floating_point():
            made.requires_grad_(made.layout is torch.strided)
        return forward_and_backward(layer, made)

    return program


def within(context: Callable[[], AbstractContextManager[Any]]) -> Program:
    def program(layer: Any, x: Tensor) -> list[Any]:
        with context():
            return forward_and_backward(layer, x)

    return program


PROGRAMS: dict[str, Program] = {
    **{name: changed(change) for name, change in CHANGES.items()},
    **{f"within {name}": within(context) for name, context in CONTEXTS.items()},
    **USES,
}


def outcome(program: Program, layer: Any, shape: tuple[int, ...]) -> list[Any]:
    """What the second call gives: results or the error; and the state of the layer after it."""
    torch.manual_seed(0)
    nn.init.uniform_(layer.weight)
    layer(torch.randn(shape)).sum().backward()
    layer.zero_grad()
    x = torch.randn(shape, requires_grad=True)
    try:
        results = [*program(layer, x)]
    except Exception as error:  # compared below
        results = [type(error), re.sub("version [0-9]+", "", str(error))]
    state = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    weight = layer._parameters.get("weight")
    return [*results, *state, None if weight is None else weight.grad]


class WithSilu(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


def both(program: Program, layer: Any, twin: Any, shape: Any) -> tuple[list[Any], list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of nested and sparse tensors, and of vmap
        expected = outcome(program, twin, shape)
        return outcome(program, layer, shape), expected


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_small_layer_gives_what_that_of_torch_gives(program: Program) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several write an expanded running mean in any order
    try:
        pair = SynchronizedBatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        actual, expected = both(program, *pair, SMALL)
    finally:
        torch.set_num_threads(threads)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, Tensor):
            assert type(a) is type(e)
            assert (a.dtype, a.shape, a.device) == (e.dtype, e.shape, e.device)
            if not e.is_meta:
                assert a.stride() == e.stride()
                assert torch.equal(a, e)
        else:
            assert a == e


def test_a_large_layer_is_that_of_torch_but_for_its_activation() -> None:
    x = torch.randn(LARGE)
    results = []
    for layer in (SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.square().sum().backward()
        results.append([y, own.grad, layer.weight.grad, layer.running_var])
    assert all(map(torch.equal, *results))
    y = SyncBatchNorm(CHANNELS, activation="silu")(x)
    assert "BatchNormOfParts" in type(y.grad_fn).__name__  # one pass less


IF_LARGE = PROGRAMS.keys() - {"expanded running mean", "overlapping statistics"}  # refused


@pytest.mark.parametrize("program", [PROGRAMS[n] for n in sorted(IF_LARGE)], ids=sorted(IF_LARGE))
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_large_layer_with_its_activation_gives_what_torch_gives(program: Program) -> None:
    layer = SynchronizedBatchNorm2d(CHANNELS, activation="silu")
    actual, expected = both(program, layer, WithSilu(CHANNELS), LARGE)
    if isinstance(expected[0], type):
        assert isinstance(actual[0], type)
        return
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, Tensor) and not e.is_meta:
            scale = max(1.0, float(e.detach().abs().max())) if e.numel() else 1.0
            tolerance = 2**-7 if e.dtype in (torch.bfloat16, torch.float16) else 1e-4
            torch.testing.assert_close(a / scale, e / scale, rtol=0, atol=tolerance)
        elif e is None:
            assert a is None


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_models_stacked_by_torch_func_run_under_vmap(device: str, train: bool) -> None:
    """As in torch's tutorial on ensembles of models."""
    results = []
    for convert in (nn.Identity(), convert_model):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in range(3)]
        models = [convert(model).train(train) for model in models]
        parameters, buffers = stack_module_state(models)
        base, x = copy.deepcopy(models[0]).to(device), torch.randn(6, 3, 8, 8)
        y = vmap(lambda p, b: call_with(base, (p, b), (x,)))(parameters, buffers)  # noqa: B023
        results.append([y, *buffers.values()])
    assert all(map(torch.equal, *results))


def test_processes_without_a_group_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun where the program forgets `init_process_group`."""
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        forward._warn_of_no_world.cache_clear()
        layer = SyncBatchNorm(3)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for training in (False, True, True):
                layer.train(training)(torch.randn(4, 3))
        assert len(told) == count
        assert all("call torch.distributed.init_process_group() before" in str(w) for w in told)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_layer_called_twice_in_one_graph(shape: tuple[int, ...]) -> None:
    layer, twin = SynchronizedBatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS).double()
    x = torch.randn(shape, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(shape)
    (layer(layer(x).sigmoid()) * dy).sum().backward()
    (twin(twin(wide).sigmoid()) * dy.double()).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, check_dtype=False, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, check_dtype=False)
    torch.testing.assert_close(layer.running_var, twin.running_var, check_dtype=False)
    assert layer.num_batches_tracked == twin.num_batches_tracked


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("record", [torch.jit.trace, lambda layer, x: make_fx(layer)(x)])
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Converting a tensor to a Python boolean",  # of `F.batch_norm` in training
)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_recorded_layer_computes_what_that_of_torch_does(
    record: Any, train: bool, shape: tuple[int, ...]
) -> None:
    """Whoever records operations sees all of them, and none is computed while recording."""
    pair = SyncBatchNorm(CHANNELS).train(train), nn.BatchNorm2d(CHANNELS).train(train)
    x = torch.randn(shape)
    recorded = [record(each, x) for each in pair]
    x = torch.randn(shape)
    actual, expected = (each(x) for each in recorded)
    torch.testing.assert_close(actual, expected)
    if record is torch.jit.trace:  # of make_fx sizes are constants
        x = torch.randn(7, CHANNELS, 5, 2)
        torch.testing.assert_close(*(each(x) for each in recorded))
    layer, twin = pair
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())
