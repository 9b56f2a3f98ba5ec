"""One training step of a model: over the undivided batch, in replicas, over processes."""

from __future__ import annotations

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
from syncbn_torch.data_parallel.batch_sizes import BatchSizes
from syncbn_torch.data_parallel.containers import tensors_in
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.data_parallel.scatter import split as split_arguments
from syncbn_torch.verify.figures import join_axis, moments, tensors_of
from syncbn_torch.verify.prepare import Arguments, make_alone, seed_everything
from syncbn_torch.verify.ranks import Ranks
from syncbn_torch.verify.recording import Call, Recorder, norm_layers, places_of_random_numbers

__all__ = [
    "Division",
    "Split",
    "Whole",
    "divided",
    "split_over_ranks",
    "split_over_replicas",
    "whole_step",
]

Loss = Callable[[Any], Any]


@dataclass
class Whole:
    """The step of the undivided batch. `random`: the modules that drew random numbers."""

    outputs: list[Tensor]
    cotangents: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    recorder: Recorder
    random: list[str]


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
    around: set[str]
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
        outputs = tensors_of(loss(model(*arguments[0], **arguments[1])))
    finally:
        for handle in handles:
            handle.remove()
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs
    ]
    backward(outputs, cotangents)
    return Whole(_kept(outputs), cotangents, _gradients(model), _buffers(model), recorder, random)


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
        recorder.around,
    )
    seed_everything(0)
    try:
        parallel = DataParallelWithCallback(model, replicas=len(parts))
        parallel._checked_layers = True  # no warning about plain layers: the report names them
        replicas = parallel.replicate(model, parallel.device_ids)
        arguments, keywords = [part[0] for part in parts], [part[1] for part in parts]
        results = parallel.parallel_apply(replicas, arguments, keywords)
        outputs = [tensors_of(loss(result)) for result in results]
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
        recorder.around,
    )
    seed_everything(0)
    outputs: list[Tensor] = []
    error = ""
    try:
        arguments, keywords = parts[ranks.rank]
        outputs = tensors_of(loss(model(*arguments, **keywords)))
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
            shares = [part * (size / sum(sizes)) for part, size in zip(own, sizes, strict=True)]
            split.joined.append(torch.stack(shares).sum(0))
        else:
            split.joined.append(torch.cat(list(own), axis))


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
