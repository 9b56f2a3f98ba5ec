"""Layers that a replica calls though they are none of its own are refused by name."""

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_core.errors import StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
)

DOUBLE: dict[str, Any] = {"dtype": torch.float64}

# Dynamo looks at tensors that code around a break of the graph has, and can't trace copy.copy.
quiet = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:Dynamo does not know:UserWarning"
)


class Detour(nn.Module):
    """Linear, layer, layer; the way to the layers is made by `way(self)` in `__init__`."""

    def __init__(self, way: Callable[[Any], Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, **DOUBLE)
        self.first = SynchronizedBatchNorm1d(4, **DOUBLE)
        self.second = SynchronizedBatchNorm1d(4, **DOUBLE)
        self.__dict__["way"] = None if way is None else way(self)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.linear(x)).sin())

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner if self.way is None else self.way)(x)


def plain_list(model: Detour) -> Callable[[Tensor], Tensor]:
    layers = [model.first, model.second]
    return lambda x: layers[1](layers[0](model.linear(x)).sin())


WAYS: dict[str, Any] = {
    "bound method": lambda model: model.inner,
    "partial": lambda model: functools.partial(Detour.inner, model),
    "plain list": plain_list,
    "forward of the layer": lambda model: (
        lambda x: model.second.forward(model.first.forward(model.linear(x)).sin())
    ),
}


def undivided(model: nn.Module, x: Tensor, cotangent: Tensor, steps: int = 1) -> list[Tensor]:
    """y, gradients and buffers of torch's layers over the whole batch."""
    twin = copy.deepcopy(model)
    for name in ("first", "second"):
        layer = nn.BatchNorm1d(4, **DOUBLE)
        layer.load_state_dict(getattr(twin, name).state_dict())
        setattr(twin, name, layer.train(model.training))
    twin.way = None
    return results(twin, twin, x, cotangent, steps)


def results(
    call: Any, model: nn.Module, x: Tensor, cotangent: Tensor, steps: int = 1
) -> list[Tensor]:
    x = x.clone().requires_grad_()
    for _ in range(steps):
        y = call(x)
        y.backward(cotangent)
    return [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_an_original_reached_around_its_replica_is_refused_by_name(way: str, replicas: int) -> None:
    model = Detour(WAYS[way])
    x, cotangent = torch.randn(9, 3, **DOUBLE), torch.randn(9, 4, **DOUBLE)
    expected = undivided(model, x, cotangent, steps=2)
    wrapper = DataParallelWithCallback(model, replicas=replicas)
    if replicas == 1:
        same(results(wrapper, model, x, cotangent, steps=2), expected)
        return
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateError, match=r"first \(SynchronizedBatchNorm1d\).*bound method"):
        wrapper(x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    torch.testing.assert_close(wrapper.eval()(x), model(x))  # running statistics need nobody
    assert model.train()(x).shape == (9, 4)  # nothing is left of the replicas


class Calls(nn.Module):
    """Calls what is no submodule of it."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = list(functions)

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def test_a_layer_outside_of_the_replicated_model_is_refused_by_name() -> None:
    elsewhere = nn.ModuleDict({"bn": SynchronizedBatchNorm1d(3)})
    layer = elsewhere["bn"]
    before = copy.deepcopy(layer.state_dict())
    model = DataParallelWithCallback(Calls(layer), replicas=2)
    x = torch.randn(6, 3)
    with pytest.raises(StateError, match=r"bn \(SynchronizedBatchNorm1d\).*not a submodule") as e:
        model(x)
    assert "nn.ModuleList" in str(e.value)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    layer.eval()  # running statistics need nobody
    torch.testing.assert_close(model(x), layer(x))
    torch.testing.assert_close(
        DataParallelWithCallback(Calls(layer.train()), replicas=1)(x), nn.BatchNorm1d(3)(x)
    )


def test_a_layer_that_a_replica_builds_itself_is_refused() -> None:
    with pytest.raises(StateError, match="not a submodule"):
        DataParallelWithCallback(Calls(lambda x: SynchronizedBatchNorm1d(3)(x)), replicas=2)(
            torch.randn(6, 3)
        )


class Nested(nn.Module):
    """Calls its layer through a wrapper that it makes itself, maybe in a thread or a checkpoint."""

    def __init__(self, how: str, inner: int) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(3).double()
        self.how, self.inner = how, inner

    def forward(self, x: Tensor) -> Tensor:
        wrapper = DataParallelWithCallback(nn.Sequential(self.bn), replicas=self.inner)
        if self.how == "checkpoint":
            return checkpoint(wrapper, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "thread":
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(wrapper, x).result()
        return wrapper(x) if self.how == "always" or (x > 1e3).any() else self.bn(x)


@pytest.mark.parametrize("inner", [1, 2, 5])
@pytest.mark.parametrize("how", ["always", "in one replica", "thread", "checkpoint"])
def test_a_wrapper_made_within_a_replica_synchronizes_over_the_whole_batch(
    how: str, inner: int
) -> None:
    model, twin = Nested(how, inner), nn.BatchNorm1d(3).double()
    x = torch.randn(9, 3, dtype=torch.float64)
    x[0] = 1e4
    cotangent = torch.randn_like(x)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = DataParallelWithCallback(model, replicas=3)(ours), twin(theirs)
    torch.testing.assert_close(y, expected)
    y.backward(cotangent)
    expected.backward(cotangent)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(model.bn.running_var, twin.running_var)


@pytest.mark.parametrize("inner", [1, 2, 3])
def test_a_wrapper_within_a_replica_synchronizes_over_the_whole_batch(inner: int) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = DataParallelWithCallback(Detour(), replicas=inner)

        def forward(self, x: Tensor) -> Tensor:
            return self.wrapped(x)

    model = Outer()
    x, cotangent = torch.randn(9, 3, **DOUBLE), torch.randn(9, 4, **DOUBLE)
    expected = undivided(model.wrapped.module, x, cotangent)
    wrapper = DataParallelWithCallback(model, replicas=2)
    same(results(wrapper, model, x, cotangent), expected)


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns in a thread of its own; its error is raised here."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


class Threaded(nn.Module):
    """Calls its layer in a thread of its own."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(3)
        self.layers = [self.bn]
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layers[0] if self.around else self.bn
        return in_a_thread(lambda: layer(x))


def test_a_replicas_own_threads_synchronize() -> None:
    x = torch.randn(6, 3)
    model = Threaded(around=False)
    y = DataParallelWithCallback(model, replicas=2)(x)
    torch.testing.assert_close(y, nn.BatchNorm1d(3)(x))


def plain_copies(model: nn.Module, count: int) -> list[nn.Module]:
    """Copies as those of `nn.DataParallel`, to which no callback comes, on the CPU."""
    made = []
    for _ in range(count):
        replica: Any = model._replicate_for_data_parallel()
        replica._parameters = dict(model._parameters)
        for name, child in model._modules.items():
            replica._modules[name] = plain_copies(child, 1)[0]
        made.append(replica)
    return made


def test_a_copy_made_by_plain_data_parallel_is_refused_by_name() -> None:
    model = nn.Sequential(SynchronizedBatchNorm1d(3))
    replica = plain_copies(model, 1)[0]
    x = torch.randn(6, 3)
    with pytest.raises(StateError, match="patch_replication_callback") as caught:
        replica(x)
    assert "0 (SynchronizedBatchNorm1d)" in str(caught.value)
    assert model[0].num_batches_tracked == 0
    model.eval()
    torch.testing.assert_close(plain_copies(model, 1)[0](x), model(x))


COMPILED: dict[str, Any] = {
    "submodule": lambda model: model[1].compile(backend="aot_eager"),
    "model": lambda model: model.compile(backend="aot_eager"),
    "optimized": lambda model: model.__setitem__(1, torch.compile(model[1], backend="aot_eager")),
}


@quiet
@pytest.mark.parametrize("what", COMPILED)
def test_compiled_parts_are_refused_in_replicas_but_not_in_eval(what: str) -> None:
    model = nn.Sequential(
        nn.Linear(3, 3, **DOUBLE), nn.Sequential(SynchronizedBatchNorm1d(3, **DOUBLE))
    )
    x = torch.randn(9, 3, **DOUBLE)
    COMPILED[what](model)
    wrapper = DataParallelWithCallback(model, replicas=2)
    with pytest.raises(StateError, match=r"\(SynchronizedBatchNorm1d\).*compiled function"):
        wrapper(x)
    torch.testing.assert_close(wrapper.eval()(x), model(x))
    model.train()(x)  # by its graph


@quiet
@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_compiled_wrapper_equals_the_undivided_batch(replicas: int, method: bool) -> None:
    model = Detour()
    x, cotangent = torch.randn(9, 3, **DOUBLE), torch.randn(9, 4, **DOUBLE)
    expected = undivided(model, x, cotangent, steps=3)
    wrapper: Any = DataParallelWithCallback(model, replicas=replicas)
    if method:
        wrapper.compile(backend="aot_eager")
    else:
        wrapper = torch.compile(wrapper, backend="aot_eager")
    same(results(wrapper, model, x, cotangent, steps=3), expected)
