"""Conversion changes the class of a layer and nothing else."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import syncbn_torch
from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import ArgumentError
from syncbn_torch import (
    BatchNorm2dReimpl,
    ConversionReport,
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
)
from syncbn_torch.batchnorm import set_process_group

PAIRS = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    (nn.SyncBatchNorm, SyncBatchNorm),
]


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4, affine=False)),
        nn.BatchNorm2d(4, track_running_stats=False, momentum=None, eps=1e-3),
    )


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_kind_of_layer_there_and_back(theirs: Any, ours: Any) -> None:
    layer = theirs(3, eps=1e-2, momentum=0.3)
    converted = convert_model(layer)
    assert type(converted) is ours
    reverted = revert_model(converted)
    assert type(reverted) is theirs
    assert reverted.__dict__.keys() == layer.__dict__.keys()
    assert (reverted.eps, reverted.momentum) == (1e-2, 0.3)
    assert reverted.weight is layer.weight


def test_parameters_and_buffers_stay_the_same_objects() -> None:
    net = model()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    converted = convert_model(net)
    assert converted is net
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    weight = net[1].weight.detach().clone()
    DataParallelWithCallback(net, replicas=2)(torch.randn(4, 3, 6, 6)).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].weight, weight)


@pytest.mark.parametrize("convert", [convert_model, lambda m: revert_model(convert_model(m))])
def test_settings_of_every_layer_are_kept(convert: Any) -> None:
    net = model().double()
    net[1].weight.requires_grad_(False)
    net[1].eval()
    net[1].note = "mine"
    net[0].eval()
    net(torch.randn(2, 3, 6, 6, dtype=torch.float64))
    reference = copy.deepcopy(net)
    net = convert(net)
    for new, old in zip(net.modules(), reference.modules(), strict=True):
        assert new.training == old.training
        for name in ("eps", "momentum", "affine", "track_running_stats", "num_features"):
            assert getattr(new, name, None) == getattr(old, name, None)
    assert net[1].note == "mine"
    assert not net[1].weight.requires_grad
    assert net[1].bias.requires_grad
    for name, value in net.state_dict().items():
        assert value.dtype == reference.state_dict()[name].dtype
        assert torch.equal(value, reference.state_dict()[name])
    assert net[2][1].num_batches_tracked == 1
    assert net[1].num_batches_tracked == 0


def test_hooks_are_kept_and_their_handles_go_on_working() -> None:
    calls: list[str] = []
    net = nn.Sequential(nn.BatchNorm1d(3))
    layer = net[0]
    handles = [
        layer.register_forward_pre_hook(lambda m, i: calls.append("pre")),
        layer.register_forward_hook(lambda m, i, o: calls.append("forward")),
        layer.register_full_backward_pre_hook(lambda m, g: calls.append("backward pre")),
        layer.register_full_backward_hook(lambda m, i, o: calls.append("backward")),
        layer.register_state_dict_pre_hook(lambda *a: calls.append("state")),
        layer.weight.register_hook(lambda g: calls.append("weight")),
    ]
    net = convert_model(net)
    net(torch.randn(4, 3, requires_grad=True)).pow(2).sum().backward()
    net.state_dict()
    assert sorted(calls) == ["backward", "backward pre", "forward", "pre", "state", "weight"]
    for handle in handles:
        handle.remove()
    calls.clear()
    net(torch.randn(4, 3, requires_grad=True)).pow(2).sum().backward()
    net.state_dict()
    assert calls == []


@pytest.mark.parametrize("nested", [False, True])
def test_data_parallel_becomes_one_with_callbacks(nested: bool) -> None:
    wrapper = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3)))
    wrapper.eval()
    converted = convert_model(nn.Sequential(wrapper) if nested else wrapper)
    inner = converted[0] if nested else converted
    assert type(inner) is DataParallelWithCallback
    assert not inner.training
    assert type(inner.module[0]) is SynchronizedBatchNorm1d
    assert inner(torch.randn(4, 3)).shape == (4, 3)


def test_a_second_conversion_changes_nothing() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), BatchNorm2dReimpl(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = convert_model(convert_model(net))
        layer = converted[0]
        assert revert_model(convert_model(converted))[0].weight is layer.weight


@pytest.mark.parametrize("change", [convert_model, revert_model])
def test_only_modules_can_be_converted(change: Any) -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got list"):
        change([nn.BatchNorm1d(3)])


def test_clamp_mode_is_not_silently_lost() -> None:
    net = nn.Sequential(SynchronizedBatchNorm1d(3, eps_mode="clamp"))
    with pytest.warns(UserWarning, match='eps_mode="clamp"'):
        assert type(revert_model(net)[0]) is SynchronizedBatchNorm1d


def test_torchs_own_class_method_and_the_way_back() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3))
    weight = net[0].weight
    net = SyncBatchNorm.convert_sync_batchnorm(net)
    assert [type(m) for m in net] == [SyncBatchNorm, SyncBatchNorm]
    assert net[0].weight is weight
    assert net[0].process_group is None
    net = pickle.loads(pickle.dumps(net))
    assert [type(m) for m in revert_model(net)] == [nn.BatchNorm2d, nn.BatchNorm1d]
    assert type(revert_model(SyncBatchNorm(3))) is nn.SyncBatchNorm


def test_checkpoints_load_in_either_direction() -> None:
    trained, fresh = model(), model()
    trained(torch.randn(4, 3, 6, 6))
    converted = convert_model(copy.deepcopy(fresh))
    converted.load_state_dict(trained.state_dict())
    fresh.load_state_dict(converted.state_dict())
    trained.eval(), converted.eval(), fresh.eval()
    x = torch.randn(4, 3, 6, 6)
    assert torch.equal(trained(x), converted(x))
    assert torch.equal(trained(x), fresh(x))


def test_patch_makes_torchs_names_ours_within_the_block() -> None:
    original = nn.BatchNorm2d
    with patch_sync_batchnorm():
        assert nn.BatchNorm1d is SynchronizedBatchNorm1d
        assert nn.modules.BatchNorm3d is SynchronizedBatchNorm3d
        assert torch.nn.modules.batchnorm.BatchNorm2d is SynchronizedBatchNorm2d
        net = nn.Sequential(nn.BatchNorm2d(3))
        with patch_sync_batchnorm():
            pass
        assert nn.BatchNorm2d is SynchronizedBatchNorm2d
    assert nn.BatchNorm2d is torch.nn.modules.batchnorm.BatchNorm2d is original
    assert type(net[0]) is SynchronizedBatchNorm2d


@pytest.mark.parametrize("place", [nn, nn.modules, nn.modules.batchnorm])
def test_patch_reaches_the_lazy_layers(place: Any) -> None:
    with patch_sync_batchnorm():
        lazy = place.LazyBatchNorm2d(eps=1e-2, momentum=0.3, affine=False)
    lazy(torch.randn(4, 3, 2, 2))
    assert type(lazy) is SynchronizedBatchNorm2d
    assert (lazy.num_features, lazy.eps, lazy.momentum, lazy.weight) == (3, 1e-2, 0.3, None)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, group: convert_model(model, process_group=group),
        lambda model, group: SyncBatchNorm.convert_sync_batchnorm(model, group),
        lambda model, group: SynchronizedBatchNorm2d(3, process_group=group),
        lambda model, group: set_process_group(convert_model(model), group),
    ],
)
@pytest.mark.parametrize("group", ["x", 0, [1, 2]])
def test_what_is_no_process_group_is_refused_at_once(use: Any, group: Any) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(ArgumentError, match=r"process_group to be a torch\.distributed group.*got"):
        use(model, group)


def test_a_conversion_with_a_wrong_process_group_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(ArgumentError):
        convert_model(model, process_group="x")
    assert type(model[0]) is nn.BatchNorm2d


def test_public_names_exist_and_are_documented() -> None:
    for name in syncbn_torch.__all__:
        documented = getattr(syncbn_torch, name)
        assert documented.__doc__
        if isinstance(documented, type) and issubclass(documented, nn.modules.batchnorm._BatchNorm):
            assert "eps: " in documented.__doc__, name


def test_process_group_reaches_layers_that_are_ours_already() -> None:
    group = SingleCommunicator()
    net = nn.Sequential(nn.BatchNorm2d(3), SynchronizedBatchNorm2d(3))
    net = SyncBatchNorm.convert_sync_batchnorm(net, group)
    assert [layer.process_group for layer in net] == [group, group]


@pytest.mark.parametrize("change", [convert_model, revert_model])
def test_a_layer_whose_forward_was_replaced_on_the_object_is_kept_and_named(change: Any) -> None:
    """It would call the forward of its old class, whatever its class is."""
    kind = nn.BatchNorm2d if change is convert_model else SynchronizedBatchNorm2d
    model = nn.Sequential(kind(3), kind(3))
    plain = model[1].forward
    model[1].forward = lambda x: plain(x)
    report = ConversionReport()
    with pytest.warns(UserWarning, match=r"\(1\): its forward was replaced on the object"):
        change(model, report=report)
    assert type(model[1]) is kind
    assert [layer.name for layer in report.converted] == ["0"]
