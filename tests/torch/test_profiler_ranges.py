"""What a profiler of torch shows of the layers; nothing is done while none runs."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from world import on_ranks

from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    forward_together,
    module_names,
    ranges,
)
from syncbn_torch._torch_private import profiler
from syncbn_torch.forward import always_ours


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.last = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.block(x))
        return y


def net() -> Any:
    return convert_model(Net())


def shown(action: Callable[[], Any], config: Any = None) -> Counter[str]:
    """How often each of our ranges is seen while `action()` runs."""
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        action()
    names = [event.name for event in seen.events() or []]
    return Counter(name for name in names if name.startswith("syncbn."))


FORWARD = ["syncbn.forward block.1", "syncbn.forward last"]
BACKWARD = ["syncbn.backward block.1", "syncbn.backward last"]
EXCHANGE = ["syncbn.exchange block.1", "syncbn.exchange last"]


def test_each_layer_has_a_range_forward_and_backward() -> None:
    model, x = net(), torch.randn(4, 3, 5, 5)
    with always_ours():
        found = shown(lambda: model(x).sum().backward())
    assert found == Counter(FORWARD + BACKWARD)


def test_replicas_show_the_exchange_of_each_layer() -> None:
    """By default the profiler sees the threads of the caller and of backward alone."""
    model = DataParallelWithCallback(net(), replicas=2)
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    found = shown(lambda: model(torch.randn(4, 3, 5, 5)).sum().backward(), all_threads)
    assert {name: found[name] for name in FORWARD + EXCHANGE} == dict.fromkeys(
        FORWARD + EXCHANGE, 2
    )
    assert {name: found[name] for name in BACKWARD} == dict.fromkeys(BACKWARD, 1)


def test_backward_that_runs_after_the_profiler_is_quiet_and_again_within_it_is_shown() -> None:
    model, x = net(), torch.randn(4, 3, 5, 5)
    outputs: list[Tensor] = []
    with always_ours():
        assert shown(lambda: outputs.append(model(x).sum())) == Counter(FORWARD)
    outputs[0].backward(retain_graph=True)
    assert shown(lambda: outputs[0].backward(retain_graph=True)) == Counter(BACKWARD)
    assert shown(lambda: outputs[0].backward()) == Counter(BACKWARD)


def test_gradients_are_the_same_while_a_profiler_runs() -> None:
    model, x = net(), torch.randn(4, 3, 5, 5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results: list[list[Tensor]] = []
    for profiled in (False, True):
        model.load_state_dict(state)
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext():
            model(x).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        results.append([*grads, *(b.clone() for b in model.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_error_in_backward_leaves_no_range_behind() -> None:
    layer, x = SynchronizedBatchNorm2d(3), torch.randn(4, 3, 5, 5, requires_grad=True)

    def fail(_: Any) -> None:
        raise RuntimeError("mine")

    def step() -> None:
        with always_ours():
            y = layer(x)
        y.grad_fn.register_prehook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mine"):
                y.sum().backward(retain_graph=True)

    assert shown(step)["syncbn.backward SynchronizedBatchNorm2d"] <= 2
    assert not shown(lambda: None)


def test_compiled_layer_is_not_compiled_again_for_a_profiler() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer, x = SynchronizedBatchNorm2d(3), torch.randn(4, 3, 5, 5)
    compiled = torch.compile(layer, backend=backend)
    for training in (True, False):
        layer.train(training)
        compiled(x)
        before = len(graphs)
        shown(lambda: compiled(x))
        compiled(x)
        assert len(graphs) == before


def test_one_search_names_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes a tenth of a second, which would fill the first profiled step."""
    searches: list[int] = []
    search = module_names._parents
    monkeypatch.setattr(
        module_names, "_parents", lambda modules: searches.append(1) or search(modules)
    )
    model, x = net(), torch.randn(4, 3, 5, 5)
    model(x)
    assert not searches, "no name is looked for while no profiler runs"
    with always_ours():
        assert shown(lambda: model(x)) == Counter(FORWARD)
    assert len(searches) == 1


def test_no_range_is_made_while_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("made a range")

    monkeypatch.setattr(ranges, "record_function", forbidden)
    monkeypatch.setattr(ranges, "name_backward", forbidden)
    x = torch.randn(4, 3, 5, 5)
    for model in (net(), DataParallelWithCallback(net(), replicas=2)):
        model(x).sum().backward()
    with always_ours(), pytest.raises(AssertionError, match="made a range"):
        shown(lambda: net()(x))


def test_emitting_for_other_profilers_counts_as_a_profiler() -> None:
    """`emit_itt` works without a GPU; `emit_nvtx` sets the same flag."""
    with torch.autograd.profiler.emit_itt():
        assert profiler._is_profiler_enabled
        net()(torch.randn(4, 3, 5, 5)).sum().backward()
    assert not profiler._is_profiler_enabled


@on_ranks(2)
def test_processes_show_the_exchange_of_each_layer_in_both_directions(rank: int, size: int) -> None:
    model, x = net(), torch.randn(4, 3, 5, 5)
    found = shown(lambda: model(x).sum().backward())
    assert found == Counter(FORWARD + BACKWARD + EXCHANGE + EXCHANGE), found
    layers = [model.block[1], model.last]
    batch = torch.randn(4, 4, 5, 5)
    found = shown(lambda: forward_together(layers, [batch, batch]))
    names = ["syncbn.forward block.1, last", "syncbn.exchange block.1, last"]
    assert found == Counter(names), found
    with open(f"{os.environ['FOLDER']}/{rank}.log", "w"):
        pass  # what Kineto prints about its start
