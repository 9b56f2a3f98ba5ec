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
from syncbn_core.errors import CommError, CommTimeout
from syncbn_torch.data_parallel.pytrees import tensors_in
from syncbn_torch.data_parallel.replicate import DataParallelWithCallback
from syncbn_torch.data_parallel.split import BatchSizes
from syncbn_torch.data_parallel.split import split as split_arguments
from syncbn_verify.comparison import Tolerance, difference, pieces, tensors_of_output
from syncbn_verify.copies import SYNCHRONIZED, Arguments, alone, norm_layers, seed_everything
from syncbn_verify.layers import Call, record
from syncbn_verify.ranks import Alone, Ranks

Loss = Callable[[Any], Any]


class Division(NamedTuple):
    """The arguments of each part of the batch, and the numbers of samples in them."""

    parts: Sequence[Arguments]
    sizes: Sequence[int]


@dataclass
class Whole:
    """The step of the undivided batch.

    `outputs`: by path; `hidden`: the paths to those that can't be compared. `differentiable`:
    whether some output has gradients. `inputs`: the calls of layers, with moments of their input.
    """

    outputs: dict[str, Tensor]
    hidden: list[str]
    differentiable: bool
    cotangents: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: dict[str, list[list[Call]]]


@dataclass
class Split:
    """The step of the split batch, which other processes may have taken part in.

    `calls(name)`: the calls of a layer, by part. `outputs`: of each part. `buffers`: those that
    each process has afterwards. `error`: what the step raised; `out_of_step`: whether it means
    that the parts made different calls.
    """

    calls: Callable[[str], list[list[Call]]]
    outputs: list[list[Tensor]] = field(default_factory=list)
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
    inputs = record(norm_layers(alone(model)), 1, moments_only=True)
    seed_everything(0)
    outputs, hidden = tensors_of_output(loss(model(*arguments[0], **arguments[1])))
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
        for y in outputs.values()
    ]
    _backward(list(outputs.values()), cotangents)
    return Whole(
        {path: y.detach().clone() for path, y in outputs.items()},
        hidden,
        any(y.requires_grad for y in outputs.values()),
        cotangents,
        _gradients(model),
        _buffers(model),
        inputs,
    )


def draws_numbers(
    model: nn.Module, arguments: Arguments, loss: Loss, whole: Whole, allowed: Tolerance
) -> bool:
    """Whether `model`, a copy that changes, returns something else after another seed."""
    seed_everything(1)
    with torch.no_grad():
        again, _ = tensors_of_output(loss(alone(model)(*arguments[0], **arguments[1])))
    return again.keys() != whole.outputs.keys() or any(
        difference(y, whole.outputs[path], allowed.floor) > allowed.model
        for path, y in again.items()
    )


def split_step(
    model: nn.Module, division: Division, whole: Whole, loss: Loss, group: Alone
) -> Split:
    """The step of `model`, a copy that changes, in as many parts as `division` has."""
    seed_everything(0)
    if isinstance(group, Ranks):
        return _over_ranks(model, division, whole, loss, group)
    return _over_replicas(model, division, whole, loss)


def _over_replicas(model: nn.Module, division: Division, whole: Whole, loss: Loss) -> Split:
    parts, sizes = division
    layers = norm_layers(model)
    for layer in layers.values():
        if isinstance(layer, SYNCHRONIZED):
            layer.process_group = SingleCommunicator()  # no other process takes part
    split = Split(record(layers, len(parts)).__getitem__)
    try:
        parallel = DataParallelWithCallback(model, replicas=len(parts))
        parallel._checked_layers = True  # no warning about plain layers: the report names them
        replicas = parallel.replicate(model, parallel.device_ids)
        args, kwargs = [part[0] for part in parts], [part[1] for part in parts]
        results = parallel.parallel_apply(replicas, args, kwargs)
        outputs = [list(tensors_of_output(loss(result))[0].values()) for result in results]
        cotangents = _cotangents(whole, [[y.shape for y in own] for own in outputs], sizes)
        _backward(list(chain(*outputs)), list(chain(*cotangents)))
        split.outputs = [[y.detach() for y in own] for own in outputs]
    except Exception as error:
        split.error = _text(error)
        calls = [[len(own) for own in split.calls(name)] for name in layers]
        late = isinstance(error, CommTimeout) and not _crossed(calls)
        split.out_of_step = isinstance(error, CommError) and not late
    split.gradients, split.buffers = _gradients(model), [_buffers(model)]
    return split


def _crossed(calls: Sequence[Sequence[int]]) -> bool:
    """Whether no replica is ahead in all layers, so that they wait for each other.

    `calls`: of each layer, by replica. If one is only late, the others are ahead of it.
    """
    ahead = [{n for n, count in enumerate(own) if count == max(own)} for own in calls]
    return bool(ahead) and not set.intersection(*ahead)


def _over_ranks(
    model: nn.Module, division: Division, whole: Whole, loss: Loss, ranks: Ranks
) -> Split:
    """The same in each rank, over its own part."""
    parts, sizes = division
    layers = norm_layers(model)
    ranks.watch(layers)
    calls = record(layers, 1)
    split = Split(lambda name: ranks.gather([call.on_cpu() for call in calls[name][0]]))
    outputs: list[Tensor] = []
    error = ""
    try:
        args, kwargs = parts[ranks.rank]
        outputs = list(tensors_of_output(loss(model(*args, **kwargs)))[0].values())
    except Exception as raised:
        error = _text(raised)
    split.error = ranks.finish("forward", error)
    if not split.error:
        cotangents = _cotangents(whole, ranks.gather([y.shape for y in outputs]), sizes)
        try:
            _backward(outputs, cotangents[ranks.rank])
        except Exception as raised:
            error = _text(raised)
        split.error = ranks.finish("backward", error)
    split.out_of_step = bool(split.error) and split.error == ranks.stopped
    if not split.error:
        split.outputs = ranks.gather([y.detach().cpu() for y in outputs])
        split.gradients = _gradients(model)
        ranks.add_up(split.gradients)
    split.buffers = ranks.gather({name: b.cpu() for name, b in _buffers(model).items()})
    return split


def _cotangents(
    whole: Whole, shapes: Sequence[Sequence[torch.Size]], sizes: Sequence[int]
) -> list[list[Tensor]]:
    """The cotangents of each part, for outputs of these shapes."""
    if any(len(own) != len(whole.outputs) for own in shapes):
        return [[torch.zeros(shape) for shape in own] for own in shapes]
    of_outputs = [
        pieces(dy, own, sizes)
        for dy, own in zip(whole.cotangents, zip(*shapes, strict=True), strict=True)
    ]
    return [[own[part] for own in of_outputs] for part in range(len(shapes))]


def _backward(outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    """Backward from those outputs that have a graph."""
    pairs = [(y, dy.to(y)) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters that need one, dense; zeros if nothing depends on them."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _text(error: BaseException) -> str:
    """Class, message and notes of an error."""
    return "; ".join(line.strip() for line in traceback.format_exception_only(error)).strip()
