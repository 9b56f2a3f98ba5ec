"""`verify_sync`: compare a training step over parts of a batch with the undivided step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from syncbn_core.errors import ArgumentError
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.scripted import scripted_batch_norm
from syncbn_torch.data_parallel.pytrees import SIMPLE_TYPES, Tree, tensors_in
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.data_parallel.split import BatchSizes, to_device
from syncbn_torch.inplace import InPlaceABNSync
from syncbn_verify.comparison import (
    Tolerance,
    difference,
    joined_outputs,
    joined_values,
    largest,
    moments,
    tolerance,
)
from syncbn_verify.copies import (
    Arguments,
    arguments_of,
    converted,
    copy_of,
    described,
    described_tensor,
    dtype_name,
    duplicate,
    norm_layers,
    random_state_kept,
    tensors_of,
    unwrapped,
)
from syncbn_verify.layers import judge_layer, judge_scripted
from syncbn_verify.ranks import Alone, Ranks, first_line, group_for
from syncbn_verify.report import Conclusion, LayerReport, SyncReport, Verdict
from syncbn_verify.steps import (
    Loss,
    Split,
    Whole,
    divided,
    draws_numbers,
    split_step,
    whole_step,
)

LOGGER = logging.getLogger("syncbn")
SAME = "pass the same model and arguments and the whole batch"

__all__ = ["Conclusion", "LayerReport", "SyncReport", "Verdict", "verify_sync"]


def verify_sync(
    model: nn.Module,
    batch: Any,
    replicas: int | None = None,
    *,
    process_group: Any = None,
    loss: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    batch_sizes: BatchSizes = None,
) -> SyncReport:
    """Check that a training step over parts of `batch` is that of the undivided batch.

    Works on copies: the model, its gradients and the random number generators stay as they are.
    Print the report that it returns; `report.ok` is the verdict. See docs/verify.md.

    Args:
        model: in training mode. Of a wrapper (`DataParallel`, `DistributedDataParallel`, of
            torch.compile) the model within is checked.
        batch: a tensor, a tuple of arguments, or a dictionary of keyword arguments. Tensors are
            split along axis 0; of other containers see `batch_sizes`.
        replicas: how many replicas in threads take a part of the batch each; default is 2.
        process_group: the ranks that take a part each, instead of replicas. All of them have to
            call this with the same model and the whole batch; the parameters and the batch of the
            first rank are used. Without `replicas` and `process_group` this is the default group,
            if torch.distributed is initialized.
        loss: what to compare and differentiate, computed from the output of each part; default
            are all floating tensors in the output. A value that each part has in the same shape,
            such as a scalar, is taken as a mean over samples.
        dtype: of the copies and the batch; None leaves theirs. A model that can't compute in
            `dtype` is checked in its own, and a note says so.
        batch_sizes: as in `DataParallelWithCallback`; lists in the batch are then lists of samples.
            Default is that of `model`, if it is such a wrapper.

    Raises `ArgumentError` for arguments that can't be checked, and what the model raises for the
    undivided batch. What it raises for the split batch is in the report.
    """
    group = group_for(replicas, process_group, "replicas", 2)
    if batch_sizes is None and isinstance(model, DataParallelWithCallback):
        batch_sizes = model.batch_sizes
    inner, note = group.together(lambda: unwrapped(model), "a model that can be checked")
    options = [f"argument dtype={dtype}", f"argument loss={'none' if loss is None else 'given'}"]
    group.agree(options + described(inner) + _described_batch(batch), SAME)
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        loss, notes = loss or (lambda output: output), [note] if note else []
        report = _report(inner, batch, group, loss, dtype, batch_sizes, notes)
    return group.from_first(report)  # type: ignore[no-any-return]


def _described_batch(batch: Any) -> list[str]:
    """What all ranks must have in common: values of tensors are left out."""
    found = Tree(batch)
    return [
        f"{path}: {described_tensor(value) if isinstance(value, Tensor) else type(value).__name__}"
        for path, value in zip(found.paths("batch"), found.values, strict=True)
    ]


def _report(
    model: nn.Module,
    batch: Any,
    group: Alone,
    loss: Loss,
    dtype: torch.dtype | None,
    batch_sizes: BatchSizes,
    notes: list[str],
) -> SyncReport:
    base, arguments = group.together(
        lambda: _prepared(model, batch, dtype), "a model and a batch that can be copied"
    )
    arguments = _shared(base, arguments, group)
    division = group.together(
        lambda: divided(arguments, group.size, _device(base), batch_sizes),
        "a batch that can be split",
    )
    group.agree([f"division of the batch {division.sizes}"], SAME)
    if len(division.parts) < (group.size if isinstance(group, Ranks) else 2):
        raise ArgumentError(
            f"expected a batch of at least {group.size} samples, got {sum(division.sizes)}; "
            "pass the whole batch"
        )
    LOGGER.info("syncbn verify: the step of the undivided batch")
    try:
        whole = group.together(
            lambda: whole_step(duplicate(base), _again(arguments), loss),
            "a model that takes the undivided batch",
        )
    except Exception as error:
        if dtype is None:
            raise
        notes.append(
            f"the model can't compute in {dtype_name(dtype)} ({first_line(error)}), so it was "
            "checked in its own dtype, in which small differences are not seen."
        )
        return _report(model, batch, group, loss, None, batch_sizes, notes)
    own = dtype or next((t.dtype for t in base.parameters()), torch.get_default_dtype())
    allowed = tolerance(own)
    random = group.together(
        lambda: draws_numbers(duplicate(base), _again(arguments), loss, whole, allowed),
        "a model that takes the undivided batch twice",
    )
    layers = norm_layers(base)
    LOGGER.info("syncbn verify: the step in %s %s", len(division.parts), group.kind)
    wrong = group.wrong_groups(layers)
    in_place = [n for n, x in layers.items() if isinstance(x, InPlaceABNSync) and x.training]
    unable = (
        f"the step in replicas, which can't synchronize InPlaceABNSync ({', '.join(in_place)}); "
        "check the model over processes: torchrun --nproc-per-node 2 -m syncbn_torch verify"
    )
    unable = unable if in_place and not isinstance(group, Ranks) else ""
    if wrong or unable:
        waiting = "it was not run, because layers would wait for ranks that take no part in it."
        split = Split(lambda name: [[] for _ in range(group.size)], error=unable or waiting)
    else:
        split = split_step(duplicate(base), division, whole, loss, group)
    LOGGER.info("syncbn verify: each layer by itself")
    judged, first = _judged(base, whole, split, wrong, allowed)
    missing = list(whole.hidden)
    if unable:
        missing.append(unable)
    figures: list[float | None] = [None, None, None]
    if math.isinf(allowed.model):
        missing.append(f"the whole model: in {dtype_name(own)} only its layers are judged")
    elif random:
        missing.append(
            "the whole model: it draws random numbers, which differ between the two steps. Each "
            "layer was judged by itself"
        )
    elif not split.error:
        figures = _differences(whole, split, division.sizes, allowed, missing, notes)
    if whole.hidden:
        notes.append("pass a loss that returns the tensors to compare.")
    if not whole.differentiable and any(p.requires_grad for p in base.parameters()):
        missing.append("the gradients: nothing that the model (or loss) returned has any")
    differs = any(figure is not None and figure > allowed.model for figure in figures)
    constant = _constant_input(whole, torch.finfo(own).eps)
    if differs and constant and all(layer.ok for layer in judged):
        missing.append(
            f"the whole model: the input of {constant} has channels of one value, so their "
            "variance is 0, and all behind them is rounding. Use a batch of random values"
        )
        figures, differs = [None, None, None], False
    judged += [
        judge_scripted(name, module, _tracked(name, module, split), split.error, differs)
        for module, name in modules_of(base).items()
        if scripted_batch_norm(module) is not None
    ]
    output, gradient, buffer = figures
    return SyncReport(
        parts=f"{len(division.parts)} {group.kind}",
        sizes=tuple(division.sizes),
        dtype=dtype_name(own),
        layers=tuple(judged),
        output=output,
        gradient=gradient,
        buffer=buffer,
        tolerance=allowed.model,
        not_compared=tuple(missing),
        first=first,
        error="" if unable else split.error,
        notes=tuple(notes),
    )


def _prepared(
    model: nn.Module, batch: Any, dtype: torch.dtype | None
) -> tuple[nn.Module, Arguments]:
    """A copy of the model and of its arguments in `dtype`."""
    base = copy_of(model, dtype)
    arguments = converted(arguments_of(batch), dtype, _device(base))
    if not tensors_in(arguments):
        raise ArgumentError(
            "expected a batch with tensors, in tuples, lists, dictionaries or dataclasses, got "
            f"none in a {type(batch).__name__}"
        )
    return base, arguments


def _shared(model: nn.Module, arguments: Arguments, group: Alone) -> Arguments:
    """Parameters, buffers, and the tensors, numbers and strings of the batch of the first rank."""
    group.share(tensors_of(model))
    found = Tree(arguments)
    group.share(tensors_in(arguments))
    shared = [
        v if type(v) in SIMPLE_TYPES or type(v) in (list, tuple) else None for v in found.values
    ]
    return found.made_of(  # type: ignore[no-any-return]
        value if first is None else first
        for value, first in zip(found.values, group.from_first(shared), strict=True)
    )


def _judged(
    base: nn.Module, whole: Whole, split: Split, wrong: dict[str, str], allowed: Tolerance
) -> tuple[list[LayerReport], str]:
    """The reports of all layers, and the first layer whose input is not that of `whole`."""
    registered = dict(base.named_modules())
    judged, drifted = [], set()
    for name, layer in norm_layers(base).items():
        calls = split.calls(name)
        report = judge_layer(
            name,
            layer,
            calls,
            [_of_layer(name, own) for own in split.buffers],
            registered=name in registered,
            wrong_group=wrong.get(name, ""),
            error=split.error,
            out_of_step=split.out_of_step,
        )
        judged.append(report)
        inputs = [own[0].x for own in calls if own and own[0].x is not None]
        expected = [call.x for call in whole.inputs[name][0][:1]]
        if expected and expected[0] is not None and inputs:
            actual = moments(joined_values(inputs))
            if difference(actual, expected[0], allowed.floor) > allowed.model:
                drifted.add(name)
    return judged, next((name for name in whole.inputs if name in drifted), "")


def _differences(
    whole: Whole,
    split: Split,
    sizes: Any,
    allowed: Tolerance,
    missing: list[str],
    notes: list[str],
) -> list[float | None]:
    """The largest differences of outputs, of gradients of parameters, and of buffers."""
    outputs: list[float] = []
    if any(len(own) != len(whole.outputs) for own in split.outputs):
        counts = [len(own) for own in split.outputs]
        notes.append(f"the whole batch gives {len(whole.outputs)} tensors, its parts {counts}.")
        outputs.append(math.inf)
    else:
        by_output = zip(*split.outputs, strict=True)
        for (path, y), own in zip(whole.outputs.items(), by_output, strict=True):
            joint = joined_outputs(y, own, sizes)
            figure = math.inf if joint is None else difference(joint, y, allowed.floor)
            if joint is None:
                shapes = [tuple(part.shape) for part in own]
                notes.append(
                    f"{path} of the parts do not join to that of the whole batch: {shapes} and "
                    f"{tuple(y.shape)}."
                )
            if joint is not None and figure and not y.is_floating_point() and not y.dim():
                missing.append(f"{path} (a whole number that is no sum over the parts)")
            else:
                outputs.append(figure)
    gradients = None
    if not allowed.gradients:
        notes.append(
            "the gradients of the whole model were not compared, because rounding can switch a "
            "ReLU on or off; those of the layers were."
        )
    elif whole.differentiable:
        # a gradient of rounding alone, as of a bias before batch norm, has no scale of its own
        tops = [g.abs().max().item() for g in whole.gradients.values() if g.numel()]
        usual = median([top for top in tops if 0 < top < math.inf] or [0.0])
        gradients = largest(split.gradients, whole.gradients, allowed.floor + 1e-3 * usual)
    buffers = [largest(own, whole.buffers, allowed.floor) for own in split.buffers]
    named = whole.outputs | {f"the gradient of {n}": g for n, g in whole.gradients.items()}
    nan = [name for name, value in (named | whole.buffers).items() if value.isnan().any()]
    if nan:
        rest = f" and {len(nan) - 2} more" if len(nan) > 2 else ""
        missing.append(f"{', '.join(nan[:2])}{rest} (NaN in both steps)")
    known = [figure for figure in buffers if figure is not None]
    return [max(outputs, default=None), gradients, max(known, default=None)]


def _constant_input(whole: Whole, eps: float) -> str:
    """The first layer whose undivided input has a channel of one value; not 0, which is exact."""
    for name, (calls,) in whole.inputs.items():
        for mean, std in (call.x for call in calls if call.x is not None):
            if ((mean != 0) & (std <= 100 * eps * mean.abs())).any():
                return name
    return ""


def _of_layer(name: str, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of one layer, by their names in it."""
    prefix = f"{name}." if name else ""
    return {key.removeprefix(prefix): t for key, t in buffers.items() if key.startswith(prefix)}


def _tracked(name: str, module: nn.Module, split: Split) -> float | None:
    """How far the buffers of a module changed in the split step; None if it has none."""
    before = dict(module.named_buffers(recurse=False))
    changes = [largest(_of_layer(name, own), before, 0.0) for own in split.buffers]
    return max((change for change in changes if change is not None), default=None)


def _again(arguments: Arguments) -> Arguments:
    """A copy for one more undivided step, which may write into it; nothing in it is `Shared`."""
    return to_device(converted(arguments), None)  # type: ignore[no-any-return]


def _device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")
