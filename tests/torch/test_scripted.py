"""Modules of torch.jit within a model stay as they are, and their batch norm is named."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn_torch import (
    ConversionReport,
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm2d,
    convert_model,
    revert_model,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # deprecated
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = torch.randn(4, 3, 5, 5)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), None, None, training=True)


def block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))


def script(module: nn.Module) -> Any:
    return torch.jit.script(module)


def trace(module: nn.Module) -> Any:
    return torch.jit.trace(module, (X,), check_trace=False)


def loaded() -> Any:
    file = io.BytesIO()
    torch.jit.save(script(block()), file)
    file.seek(0)
    return torch.jit.load(file)


# What torch.jit has compiled, and the names of the batch norm in it that takes statistics.
COMPILED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "convolution": (lambda: script(nn.Conv2d(3, 3, 1)), []),
    "layer": (lambda: script(nn.BatchNorm2d(3)), [""]),
    "scripted": (lambda: script(block()), ["1"]),
    "traced": (lambda: trace(block()), ["1"]),
    "loaded": (loaded, ["1"]),
    "functional": (lambda: script(Functional()), [""]),
    "functional traced": (lambda: trace(Functional()), [""]),
    "traced in eval": (lambda: trace(block().eval()), []),
    "frozen": (lambda: torch.jit.freeze(script(block().eval())), []),
}


@pytest.mark.parametrize("held", ["itself", "submodule", "list"])
@pytest.mark.parametrize(("make", "names"), COMPILED.values(), ids=COMPILED.keys())
def test_compiled_modules_stay_and_their_batch_norm_is_named(
    make: Callable[[], Any], names: list[str], held: str
) -> None:
    compiled = make()
    place = {"itself": "", "submodule": "0.", "list": "layers[0]."}[held]
    model: Any = compiled
    if held != "itself":
        model = nn.Sequential(compiled if held == "submodule" else nn.Identity())
        model.append(nn.BatchNorm2d(3))
        model.layers = [compiled] if held == "list" else []
    expected = [(place + name).strip(".") or "the model itself" for name in names]
    ways: list[Callable[[Any], Any]] = [convert_model, SyncBatchNorm.convert_sync_batchnorm]
    for convert in ways:
        report = ConversionReport()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert convert(model) is model
            convert_model(model, report=report)  # again: only names what was kept
        kept = [layer for layer in report.kept if not layer.expected]
        assert [layer.name for layer in kept] == expected
        assert all("of torch.jit" in layer.before for layer in kept)
        texts = [str(w.message) for w in said]
        assert any("can't synchronize" in text for text in texts) is bool(expected), texts
        if held != "itself":
            assert compiled is (model[0] if held == "submodule" else model.layers[0])
            assert type(model[1]).__name__.startswith("Sync")
            assert type(revert_model(model)[1]) in (nn.BatchNorm2d, nn.SyncBatchNorm)
        else:
            assert revert_model(model) is model
    assert model(X).shape == X.shape


@pytest.mark.parametrize("make", [script, trace])
def test_replicas_warn_of_compiled_batch_norm_that_takes_statistics(make: Any) -> None:
    model = nn.Sequential(make(block()), SynchronizedBatchNorm2d(3))
    wrapper = DataParallelWithCallback(model, replicas=2)
    with pytest.warns(UserWarning, match=r"0\.1 \(BatchNorm2d of torch\.jit\) does not sync"):
        wrapper(X)
