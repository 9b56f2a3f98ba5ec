"""`verify_sync` on models with real faults: each is found, and the right layer is blamed."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_core.errors import ArgumentError, StateError
from syncbn_torch import (
    DataParallelWithCallback,
    Shared,
    SynchronizedBatchNorm2d,
    SyncReport,
    convert_model,
    verify_sync,
)


class Net(nn.Module):
    """Three layers; `bn_right` is called twice, and ReLUs work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn_left, self.bn_right = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.bn(self.conv(x)).relu_()
        x = self.bn_left(self.left(x)) + self.bn_right(self.right(x))
        x = self.bn_right(x).relu_()
        return self.head(x.mean((2, 3)))


def batch(samples: int = 5) -> Tensor:
    return torch.randn(samples, 3, 6, 6)


def sync_net(kind: type[Net] = Net) -> Any:
    return convert_model(kind())


def verdicts(report: SyncReport) -> dict[str, str]:
    return {layer.name: layer.verdict for layer in report.layers}


def small(report: SyncReport) -> bool:
    """Whether all differences that are known are rounding in float64."""
    figures = [report.output, report.gradient, report.buffer]
    for layer in report.layers:
        figures += [layer.output, layer.gradient, layer.running]
    return all(figure is None or figure < 1e-8 for figure in figures)


# ------------------------------------------------------------------------------- right models


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_converted_model_is_right_to_rounding(replicas: int) -> None:
    report = verify_sync(sync_net(), batch(), replicas)
    assert report.ok, report
    assert small(report)
    assert set(verdicts(report).values()) == {"ok"}
    assert [layer.calls[0] for layer in report.layers] == [1, 1, 2]
    assert len(report.sizes) == replicas
    assert sum(report.sizes) == 5
    for layer in report.layers:
        assert None not in (layer.output, layer.gradient, layer.running)


def test_a_model_in_its_own_dtype_is_judged_with_wider_limits() -> None:
    right, wrong = sync_net(), sync_net()
    wrong.bn_left = nn.BatchNorm2d(8)
    report = verify_sync(right, batch(), dtype=None)
    assert report.ok
    assert "Note: the gradients of the whole model were not compared" in str(report)
    report = verify_sync(wrong, batch(), dtype=None)
    assert report.dtype == "float32"
    assert [layer.name for layer in report.faulty] == ["bn_left"]
    report = verify_sync(right.bfloat16(), batch().bfloat16(), dtype=None)
    assert report.conclusion == "incomplete"
    assert set(verdicts(report).values()) == {"ok"}
    assert "in bfloat16 only its layers are judged" in str(report)


# ----------------------------------------------------------------------- the model stays as it is


class Noisy(Net):
    """Draws from every generator, and has a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(1)
        return self.drop(super().forward(x))


def test_the_model_the_batch_and_random_generators_stay_as_they_are() -> None:
    model = sync_net(Noisy)
    model.bn_left.eval()
    model.head.weight.requires_grad_(False)
    x = batch()
    model(x).sum().backward()
    calls: list[Tensor] = []
    model.bn.register_forward_hook(lambda *_: None)

    def state() -> dict[str, Any]:
        tensors = {**model.state_dict(), "x": x, "torch": torch.get_rng_state()}
        grads = {f"grad {name}": p.grad for name, p in model.named_parameters()}
        tensors |= {name: grad for name, grad in grads.items() if grad is not None}
        return {
            "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
            "modes": [(type(m), m.training, len(m._forward_hooks)) for m in model.modules()],
            "needs": [(id(p), p.requires_grad) for p in model.parameters()],
            "p": model.drop.p,
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),  # noqa: NPY002
        }

    before = state()
    assert verify_sync(model, x).ok
    after = state()
    assert not calls
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor, after["tensors"][name]), name
    after.pop("tensors")
    assert before == after


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert small(verify_sync(sync_net(), batch()))
    model, x = sync_net(), batch()
    with torch.inference_mode():
        report = verify_sync(model, x)
    assert report.gradient is not None
    assert report.ok


# ------------------------------------------------------------------------------- layers at fault


def test_a_plain_layer_is_blamed_and_not_those_after_it() -> None:
    model = sync_net()
    model.bn = nn.BatchNorm2d(8)
    report = verify_sync(model, batch())
    assert not report.ok
    assert verdicts(report) == {"bn": "not synchronized", "bn_left": "ok", "bn_right": "ok"}
    assert report.first == "bn_left"
    bn = report.layers[0]
    for figure in (bn.output, bn.gradient, bn.running):
        assert figure is not None
        assert figure > 1e-3
    assert "convert_model" in bn.reason
    assert "- bn: a plain nn.BatchNorm2d" in str(report)
    with pytest.raises(StateError, match="a plain nn"):
        report.raise_if_wrong()


def test_a_plain_layer_is_blamed_also_where_the_batch_cannot_show_it() -> None:
    report = verify_sync(Net(), torch.zeros(4, 3, 6, 6))
    assert set(verdicts(report).values()) == {"not synchronized"}


def test_an_unknown_subclass_is_blamed_and_one_that_cannot_be_told_is_called_unclear() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sin()

    model = sync_net()
    model.bn = Activated(8)
    report = verify_sync(model, batch())
    assert verdicts(report)["bn"] == "not synchronized"
    assert "Replace Activated, which convert_model does not know" in str(report)
    report = verify_sync(nn.Sequential(Activated(3)), torch.zeros(4, 3, 6, 6))
    assert verdicts(report) == {"0": "unclear"}
    assert "random values" in str(report)
    assert not report.ok


def test_an_unknown_subclass_that_uses_running_statistics_only_is_right() -> None:
    class Frozen(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)

    report = verify_sync(nn.Sequential(nn.Conv2d(3, 3, 1), Frozen(3)), batch())
    assert verdicts(report) == {"1": "ok"}
    assert report.ok


def test_torchs_own_sync_batch_norm_does_not_synchronize_replicas() -> None:
    report = verify_sync(nn.Sequential(nn.SyncBatchNorm(3)), batch())
    assert verdicts(report) == {"0": "not synchronized"}
    assert "several processes only" in str(report)
    taken_out = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(SynchronizedBatchNorm2d(3)))
    report = verify_sync(taken_out, batch())
    assert verdicts(report) == {"0": "not synchronized"}
    assert "several processes only. Call syncbn_torch.convert_model(model)." in str(report)


def test_a_synchronized_layer_that_a_subclass_breaks_is_blamed() -> None:
    class Broken(SynchronizedBatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return nn.BatchNorm2d.__mro__[1].forward(self, input)  # type: ignore[attr-defined,no-any-return]

    report = verify_sync(nn.Sequential(Broken(3)), batch())
    assert verdicts(report) == {"0": "not synchronized"}
    assert "although a Broken synchronizes" in str(report)


def test_plain_layers_in_nested_lists_are_found_and_cast() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [[nn.BatchNorm2d(3)], {"last": (nn.BatchNorm2d(3), nn.Dropout())}]

        def forward(self, x: Tensor) -> Any:
            bn, drop = self.layers[1]["last"]  # type: ignore[call-overload]
            return drop(bn(self.layers[0][0](x)))  # type: ignore[index]

    report = verify_sync(Nested(), batch())
    assert report.dtype == "float64"
    names = ["layers[0][0]", "layers[1]['last'][0]"]
    assert verdicts(report) == dict.fromkeys(names, "not synchronized")
    assert not report.not_compared
    assert "mixes samples" not in str(report)


def test_a_synchronized_layer_in_a_plain_list_fails_and_is_named() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [SynchronizedBatchNorm2d(3, dtype=torch.float64)]

        def forward(self, x: Tensor) -> Any:
            return self.layers[0](x)

    report = verify_sync(Listed(), batch())
    assert not report.ok
    assert "layers[0]" in verdicts(report)
    assert "StateError" in report.error
    assert "nn.ModuleList" in str(report)
    assert re.search(r"; raised in replica [01] of 2", str(report))


# --------------------------------------------------------------------------- remarks on layers


def test_a_layer_whose_calls_cannot_be_recorded_is_unclear_for_that_reason() -> None:
    class OfLists(SynchronizedBatchNorm2d):
        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs[0])

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = OfLists(3)

        def forward(self, x: Tensor) -> Any:
            return self.bn([x])

    report = verify_sync(Listed(), batch())
    assert report.conclusion == "incomplete"
    assert verdicts(report) == {"bn": "unclear"}
    assert "its input or its output is not a tensor" in str(report)


def test_eval_mode_and_layers_that_are_never_called_are_no_faults() -> None:
    model = sync_net()
    model.bn.eval()
    model.unused = nn.BatchNorm2d(3)
    report = verify_sync(model, batch())
    assert report.ok, report
    assert verdicts(report)["bn"] == "eval mode"
    assert verdicts(report)["unused"] == "not called"
    assert "Note: bn: in eval mode" in str(report)


def test_frozen_layers_without_statistics_of_the_batch_are_right() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.ones(3))
            self.register_buffer("running_var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var)  # type: ignore[arg-type]

    report = verify_sync(nn.Sequential(Frozen(), nn.InstanceNorm2d(3)), batch())
    assert verdicts(report) == {"0": "ok"}
    assert report.ok


def test_checkpointed_layers_are_counted_once() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    report = verify_sync(sync_net(Checkpointed), batch())
    assert report.ok, report
    assert [layer.calls for layer in report.layers] == [(1, 1), (1, 1), (2, 2)]


# ---------------------------------------------------------------------------- unequal calls


class Skips(Net):
    """A replica with a sample above 100 does not call `bn_left`."""

    def forward(self, x: Tensor) -> Any:
        x = self.bn(self.conv(x))
        if x.shape[0] > 2:
            x = self.bn_left(x)
        return self.bn_right(x).mean((2, 3))


class SkipsLast(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.bn(self.conv(x))
        return self.bn_left(x) if x.shape[0] > 2 else x


@pytest.mark.parametrize("kind", [Skips, SkipsLast])
def test_a_layer_that_one_replica_skips_is_named_and_nobody_waits(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCBN_TIMEOUT", "2")  # the replicas wait for each other in two layers
    report = verify_sync(sync_net(kind), batch(5))
    assert not report.ok
    assert verdicts(report)["bn"] == "ok"
    assert verdicts(report)["bn_left"] == "unequal calls"
    assert report.layers[1].calls == (1, 0)
    assert report.error
    assert "bn_left: the parts called it 1 and 0 times" in str(report)


def test_what_a_replica_raises_is_in_the_report() -> None:
    class Raises(Net):
        def forward(self, x: Tensor) -> Any:
            x = self.bn(self.conv(x))
            if x.shape[0] == 2:
                raise ZeroDivisionError("mine")
            return self.bn_left(x)

    report = verify_sync(sync_net(Raises), batch(5))
    assert not report.ok
    assert "ZeroDivisionError: mine" in report.error
    assert "replica 1 of 2" in report.error
    assert verdicts(report) == {"bn": "ok", "bn_left": "not reached", "bn_right": "not reached"}


# ------------------------------------------------------------- the whole model, random numbers


def test_a_model_that_mixes_samples_is_told_from_layers_that_are_wrong() -> None:
    class Mixes(Net):
        def forward(self, x: Tensor) -> Any:
            x = self.bn(self.conv(x))
            return self.bn_left(x - x.mean(0)).square().mean((2, 3))

    report = verify_sync(sync_net(Mixes), batch())
    assert not report.faulty
    assert report.model_differs
    assert not report.ok
    text = str(report)
    assert "mixes samples outside of batch norm" in text
    assert "The first layer whose input differs is bn_left." in text


def test_known_random_layers_are_switched_off_in_the_copies() -> None:
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob = 0.5

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(x.shape[0], 1, 1, 1) >= self.drop_prob
            return x * mask if self.training else x

    class Random(Net):
        def __init__(self) -> None:
            super().__init__()
            self.path, self.drop, self.rrelu = DropPath(), nn.Dropout2d(0.5), nn.RReLU()
            self.drop_rate = 0.5

        def forward(self, x: Tensor) -> Any:
            x = self.drop(self.path(self.rrelu(self.bn(self.conv(x)))))
            x = F.dropout(x, self.drop_rate, self.training)
            return self.bn_left(F.dropout(x, self.drop.p, self.training))

    report = verify_sync(sync_net(Random), batch())
    assert report.ok, report
    assert not report.not_compared
    assert small(report)


class ConvDropoutNorm(nn.Sequential):
    """Its name has "Dropout" in it, and it holds batch norm, as in nnU-Net."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 1), nn.Dropout(0.5), nn.BatchNorm2d(4))


class DropBlockNorm(nn.BatchNorm2d):
    pass


def test_batch_norm_within_a_module_named_after_dropout_is_checked() -> None:
    report = verify_sync(nn.Sequential(ConvDropoutNorm(), DropBlockNorm(4)), batch())
    assert verdicts(report) == {"0.2": "not synchronized", "1": "not synchronized"}
    assert not report.not_compared
    assert verify_sync(convert_model(ConvDropoutNorm()), batch()).ok


class AddsNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("right", [True, False])
def test_other_random_numbers_are_reported_and_layers_still_judged(right: bool) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 3, 1), AddsNoise(), nn.BatchNorm2d(3))
    if right:
        model = convert_model(model)
    report = verify_sync(model, batch())
    assert report.conclusion == ("incomplete" if right else "wrong")
    assert verdicts(report) == {"2": "ok" if right else "not synchronized"}
    assert "draws random numbers" in str(report)


def test_a_model_that_cannot_compute_in_float64_is_checked_in_its_own_dtype() -> None:
    class Single(Net):
        def forward(self, x: Tensor) -> Any:
            return F.conv2d(super().forward(x)[..., None, None], torch.ones(2, 5, 1, 1))

    report = verify_sync(sync_net(Single), batch())
    assert report.ok, report
    assert report.dtype == "float32"
    assert "can't compute in float64" in str(report)


# ------------------------------------------------------------------- what goes in and comes out


@dataclass
class Result:
    logits: Tensor
    loss: Tensor
    nothing: None = None


class TakesMuch(Net):
    """Arguments by name, integers, and results of every kind."""

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Any:
        logits = super().forward(x) * scale
        if labels is None:
            return logits.t(), [logits]
        assert labels.dtype is torch.int64
        return Result(logits, F.cross_entropy(logits, labels))


def test_batches_and_results_may_have_any_form() -> None:
    model, x, labels = sync_net(TakesMuch), batch(), torch.arange(5)
    batches: list[Any] = [x, (x,), (x, labels), {"x": x, "labels": labels, "scale": 2.0}]
    for given in batches:
        report = verify_sync(model, given)
        assert report.ok, report
        assert small(report)
        assert report.gradient is not None


class Scales(Net):
    def forward(self, x: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        assert isinstance(scale, Tensor)
        assert len(scale) == 3
        return super().forward(x.mul_(scale[:, None, None]))


def test_a_shared_argument_reaches_both_steps_as_its_value() -> None:
    x, scale = batch(), torch.rand(3)
    report = verify_sync(sync_net(Scales), (x, Shared(scale)))
    assert report.ok, report
    assert report.dtype == "float64"
    assert small(report)


@pytest.mark.parametrize(
    "nothing", ["path", (), {"n": 3}, object()], ids=["text", "none", "number", "object"]
)
def test_a_batch_without_tensors_is_refused(nothing: Any) -> None:
    with pytest.raises(ArgumentError, match="a batch with tensors"):
        verify_sync(sync_net(), nothing)


class Opaque:
    def __init__(self, held: Any) -> None:
        self.held = [held, self]


def test_an_output_without_tensors_is_not_said_to_be_compared() -> None:
    class Hides(Net):
        def forward(self, x: Tensor) -> Any:
            return Opaque(Opaque(super().forward(x)))

    report = verify_sync(sync_net(Hides), batch())
    assert report.output is None
    assert report.conclusion == "incomplete"
    assert "INCOMPLETE: 3 layers give the forward results of the undivided batch" in str(report)
    assert "- output['held'][0].held (in a Opaque)" in str(report)
    assert "pass a loss" in str(report)


def test_a_loss_of_the_output_can_be_compared_instead() -> None:
    seen: list[torch.Size] = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output.square().mean()

    report = verify_sync(sync_net(), batch(), loss=loss)
    assert report.ok, report
    assert small(report)
    assert {shape[0] for shape in seen} == {5, 3, 2}


def test_outputs_that_cannot_be_joined_are_not_taken_for_equal() -> None:
    class Pairs(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y @ y.t()

    report = verify_sync(sync_net(Pairs), batch(4))
    assert not report.ok
    assert "do not join" in str(report)


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    nn.DataParallel,
    lambda model: DataParallelWithCallback(model, replicas=2),
    lambda model: torch.compile(model, backend="eager"),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["DataParallel", "WithCallback", "compile"])
def test_the_model_within_a_wrapper_is_checked(wrap: Callable[[nn.Module], nn.Module]) -> None:
    report = verify_sync(wrap(sync_net()), batch())
    assert report.ok, report
    assert set(verdicts(report)) == {"bn", "bn_left", "bn_right"}
    assert "Checked is the model within" in str(report)


def uncopyable() -> nn.Module:
    model = sync_net()
    model.cache = model.conv.weight * 2
    return model  # type: ignore[no-any-return]


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: sync_net().eval(), {}, "in training mode"),
    (lambda: nn.Sequential(nn.LazyBatchNorm2d()), {}, "lazy parameter 0.weight"),
    (uncopyable, {}, "copy.deepcopy can copy"),
    (lambda: "model", {}, "expected an nn.Module, got str"),
    (sync_net, {"replicas": 1}, "2 or more replicas, got 1"),
    (sync_net, {"replicas": 2, "process_group": object()}, "leave one out"),
    (lambda: None, {}, "got NoneType"),
]


@pytest.mark.parametrize(("make", "options", "words"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_checked_is_refused(
    make: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        verify_sync(make(), batch(), **options)


def test_importing_the_package_does_not_import_the_check() -> None:
    code = """
import sys, syncbn_torch
print('syncbn_verify' in sys.modules, syncbn_torch.verify_sync.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False verify_sync"


def test_nan_in_both_steps_is_not_compared_and_nan_in_one_is_wrong() -> None:
    model, x = sync_net(), batch()
    x[0, 0, 0, 0] = float("nan")
    report = verify_sync(model, x)
    assert report.conclusion == "incomplete"
    assert set(verdicts(report).values()) == {"unclear"}
    assert "- output, the gradient of conv.weight and 18 more (NaN in both steps)" in str(report)

    class Late(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y * float("nan") if len(x) == 2 else y

    report = verify_sync(sync_net(Late), batch())
    assert report.output == float("inf")
    assert not report.ok


def test_lists_of_samples_are_split_where_batch_sizes_is_set() -> None:
    class OfImages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.layers(torch.stack(images))  # type: ignore[no-any-return]

    model = convert_model(OfImages())
    batch = (list(torch.randn(5, 3, 6, 6)),)
    report = verify_sync(model, batch, batch_sizes=[2, 3])
    assert report.ok, report
    assert report.sizes == (2, 3)
    wrapped = DataParallelWithCallback(model, replicas=2, batch_sizes="even")
    assert verify_sync(wrapped, batch).sizes == (3, 2)
