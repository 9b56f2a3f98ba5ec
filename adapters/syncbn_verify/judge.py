"""Judge layers and the whole model by what was recorded.

A layer is judged by itself: what it returned to the parts of the batch must be what it returns for
all of its input at once. So only the layers that went wrong are blamed, not those after them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.conversion.convert import convert_model
from syncbn_torch.conversion.scripted import name_of_scripted, uses_batch
from syncbn_verify.figures import (
    Tolerance,
    both_nan,
    buffer_difference,
    difference,
    joined,
    largest,
    moments,
    scale_of,
)
from syncbn_verify.prepare import duplicate
from syncbn_verify.recording import Call
from syncbn_verify.replay import KNOWN, Buffers, Replay, replayed
from syncbn_verify.report import LayerReport, Verdict
from syncbn_verify.steps import Split, Whole

__all__ = ["judge_layer", "judge_scripted", "model_differences"]

_COMPILED = (
    "compiled by torch.jit, so it uses the statistics of each part alone. Convert and train the "
    "model as it was before torch.jit.script or trace."
)
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def judge_layer(
    name: str, layer: nn.Module, whole: Whole, split: Split, registered: bool, wrong_group: str
) -> LayerReport:
    """The report of one layer. `layer`: as it was before both steps.

    `registered`: False for a layer in a plain list. `wrong_group`: why the layer's group is not
    the checked one, or "".
    """
    begun, calls = split.begun(name), split.calls(name)
    found = LayerReport(name, _kind(layer), tuple(begun), "ok")
    complete = len({*begun, *map(len, calls)}) == 1 and bool(begun[0])
    figures: Replay | None = None
    unable = "its output is not a tensor"
    if not complete:
        unable = "not all of its calls could be recorded: its first argument has to be a tensor"
    elif all(call.y is not None for own in calls for call in own):
        found = replace(found, statistics=_drift(whole.recorder.calls[name][0], calls))
        buffers = [] if split.error else _of_layer(name, split.buffers)
        try:
            figures = replayed(layer, calls, buffers)
        except Exception as error:  # a class of the user's, called in a way that is not known
            unable = f"calling the layer by itself raised {type(error).__name__}: {error}"
    if figures is not None:
        found = replace(
            found, output=figures.output, gradient=figures.gradient, running=figures.running
        )
    uses_batch = _uses_batch(layer, calls)
    verdict, reason = _verdict(
        layer, begun, figures, split, registered, wrong_group, unable, uses_batch
    )
    if verdict == "not called" and _changed(name, layer, split):
        verdict = "not synchronized"
        reason = (
            "its running statistics changed, but its forward was not called, so something else "
            "normalizes (F.batch_norm, or the forward of a base class). Call the layer itself."
        )
    return replace(found, verdict=verdict, reason=reason)


def _verdict(
    layer: nn.Module,
    begun: Sequence[int],
    figures: Replay | None,
    split: Split,
    registered: bool,
    wrong_group: str,
    unable: str,
    uses_batch: bool,
) -> tuple[Verdict, str]:
    if split.error and not split.out_of_step and len(set(begun)) > 1:
        return "not reached", ""
    if not any(begun):
        if wrong_group:
            return "wrong group", f"{wrong_group}."
        return ("not reached", "") if split.error else ("not called", "")
    if not uses_batch:
        return "eval mode", "in eval mode: running statistics need no synchronization."
    if len(set(begun)) > 1:
        return "unequal calls", (
            f"the parts called it {_listed(begun)} times. Every part has to make the same calls in "
            "the same order."
        )
    if wrong_group:
        return "wrong group", f"{wrong_group}."
    if type(layer) in _PLAIN or (figures is not None and not figures.right):
        return "not synchronized", _why_not(layer, registered)
    if figures is None:
        # so begins torch's error for tensors of the CPU
        refused = "SyncBatchNorm expected input tensor" in split.error
        if refused and isinstance(layer, nn.SyncBatchNorm):
            return "not synchronized", _why_not(layer, registered)
        if split.error:
            return "not reached", ""
        return "unclear", f"{unable}. Check it by hand."
    if (
        not isinstance(layer, KNOWN)
        and isinstance(layer, _BatchNorm)
        and figures.separate <= 10 * figures.limit
    ):
        if figures.frozen:
            return "eval mode", "uses running statistics only, also in training mode."
        return "unclear", (
            "all parts of the batch have the same statistics here, so nothing can be said about "
            "this class. Use a batch of random values."
        )
    if figures.nan:
        return "unclear", (
            "some of its results are NaN in both steps, so they can't be compared. Use a batch and "
            "parameters without NaN."
        )
    return "ok", ""


def _uses_batch(layer: nn.Module, calls: Sequence[Sequence[Call]]) -> bool:
    """Whether the layer took statistics of its input; the model may set its mode in forward."""
    modes = [call.settings.get("training", layer.training) for own in calls for call in own]
    return any(modes or [layer.training]) or getattr(layer, "running_mean", None) is None


def _why_not(layer: nn.Module, registered: bool) -> str:
    kind = _kind(layer)
    if isinstance(layer, _SynchronizedBatchNorm):
        if not layer.training:
            return (
                "in eval mode without running statistics it uses the batch of each rank. Keep "
                "running statistics, or train it."
            )
        return (
            f"its results are not those of the whole batch, although a {kind} synchronizes. Look "
            "at what its class, its hooks or the model do to it."
        )
    if not registered:
        return (
            f"a {kind} in a plain list or dictionary. Register it, for example in an "
            "nn.ModuleList, and call syncbn_torch.convert_model(model)."
        )
    if isinstance(layer, nn.SyncBatchNorm):
        known = type(layer) is nn.SyncBatchNorm or _convertible(layer)
        remedy = (
            "Call syncbn_torch.convert_model(model)."
            if known
            else f"Replace {kind}, which convert_model does not know, by a synchronized layer."
        )
        return f"nn.SyncBatchNorm synchronizes CUDA tensors of several processes only. {remedy}"
    if _convertible(layer):
        plain = f"plain nn.{kind}" if type(layer) in _PLAIN else kind
        return (
            f"a {plain}, which uses the statistics of each part alone. Call "
            "syncbn_torch.convert_model(model)."
        )
    return (
        f"{kind} is a class that convert_model does not know, and it does not synchronize. Replace "
        "it by a synchronized layer with the same settings."
    )


def _convertible(layer: nn.Module) -> bool:
    """Whether convert_model replaces the layer."""
    holder = nn.Sequential(duplicate(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not
        convert_model(holder)
    return type(holder[0]) is not type(layer)


def _kind(layer: nn.Module) -> str:
    return type(layer).__name__


def _listed(counts: Sequence[int]) -> str:
    *before, last = map(str, counts)
    return f"{', '.join(before)} and {last}"


def _drift(whole: Sequence[Call], calls: Sequence[Sequence[Call]]) -> float | None:
    """How far mean and standard deviation of the whole input are from the undivided step's."""
    drift = []
    for expected, own in zip(whole, zip(*calls, strict=True), strict=False):
        before, now = expected.x.cpu(), moments(joined([call.x for call in own])).cpu()
        if now.shape != before.shape:
            return math.inf
        scale = before.abs().nan_to_num(0.0, 0.0).amax().clamp_min(1e-300)
        drift.append(difference(now, before, scale))
    return largest(drift)


def _of_layer(name: str, buffers: Buffers) -> list[dict[str, Tensor]]:
    """The buffers of one layer, by their names in the layer."""
    prefix = f"{name}." if name else ""
    return [
        {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        for own in buffers
    ]


def _changed(name: str, layer: nn.Module, split: Split) -> bool:
    """Whether buffers of the layer have other values than before the step."""
    return any(
        difference(value, before, torch.ones((), dtype=torch.float64)) > 0
        for own in _of_layer(name, split.buffers)
        for key, before in layer.named_buffers()
        if (value := own.get(key)) is not None
    )


def judge_scripted(name: str, module: nn.Module, split: Split, differs: bool) -> LayerReport:
    """The report of batch norm that torch.jit has compiled, whose calls can't be seen.

    `differs`: whether the whole model's results do.
    """
    report = LayerReport(name, name_of_scripted(module), (), "not synchronized", reason=_COMPILED)
    if not uses_batch(module):
        return replace(report, verdict="eval mode", reason="in eval mode, compiled by torch.jit.")
    if split.error:
        return replace(report, verdict="not reached", reason="")
    if any(True for _ in module.buffers(recurse=False)):
        if not _changed(name, module, split):
            return replace(report, verdict="not called", reason="")
    elif not differs:
        return replace(report, verdict="unclear", reason=f"{_COMPILED} Or check it by hand.")
    return report


@dataclass(frozen=True)
class ModelDifferences:
    """The largest differences of the whole model's results; None: not known.

    `not_compared`: which outputs, gradients and buffers could not be compared, and why.
    """

    output: float | None = None
    gradient: float | None = None
    buffer: float | None = None
    not_compared: tuple[str, ...] = ()


def model_differences(
    whole: Whole, other: Whole | None, split: Split, allowed: Tolerance
) -> ModelDifferences:
    """Differences of outputs, of gradients of parameters, and of buffers.

    `other`: the undivided step after small changes.
    """
    if split.error:
        return ModelDifferences()
    limit, outputs, missing = allowed.model, [], [*whole.hidden]
    nan: list[str] = []
    others = other.outputs if other is not None else [None] * len(whole.outputs)
    for path, joint, y, shaken_y in zip(
        whole.paths, split.joined, whole.outputs, others, strict=False
    ):
        if joint is None:
            continue
        figure = difference(joint, y, scale_of(y, limit, allowed, shaken_y))
        if figure and not y.is_floating_point() and not y.dim():
            missing.append(f"{path} (a whole number that is no sum over the parts)")
        else:
            outputs.append(figure)
        if both_nan(joint, y):
            nan.append(path)
    gradients = []
    # a gradient of rounding alone, as of a bias before batch norm, has no scale of its own
    sizes = [g.abs().max().item() for g in whole.gradients.values() if g.numel()]
    floor = 1e-3 * median([size for size in sizes if math.isfinite(size)] or [0.0])
    for name in dict.fromkeys([*whole.gradients, *split.gradients]):
        actual, expected = split.gradients.get(name), whole.gradients.get(name)
        actual = torch.zeros_like(expected) if actual is None and expected is not None else actual
        expected = torch.zeros_like(actual) if expected is None and actual is not None else expected
        if actual is None or expected is None:
            continue
        shaken_one = None if other is None else other.gradients.get(name)
        scale = scale_of(expected, limit, allowed, shaken_one) + floor
        gradients.append(difference(actual, expected, scale))
        if both_nan(actual, expected):
            nan.append(f"the gradient of {name}")
    changed = {} if other is None else other.buffers
    buffers = [
        buffer_difference(own, whole.buffers, changed, limit, allowed) for own in split.buffers
    ]
    nan += [
        name
        for name, buffer in whole.buffers.items()
        if any(name in own and both_nan(own[name], buffer) for own in split.buffers)
    ]
    if nan:
        rest = f" and {len(nan) - 2} more" if len(nan) > 2 else ""
        missing.append(f"{', '.join(nan[:2])}{rest} (NaN in both steps)")
    output = math.inf if split.mismatch else largest(outputs)
    return ModelDifferences(output, largest(gradients), largest(buffers), tuple(missing))
