"""A layer that was called before gives what one that was not gives, whatever changed in between.

The first call checks everything and notes it; later ones check only what may have changed.
"""

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from syncbn_core.borrow import exchange_function
from syncbn_core.errors import StateError
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm, dispatch
from syncbn_torch.backends import cpu
from syncbn_torch.which_kernel import always_ours

CHANNELS = 4
SHAPES = {"torch's kernel": (2, CHANNELS, 3, 3), "our kernels": (4, CHANNELS, 60, 60)}
Change = Callable[[Any, Tensor], Any]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return SHAPES[request.param]


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


def freed(name: str) -> Change:
    return lambda layer, x: getattr(layer, name).untyped_storage().resize_(0) and None


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


def shortened(layer: Any, x: Tensor) -> Tensor:
    short = x.detach().clone()
    short.untyped_storage().resize_(short.nbytes // 2)
    return short


def freed_with_offset(layer: Any, x: Tensor) -> Tensor:
    both = torch.cat([x.detach(), x.detach()])
    half = both[len(x) :]
    both.untyped_storage().resize_(0)
    return half


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
    "bias of another shape": set_to(bias=nn.Parameter(torch.ones(1))),
    "running mean of another shape": set_to(running_mean=torch.ones(CHANNELS + 1)),
    "momentum None": set_to(momentum=None),
    "momentum 1": set_to(momentum=1),
    "another eps": set_to(eps=0.1),
    "clamp": set_to(eps_mode="clamp", eps=2.0),
    "not tracking": set_to(track_running_stats=False),
    "other num_features": set_to(num_features=CHANNELS + 1),
    "eval": lambda layer, x: layer.eval() and None,
    "double": lambda layer, x: layer.double() and None,
    "half": lambda layer, x: layer.half() and None,
    "meta": lambda layer, x: layer.to("meta") and None,
    "vectors of other dtypes": halved_vectors,
    "strided vectors": strided,
    "expanded running mean": expanded,
    "overlapping statistics": shares,
    "weight freed": freed("weight"),
    "running mean freed": freed("running_mean"),
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
    "list": input_made(lambda x: [x]),
    "rows": input_made(lambda x: x.flatten(1)[:, :CHANNELS]),
    "five axes": input_made(lambda x: x[..., None]),
    "one axis": input_made(Tensor.flatten),
    "fewer channels": input_made(lambda x: x[:, 1:]),
    "empty batch": input_made(lambda x: x[:0]),
    "one value per channel": input_made(lambda x: x[:1, :, :1, :1]),
    "shortened input": shortened,
    "freed input with an offset": freed_with_offset,
}


def outcome(run: Callable[[], Any], layer: Any) -> list[Any]:
    """What a call gives: results or the error, and the state of the layer after it."""
    try:
        results = [*run()]
    except Exception as error:  # compared below
        results = [type(error).__name__, re.sub("version [0-9]+", "", str(error))]
    state = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    state = [own if own is None or own.is_meta else own.clone() for own in readable(state)]
    weight = layer._parameters.get("weight")
    return [*results, *state, None if weight is None else weight.grad]


def readable(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is not None and not t.untyped_storage().nbytes() else t for t in tensors]


def same(actual: list[Any], expected: list[Any]) -> None:
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


def called_before(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A layer that was called, and one in the same state that was not."""
    layer = SyncBatchNorm(CHANNELS)
    assert layer.weight is not None
    nn.init.uniform_(layer.weight)
    for _ in range(2):
        layer(torch.randn(shape)).sum().backward()
    layer.zero_grad()
    assert layer._checked is not None
    return layer, copy.deepcopy(layer)


def forward_and_backward(layer: Any, x: Any) -> list[Any]:
    y = layer(x)
    if isinstance(y, Tensor) and y.requires_grad and not y.is_meta:
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
    return [y.detach(), x.grad if x.is_leaf else None]


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_after_the_first_call(change: Change, ours: bool, shape: tuple[int, ...]) -> None:
    known, new = called_before(shape)
    results = []
    for layer in (known, new):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        with always_ours(ours), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of nested and sparse tensors
            made = change(layer, x)
            made = x if made is None else made
            if isinstance(made, Tensor) and made.is_leaf and made.is_floating_point():
                made.requires_grad_(made.layout is torch.strided)
            results.append(outcome(partial(forward_and_backward, layer, made), layer))
    same(*results)


IN_EVAL = {  # torch's kernel reads beyond such storages, as in torch's own layers
    name: change for name, change in CHANGES.items() if change not in (shortened, freed_with_offset)
}


@pytest.mark.parametrize("change", IN_EVAL.values(), ids=IN_EVAL.keys())
def test_eval_with_and_without_the_usual_case(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = called_before((2, CHANNELS, 3, 3))
    results = []
    for layer in layers:
        layer.eval()
        torch.manual_seed(0)
        x = torch.randn(2, CHANNELS, 3, 3, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of nested and sparse tensors
            made = change(layer, x)
            made = x if made is None else made
            results.append(outcome(partial(forward_and_backward, layer, made), layer))
        monkeypatch.setattr(dispatch, "usual_eval", lambda *_: None)
    same(*results)


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


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_call_in_a_context(
    context: Callable[[], AbstractContextManager[Any]], shape: tuple[int, ...]
) -> None:
    known, new = called_before(shape)
    results = []
    for layer in (known, new):
        torch.manual_seed(0)
        with context():
            x = torch.randn(shape, requires_grad=True)
            results.append(outcome(partial(forward_and_backward, layer, x), layer))
    same(*results)


def loss(layer: Any, x: Tensor) -> Tensor:
    return (layer(x) * torch.linspace(-1, 1, x.numel()).view(x.shape)).pow(2).sum()


def by_checkpoint(layer: Any, x: Tensor, reentrant: bool) -> Any:
    y = checkpoint(partial(loss, layer), x, use_reentrant=reentrant)
    return torch.autograd.grad(y, [x]) if not reentrant else (y.backward(), x.grad)[1:]


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


def replaced_before_backward(layer: Any, x: Tensor) -> Any:
    y = layer(x)
    x.data = torch.zeros(1)
    y.sum().backward()
    return []


def weight_replaced_before_backward(layer: Any, x: Tensor) -> Any:
    y = layer(x)
    layer.weight.data = torch.zeros(CHANNELS)
    return torch.autograd.grad(y, [x, layer.bias], torch.ones_like(y))


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
    "checkpoint": partial(by_checkpoint, reentrant=False),
    "reentrant checkpoint": partial(by_checkpoint, reentrant=True),
    "second derivative": second,
    "is_grads_batched": batched,
    "vmap of backward": vmapped_gradient,
    "retain_graph": twice_with_retained_graph,
    "jvp": tangent,
    "torch.func.grad": functional_gradient,
    "functional_call": functional_call,
    "functional_call with a computed weight": functional_call_with_computed_weight,
    "x replaced before backward": replaced_before_backward,
    "weight replaced before backward": weight_replaced_before_backward,
    "expanded dy": partial(swept_dy, make=lambda dy: torch.ones(()).expand_as(dy)),
    "channels_last dy": partial(swept_dy, make=lambda dy: dy.to(memory_format=torch.channels_last)),
    "negated dy": partial(swept_dy, make=negative),
    "dy of a subclass": partial(swept_dy, make=lambda dy: dy.as_subclass(Mine)),
    "running mean saved before": written_in_between,
    "weight written before backward": weight_written_before_backward,
}


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_use(use: Callable[[Any, Tensor], Any], ours: bool, shape: tuple[int, ...]) -> None:
    known, new = called_before(shape)
    results = []
    for layer in (known, new):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        with always_ours(ours):
            results.append(outcome(partial(use, layer, x), layer))
    same(*results)


@pytest.mark.parametrize("needs", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 0, 1)])
def test_only_some_gradients(needs: tuple[bool, ...], shape: tuple[int, ...]) -> None:
    known, new = called_before(shape)
    results = []
    for layer in (known, new):
        torch.manual_seed(0)
        x = torch.randn(shape)
        for tensor, need in zip((x, layer.weight, layer.bias), needs, strict=True):
            tensor.requires_grad_(bool(need))
        y = layer(x)
        y.backward(torch.randn_like(y))
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    same(*results)


def test_a_layer_called_twice_in_one_graph(shape: tuple[int, ...]) -> None:
    layer, _ = called_before(shape)
    twin = nn.BatchNorm2d(CHANNELS).double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(shape, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    torch.manual_seed(0)
    dy = torch.randn(shape)
    (layer(layer(x).sigmoid()) * dy).sum().backward()
    (twin(twin(wide).sigmoid()) * dy.double()).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, check_dtype=False, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, check_dtype=False)
    torch.testing.assert_close(layer.running_var, twin.running_var, check_dtype=False)
    assert layer.num_batches_tracked == twin.num_batches_tracked


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_check_for_themselves(copied: Callable[[Any], Any]) -> None:
    layer, _ = called_before((2, CHANNELS, 3))
    assert copied(layer)._checked is None
    assert "_checked" not in pickle.dumps(layer.state_dict()).decode("latin1")


@pytest.fixture
def by_attributes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(cpu, "_FUNCTION", 0)


@pytest.mark.skipif(not exchange_function(Tensor), reason="this torch has no C exchange API")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", ["nothing", "channels_last input", "part of a tensor"])
def test_tensors_by_dlpack_and_by_attributes(
    make: str, dtype: torch.dtype, by_attributes: Callable[[], None], shape: tuple[int, ...]
) -> None:
    known, _ = called_before(shape)
    results: list[list[Any]] = []
    for change in (lambda: None, by_attributes):
        change()
        layer = copy.deepcopy(known).to(dtype)
        for _ in range(2):  # the second is the usual one
            torch.manual_seed(0)
            x = torch.randn(shape).to(dtype)
            made = CHANGES[make](layer, x)
            x = (x if made is None else made).detach().requires_grad_()
            with always_ours():
                results.append(outcome(partial(forward_and_backward, layer, x), layer))
    same(results[2], results[0])
    same(results[3], results[1])


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCBN_DLPACK", "attributes")
    assert exchange_function(Tensor) == 0
    monkeypatch.delenv("SYNCBN_DLPACK")
    assert exchange_function(int) == 0


def modes_of_both(train: bool) -> tuple[Any, nn.Module]:
    layer, twin = SyncBatchNorm(CHANNELS).train(train), nn.BatchNorm2d(CHANNELS).train(train)
    return layer, twin


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("record", [torch.jit.trace, lambda layer, x: make_fx(layer)(x)])
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Converting a tensor to a Python boolean",  # of `F.batch_norm` in training
)
def test_a_recorded_layer_computes_what_that_of_torch_does(
    record: Any, calls: int, train: bool, shape: tuple[int, ...]
) -> None:
    """Whoever records operations sees all of them, and none is computed while recording."""
    pair = modes_of_both(train)
    for _ in range(calls):
        x = torch.randn(shape)
        for each in pair:
            each(x)
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_recording_that_would_be_wrong_is_refused(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layer = SyncBatchNorm(CHANNELS, eps_mode="clamp", eps=0.5)
    with pytest.raises(StateError, match=r"SyncBatchNorm.*'clamp'.*model\.eval\(\)"):
        torch.jit.trace(layer, x)
    before = copy.deepcopy(layer)
    graph = make_fx(layer)(x)
    y = before(x)
    torch.testing.assert_close(graph(x), before(x))
    torch.testing.assert_close(layer.state_dict(), before.state_dict())
    torch.testing.assert_close(torch.jit.trace(layer.eval(), x)(x), layer(x))
    for record in (torch.jit.trace, lambda model, x: make_fx(model)(x)):
        with pytest.raises(StateError, match=r"replicas.*wrapper\.module"):
            record(DataParallelWithCallback(layer.train(), replicas=2), x)
    assert y.shape == x.shape


@pytest.mark.parametrize("train", [True, False])
def test_a_function_mode_sees_one_batch_norm_in_each_call(train: bool) -> None:
    class Counts(TorchFunctionMode):
        seen = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += function is F.batch_norm
            return function(*args, **(kwargs or {}))

    for shape in SHAPES.values():
        for layer in modes_of_both(train):
            with Counts() as counts:
                for _ in range(3):
                    layer(torch.randn(shape))
            assert counts.seen == 3


@pytest.mark.parametrize("train", [True, False])
def test_conditional_weights_take_part(train: bool, shape: tuple[int, ...]) -> None:
    """A layer without parameters, to which somebody gives new tensors before each call."""
    layer, twin = SyncBatchNorm(CHANNELS, affine=False), nn.BatchNorm2d(CHANNELS, affine=False)
    for each in (layer, twin):
        each.train(train)
        each(torch.ones(shape))
        del each.weight, each.bias
    for _ in range(3):
        x, weight, bias = torch.randn(shape), torch.rand(CHANNELS), torch.rand(CHANNELS)
        for each in (layer, twin):
            each.weight, each.bias = weight, bias
        torch.testing.assert_close(layer(x), twin(x))


def test_no_graph_of_a_computed_weight_is_kept(shape: tuple[int, ...]) -> None:
    layer = SyncBatchNorm(CHANNELS)
    for ours in (False, True):
        kept: list[weakref.ref[Tensor]] = []

        def call(kept: Any = kept, ours: bool = ours) -> None:
            source = torch.ones(CHANNELS, requires_grad=True)
            factor = torch.full((CHANNELS,), 2.0)  # which the graph of the weight saves
            kept.append(weakref.ref(factor))
            with always_ours(ours):
                torch.func.functional_call(layer, {"weight": source * factor}, torch.randn(shape))

        call()
        gc.collect()
        assert kept[0]() is None


def test_an_input_replaced_before_backward_is_named(shape: tuple[int, ...]) -> None:
    for new in (torch.zeros(1), torch.zeros(shape, dtype=torch.float64)):
        layer, x = SyncBatchNorm(CHANNELS), torch.randn(shape, requires_grad=True)
        with always_ours():
            y = layer(x)
        x.data = new
        with pytest.raises(StateError, match="replaced in between"):
            y.sum().backward()
