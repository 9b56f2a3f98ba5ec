"""What `convert_model` finds and tells: the report, the warning, layers that are not registered,
conversions of the user's own."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import StateError
from syncbn_torch import (
    ConversionReport,
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    register_conversion,
    revert_model,
)
from syncbn_torch.conversion.registry import conversions, origins


class Fused(nn.BatchNorm2d):
    """Normalizes and activates."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SynchronizedFused(Fused, SynchronizedBatchNorm2d):
    """The same; `super().forward` synchronizes."""


class Renamed(nn.BatchNorm2d):
    """Has an attribute and a method more, and torch's forward."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-2)
        self.gain = 2

    def double_gain(self) -> int:
        return self.gain * 2


@pytest.fixture
def registry() -> Any:
    """Registrations of a test end with it."""
    kept = conversions.copy(), origins.copy()
    yield
    for now, before in zip((conversions, origins), kept, strict=True):
        now.clear()
        now.update(before)


def images() -> Tensor:
    return torch.randn(4, 3, 5, 5)


# ------------------------------------------------------------------------------- the report


def test_the_report_has_a_line_for_each_class() -> None:
    net = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(6)), Fused(3), nn.BatchNorm1d(3))
    report = ConversionReport()
    with pytest.warns(UserWarning, match="kept 1 of 8 layers"):
        convert_model(net, report=report)
    assert len(report.converted) == 7
    assert [layer.name for layer in report.kept] == ["6"]
    assert str(report) == (
        "6 BatchNorm2d -> SynchronizedBatchNorm2d (0, 1, 2, 3, ...)\n"
        "1 Fused (6): unknown subclass of BatchNorm2d with its own forward; see extra=\n"
        "1 BatchNorm1d -> SynchronizedBatchNorm1d (7)"
    )


def test_unknown_subclasses_stay_and_one_short_warning_tells() -> None:
    kinds = [type(f"Fused{i}", (Fused,), {}) for i in range(40)]
    net = nn.Sequential(*(kind(3) for kind in kinds for _ in range(3)), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="38 more;") as seen:
        convert_model(net)
    (warning,) = seen
    text = str(warning.message)
    assert warning.filename == __file__
    assert len(text) <= 400
    assert text.startswith(
        "convert_model kept 120 of 121 layers as they are: 3 Fused0 (0, ...): unknown subclass of "
        "BatchNorm2d with its own forward; see extra=; "
    )
    assert text.endswith("more; to see all, pass report=ConversionReport() and print it")
    assert type(net[0]) is kinds[0]


def test_nothing_found_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="found no batch norm layer in Linear, so it changed noth"):
        convert_model(nn.Linear(2, 2))


def test_layers_that_only_look_like_batch_norm_are_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("running_var", torch.ones(3))

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(3))
            self.register_buffer("running_var", torch.ones(3))

    net = nn.Sequential(Own(), Frozen(), nn.InstanceNorm2d(3, track_running_stats=True))
    with pytest.warns(UserWarning, match="1 Own .0.: it has a running_var, but Own is no subclass"):
        convert_model(net)


def test_layers_of_inplace_abn_are_named_with_ours() -> None:
    class InPlaceABN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("running_var", torch.ones(3))

    InPlaceABN.__module__ = "inplace_abn.abn"
    with pytest.warns(UserWarning, match="use InPlaceABNSync of syncbn_torch.inplace"):
        convert_model(nn.Sequential(InPlaceABN()))


# ------------------------------------------------------------------- subclasses and conversions


def test_a_subclass_with_torchs_forward_is_converted_and_stays_a_subclass() -> None:
    net = nn.Sequential(Renamed(3))
    twin = Renamed(3)
    convert_model(net)
    assert isinstance(net[0], SynchronizedBatchNorm2d)
    assert isinstance(net[0], Renamed)
    assert net[0].double_gain() == 4
    x = images()
    torch.testing.assert_close(DataParallelWithCallback(net, replicas=2)(x), twin(x))
    restored = pickle.loads(pickle.dumps(net))
    assert type(restored[0]) is type(net[0])
    assert torch.equal(restored[0].running_var, net[0].running_var)
    for other in (net, restored):
        assert type(revert_model(other)[0]) is Renamed


def test_extra_gives_layers_another_class() -> None:
    net, twin = nn.Sequential(Fused(3)), Fused(3)
    weight = net[0].weight
    convert_model(net, extra={Fused: SynchronizedFused})
    assert type(net[0]) is SynchronizedFused
    assert net[0].weight is weight
    x = images()
    torch.testing.assert_close(DataParallelWithCallback(net, replicas=2)(x), twin(x))
    assert type(revert_model(net)[0]) is Fused
    assert "_converted_from" not in vars(net[0])


def test_extra_with_none_keeps_layers_without_a_warning() -> None:
    report = ConversionReport()
    net = convert_model(nn.Sequential(Fused(3)), extra={Fused: None}, report=report)
    assert type(net[0]) is Fused
    assert report.kept[0].reason == "extra= says that it stays"


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_new_module_takes_the_place_of_a_layer_everywhere() -> None:
    net = nn.Module()
    net.bn = net.alias = layer = Fused(3)
    net.block = nn.Sequential(layer, nn.ReLU())
    net.listed, net.by_name, net.unique = [layer, None], {"bn": [layer]}, {layer}
    net.pair, net.fixed = Pair(layer, 1), frozenset([layer])
    net.__dict__["hidden"] = layer
    made: list[nn.Module] = []

    def make(old: Fused) -> nn.Module:
        made.append(nn.Sequential(SynchronizedBatchNorm2d(old.num_features), nn.ReLU()))
        return made[-1]

    group = SingleCommunicator()
    convert_model(net, extra={Fused: make}, process_group=group)
    (new,) = made
    places = [net.bn, net.alias, net.block[0], net.listed[0], net.by_name["bn"][0]]
    places += [*net.unique, net.pair.first, *net.fixed, net.hidden]
    assert all(place is new for place in places)
    assert type(net.pair) is Pair
    assert new[0].process_group is group
    assert type(convert_model(Fused(3), extra={Fused: make})) is nn.Sequential


def test_a_factory_that_fails_changes_nothing() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), Fused(3))

    def fail(layer: Fused) -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        convert_model(net, extra={Fused: fail})
    assert type(net[0]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({Fused: int}, "expected a subclass of nn.Module, a function or None for Fused, got"),
        ({"Fused": None}, "expected a subclass of nn.Module as the class to convert, got 'Fused'"),
        ([Fused], "expected extra={Class: what it becomes}, got list"),
        ({Fused: lambda layer: 3}, "expected an nn.Module from the function for Fused in extra="),
    ],
)
def test_a_wrong_extra_is_an_error(extra: Any, text: str) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), Fused(3))
    with pytest.raises(TypeError) as caught:
        convert_model(net, extra=extra)
    assert text in str(caught.value)
    assert type(net[0]) is nn.BatchNorm2d


@pytest.mark.usefixtures("registry")
def test_a_registered_class_goes_there_and_back() -> None:
    register_conversion(Fused, SynchronizedFused)
    net = convert_model(nn.Sequential(Fused(3), nn.BatchNorm2d(3)))
    assert [type(m) for m in net] == [SynchronizedFused, SynchronizedBatchNorm2d]
    assert [type(m) for m in revert_model(net)] == [Fused, nn.BatchNorm2d]


@pytest.mark.usefixtures("registry")
def test_a_registered_function_needs_a_way_back() -> None:
    def there(old: Fused) -> nn.Module:
        return nn.Sequential(SynchronizedBatchNorm2d(old.num_features), nn.ReLU())

    register_conversion(Fused, there, lambda new: Fused(new[0].num_features))
    net = convert_model(nn.Sequential(Fused(3)))
    assert type(net[0]) is nn.Sequential
    assert type(revert_model(net)[0]) is Fused
    register_conversion(Fused, there)
    net = convert_model(nn.Sequential(Fused(3)))
    with pytest.warns(UserWarning, match="no way back is registered for Fused"):
        revert_model(net)


# ------------------------------------------------------------- layers that are not registered


class Hiding(nn.Module):
    """Holds layers in every way that `_modules` does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.listed = [self.bn, nn.BatchNorm2d(3)]
        self.nested = {"a": ({"b": nn.Sequential(nn.BatchNorm2d(3))},)}
        self.unique = {nn.BatchNorm2d(3)}
        self.listed.append(self.listed)  # type: ignore[arg-type]
        self.method = self.bn.forward
        self.__dict__["plain"] = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[1](self.bn(x))


def test_layers_in_plain_lists_and_attributes_are_converted_and_reported() -> None:
    net, report = Hiding(), ConversionReport()
    bn, plain = net.bn, net.plain
    convert_model(net, report=report)
    assert net.bn is net.listed[0] is bn
    assert net.plain is plain
    assert type(net.method.__self__) is SynchronizedBatchNorm2d
    hidden = [layer.name for layer in report if not layer.registered]
    assert hidden == ["listed[1]", "nested['a'][0]['b'].0", "unique[0]", "plain"]
    assert len(report.converted) == 5
    assert "no submodule" in str(report)
    assert len(revert_model(net, report=report).nested) == 1
    assert len(report.converted) == 5
    assert type(plain) is nn.BatchNorm2d


def test_a_replica_that_calls_an_unregistered_layer_raises() -> None:
    net = DataParallelWithCallback(convert_model(Hiding()), replicas=2)
    with pytest.raises(StateError, match="register it"):
        net(images())


# ------------------------------------------------------------------------- the wrapper's warnings


def test_a_wrapper_warns_once_of_plain_layers_in_training() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), SynchronizedBatchNorm2d(3))
    wrapper = DataParallelWithCallback(net, replicas=2)
    wrapper.eval()(images())
    wrapper.train()(images()[:1])  # a single replica has the whole batch
    with pytest.warns(UserWarning, match=r"^0 \(BatchNorm2d\) and 1 more layers do not") as seen:
        wrapper(images())
    assert len(seen) == 1
    assert "convert_model(model) converts them, or says why not" in str(seen[0].message)
    assert seen[0].filename == __file__
    wrapper(images())


def test_a_class_that_a_layer_cannot_become_changes_nothing() -> None:
    class Slotted(nn.BatchNorm2d):
        __slots__ = ("more",)

    model = nn.Sequential(nn.BatchNorm2d(3), Fused(3))
    with pytest.raises(TypeError, match=r"that 1 \(Fused\) can become in place, got Slotted"):
        convert_model(model, extra={Fused: Slotted})
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, Fused]
