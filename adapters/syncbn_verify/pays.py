"""`pays`: do the parts of a batch differ so much that synchronization matters?

A part of n samples has statistics of its own, which differ from those of the whole batch by chance.
Random parts of the same samples show how much that is. With

    d_i = mean_i - mean,   e_i = var_i - var       of part i, per channel
    T   = average over parts and channels of  d_i**2 / (var + eps) + (e_i / (var + eps))**2

`T / T of random parts` is 1 for parts that were mixed at random. T of random parts falls as 1 / n,
so parts of n samples with the ratio r are like random parts of n / r samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from syncbn_core.errors import ArgumentError
from syncbn_torch.data_parallel.pytrees import tensors_in
from syncbn_torch.data_parallel.split import to_device
from syncbn_verify.copies import alone, copy_of, norm_layers, random_state_kept, unwrapped
from syncbn_verify.report import aligned, listed

SHUFFLES = 999  # random parts of each batch; so the smallest `chance` is 0.001
RARE = 0.002

Kind = Literal["one sample", "unlike", "a little unlike", "alike"]


@dataclass(frozen=True)
class LayerParts:
    """How far the statistics of parts are from those of the whole batch, at one layer.

    Attributes:
        name: in the model.
        values: per channel in a part, on average.
        mean: root mean square of `(mean_i - mean) / sqrt(var + eps)`.
        mean_by_chance: the same for random parts of the same samples.
        variance, variance_by_chance: of `(var_i - var) / (var + eps)`.
        ratio: T of the parts over T of random parts; 1 is chance.
        samples: of how many samples random parts differ as much: samples of a part / ratio.
    """

    name: str
    values: float
    mean: float
    mean_by_chance: float
    variance: float
    variance_by_chance: float
    ratio: float
    samples: float


@dataclass(frozen=True)
class PartsReport:
    """What `pays` found; `str(report)` is a table with a conclusion.

    Attributes:
        parts, batches: how many.
        samples: in a part, on average.
        layers: a `LayerParts` for each layer that uses statistics of the batch.
        chance: the share of random parts that differ as much, over all layers.
        skipped: layers that could not be looked at, and why.
    """

    parts: int
    batches: int
    samples: float
    layers: tuple[LayerParts, ...]
    chance: float
    skipped: tuple[str, ...] = ()

    @property
    def unlike(self) -> tuple[LayerParts, ...]:
        """Layers where parts differ as random parts of less than two samples."""
        return tuple(layer for layer in self.layers if layer.samples < 2)

    @property
    def conclusion(self) -> Kind:
        """What kind of parts these are.

        "one sample": a part holds less than two. "unlike": parts differ more than by chance, in
        some layer as much as parts of less than two samples. "a little unlike": more than by
        chance, but less than that. "alike": no more than by chance.
        """
        if self.samples < 2:
            return "one sample"
        if self.chance > RARE:
            return "alike"
        return "unlike" if self.unlike else "a little unlike"

    @property
    def pays(self) -> bool | None:
        """Whether synchronization is expected to matter; None if only a training can tell."""
        known = {"one sample": True, "unlike": True, "alike": False}
        return known.get(self.conclusion)

    def __str__(self) -> str:
        columns = ("layer", "values", "mean off", "by chance", "var off", "by chance", "ratio")
        rows = [(*columns, "like parts of"), *map(_row, self.layers)]
        samples = f"{self.samples:g} sample{'s' * (self.samples != 1)}"
        head = f"{self.batches} batches in {self.parts} parts of {samples}"
        said = [f"Not looked at: {text}" for text in self.skipped]
        return "\n".join([head, "", *aligned(rows, 1), "", self._said(), *said])

    def _said(self) -> str:
        if not self.layers:
            return "NO LAYER that could be looked at uses statistics of the batch."
        if self.conclusion == "one sample":
            return (
                "ONE SAMPLE PER PART: training normalizes each by itself, evaluation by running "
                "statistics of many: these are two functions. Synchronize."
            )
        as_much = round(self.chance * (1 + SHUFFLES)) - 1
        chance = f"{as_much} of {SHUFFLES} random divisions differ as much"
        if self.conclusion == "alike":
            worst = max(self.layers, key=lambda layer: layer.variance)
            return (
                f"ALIKE: the parts differ no more than by chance ({chance}). Expect no difference "
                f"that you see. The noise is largest in layer {worst.name}: the mean is off by "
                f"{worst.mean:.2f} standard deviations, the variance by {worst.variance:.0%}."
            )
        worst = min(self.layers, key=lambda layer: layer.samples)
        more = f"the parts differ more than by chance ({chance}), most in layer {worst.name}"
        like = f"{more}: like random parts of {worst.samples:.1f} samples"
        if self.conclusion == "unlike":
            names = listed([layer.name for layer in self.unlike])
            return f"UNLIKE: {like}. Less than two in {names}. Synchronize."
        return (
            f"A LITTLE UNLIKE: {like}. Whether that matters only training with and without "
            "synchronization can tell."
        )


def pays(
    model: nn.Module,
    loader: Iterable[Any],
    parts: int = 4,
    *,
    batches: int = 20,
    device: Any = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> PartsReport:
    """Look whether parts of the batches of `loader` differ more than by chance.

    Runs a copy of `model` in training mode, without gradients, on whole batches, and compares the
    statistics that `parts` consecutive parts of each have in each batch norm layer, with those of
    random parts. Nothing is changed, and nothing is sent. Print the report that it returns. See
    docs/is-it-for-me.md.

    Args:
        model: in training mode, with layers of any class; best after some steps of training.
        loader: its batches are those of all ranks or replicas together, in their order.
        parts: how many ranks or replicas there are.
        batches: at most so many are taken.
        device: batches are moved there, or stay where they are.
        forward: called as `forward(model, batch)`. By default the model gets the batch, or its
            first element if it is a list or tuple.
        progress: called with the number of batches that are done, after each.

    Samples are along axis 0 of the first tensor in a batch. A layer whose input has another number
    of rows per sample, such as regions of images, is skipped. Raises `ArgumentError` for a batch of
    fewer samples than parts, or without batches.
    """
    if not isinstance(parts, int) or parts < 2:
        raise ArgumentError(f"expected 2 or more parts, got {parts!r}")
    inner, _ = unwrapped(model)
    call = forward or (lambda model, batch: model(batch[0] if _is_row(batch) else batch))
    done, samples, found = 0, 0, {}
    with random_state_kept(), torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        copied = alone(copy_of(inner, None))
        for name, layer in norm_layers(copied).items():
            if layer.training and getattr(layer, "_frozen", None) is None:
                own = found[name] = _Found(layer)
                stack.callback(layer.register_forward_pre_hook(own.note).remove)
        for batch in itertools.islice(loader, batches):
            batch = batch if device is None else to_device(batch, device)
            size = _samples_of(batch, parts)
            shares = _shares(size, parts, done)
            for own in found.values():
                own.shares = shares
            call(copied, batch)
            done, samples = done + 1, samples + size
            progress(done)
    if not done:
        raise ArgumentError("expected batches, got none; is the loader used up?")
    return _report(found, parts, done, samples / done / parts)


def _is_row(batch: Any) -> bool:
    return isinstance(batch, list | tuple)


def _samples_of(batch: Any, parts: int) -> int:
    first = next((t for t in tensors_in(batch) if t.dim()), None)
    if first is None or len(first) < parts:
        got = "none" if first is None else f"{len(first)} samples"
        raise ArgumentError(
            f"expected batches with a tensor of {parts} or more samples, got {got}; take fewer "
            "parts, or larger batches"
        )
    return len(first)


def _shares(size: int, parts: int, seed: int) -> Tensor:
    """`(1 + SHUFFLES, parts, size)`: the weight of each sample in each part; first as they are."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(size)]
    orders += [torch.randperm(size, generator=generator) for _ in range(SHUFFLES)]
    shares = torch.zeros(len(orders), parts, size, dtype=torch.float64)
    for share, order in zip(shares, orders, strict=True):
        for part, own in zip(share, order.tensor_split(parts), strict=True):
            part[own] = 1 / len(own)
    return shares


class _Found:
    """What was found at a layer: T of the parts and of each shuffle, in two summands."""

    def __init__(self, layer: nn.Module) -> None:
        self.eps = float(getattr(layer, "eps", 0.0))
        self.shares = torch.empty(0)
        self.off: Tensor = torch.zeros(2, 1 + SHUFFLES, dtype=torch.float64)
        self.calls, self.values, self.reason = 0, 0.0, "not called"

    def note(self, layer: nn.Module, inputs: Sequence[Any]) -> None:
        if not inputs:
            self.reason = "called by keyword"
            return
        x = inputs[0]
        samples = self.shares.shape[-1]
        if x.dim() < 2 or len(x) % samples or not x.numel():
            self.reason = f"got {len(x)} rows for {samples} samples"
            return
        rows = x.detach().reshape(samples, len(x) // samples, x.shape[1], -1)
        wide = rows.double() if rows.dtype == torch.float64 else rows.float()
        var, mean = (t.double().cpu() for t in torch.var_mean(wide, (1, 3), correction=0))
        d = mean - mean.mean(0)
        square = var + d**2
        whole = square.mean(0)
        own = self.shares @ d  # (shuffles, parts, channels)
        of_parts = self.shares @ square - own**2
        scale = whole + self.eps
        self.off[0] += (own**2 / scale).mean((1, 2))
        self.off[1] += ((of_parts - whole) / scale).square().mean((1, 2))
        self.calls += 1
        self.values += rows[0, :, 0].numel() * samples / self.shares.shape[1]


def _report(found: dict[str, _Found], parts: int, batches: int, samples: float) -> PartsReport:
    layers, summed = [], torch.zeros(1 + SHUFFLES, dtype=torch.float64)
    for name, own in found.items():
        if own.calls and samples > 0:
            off = own.off / own.calls
            total, chance = off.sum(0), off[:, 1:].mean(1)
            ratio = _over(total[0], chance.sum())
            summed += total / chance.sum() if chance.sum() else 1.0
            mean, variance = off[:, 0].sqrt().tolist()
            by_chance = chance.sqrt().tolist()
            figures = (mean, by_chance[0], variance, by_chance[1], ratio)
            layers.append(LayerParts(name, own.values / own.calls, *figures, samples / ratio))
    as_much = int((summed[1:] >= summed[0] * (1 - 1e-9)).sum())
    skipped = [f"{name}: {own.reason}" for name, own in found.items() if not own.calls]
    chance_of = (1 + as_much) / (1 + SHUFFLES)
    return PartsReport(parts, batches, samples, tuple(layers), chance_of, tuple(skipped))


def _over(value: Tensor, other: Tensor) -> float:
    return (value / other).item() if other else 1.0


def _row(layer: LayerParts) -> tuple[str, ...]:
    off = (layer.mean, layer.mean_by_chance, layer.variance, layer.variance_by_chance)
    figures = [f"{value:.3f}" for value in off]
    return (
        layer.name,
        f"{layer.values:.0f}",
        *figures,
        f"{layer.ratio:.2f}",
        f"{layer.samples:.1f}",
    )
