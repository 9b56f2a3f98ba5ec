"""One training step of a model: over the undivided batch, in replicas, over processes."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import CommError
from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.data_parallel.pytrees import tensors_in
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.data_parallel.split import BatchSizes
from syncbn_torch.data_parallel.split import split as split_arguments
from syncbn_verify.figures import found_in, join_axis, moments, shaken
from syncbn_verify.functional import FunctionalCalls
from syncbn_verify.prepare import Arguments, make_alone, seed_everything
from syncbn_verify.ranks import Ranks
from syncbn_verify.recording import Call, Recorder, norm_layers, places_of_random_numbers

__all__ = [
    "Division",
    "Split",
    "Whole",
    "divided",
    "functional_calls",
    "shaken_step",
    "split_over_ranks",
    "split_over_replicas",
    "whole_step",
]

Loss = Callable[[Any], Any]


@dataclass
class Whole:
    """The step of the undivided batch.

    `random`: the modules that drew random numbers. `paths`: of the outputs; `hidden`: of those
    that can't be compared. `gradients`: of the parameters, as far as they have one.
    """

    outputs: list[Tensor]
    cotangents: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    recorder: Recorder
    random: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


class Division(NamedTuple):
    """The arguments of each part of the batch, and the numbers of samples in them."""

    parts: Sequence[Arguments]
    sizes: Sequence[int]


@dataclass
class Split:
    """The step of the split batch, which other processes may have taken part in.

    `calls(name)`, `begun(name)`: the calls of a layer, and how many were begun, by part.
    `buffers`: those that each process has afterwards. `joined`: the outputs of all parts, or None
    where they don't fit together (`mismatch` says how). `error`: what the step raised;
    `out_of_step`: whether it means that the parts made different calls.
    """

    calls: Callable[[str], list[list[Call]]]
    begun: Callable[[str], list[int]]
    joined: list[Tensor | None] = field(default_factory=list)
    mismatch: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""
    out_of_step: bool = False


def divided(
    arguments: Arguments, count: int, device: torch.device, batch_sizes: BatchSizes
) -> Division:
    """The arguments in at most `count` parts, as `DataParallelWithCallback` splits them."""
    args, kwargs = split_arguments(*arguments, 0, [device] * count, batch_sizes)
    parts = list(zip(args, kwargs, strict=True))
    sizes = args.sizes
    if sizes is None:  # those of the first tensors
        tensors = [[t for t in tensors_in(part) if t.dim()] for part in parts]
        sizes = [own[0].shape[0] if own else 1 for own in tensors]
    return Division(parts, sizes)


def whole_step(model: nn.Module, arguments: Arguments, loss: Loss) -> Whole:
    """The step of `model`, a copy that changes, over the whole batch at once."""
    recorder = Recorder(norm_layers(make_alone(model)), remember=moments)
    random, handles = places_of_random_numbers(model)
    seed_everything(0)
    try:
        found = found_in(loss(model(*arguments[0], **arguments[1])))
    finally:
        for handle in handles:
            handle.remove()
    outputs = found.tensors
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs
    ]
    backward(outputs, cotangents)
    gradients, buffers = _gradients(model), _buffers(model)
    return Whole(
        _kept(outputs), cotangents, gradients, buffers, recorder, random, found.paths, found.hidden
    )


def shaken_step(
    model: nn.Module, arguments: Arguments, loss: Loss, whole: Whole, amount: float
) -> Whole | None:
    """The step of the undivided batch after small random changes, which show what rounding may do.

    Parameters, buffers, arguments, inputs of layers and cotangents change by a share of at most
    `amount`. None if the model then raises, or returns something of another form.
    """
    generator = torch.Generator().manual_seed(2)

    def change(tensor: Tensor) -> Tensor:
        return shaken(tensor, amount, generator)

    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers(), tensors_in(arguments)):
            tensor.copy_(change(tensor))
    recorder = Recorder(norm_layers(make_alone(model)), lambda x: x[:0], change)
    seed_everything(0)
    try:
        outputs = found_in(loss(model(*arguments[0], **arguments[1]))).tensors
        if _shapes(outputs) != _shapes(whole.outputs):
            return None
        cotangents = [change(dy) for dy in whole.cotangents]
        backward(outputs, cotangents)
    except Exception:  # such as a check of a value that has changed
        return None
    return Whole(_kept(outputs), cotangents, _gradients(model), _buffers(model), recorder)


def functional_calls(
    model: nn.Module, arguments: Arguments, part: Arguments, loss: Loss
) -> tuple[list[Tensor], tuple[str, ...]]:
    """What another seed gives, and the modules that call `F.batch_norm` over parts of the batch.

    An input that has as many rows for a part as for the whole batch, such as a weight that is
    standardized, is right. `model`: a copy.
    """
    calls = FunctionalCalls(make_alone(model))
    seed_everything(1)
    with torch.no_grad(), calls:
        outputs = found_in(loss(model(*arguments[0], **arguments[1]))).tensors
    whole = list(calls.found)
    if not whole:
        return outputs, ()
    calls.found.clear()
    with torch.no_grad(), calls, contextlib.suppress(Exception):
        model(*part[0], **part[1])
    names = {
        name
        for (name, shape), (_, of_part) in zip(whole, calls.found, strict=False)
        if shape[:1] != of_part[:1]
    }
    return outputs, tuple(sorted(names))


def split_over_replicas(model: nn.Module, division: Division, whole: Whole, loss: Loss) -> Split:
    """The step of `model`, a copy that changes, in one replica for each part."""
    parts, sizes = division
    layers = norm_layers(model)
    for layer in layers.values():
        if isinstance(layer, _SynchronizedBatchNorm):
            layer.process_group = SingleCommunicator()  # no other process takes part
    recorder, indices = Recorder(layers), range(len(parts))
    split = Split(
        lambda name: [recorder.calls[name][part] for part in indices],
        lambda name: [recorder.begun[name][part] for part in indices],
    )
    seed_everything(0)
    try:
        parallel = DataParallelWithCallback(model, replicas=len(parts))
        parallel._checked_layers = True  # no warning about plain layers: the report names them
        replicas = parallel.replicate(model, parallel.device_ids)
        arguments, keywords = [part[0] for part in parts], [part[1] for part in parts]
        results = parallel.parallel_apply(replicas, arguments, keywords)
        outputs = [found_in(loss(result)).tensors for result in results]
        cotangents = _cotangents(split, whole, [_shapes(own) for own in outputs], sizes)
        backward(list(chain(*outputs)), list(chain(*cotangents)))
        _join(split, whole, [_kept(own) for own in outputs], sizes)
    except Exception as error:
        split.error, split.out_of_step = _text(error), isinstance(error, CommError)
    split.gradients, split.buffers = _gradients(model), [_buffers(model)]
    return split


def split_over_ranks(
    model: nn.Module, division: Division, whole: Whole, loss: Loss, ranks: Ranks
) -> Split:
    """The step of `model`, a copy that changes, in each rank over its own part."""
    parts, sizes = division
    layers = norm_layers(model)
    ranks.watch(layers)
    recorder = Recorder(layers)
    split = Split(
        lambda name: ranks.gather([call.on_cpu() for call in recorder.calls[name][0]]),
        lambda name: ranks.gather(recorder.begun[name][0]),
    )
    seed_everything(0)
    outputs: list[Tensor] = []
    error = ""
    try:
        arguments, keywords = parts[ranks.rank]
        outputs = found_in(loss(model(*arguments, **keywords))).tensors
    except Exception as raised:
        error = _text(raised)
    split.error = ranks.finish("forward", error)
    if not split.error:
        shapes = ranks.gather(_shapes(outputs))
        cotangents = _cotangents(split, whole, shapes, sizes)
        try:
            backward(outputs, cotangents[ranks.rank])
        except Exception as raised:
            error = _text(raised)
        split.error = ranks.finish("backward", error)
    if not split.error:
        everyone = ranks.gather([y.cpu() for y in _kept(outputs)])
        _join(split, whole, everyone, sizes)
        split.gradients = ranks.add_up(_gradients(model), dict(model.named_parameters()))
    split.out_of_step = bool(split.error) and split.error == ranks.stopped
    split.buffers = ranks.gather({name: b.cpu() for name, b in _buffers(model).items()})
    return split


def backward(outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> None:
    """Backward from those outputs that have a graph and a cotangent."""
    pairs = [
        (y, dy)
        for y, dy in zip(outputs, cotangents, strict=True)
        if y.requires_grad and dy is not None
    ]
    if pairs:
        torch.autograd.backward(
            [y for y, _ in pairs], [dy.to(y.device) for y, dy in pairs if dy is not None]
        )


def _cotangents(
    split: Split,
    whole: Whole,
    shapes: Sequence[Sequence[torch.Size]],
    sizes: Sequence[int],
) -> list[list[Tensor | None]]:
    """The cotangents of each part: rows of those of the whole batch, or their weighted share."""
    if len({len(own) for own in [*shapes, whole.outputs]}) > 1:
        counts = [len(own) for own in shapes]
        split.mismatch = f"{len(whole.outputs)} tensors of the whole batch, {counts} of its parts"
        return [[None] * len(own) for own in shapes]
    cut: list[list[Tensor | None]] = [[] for _ in shapes]
    for dy, own in zip(whole.cotangents, zip(*shapes, strict=True), strict=True):
        try:
            axis = join_axis(dy.shape, own)
        except ValueError as error:
            split.mismatch = str(error)
            pieces: list[Any] = [None] * len(own)
        else:
            if axis is None:
                pieces = [dy * (size / sum(sizes)) for size in sizes]
            else:
                pieces = list(dy.split([shape[axis] for shape in own], axis))
        for part, piece in zip(cut, pieces, strict=True):
            part.append(piece)
    return cut


def _join(
    split: Split, whole: Whole, outputs: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> None:
    """Join the outputs of the parts to those of the whole batch."""
    if len({len(own) for own in [*outputs, whole.outputs]}) > 1:
        return
    for y, own in zip(whole.outputs, zip(*outputs, strict=True), strict=True):
        try:
            axis = join_axis(y.shape, [part.shape for part in own])
        except ValueError:
            split.joined.append(None)
            continue
        if axis is None:
            split.joined.append(_mean(own, sizes, y))
        else:
            split.joined.append(torch.cat(list(own), axis))


def _mean(parts: Sequence[Tensor], sizes: Sequence[int], whole: Tensor) -> Tensor:
    """The mean over samples; of whole numbers the common value, or the sum: they may be counts."""
    if not whole.is_floating_point():
        same = all(torch.equal(part, whole.to(part.device)) for part in parts)
        return parts[0] if same else torch.stack(list(parts)).sum(0)
    shares = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
    return torch.stack(shares).sum(0)


def _shapes(outputs: Sequence[Tensor]) -> list[torch.Size]:
    return [y.shape for y in outputs]


def _kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of those parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _text(error: BaseException) -> str:
    """Class, message and notes of an error."""
    return "; ".join(line.strip() for line in traceback.format_exception_only(error)).strip()
