"""Judge each batch norm layer by itself: record its calls, then call it with all of its input.

What a layer returned to the parts of the batch must be what it returns for the input of all parts
at once. So only layers that went wrong are blamed, not those after them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncbn_torch._torch_private import backward_task
from syncbn_torch.conversion.convert import convert_model
from syncbn_torch.conversion.scripted import name_of_scripted, uses_batch
from syncbn_torch.data_parallel import originals
from syncbn_torch.data_parallel.pytrees import SIMPLE_TYPES
from syncbn_verify.comparison import difference, joined_values, largest, moments, tolerance
from syncbn_verify.copies import SYNCHRONIZED, alone, duplicate
from syncbn_verify.report import LayerReport, Verdict

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Call:
    """One call of a layer by one part of the batch; what is not known is None.

    `more`, `named`: the arguments after x. `settings`: the layer's numbers and flags at that time,
    as `training` and `momentum`, which the model may set in its forward.
    """

    x: Tensor | None = None
    y: Tensor | None = None
    dx: Tensor | None = None
    dy: Tensor | None = None
    more: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def on_cpu(self) -> Call:
        """The same on the CPU, to be sent to other processes."""
        tensors = {key: _on_cpu(getattr(self, key)) for key in ("x", "y", "dx", "dy")}
        named = {name: _on_cpu(value) for name, value in self.named.items()}
        more = tuple(map(_on_cpu, self.more))
        return Call(**tensors, more=more, named=named, settings=self.settings)


Calls = Sequence[Sequence[Call]]  # of one layer, by part


def record(
    layers: Mapping[str, nn.Module], parts: int, *, moments_only: bool = False
) -> dict[str, list[list[Call]]]:
    """The calls of layers, by name and part, that are made from now on.

    A recorded layer gets a subclass of its class, whose forward records. Hooks would miss calls of
    `layer.forward`, and see what other hooks have changed. `moments_only`: keep nothing but the
    moments of the input, as `x`.
    """
    calls: dict[str, list[list[Call]]] = {name: [[] for _ in range(parts)] for name in layers}
    for name, layer in layers.items():
        layer.__class__ = _recording(type(layer), calls[name], moments_only)
    return calls


def _recording(
    base: type[nn.Module], calls: list[list[Call]], moments_only: bool
) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(base.forward, self)
        if backward_task() != -1:  # a checkpoint computes the call again
            return run(*args, **kwargs)
        replica = originals.current()
        call = Call()
        calls[0 if replica is None else replica.index].append(call)
        if not args:  # the input by its name?
            first = next(iter(inspect.signature(run).parameters), "")
            if first in kwargs:
                args = (kwargs.pop(first),)
        if not args or not isinstance(args[0], Tensor):
            return run(*args, **kwargs)
        if moments_only:
            call.x = moments(args[0])
            return run(*args, **kwargs)
        call.x = _kept(args[0])
        call.more = tuple(map(_kept, args[1:]))
        call.named = {name: _kept(value) for name, value in kwargs.items()}
        call.settings = {
            key: value
            for key, value in vars(self).items()
            if type(value) in SIMPLE_TYPES and not key.startswith("_") and key != "process_group"
        }
        x = args[0].clone()  # so that its gradient is that of this call alone
        if x.requires_grad:
            x.register_hook(partial(setattr, call, "dx"))  # first: the layer may overwrite x
        y = run(x, *args[1:], **kwargs)
        if isinstance(y, Tensor):
            call.y = _kept(y)
            if y.grad_fn is not None:
                # what the layer gets in the end: hooks of the user may change the gradient before
                y.grad_fn.register_prehook(partial(_keep_gradient, call, y.output_nr))
        return y

    same = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**same, "forward": forward})


def _keep_gradient(call: Call, number: int, gradients: tuple[Tensor | None, ...]) -> None:
    call.dy = gradients[number]


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    return value if type(value) in SIMPLE_TYPES else None


def judge_layer(
    name: str,
    layer: nn.Module,
    calls: Calls,
    buffers: Sequence[Mapping[str, Tensor]],
    *,
    registered: bool,
    wrong_group: str,
    error: str,
    out_of_step: bool,
) -> LayerReport:
    """The report of one layer.

    `layer`: as it was before the step. `buffers`: of the layer after it, in each process.
    `registered`: False for a layer in a plain list. `wrong_group`: why the layer's group is not
    the checked one, or "". `error`: of the split step; `out_of_step`: whether it means that the
    parts made different calls.
    """
    begun = tuple(map(len, calls))
    report = LayerReport(name, type(layer).__name__, begun, "ok")
    flat = [call for own in calls for call in own]
    training = any(call.settings.get("training", layer.training) for call in flat)
    if wrong_group:
        return replace(report, verdict="wrong group", reason=f"{wrong_group}.")
    if error and (not any(begun) or (len(set(begun)) > 1 and not out_of_step)):
        return replace(report, verdict="not reached")
    if not any(begun):
        return replace(report, verdict="not called")
    if not training and getattr(layer, "running_mean", None) is not None:
        reason = "in eval mode: running statistics need no synchronization."
        return replace(report, verdict="eval mode", reason=reason)
    if len(set(begun)) > 1:
        counts = f"{', '.join(map(str, begun[:-1]))} and {begun[-1]}"
        reason = (
            f"the parts called it {counts} times. Every part has to make the same calls in the "
            "same order."
        )
        return replace(report, verdict="unequal calls", reason=reason)
    unable, right = "its input or its output is not a tensor", type(layer) not in _PLAIN
    if all(call.y is not None for call in flat):
        try:
            report, is_right = _compared(report, layer, calls, [] if error else buffers)
            unable, right = "", right and is_right
        except Exception as raised:  # a class of the user's, called in a way that is not known
            unable = f"calling the layer by itself raised {type(raised).__name__}: {raised}"
    # so begins torch's error for tensors of the CPU
    elif isinstance(layer, nn.SyncBatchNorm) and "SyncBatchNorm expected input" in error:
        right = False
    elif error and right:
        return replace(report, verdict="not reached")
    if not right:
        return replace(report, verdict="not synchronized", reason=_why_not(layer, registered))
    if not unable and any(call.y is not None and call.y.isnan().any() for call in flat):
        unable = "some of its results are NaN. Use a batch and parameters without NaN"
    known = isinstance(layer, (*SYNCHRONIZED, nn.SyncBatchNorm))
    if not unable and not known and _same_moments(calls):
        unable = (
            "all parts of the batch have the same statistics here, so nothing can be said about "
            "this class. Use a batch of random values"
        )
    return replace(report, verdict="unclear", reason=f"{unable}.") if unable else report


def _compared(
    report: LayerReport, layer: nn.Module, calls: Calls, buffers: Sequence[Mapping[str, Tensor]]
) -> tuple[LayerReport, bool]:
    """The report with differences to the layer's results for the joined input, if all is right."""
    one = alone(duplicate(layer))
    home = next((t.device for t in [*one.parameters(), *one.buffers()]), torch.device("cpu"))
    tensors = [t for own in calls for c in own for t in (c.x, c.y) if t is not None]
    allowed = max(tolerance(tensor.dtype) for tensor in tensors)
    output, gradients = [], []
    for own in zip(*calls, strict=True):
        x = joined_values([c.x for c in own if c.x is not None]).to(home).requires_grad_()
        y = _called(one, own, x)
        actual = joined_values([c.y for c in own if c.y is not None])
        floor = max(allowed.floor, _rounding(layer, x) / allowed.layer)
        output.append(difference(actual, y, floor))
        dxs = [c.dx for c in own if c.dx is not None]
        if y.requires_grad and len(dxs) == len(own):
            dys = [torch.zeros_like(c.y) if c.dy is None else c.dy for c in own]
            (dx,) = torch.autograd.grad(y, x, joined_values(dys).to(home), allow_unused=True)
            dx = torch.zeros_like(x) if dx is None else dx
            gradients.append(difference(joined_values(dxs), dx, floor))
    running = [largest(own, dict(one.named_buffers()), allowed.floor) for own in buffers]
    report = replace(
        report,
        output=max(output),
        gradient=max(gradients, default=None),
        running=max((figure for figure in running if figure is not None), default=None),
    )
    figures = (report.output, report.gradient, report.running)
    return report, all(figure is None or figure <= allowed.layer for figure in figures)


def _rounding(layer: nn.Module, x: Tensor) -> float:
    """The error that y may have: that of the mean of x, which small variances make large."""
    mean, std = moments(x)
    unit = min(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
    shares = mean.abs() / (std.square() + getattr(layer, "eps", 0.0)).sqrt()
    return 100 * unit * float(shares.max())


def _called(layer: nn.Module, calls: Sequence[Call], x: Tensor) -> Tensor:
    """The forward of the layer's class, which was recorded: hooks have run before and after it."""
    first = calls[0]
    vars(layer).update({k: v for k, v in first.settings.items() if k in vars(layer)})

    def joint(values: Sequence[Any]) -> Any:
        """A further argument: rows of all parts, or what all of them have got."""
        value = values[0]
        if not isinstance(value, Tensor):
            return value
        rows = value.dim() and all(len(v) == len(c.x) for v, c in zip(values, calls, strict=True))  # type: ignore[arg-type]
        return (torch.cat(list(values)) if rows else value).to(x.device)

    more = [joint(values) for values in zip(*[call.more for call in calls], strict=True)]
    named = {name: joint([call.named[name] for call in calls]) for name in first.named}
    # a clone: the layer may overwrite its input
    y: Tensor = type(layer).forward(layer, x.clone(), *more, **named)
    return y


def _same_moments(calls: Calls) -> bool:
    """Whether all parts of the batch have the same mean and standard deviation in each call."""
    each = [[moments(c.x) for c in own if c.x is not None] for own in zip(*calls, strict=True)]
    return all(difference(x, own[0], 1e-5) < 1e-6 for own in each for x in own)


def _why_not(layer: nn.Module, registered: bool) -> str:
    kind = type(layer).__name__
    if isinstance(layer, SYNCHRONIZED):
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
    holder = nn.Sequential(duplicate(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_model(holder)
    convertible = type(holder[0]) is not type(layer)
    remedy = (
        "Call syncbn_torch.convert_model(model)."
        if convertible
        else f"Replace {kind}, which convert_model does not know, by a synchronized layer."
    )
    if isinstance(layer, nn.SyncBatchNorm):
        return f"nn.SyncBatchNorm synchronizes CUDA tensors of several processes only. {remedy}"
    plain = f"plain nn.{kind}" if type(layer) in _PLAIN else kind
    return f"a {plain}, which uses the statistics of each part alone. {remedy}"


def judge_scripted(
    name: str, module: nn.Module, tracked: float | None, error: str, differs: bool
) -> LayerReport:
    """The report of batch norm that torch.jit has compiled, whose calls can't be seen.

    `tracked`: how far its buffers changed; None if it has none. `differs`: whether the whole
    model's results do.
    """
    report = LayerReport(name, name_of_scripted(module), (), "not synchronized")
    if not uses_batch(module):
        return replace(report, verdict="eval mode", reason="in eval mode, compiled by torch.jit.")
    if error:
        return replace(report, verdict="not reached")
    if tracked == 0:
        return replace(report, verdict="not called")
    reason = (
        "compiled by torch.jit, so it uses the statistics of each part alone. Convert and train "
        "the model as it was before torch.jit.script or trace."
    )
    verdict: Verdict = "not synchronized" if tracked or differs else "unclear"
    return replace(report, verdict=verdict, reason=reason)
