"""timm: models of many families, converted completely, and its layers with an activation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import LIMIT, batch_norms, over_ranks, over_replicas, record
from torch import Tensor, fx, nn
from world import on_ranks, raises

from syncbn_core.errors import ProtocolError, StateError
from syncbn_torch import (
    ConversionReport,
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm2d,
    convert_model,
    revert_model,
)

timm = pytest.importorskip("timm")

from timm import layers as timm_layers  # noqa: E402

# A small model of each family, and the side of its images.
FAMILIES = {
    "resnet10t": 32,
    "resnext26ts": 32,
    "seresnext26ts": 32,
    "res2net50_14w_8s": 32,
    "resnest14d": 32,
    "skresnet18": 32,
    "densenet121": 32,
    "dla46_c": 32,
    "dpn48b": 32,
    "hrnet_w18_small": 32,
    "inception_v3": 96,
    "efficientnet_lite0": 32,
    "mixnet_s": 32,
    "mobilenetv3_small_050": 32,
    "mobilenetv4_conv_small_035": 32,
    "lcnet_035": 32,
    "ghostnet_050": 32,
    "rexnet_100": 32,
    "regnetx_002": 32,
    "gernet_s": 32,
    "repvgg_a0": 32,
    "mobileone_s0": 64,
    "ese_vovnet19b_slim_dw": 32,
    "hgnetv2_b0": 32,
    "selecsls42": 32,
    "cspresnet50": 32,
    "fastvit_t8": 64,
    "mobilevit_xxs": 64,
    "levit_128s": 224,
}
SUBJECTS = list(FAMILIES)


pytestmark = pytest.mark.usefixtures("one_thread")


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"num_classes": 5, "drop_rate": 0.0}
    model = timm.create_model(name, pretrained=False, **arguments).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, timm_layers.DropPath):
            module.drop_prob = 0.0
    return model  # type: ignore[no-any-return]


def images(side: int) -> Tensor:
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def checked_step(name: str, step: Callable[..., float], over: str) -> None:
    model, report = built(name), ConversionReport()
    layers = len(batch_norms(model))
    difference = step(
        model, images(FAMILIES[name]), convert=lambda m: convert_model(m, report=report)
    )
    assert difference < LIMIT, f"{name}: {difference}"
    assert len(report.converted) == layers
    assert report.kept == []
    record("timm", name, over=over, layers=layers, difference=difference)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_step_over_replicas_is_that_of_the_undivided_batch(name: str) -> None:
    checked_step(name, over_replicas, "2 replicas")


def steps_over_ranks(part: int) -> None:
    """A world has 100 seconds, also on a busy machine; so each takes a fifth of the models."""
    for name in SUBJECTS[part::5]:
        checked_step(name, over_ranks, "2 ranks")


@on_ranks(2)
def test_a_step_over_ranks_of_the_first_fifth_of_the_models(rank: int, size: int) -> None:
    steps_over_ranks(0)


@on_ranks(2)
def test_a_step_over_ranks_of_the_second_fifth_of_the_models(rank: int, size: int) -> None:
    steps_over_ranks(1)


@on_ranks(2)
def test_a_step_over_ranks_of_the_third_fifth_of_the_models(rank: int, size: int) -> None:
    steps_over_ranks(2)


@on_ranks(2)
def test_a_step_over_ranks_of_the_fourth_fifth_of_the_models(rank: int, size: int) -> None:
    steps_over_ranks(3)


@on_ranks(2)
def test_a_step_over_ranks_of_the_fifth_fifth_of_the_models(rank: int, size: int) -> None:
    steps_over_ranks(4)


# ------------------------------------------------------------------ the layer with an activation


def acting(**settings: Any) -> Any:
    return timm_layers.BatchNormAct2d(3, **settings).double()


def test_the_layer_keeps_activation_drop_flags_and_identity() -> None:
    layer = acting(eps=1e-3, momentum=0.3, act_layer=nn.SiLU, drop_layer=nn.Dropout2d)
    layer.drop.p = 0.0
    layer.weight.requires_grad_(False)
    layer.note = "mine"
    act, drop, twin = layer.act, layer.drop, copy.deepcopy(layer)
    assert convert_model(layer) is layer
    assert isinstance(layer, SynchronizedBatchNorm2d)
    assert isinstance(layer, timm_layers.BatchNormAct2d)
    assert layer.act is act
    assert layer.drop is drop
    assert (layer.eps, layer.momentum, layer.note) == (1e-3, 0.3, "mine")
    assert not layer.weight.requires_grad
    x = torch.randn(4, 3, 5, 5).double()
    torch.testing.assert_close(DataParallelWithCallback(layer, replicas=2)(x), twin(x))
    assert type(revert_model(layer)) is timm_layers.BatchNormAct2d
    assert vars(layer).keys() == vars(twin).keys()
    assert layer.act is act


def test_strict_state_dicts_in_both_directions() -> None:
    model, fresh = (timm.create_model("test_efficientnet") for _ in range(2))
    converted = convert_model(copy.deepcopy(fresh))
    converted.load_state_dict(model.state_dict(), strict=True)
    fresh.load_state_dict(converted.state_dict(), strict=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_the_drop_in_class_method_keeps_activations_too() -> None:
    """torch's own loses the activation here."""
    group = torch.distributed.GroupMember.NON_GROUP_MEMBER
    model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(acting(act_layer=nn.SiLU)), group)
    assert isinstance(model[0], SynchronizedBatchNorm2d)
    assert type(model[0].act) is nn.SiLU
    assert model[0].process_group is group


def test_norms_that_take_statistics_in_their_own_way_are_named() -> None:
    model = nn.Sequential(acting(), timm_layers.EvoNorm2dB0(3), timm_layers.SplitBatchNorm2d(3))
    with pytest.warns(
        UserWarning, match=r"EvoNorm2dB0 \(1\): it has a running_var.*SplitBatchNorm2d"
    ):
        convert_model(model)


def test_timms_freezing_finds_converted_layers() -> None:
    model = convert_model(nn.Sequential(acting(act_layer=nn.SiLU)))
    frozen = timm_layers.freeze_batch_norm_2d(model)
    assert isinstance(frozen[0], timm_layers.FrozenBatchNormAct2d)
    assert type(frozen[0].act) is nn.SiLU


@on_ranks(2)
def test_unlike_activations_of_ranks_are_named(rank: int, size: int) -> None:
    layer = convert_model(acting(act_layer=nn.SiLU if rank else nn.ReLU))
    raises(ProtocolError, "with SiLU", "with ReLU", call=lambda: layer(images(5)))


def test_a_traced_layer_is_one_node_that_synchronizes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), acting(act_layer=nn.SiLU)).double()
    x = torch.randn(4, 3, 5, 5).double()
    difference = over_replicas(model, x, convert=lambda m: fx.symbolic_trace(convert_model(m)))
    assert difference < LIMIT
    traced = fx.symbolic_trace(convert_model(model))
    assert [node.name for node in traced.graph.nodes] == ["input_1", "_0", "_1", "output"]
    model[1].register_forward_hook(lambda module, args, y: None)
    with pytest.raises(StateError, match=r"without hooks .*got 1 \(SynchronizedBatchNormAct2d"):
        fx.symbolic_trace(model)


# ---------------------------------------------------------------------- timm's own conversion


def test_our_conversion_after_timms_and_the_way_back() -> None:
    model = timm.create_model("test_efficientnet", drop_rate=0.0).double()
    x = torch.randn(4, 3, 64, 64).double()
    difference = over_replicas(
        model, x, convert=lambda m: convert_model(timm_layers.convert_sync_batchnorm(m))
    )
    assert difference < LIMIT
    layer = timm_layers.convert_sync_batchnorm(acting(act_layer=nn.SiLU))
    assert type(layer) is timm_layers.SyncBatchNormAct
    keys = vars(layer).keys()
    convert_model(layer)
    assert isinstance(layer, SynchronizedBatchNorm2d)
    assert type(layer.act) is nn.SiLU
    assert type(revert_model(layer)) is timm_layers.SyncBatchNormAct
    assert vars(layer).keys() == keys


@on_ranks(2)
def test_over_ranks_both_orders_of_conversion_end_synchronized(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", drop_rate=0.0).double()
    x = torch.randn(4, 3, 64, 64).double()
    theirs = timm_layers.convert_sync_batchnorm
    plain = theirs(convert_model(copy.deepcopy(model)))
    raises(ValueError, "expected input tensor to be on", call=lambda: plain(x))
    for convert in (
        lambda m: convert_model(theirs(m)),
        lambda m: convert_model(theirs(convert_model(m))),
    ):
        assert over_ranks(model, x, convert=convert) < LIMIT
