"""`verify_sync`: compare a training step over parts of a batch with the undivided step."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncbn_core.errors import ArgumentError
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.scripted import scripted_batch_norm
from syncbn_torch.data_parallel.pytrees import tensors_in
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.data_parallel.split import BatchSizes, to_device
from syncbn_verify.agreement import description, plain_values, with_plain_values
from syncbn_verify.figures import Tolerance, difference, scale_of, tolerance
from syncbn_verify.judge import judge_layer, judge_scripted, model_differences
from syncbn_verify.prepare import (
    Arguments,
    arguments_of,
    check_model,
    converted,
    copy_of,
    duplicate,
    random_state_kept,
    unwrapped,
)
from syncbn_verify.ranks import Ranks, first_line
from syncbn_verify.recording import norm_layers
from syncbn_verify.report import Conclusion, LayerReport, SyncReport, Verdict
from syncbn_verify.steps import (
    Division,
    Split,
    Whole,
    divided,
    functional_calls,
    shaken_step,
    split_over_ranks,
    split_over_replicas,
    whole_step,
)

__all__ = ["Conclusion", "LayerReport", "SyncReport", "Verdict", "verify_sync"]

T = TypeVar("T")


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
    ranks = _ranks(replicas, process_group)
    if batch_sizes is None and isinstance(model, DataParallelWithCallback):
        batch_sizes = model.batch_sizes
    inner, note = _together(ranks, lambda: _checked(model), "a model that can be checked")
    if ranks is not None:
        ranks.agree(
            description(inner, batch, dtype=dtype, loss="none" if loss is None else "a function")
        )
    notes = [note] if note else []
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        report = _report(
            inner, batch, replicas or 2, ranks, loss or _identity, dtype, batch_sizes, notes
        )
    return report if ranks is None else ranks.from_first(report)


def _ranks(replicas: int | None, process_group: Any) -> Ranks | None:
    if replicas is not None:
        if process_group is not None:
            raise ArgumentError("expected replicas or process_group, got both; leave one out")
        if not isinstance(replicas, int) or replicas < 2:
            raise ArgumentError(f"expected 2 or more replicas, got {replicas!r}")
        return None
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if process_group is None and not several:
        return None
    ranks = Ranks(process_group)
    if ranks.size < 2:
        raise ArgumentError("expected a process_group of 2 or more ranks, got one of 1 rank")
    return ranks


def _together(ranks: Ranks | None, work: Callable[[], T], expected: str) -> T:
    """The result of `work`; an error on one rank is one on all."""
    return work() if ranks is None else ranks.together(work, expected)


def _checked(model: nn.Module) -> tuple[nn.Module, str]:
    """The model within wrappers, and a note about them."""
    inner, note = unwrapped(model)
    check_model(inner)
    return inner, note


def _identity(output: Any) -> Any:
    return output


def _report(
    model: nn.Module,
    batch: Any,
    replicas: int,
    ranks: Ranks | None,
    loss: Callable[[Any], Any],
    dtype: torch.dtype | None,
    batch_sizes: BatchSizes,
    notes: list[str],
) -> SyncReport:
    count = replicas if ranks is None else ranks.size
    what = "a model and a batch that can be copied"
    base, arguments = _together(ranks, lambda: _prepared(model, batch, dtype), what)
    if ranks is not None:
        ranks.share(_tensors(base))
        values = ranks.from_first(plain_values(arguments))
        arguments = with_plain_values(arguments, iter(values))
        ranks.share(tensors_in(arguments))
    division = _together(
        ranks,
        lambda: divided(arguments, count, _device(base), batch_sizes),
        "a batch that can be split",
    )
    if ranks is not None:
        ranks.agree({"division of the batch": str(division.sizes)})
    if len(division.parts) < (2 if ranks is None else count):
        raise ArgumentError(
            f"expected a batch of at least {count} samples, got {sum(division.sizes)}; "
            "pass the whole batch"
        )
    try:
        whole = _together(
            ranks,
            lambda: whole_step(duplicate(base), _again(arguments), loss),
            "a model that takes the undivided batch",
        )
    except Exception as error:
        if dtype is None:
            raise
        notes.append(
            f"the model can't compute in {_short(dtype)} ({first_line(error)}), so it was checked "
            "in its own dtype, in which small differences are not seen."
        )
        return _report(model, batch, replicas, ranks, loss, None, batch_sizes, notes)
    own = dtype or next((t.dtype for t in base.parameters()), torch.get_default_dtype())
    allowed = tolerance(own)
    random, functional = _together(
        ranks,
        lambda: _second_look(base, arguments, division, loss, whole, allowed),
        "a model that takes the undivided batch twice",
    )
    other = shaken_step(duplicate(base), _again(arguments), loss, whole, allowed.shake)
    layers = norm_layers(base)
    wrong, can_run = ({}, True) if ranks is None else ranks.wrong_groups(layers)
    if not can_run:
        split = _not_run(count)
    elif ranks is None:
        split = split_over_replicas(duplicate(base), division, whole, loss)
    else:
        split = split_over_ranks(duplicate(base), division, whole, loss, ranks)
    registered = dict(base.named_modules())
    judged = [
        judge_layer(name, layer, whole, split, name in registered, wrong.get(name, ""))
        for name, layer in layers.items()
    ]
    model_wide = model_differences(whole, other, split, allowed)
    differs = any(
        figure is not None and figure > allowed.model
        for figure in (model_wide.output, model_wide.gradient, model_wide.buffer)
    )
    judged += [
        judge_scripted(name, module, split, differs)
        for module, name in modules_of(base).items()
        if scripted_batch_norm(module) is not None
    ]
    missing = [*model_wide.not_compared]
    if split.mismatch:
        notes.append(f"outputs of the parts do not join to those of the batch: {split.mismatch}.")
    if whole.hidden:
        notes.append("pass a loss that returns the tensors to compare.")
    if not whole.gradients and any(p.requires_grad for p in base.parameters()):
        missing.append(
            "the gradients: nothing that the model (or loss) returned has any, so outputs and "
            "gradients were not compared; pass a loss that returns the tensors to compare"
            if not whole.outputs
            else "the gradients: nothing that the model (or loss) returned has any; pass a loss"
        )
    if math.isinf(allowed.model):
        missing.append(f"the whole model: in {_short(own)} only its layers are judged")
    return SyncReport(
        parts=f"{len(division.parts)} {'replicas' if ranks is None else 'ranks'}",
        sizes=tuple(division.sizes),
        dtype=_short(own),
        layers=tuple(judged),
        output=model_wide.output,
        gradient=model_wide.gradient,
        buffer=model_wide.buffer,
        tolerance=allowed.model,
        random=random,
        functional=functional,
        not_compared=tuple(missing),
        error=split.error,
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


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, also those of modules in plain lists."""
    return [
        tensor
        for module in modules_of(model)
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False))
    ]


def _second_look(
    base: nn.Module,
    arguments: Arguments,
    division: Division,
    loss: Callable[[Any], Any],
    whole: Whole,
    allowed: Tolerance,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where the model draws random numbers that change its output, and calls `F.batch_norm`."""
    part = converted(division.parts[0])
    outputs, functional = functional_calls(duplicate(base), _again(arguments), part, loss)
    same = [y.shape for y in outputs] == [y.shape for y in whole.outputs] and all(
        difference(y, expected, scale_of(expected, allowed.model, allowed)) <= allowed.model
        for y, expected in zip(outputs, whole.outputs, strict=True)
    )
    random = () if same else tuple(whole.random) or ("where is not known",)
    return random, functional


def _not_run(count: int) -> Split:
    return Split(
        calls=lambda name: [[] for _ in range(count)],
        begun=lambda name: [0] * count,
        error="it was not run, because layers would wait for ranks that take no part in the check.",
    )


def _again(arguments: Arguments) -> Arguments:
    """A copy for one more undivided step, which may write into it; nothing in it is `Shared`."""
    return to_device(converted(arguments), None)  # type: ignore[no-any-return]


def _device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
