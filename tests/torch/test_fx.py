"""Layers are leaves of torch.fx; what fusion, quantization, torch.jit and torch.export do."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import optimization
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.fusion import fuse_conv_bn_eval
from world import on_ranks

from syncbn_core.errors import StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
    revert_model,
)


class Block(nn.Module):
    """Conv, batch norm, relu, with a shared layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.conv = nn.Conv2d(4, 4, 1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.bn(input=self.bn(self.conv(x)) + x)


def images() -> Tensor:
    return torch.randn(8, 3, 6, 6).double()


@pytest.fixture
def model() -> nn.Module:
    """In float64, with running statistics of a few batches."""
    made = Block().double()
    for _ in range(3):
        made(images())
    return made


@pytest.fixture
def converted(model: nn.Module) -> nn.Module:
    return convert_model(copy.deepcopy(model))


def calls(traced: fx.GraphModule) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in traced.graph.nodes]


class NamesScopes(fx.Tracer):
    """A tracer that knows nothing of this package, and overrides what tracers override."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Any]] = []

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        stack = proxy.node.meta.get("nn_module_stack", {})
        self.made.append((kind, [name for name, _ in stack.values()]))
        return proxy


def test_a_traced_model_has_the_graph_of_the_unconverted_one(
    model: nn.Module, converted: nn.Module
) -> None:
    traced = fx.symbolic_trace(converted)
    wanted = fx.symbolic_trace(model)
    assert calls(traced) == calls(wanted)
    assert isinstance(traced.get_submodule("bn"), SynchronizedBatchNorm2d)
    x = images()
    for training in (True, False):
        torch.testing.assert_close(traced.train(training)(x), model.train(training)(x))
    for ours, theirs in zip(traced.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_tracer_finds_the_layers_in_their_modules(
    model: nn.Module, converted: nn.Module
) -> None:
    ours, theirs = NamesScopes(), NamesScopes()
    ours.trace(converted)
    theirs.trace(model)
    assert ours.made == theirs.made


@pytest.mark.parametrize(
    ("layer", "shape"), [(SynchronizedBatchNorm1d(3), (4, 3)), (SyncBatchNorm(3), (4, 3, 2))]
)
def test_other_layers_are_leaves_too(layer: nn.Module, shape: tuple[int, ...]) -> None:
    traced = fx.symbolic_trace(nn.Sequential(layer))
    assert ("call_module", "0") in calls(traced)
    x = torch.randn(shape)
    torch.testing.assert_close(traced(x), copy.deepcopy(layer)(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_replicas_of_a_traced_model_synchronize(
    model: nn.Module, converted: nn.Module, copied: Any
) -> None:
    traced = copied(fx.symbolic_trace(converted))
    x = images()
    torch.testing.assert_close(DataParallelWithCallback(traced, replicas=3)(x), model(x))
    for ours, theirs in zip(traced.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_ranks_of_a_traced_model_synchronize(rank: int, size: int) -> None:
    torch.manual_seed(0)
    alone = Block().double()
    traced = fx.symbolic_trace(convert_model(copy.deepcopy(alone)))
    x = images()
    y = DistributedDataParallel(traced)(x.chunk(size)[rank])
    torch.testing.assert_close(y, alone(x).chunk(size)[rank])


def test_a_layer_whose_hooks_would_run_twice_is_named(converted: Any) -> None:
    """Once when traced, and again when the graph calls the layer."""
    handle = converted.stem[1].register_forward_hook(lambda module, args, y: y * 2)
    with pytest.raises(StateError, match=r"got stem\.1 \(SynchronizedBatchNorm2d\): .*again"):
        fx.symbolic_trace(converted)

    class Knows(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, SynchronizedBatchNorm2d) or super().is_leaf_module(
                m, module_qualified_name
            )

    x, expected = images(), copy.deepcopy(converted)
    traced = fx.GraphModule(converted, Knows().trace(converted))
    torch.testing.assert_close(traced(x), expected(x))
    handle.remove()
    fx.symbolic_trace(converted)


def test_a_subclass_whose_forward_would_run_twice_is_named() -> None:
    class Doubles(SynchronizedBatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    with pytest.raises(StateError, match=r"got 0 \(Doubles\)"):
        fx.symbolic_trace(nn.Sequential(Doubles(3)))


def fused(model: nn.Module) -> fx.GraphModule:
    return optimization.fuse(model.eval())  # type: ignore[return-value]


def test_fusion_leaves_synchronized_layers_and_fuses_reverted_ones(
    model: nn.Module, converted: nn.Module
) -> None:
    x, expected = images(), model.eval()
    left = fused(converted)
    assert isinstance(left.get_submodule("stem.1"), SynchronizedBatchNorm2d)
    torch.testing.assert_close(left(x), expected(x))
    done = fused(revert_model(copy.deepcopy(converted)))
    assert ("call_module", "stem.1") not in calls(done)
    torch.testing.assert_close(done(x), expected(x))
    # as well, if it was traced before
    traced = revert_model(fx.symbolic_trace(converted))
    torch.testing.assert_close(optimization.fuse(traced, no_trace=True)(x), expected(x))
    # and by hand
    conv: Any = converted.get_submodule("stem.0")
    by_hand = fuse_conv_bn_eval(conv, converted.get_submodule("stem.1"))
    torch.testing.assert_close(by_hand(x), expected.get_submodule("stem")(x))


def test_fusion_leaves_layers_that_clamp(converted: Any) -> None:
    """Its formula is not theirs; `revert_model` keeps them."""
    for module in converted.modules():
        if isinstance(module, SynchronizedBatchNorm2d):
            module.eps_mode, module.eps = "clamp", 0.5
    x, expected = images(), copy.deepcopy(converted).eval()
    with pytest.warns(UserWarning, match="clamp"):
        reverted = revert_model(converted)
    torch.testing.assert_close(fused(reverted)(x), expected(x))


@pytest.mark.filterwarnings("ignore")  # torch.ao warns that it is deprecated
@pytest.mark.parametrize("aware", [False, True])
def test_quantization(model: nn.Module, converted: nn.Module, aware: bool) -> None:
    """It leaves synchronized layers in floating point, and fuses reverted ones."""
    quantize = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao import quantization

    mapping = getattr(quantization, f"get_default_{'qat_' * aware}qconfig_mapping")("fbgemm")
    prepare = quantize.prepare_qat_fx if aware else quantize.prepare_fx
    x = images().float()

    def quantized(source: nn.Module) -> nn.Module:
        prepared = prepare(copy.deepcopy(source).float().train(aware), mapping, (x,))
        prepared(x)
        return quantize.convert_fx(prepared.eval())  # type: ignore[no-any-return]

    wanted = quantized(model)
    kept = quantized(converted)
    assert isinstance(kept.get_submodule("stem.1"), SynchronizedBatchNorm2d)
    # quantized to 8 bits
    torch.testing.assert_close(kept(x), wanted(x), atol=0.3, rtol=0)
    torch.testing.assert_close(quantized(revert_model(copy.deepcopy(converted)))(x), wanted(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated
def test_script_says_what_to_do(converted: nn.Module) -> None:
    with pytest.raises(StateError, match=r"SynchronizedBatchNorm2d; pass revert_model"):
        torch.jit.script(converted)
    scripted = torch.jit.script(revert_model(copy.deepcopy(converted)).eval())
    x = images()
    torch.testing.assert_close(scripted(x), converted.eval()(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated
def test_trace_and_export_take_the_model_in_eval(converted: nn.Module) -> None:
    x, other = images(), images()
    converted.eval()
    torch.testing.assert_close(torch.jit.trace(converted, (x,))(other), converted(other))
    exported = torch.export.export(converted, (x,)).module()
    torch.testing.assert_close(exported(other), converted(other))
