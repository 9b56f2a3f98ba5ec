"""`verify_sync` accuses no right model, and says what it did not compare."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SyncReport,
    convert_model,
    freeze,
    mask_of_lengths,
    register_conversion,
    verify_sync,
)
from syncbn_torch.inplace import InPlaceABN, InPlaceABNSync

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # deprecated
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = torch.randn(6, 3, 8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Any:
        return F.relu_(self.bn2(self.conv2(F.relu(self.bn(self.conv(x)), inplace=True))) + x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.gru = nn.BatchNorm1d(3), nn.GRU(3, 4, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.gru(self.bn(x.flatten(2)).transpose(1, 2))


class Many(Block):
    """Outputs of all kinds."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).mean((2, 3))
        scores = y.masked_fill(torch.tensor([True, False, False]), float("-inf"))
        return {
            "nested": [y, (scores, y.argmax(1), y > 0)],
            "complex": torch.complex(y, 2 * y),
            "sparse": y.to_sparse(),
            "count": torch.tensor(len(x)),
            "classes": torch.tensor(3),
            "loss": y.square().mean(),
            "array": y.detach().numpy(),
        }


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Again(Block):
    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.bn(self.conv(x)).tanh()
        return x


class Hooked(Block):
    """Hooks change input, output and gradient of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bn.register_forward_pre_hook(lambda layer, args: (args[0] * 3 + 0.5,))
        self.bn.register_forward_hook(lambda layer, args, y: 2 * y + 1)
        self.bn.register_full_backward_hook(lambda layer, dx, dy: (dx[0] / 2,))

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.bn(self.conv(x))))
        if y.requires_grad:
            y.register_hook(lambda dy: dy / 3)
        return y.sin()


class Inner(Block):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.parallel = DataParallelWithCallback(Block(), replicas=2, **options)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.parallel(x))


class SetsMode(Block):
    def forward(self, x: Tensor) -> Any:
        self.bn.eval()
        return super().forward(x)


class ByKeyword(Block):
    def forward(self, x: Tensor) -> Any:
        return self.bn(input=self.conv(x))


class SetsMomentum(Block):
    def forward(self, x: Tensor) -> Any:
        self.bn.momentum = 0.3
        x = self.bn(self.conv(x))
        self.bn.momentum = 0.7
        return self.bn(self.conv(x))


class CallsForward(Block):
    def forward(self, x: Tensor) -> Any:
        return self.bn.forward(self.conv(x))


class Constant(Block):
    """A branch with a constant input, and outputs that are rounding alone."""

    def forward(self, x: Tensor) -> Any:
        same = self.bn(self.conv(torch.full_like(x, 0.3)))
        constant = torch.full_like(x, 0.1)
        return (
            super().forward(x) + same,
            same.mean((1, 2, 3)),
            x - x.mean((2, 3), keepdim=True),
            constant - constant.mean(),
        )


class Standardized(nn.Conv2d):
    """Weight standardization, as in timm: `F.batch_norm` of a weight."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias)


class Embedded(nn.Module):
    """Gradients of the table are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bn = nn.Embedding(9, 4, sparse=True), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.table(x))  # type: ignore[no-any-return]


class TimeFirst(nn.Module):
    """Rows of all samples by time, then by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.bn = nn.GRU(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x.transpose(0, 1))
        return self.bn(y.reshape(-1, 3)).reshape(y.shape).transpose(0, 1)  # type: ignore[no-any-return]


class OfEachSample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, *x.shape[2:])
        return F.batch_norm(rows, None, None, training=True).reshape_as(x)


class Conditional(SynchronizedBatchNorm2d):
    def forward(self, input: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input) * scale[:, None, None, None]


class UsesConditional(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bn = Conditional(3)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x), scale=x.mean((1, 2, 3)))


class Activated(nn.BatchNorm2d):
    """The model uses the activation."""

    act = nn.SiLU()


class UsesActivated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = Activated(3)

    def forward(self, x: Tensor) -> Any:
        return self.bn.act(self.bn(x))


class Fused(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SynchronizedFused(Fused, SynchronizedBatchNorm2d):
    pass


register_conversion(Fused, SynchronizedFused)


class Masked(nn.Module):
    """Two layers, whose padding holds NaN and large numbers."""

    def __init__(self, activation: str | None = None) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(3, activation=activation)
        self.conv, self.bn2 = nn.Conv1d(3, 3, 3, padding=1), SynchronizedBatchNorm1d(3)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        mask = mask_of_lengths(lengths, x.shape[2])
        return self.bn2(self.conv(self.bn(x, mask)), mask=mask[:, None])


LENGTHS = torch.tensor([8, 3, 0, 5, 1, 8])
PADDED = X[..., 0].masked_fill(~mask_of_lengths(LENGTHS, 8)[:, None], float("nan"))


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3), layer, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))


def frozen() -> nn.Module:
    model = convert_model(between(nn.BatchNorm2d(3)))
    freeze(model[1])
    return model


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "residual": (lambda: nn.Sequential(Block(), nn.MaxPool2d(2), Block()), X),
    "recurrent": (Recurrent, X),
    "outputs": (Many, X),
    "checkpoint": (Checkpointed, X),
    "called again": (Again, X),
    "hooks": (Hooked, X),
    "inner wrapper": (Inner, X),
    "inner wrapper with sizes": (lambda: Inner(batch_sizes=[3, 3]), X),
    "mode in forward": (SetsMode, X),
    "keyword": (ByKeyword, X),
    "momentum in forward": (SetsMomentum, X),
    "forward": (CallsForward, X),
    "constant": (Constant, X),
    "sparse gradients": (Embedded, torch.arange(6)),
    "time before samples": (TimeFirst, torch.randn(6, 5, 4)),
    "constant input": (Block, torch.full_like(X, 0.37)),
    "offset": (lambda: nn.Sequential(nn.BatchNorm2d(3), Block()), X.double() + 1e5),
    "offset in a block": (Block, X.double() + 1e5),
    "small": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), X * 1e-8),
    "weight standardization": (lambda: nn.Sequential(Standardized(3, 3, 1), Block()), X),
    "norm of samples": (lambda: nn.Sequential(Block(), OfEachSample()), X),
    "more arguments": (UsesConditional, X),
    "activation beside": (lambda: nn.Sequential(UsesActivated(), Block()), X),
    "registered": (lambda: between(Fused(3)), X),
    "mask": (Masked, (PADDED, LENGTHS)),
    "mask and activation": (lambda: Masked("silu"), (PADDED, LENGTHS)),
    "activation": (lambda: between(SynchronizedBatchNorm2d(3, activation="leaky_relu")), X),
    "clamp": (lambda: between(SynchronizedBatchNorm2d(3, eps_mode="clamp")), X),
    "frozen": (frozen, X),
    "scripted": (lambda: nn.Sequential(scripted(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)), X),
    "scripted dropout": (lambda: nn.Sequential(scripted(nn.Dropout()), nn.BatchNorm2d(3)), X),
    "scripted in eval": (lambda: nn.Sequential(scripted(nn.BatchNorm2d(3)).eval(), Block()), X),
}


def checked(model: nn.Module, x: Any = X, replicas: int = 2) -> SyncReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that can't be converted
        return verify_sync(convert_model(model), x, replicas)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("make", "x"), RIGHT.values(), ids=RIGHT.keys())
def test_a_right_model_is_not_accused(make: Callable[[], nn.Module], x: Any, replicas: int) -> None:
    report = checked(make(), x, replicas)
    assert report.conclusion == "ok", report


@pytest.mark.parametrize("value", [1.0, 0.37, 1e5])
def test_constant_input_is_told_from_a_model_that_mixes_samples(value: float) -> None:
    """Rounding decides what is behind such a layer, and switches ReLUs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    report = checked(model, torch.full_like(X, value))
    assert report.conclusion == "incomplete", report
    assert "the input of 1 has channels of one value" in str(report)


def test_layers_that_work_in_place_are_judged_and_need_processes() -> None:
    report = checked(between(InPlaceABNSync(3)))
    assert report.conclusion == "incomplete", report
    assert "replicas, which can't synchronize InPlaceABNSync (1); check the model" in str(report)
    model = between(InPlaceABN(3))
    verdicts = {x.name: x.verdict for x in checked(model).layers}
    assert verdicts == {"1": "not synchronized", "3": "ok"}


def test_a_narrow_terminal_gets_a_narrow_table() -> None:
    report = checked(nn.Sequential(OrderedDict(the_encoder_of_the_left_images=Block())))
    assert "SynchronizedBatchNorm2d" in str(report)
    table, _, _ = report.text(72).partition("(the whole model)")
    assert max(map(len, table.splitlines())) == 72
    assert "Synchronized" not in table
    assert re.search(r"\n\.\.\.\w*left_images.bn2  ", table)


# -------------------------------------------------------------------------- what is not compared


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def mixed(y: Tensor) -> Tensor:
    """A mistake of about a tenth."""
    return y + y.mean(0) / 10


# What the model makes of its output, and what the report says of it.
HIDDEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "NaN": (lambda y: (y, torch.full_like(y, float("nan"))), "output[1] (NaN in both steps)"),
    "some NaN": (lambda y: y + torch.tensor([float("nan"), 0, 0]), "output (NaN in both steps)"),
    "unknown": (
        lambda y: {"y": y, "more": Opaque(mixed(y))},
        "output['more'].tensor (in",
    ),
    "in an unknown": (lambda y: [y, Opaque(y)], "output[1].tensor"),
    "nested": (lambda y: (y, torch.nested.as_nested_tensor([y, y])), "output[1] ("),
    "no gradient": (lambda y: y.detach(), "the gradients: nothing that the model"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("change", "words"), HIDDEN.values(), ids=HIDDEN.keys())
def test_what_was_not_compared_is_named_and_not_ok(
    change: Callable[[Tensor], Any], words: str
) -> None:
    class Changed(Block):
        def forward(self, x: Tensor) -> Any:
            return change(super().forward(x).mean((2, 3)))

    report = checked(Changed())
    assert report.conclusion == "incomplete", report
    assert not report.ok
    assert "INCOMPLETE: 2 layers" in str(report)
    assert words in str(report)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "complex": lambda y: torch.complex(torch.ones_like(y), mixed(y)),
    "one huge value": lambda y: torch.cat(
        [torch.full((1, 1), 1e12).expand(len(y), 1), mixed(y)], 1
    ),
    "huge column": lambda y: mixed(y) * torch.tensor([1e20, 1.0, 1.0]),
    "sparse": lambda y: (y, mixed(y).to_sparse()),
    "integers": lambda y: (y, (1e4 * mixed(y)).long()),
    "array": lambda y: (y, mixed(y).detach().numpy()),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_found_in_every_kind_of_output(change: Callable[[Tensor], Any]) -> None:
    class Changed(Block):
        def forward(self, x: Tensor) -> Any:
            return change(super().forward(x).mean((2, 3)))

    report = checked(Changed())
    assert report.conclusion == "wrong"
    assert report.model_differs
    assert not report.faulty


def test_a_mistake_in_a_channel_beside_one_of_huge_weight_is_found() -> None:
    class Half(SynchronizedBatchNorm2d):
        """Synchronizes its first channel only."""

        def forward(self, input: Tensor) -> Tensor:
            whole = super().forward(input)
            alone = F.batch_norm(input, None, None, self.weight, self.bias, training=True)
            return torch.cat([whole[:, :1], alone[:, 1:]], 1)

    model = nn.Sequential(Half(3))
    with torch.no_grad():
        model[0].weight[0] = 1e12
    assert [layer.verdict for layer in checked(model).layers] == ["not synchronized"]


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


def test_functional_batch_norm_is_found_and_the_layer_after_it_named() -> None:
    model = nn.Sequential(Block(), Functional(), Block())
    report = checked(model)
    assert report.conclusion == "wrong"
    assert not report.faulty
    assert "or by F.batch_norm" in str(report)
    assert "The first layer whose input differs is 2.bn." in str(report)


# ------------------------------------------------------------------------------- torch.jit


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, (X,), check_trace=False)


@pytest.mark.parametrize("compiled", [scripted, traced])
@pytest.mark.parametrize("within", [True, False])
def test_compiled_batch_norm_is_blamed_and_the_model_stays_as_it_is(
    compiled: Callable[[nn.Module], Any], within: bool
) -> None:
    model = compiled(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    report = checked(nn.Sequential(model, nn.BatchNorm2d(3)) if within else model)
    name = "0.1" if within else "1"
    assert [layer.name for layer in report.faulty] == [name]
    assert f"{name}: compiled by torch.jit, so it uses the statistics of each part" in str(report)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiled_batch_norm_that_is_not_called_is_no_fault() -> None:
    class Spare(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = scripted(nn.BatchNorm2d(3))

    report = checked(Spare())
    assert report.ok, report
    assert report.layers[-1].verdict == "not called"
