"""`pays`: do the parts of a batch differ so much that synchronization matters?

A part of n samples has statistics of its own, which differ from those of the whole batch by chance.
Random parts of the same samples show how much that is. With

    d_i = mean_i - mean,   e_i = var_i - var       of part i, per channel
    T   = average over parts and channels of  d_i**2 / (var + eps) + (e_i / (var + eps))**2

`T / T of random parts` is 1 for parts that were mixed at random. T of random parts falls as 1 / n,
so parts of n samples with the ratio r are like random parts of n / r samples.

All that is needed of a layer's input is the number of values, the mean and the variance of each
sample. Ranks tell each other these, and each of them divides the samples for its share of T.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncbn_core.errors import ArgumentError, ProtocolError
from syncbn_torch.data_parallel.pytrees import tensors_in
from syncbn_torch.data_parallel.split import to_device
from syncbn_torch.masks import checked_mask
from syncbn_verify.copies import (
    SYNCHRONIZED,
    arguments_of,
    copy_of,
    described,
    norm_layers,
    random_state_kept,
    tensors_of,
    unwrapped,
)
from syncbn_verify.parts import SHUFFLES, LayerParts, PartsReport
from syncbn_verify.ranks import Alone, Ranks, first_line, group_for
from syncbn_verify.report import by_reason, listed
from syncbn_verify.steps import divided

LOGGER = logging.getLogger("syncbn")
CHUNK = 2**20  # numbers that are computed at a time: 8 MB

Forward = Callable[..., Any]


def pays(
    model: nn.Module,
    loader: Any,
    parts: int | None = None,
    *,
    process_group: Any = None,
    batches: int = 20,
    device: Any = None,
    forward: Forward | None = None,
    samples: Callable[[Any], int] | None = None,
) -> PartsReport:
    """Look whether parts of batches differ so much that synchronization matters.

    Runs a copy of `model` without gradients. Its batch norm layers normalize by the statistics of
    the whole batch. The statistics of the parts are compared with those of random parts. Nothing is
    changed. Print the report that it returns; docs/is-it-for-me.md explains it.

    Args:
        model: in training mode, with layers of any class; best after some steps of training.
        loader: of batches. Without ranks a batch is that of all ranks or replicas together, in
            their order. Or one batch as `verify_sync` takes it: a tensor, a tuple of arguments, or
            a dictionary of keyword arguments.
        parts: how many parts of a batch this process looks at, one for each rank or replica that
            training will have; default is 4.
        process_group: the ranks whose batches are the parts, instead of `parts`. All of them call
            this, each with its own loader, or with the same one batch; the parameters of the first
            rank are used. Without `parts` and `process_group` this is the default group, if
            torch.distributed is initialized.
        batches: at most so many are taken; with ranks, as many as all of them have.
        device: batches are moved there, or stay where they are.
        forward: called as `forward(model, batch)`. By default the model gets the batch of a loader,
            or its first element if it is a list or tuple.
        samples: called as `samples(batch)`, for the number of samples in it. By default they are
            along axis 0 of the first tensor. `lambda batch: len(batch[0])` suits lists of images.

    Samples are along axis 0 of what layers get. The report says which layers could not be looked
    at, such as one whose input has rows that are no samples. Raises `ArgumentError` if `parts` does
    not divide the samples of a batch, if there is no batch, and if all ranks have the same samples;
    and what the model raises.
    """
    group = group_for(parts, process_group, "parts", 4)
    inner, _ = group.together(lambda: unwrapped(model), "a model that can be looked at")
    group.agree([*described(inner), f"argument batches={batches}"], "pass the same model")
    with random_state_kept(), torch.inference_mode(False), torch.no_grad():
        copied = group.together(lambda: copy_of(inner, None), "a model that can be copied")
        group.share(tensors_of(copied))
        study = _Study(copied, group)
        call = forward or _forward
        if isinstance(loader, Tensor | tuple | Mapping):
            call = forward or _forward_of_one
            loader = [group.together(lambda: _own(loader, group), "a batch that can be split")]
        taken = group.together(lambda: iter(loader), "an iterable of batches")
        while study.batches < batches:
            batch, size = group.together(lambda: _next(taken, device, samples, study), "batches")
            if not study.begin(size):
                break
            LOGGER.info("syncbn pays: batch %s of at most %s", study.batches, batches)
            try:
                call(copied, batch)
                group.compare("the forward is over")
            except Exception as error:
                with suppress(ProtocolError):  # so that no rank waits
                    group.compare(f"the forward failed, {first_line(error)}")
                raise
        return study.report()


def _own(batch: Any, group: Alone) -> Any:
    """This rank's part of a batch that all ranks have; without ranks, the batch."""
    if not isinstance(group, Ranks):
        return batch
    device = next(iter(tensors_in(batch)), torch.empty(0)).device
    parts, sizes = divided(((batch,), {}), group.size, device, None)
    if len(parts) < group.size:
        raise ArgumentError(f"expected a batch of {group.size} or more samples, got {sum(sizes)}")
    return parts[group.rank][0][0]


def _next(taken: Iterator[Any], device: Any, samples: Any, study: _Study) -> tuple[Any, int]:
    """The next batch, and how many samples it has in this process; 0 at the end."""
    for batch in taken:
        batch = batch if device is None else to_device(batch, device)
        first = next((len(t) for t in tensors_in(batch) if t.dim()), 0)
        size = samples(batch) if samples else first
        if not size or size % study.here:
            raise ArgumentError(
                f"expected batches of samples in a multiple of {study.here}, got {size}; take "
                "other parts, or a loader that drops a last batch of another size. Samples are "
                "along axis 0 of the first tensor, unless samples= or --samples counts them"
            )
        return batch, size
    return None, 0


def _forward(model: nn.Module, batch: Any) -> Any:
    """The model of a batch of a loader."""
    try:
        return model(batch[0] if isinstance(batch, list | tuple) else batch)
    except Exception as error:
        if isinstance(batch, Tensor) or isinstance(error, ProtocolError):
            raise
        raise ArgumentError(
            "expected a model that takes the batch (of a list or tuple its first element), got a "
            f"{type(batch).__name__}, for which it raised {first_line(error)}; pass forward=, "
            "called as forward(model, batch), or --forward package.module:function"
        ) from error


def _forward_of_one(model: nn.Module, batch: Any) -> Any:
    """The model of a batch as `verify_sync` takes it."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)


@dataclass
class _Layer:
    """What was found of a layer: sums over its calls, and why other calls were left out.

    off: T of each division that this process looks at, in two summands.
    """

    off: Any = 0.0
    values: float = 0.0
    calls: int = 0
    left: list[str] = field(default_factory=list)


class _Study:
    """The layers of `model`, a copy, which use the statistics of whole batches from now on."""

    def __init__(self, model: nn.Module, group: Alone) -> None:
        self.group, self.layers, self.differ = group, dict[str, _Layer](), False
        self.here = 1 if isinstance(group, Ranks) else group.size  # parts in this process
        self.batches, self.samples, self.notes = 0, 0, tuple[str, ...]()
        for name, layer in norm_layers(model).items():
            frozen = getattr(layer, "_frozen", None) is not None
            if layer.running_mean is None or (layer.training and not frozen):
                own = self.layers[name] = _Layer()
                if not hasattr(layer, "momentum"):  # as FrozenBatchNorm2d of torchvision
                    own.left.append("its class has no momentum, so it is taken for frozen")
                    continue
                layer.training = False  # by the statistics of `_note`; so nothing is sent
                called = partial(self._called, name, layer, layer.forward)
                setattr(layer, "forward", called)  # noqa: B010  (hooks miss calls of `forward`)

    def begin(self, size: int) -> bool:
        """Begin a batch of `size` samples; returns False if this or another rank has no more."""
        self.sizes = sizes = self.group.gather(size)
        if not all(sizes):
            ended = listed([f"rank {rank}" for rank, own in enumerate(sizes) if not own])
            note = f"Only {self.batches} batches were looked at: then {ended} had no more."
            self.notes = (note,) if any(sizes) else ()
            return False
        parts = torch.arange(self.group.size, dtype=torch.int16)
        of_parts = torch.tensor(sizes).repeat_interleave(self.here) // self.here
        parts = parts.repeat_interleave(of_parts)
        generator = torch.Generator().manual_seed(self.batches)
        self.divisions = parts.repeat(1 + SHUFFLES, 1)  # the part of each sample; first as it is
        for division in self.divisions[1:]:
            division[torch.randperm(len(parts), generator=generator)] = parts
        self.divisions = self.divisions[self.group.rank :: len(sizes)]
        self.batches, self.samples = self.batches + 1, self.samples + len(parts)
        return True

    def _called(self, name: str, layer: Any, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.group.compare(f"layer {name}")
        x, mask, *_ = *args, *kwargs.values(), None, None
        moments, held = None, layer.running_mean
        if isinstance(x, Tensor) and x.dim() > 1 and (held is None or held.numel() == x.shape[1]):
            mask = mask if isinstance(layer, SYNCHRONIZED) else None
            moments = _moments(x.detach(), mask, self.sizes[self.group.rank])
        each = self.group.gather(moments)
        if any(own is None for own in each):
            self.layers[name].left.append("got no tensor with channels along axis 1")
        else:
            self._note(self.layers[name], layer, x, each)
        return forward(*args, **kwargs)

    def _note(self, own: _Layer, layer: Any, x: Tensor, each: list[Tensor]) -> None:
        """Give `layer` the statistics of the whole batch, and compare those of parts with them."""
        moments = torch.cat(each)
        self.differ |= any(not torch.equal(each[0], other) for other in each)
        count, mean, var = moments.tensor_split([1, 1 + x.shape[1]], 1)
        share = count / count.sum().clamp(min=1)
        center = (share * mean).sum(0)
        d = mean - center
        square = var + d**2
        whole = (share * square).sum(0)
        wide = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        for name, value in (("running_mean", center), ("running_var", whole)):
            held = (getattr(layer, name), getattr(layer, "weight", None), wide)
            like = next(tensor for tensor in held if tensor is not None)
            setattr(layer, name, value.to(like).view_as(like))
        if [len(rows) for rows in each] != self.sizes:
            own.left.append(f"got {len(x)} rows for {self.sizes[self.group.rank]} samples")
        elif not moments.isfinite().all():
            own.left.append(f"got NaN or inf in batch {self.batches}")
        else:
            scale = whole + float(getattr(layer, "eps", 0.0))
            e = (square - whole) / scale
            table = count * torch.cat([torch.ones_like(count), d / scale.sqrt(), e], 1)
            own.off = own.off + _off(table, self.divisions, self.group.size)
            own.values += count.sum().item() / self.group.size
            own.calls += 1

    def report(self) -> PartsReport:
        if not self.batches:
            raise ArgumentError("expected batches, got none; is the loader used up?")
        layers, skipped, summed = [], [], torch.zeros(1 + SHUFFLES, dtype=torch.float64)
        samples = self.samples / self.batches / self.group.size
        for name, own in self.layers.items():
            if own.left or not own.calls:
                some = f"; {len(own.left)} of {len(own.left) + own.calls} calls are left out"
                skipped.append((name, (own.left or ["not called"])[0] + some * bool(own.calls)))
            if own.calls:
                off = torch.empty(2, 1 + SHUFFLES, dtype=torch.float64)
                each = self.group.gather(own.off / own.calls)
                for rank, theirs in enumerate(each):
                    off[:, rank :: len(each)] = theirs
                by_chance = off[:, 1:].mean(1)
                relative = (
                    off.sum(0) / by_chance.sum() if by_chance.any() else torch.ones_like(off[0])
                )
                summed += relative
                ratio = relative[0].item()
                like = samples / max(ratio, 1 / self.group.size)
                figures = torch.stack([off[:, 0], by_chance], 1).sqrt().flatten().tolist()
                figures = [own.values / own.calls, *figures, ratio, like]
                layers.append(LayerParts(name, *figures))
        if isinstance(self.group, Ranks) and layers and not self.differ:
            raise ArgumentError(
                "expected other samples on each rank, got the same on all; give each its own "
                "loader, as by a DistributedSampler, or pass parts= if a batch is that of all ranks"
            )
        chance = (1 + int((summed[1:] >= summed[0] * (1 - 1e-9)).sum())) / (1 + SHUFFLES)
        found = (tuple(layers), chance, tuple(by_reason(skipped)), self.notes)
        report = PartsReport(self.group.size, self.batches, samples, *found)
        return self.group.from_first(report)  # type: ignore[no-any-return]


def _moments(x: Tensor, mask: Tensor | None, samples: int) -> Tensor:
    """`(samples, 1 + 2C)`: values per channel, their means, and their variances.

    One row if the rows of x are no samples, none for an empty x.
    """
    if not x.numel():
        return torch.zeros(0, 1 + 2 * x.shape[1], dtype=torch.float64)
    rows = samples if len(x) % samples == 0 else 1
    shape = (rows, len(x) // rows, -1, x[0, 0].numel())
    kept = x.new_ones(len(x), dtype=torch.bool) if mask is None else mask
    kept = checked_mask(kept, x).expand(x[:, :1].shape).reshape(shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(shape).where(kept, 0)
    count = kept.sum((1, 3))
    mean = wide.sum((1, 3)) / count.clamp(min=1)
    var = ((wide - mean[:, None, :, None]) ** 2).where(kept, 0).sum((1, 3)) / count.clamp(min=1)
    return torch.cat([t.to("cpu", torch.float64) for t in (count, mean, var)], 1)


def _off(table: Tensor, divisions: Tensor, parts: int) -> Tensor:
    """`(2, divisions)`: T, in two summands, of `table`: count, and count times d and e of samples.

    d and e are those of the module's text, in units of the whole batch.
    """
    found = []
    for chunk in divisions.split(max(1, CHUNK // (parts * max(table.shape)))):
        sums = (chunk[:, None] == torch.arange(parts)[:, None]).double() @ table
        d, square = (sums[..., 1:] / sums[..., :1]).chunk(2, -1)
        squares = torch.stack([d, square - d**2]) ** 2
        found.append(squares.nanmean((2, 3)))  # NaN: a part whose samples are all masked
    return torch.cat(found, 1)
