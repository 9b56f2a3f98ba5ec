"""Layers are leaves of torch.fx; what fusion, quantization, torch.jit and torch.export do."""

import copy
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


@on_ranks(2)
def test_ranks_of_a_traced_model_synchronize(rank: int, size: int) -> None:
    torch.manual_seed(0)
    alone = Block().double()
    traced = fx.symbolic_trace(convert_model(copy.deepcopy(alone)))
    x = images()
    y = DistributedDataParallel(traced)(x.chunk(size)[rank])
    torch.testing.assert_close(y, alone(x).chunk(size)[rank])


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
