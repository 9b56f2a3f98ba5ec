"""Judge layers and the whole model by what was recorded.

A layer is judged by itself: what it returned to the parts of the batch must be what it returns for
all of its input at once. So only the layers that went wrong are blamed, not those after them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.convert import convert_model
from syncbn_torch.verify.figures import buffer_difference, difference, joined, moments, tolerance
from syncbn_torch.verify.prepare import duplicate, make_alone
from syncbn_torch.verify.recording import Call
from syncbn_torch.verify.report import LayerReport, Verdict
from syncbn_torch.verify.steps import Split, Whole

__all__ = ["judge_layer", "model_differences"]

Buffers = Sequence[Mapping[str, Tensor]]

_KNOWN = (_SynchronizedBatchNorm, nn.SyncBatchNorm)
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class _Replay:
    """Differences of a layer to its replay over the joined input, and their limit.

    `separate`: how far the output would be off if each part used its own statistics; 0 for
    classes that are known to synchronize. `frozen`: whether the layer computes with its running
    statistics also in training mode; asked only where `separate` is small.
    """

    output: float
    gradient: float | None
    running: float | None
    separate: float
    limit: float
    frozen: bool = False

    @property
    def right(self) -> bool:
        figures = (self.output, self.gradient, self.running)
        return all(figure is None or figure <= self.limit for figure in figures)


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
    figures: _Replay | None = None
    unable = "its output is not a tensor"
    if not complete:
        unable = "not all of its calls could be recorded: its first argument has to be a tensor"
    elif all(call.y is not None for own in calls for call in own):
        found = replace(found, statistics=_drift(whole.recorder.calls[name][0], calls))
        buffers = [] if split.error else _of_layer(name, split.buffers)
        try:
            figures = _replayed(layer, calls, buffers)
        except Exception as error:  # a class of the user's, called in a way that is not known
            unable = f"calling the layer by itself raised {type(error).__name__}: {error}"
    if figures is not None:
        found = replace(
            found, output=figures.output, gradient=figures.gradient, running=figures.running
        )
    verdict, reason = _verdict(layer, begun, figures, split, registered, wrong_group, unable)
    if verdict == "not called" and _changed(name, layer, split):
        verdict = "not synchronized"
        reason = (
            "its running statistics changed, but its forward was not called, so something else "
            "normalizes (F.batch_norm, or the forward of a base class). Call the layer itself."
        )
    if verdict == "ok" and name in split.around:
        reason = (
            "called around the replica, by a bound method or a plain list; the replica's own copy "
            "ran and synchronized. Under activation checkpointing this raises CheckpointError."
        )
    return replace(found, verdict=verdict, reason=reason)


def _verdict(
    layer: nn.Module,
    begun: Sequence[int],
    figures: _Replay | None,
    split: Split,
    registered: bool,
    wrong_group: str,
    unable: str,
) -> tuple[Verdict, str]:
    uses_batch = layer.training or getattr(layer, "running_mean", None) is None
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
        not isinstance(layer, _KNOWN)
        and isinstance(layer, _BatchNorm)
        and figures.separate <= 10 * figures.limit
    ):
        if figures.frozen:
            return "eval mode", "uses running statistics only, also in training mode."
        return "unclear", (
            "all parts of the batch have the same statistics here, so nothing can be said about "
            "this class. Use a batch of random values."
        )
    return "ok", ""


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
        (mean, std), now = expected.x.cpu(), moments(joined([call.x for call in own])).cpu()
        if now.shape != expected.x.shape:
            return math.inf
        scale = torch.stack([mean.abs(), std]).amax().item()
        drift += [difference(now[0], mean, scale), difference(now[1], std, scale)]
    return max(drift, default=None)


def _replayed(layer: nn.Module, calls: Sequence[Sequence[Call]], buffers: Buffers) -> _Replay:
    """Call the layer with the joined input of all parts, once for each call of the parts."""
    home = next((t.device for t in [*layer.parameters(), *layer.buffers()]), None)
    once = make_alone(duplicate(layer))
    # normalized values are about 1, times the weight; an input of equal values gives rounding alone
    weight = getattr(layer, "weight", None)
    unit = weight.detach().abs().max().item() if isinstance(weight, Tensor) else 1.0
    output, gradient, separate, limit = 0.0, [], 0.0, 0.0
    before: nn.Module | None = None
    for own in zip(*calls, strict=True):
        given = joined([call.x for call in own])
        x = given.to(home or given.device).requires_grad_()
        before = None if isinstance(layer, _KNOWN) else duplicate(once)
        y = once(x)
        actual = joined([call.y for call in own if call.y is not None]).to(y.device)
        output = max(output, difference(actual, y, unit))
        if before is not None:
            separate = max(separate, _separate(before, own, y, unit))
        limit = max(limit, tolerance(x.dtype).layer, tolerance(y.dtype).layer)
        gradient += _gradient(x, y, own)
    running = _largest(buffer_difference(after, dict(once.named_buffers())) for after in buffers)
    frozen = before is not None and separate <= 10 * limit and _is_frozen(before, x, unit, limit)
    return _Replay(output, _largest(gradient), running, separate, limit, frozen)


def _largest(figures: Iterable[float | None]) -> float | None:
    """The largest figure that is known; None if none is."""
    return max((figure for figure in figures if figure is not None), default=None)


def _gradient(x: Tensor, y: Tensor, calls: Sequence[Call]) -> list[float]:
    """The difference of the gradient of x, if all parts have one."""
    dxs = [call.dx for call in calls if call.dx is not None]
    if len(dxs) < len(calls) or not y.requires_grad:
        return []
    dys = [torch.zeros_like(call.x) if call.dy is None else call.dy for call in calls]
    dy = joined(dys).to(y.device)
    (dx,) = torch.autograd.grad(y, x, dy)
    # The gradient may be rounding alone, as that of equal dy is. What it is made of has this size:
    slope = _spread(y) / (_spread(x) or 1.0)
    floor = dy.abs().max().item() * slope if dy.numel() else 0.0
    return [difference(joined(dxs).to(dx.device), dx, floor if math.isfinite(floor) else 0.0)]


def _spread(x: Tensor) -> float:
    """The largest standard deviation of a channel."""
    return moments(x)[1].max().item() if x.numel() else 0.0


def _separate(layer: nn.Module, calls: Sequence[Call], y: Tensor, unit: float) -> float:
    """How far off the output would be if each part were normalized by itself."""
    try:
        with torch.no_grad():
            alone = [duplicate(layer)(call.x.to(y.device)) for call in calls]
            return difference(joined(alone), y, unit)
    except ValueError:  # one value per channel
        return math.inf


def _is_frozen(layer: nn.Module, x: Tensor, unit: float, limit: float) -> bool:
    """Whether the layer gives for random values of the shape of x what it gives in eval mode."""
    probe = 3 + 2 * torch.randn_like(x)
    with torch.no_grad():
        training, evaluating = duplicate(layer)(probe), duplicate(layer).eval()(probe)
    return difference(training, evaluating, unit) <= limit


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
        difference(value.to(before.device), before) > 0
        for own in _of_layer(name, split.buffers)
        for key, before in layer.named_buffers()
        if (value := own.get(key)) is not None
    )


def model_differences(
    whole: Whole, split: Split
) -> tuple[float | None, float | None, float | None]:
    """The largest differences of outputs, of gradients of parameters, and of buffers."""
    if split.error:
        return None, None, None
    outputs = [
        difference(joint.to(y.device), y)
        for joint, y in zip(split.joined, whole.outputs, strict=False)
        if joint is not None
    ]
    floor = 1e-3 * max((g.abs().max().item() for g in whole.gradients.values()), default=0.0)
    gradients = [
        # a gradient of rounding alone (a bias before batch norm) has no scale of its own
        difference(split.gradients.get(name, torch.zeros_like(g)), g, floor)
        for name, g in whole.gradients.items()
    ]
    buffers = _largest(buffer_difference(own, whole.buffers) for own in split.buffers)
    output = math.inf if split.mismatch else max(outputs, default=None)
    return output, max(gradients, default=None), buffers
