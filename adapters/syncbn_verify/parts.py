"""`PartsReport`: what `pays` found, as an object and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from statistics import median
from typing import Literal

from syncbn_verify.report import aligned, listed

SHUFFLES = 999  # random parts of each batch; so the smallest `chance` is 0.001
RARE = 0.002
# A ResNet-50 has it with 8 images per part, and trains worse than with 16: docs/is-it-for-me.md.
LARGE = 0.15

Kind = Literal["one sample", "unlike", "a little unlike", "noisy", "alike", "not judged"]


@dataclass(frozen=True)
class LayerParts:
    """How far the statistics of parts are from those of the whole batch, at one layer.

    Attributes:
        name: in the model.
        values: per channel in a part, on average.
        mean: root mean square of `(mean_i - mean) / sqrt(var + eps)`.
        mean_by_chance: the same for random parts of the same samples.
        variance: root mean square of `(var_i - var) / (var + eps)`.
        variance_by_chance: the same for random parts of the same samples.
        ratio: T of the parts over T of random parts; 1 is chance.
        samples: of how many samples random parts differ as much: samples of a part / ratio, at
            most those of the batch.
    """

    name: str
    values: float
    mean: float
    mean_by_chance: float
    variance: float
    variance_by_chance: float
    ratio: float
    samples: float

    @property
    def off(self) -> float:
        """How far parts put normalized values off, in standard deviations (root mean square).

        To first order `y_i - y = -(mean_i - mean) / std - y * (var_i - var) / (2 * var)`.
        """
        return float((self.mean**2 + self.variance**2 / 4) ** 0.5)


@dataclass(frozen=True)
class PartsReport:
    """What `pays` found; `str(report)` is a table with a conclusion.

    Attributes:
        parts: how many.
        batches: how many.
        samples: in a part, on average.
        layers: a `LayerParts` for each layer that uses statistics of the batch.
        chance: the share of random parts that differ as much, over all layers.
        skipped: layers that could not be looked at, or not in all calls, and why.
        notes: further remarks.
    """

    parts: int
    batches: int
    samples: float
    layers: tuple[LayerParts, ...]
    chance: float
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unlike(self) -> tuple[LayerParts, ...]:
        """Layers where parts differ as random parts of less than two samples."""
        return tuple(layer for layer in self.layers if layer.samples < 2)

    @property
    def off(self) -> float:
        """`LayerParts.off` of the median layer; NaN without layers."""
        return median([layer.off for layer in self.layers] or [nan])

    @property
    def conclusion(self) -> Kind:
        """What kind of parts these are.

        "one sample": a part holds less than two. "unlike": parts differ more than by chance, in
        some layer as much as parts of less than two samples. "a little unlike": more than by
        chance, but less than that. "noisy": no more than by chance, but chance puts normalized
        values off by 0.15 standard deviations or more in the median layer. "alike": by less.
        "not judged": no layer could be looked at.
        """
        if not self.layers:
            return "not judged"
        if self.samples < 2:
            return "one sample"
        if self.chance > RARE:
            return "noisy" if self.off >= LARGE else "alike"
        return "unlike" if self.unlike else "a little unlike"

    @property
    def pays(self) -> bool | None:
        """Whether synchronization is expected to matter; None if only a training can tell."""
        known = {"one sample": True, "unlike": True, "alike": False}
        return known.get(self.conclusion)

    def __str__(self) -> str:
        columns = ("layer", "values", "mean off", "by chance", "var off", "by chance", "ratio")
        table = aligned([(*columns, "like parts of"), *map(_row, self.layers)], 1)
        samples = f"{self.samples:g} sample{'s' * (self.samples != 1)}"
        batches = f"{self.batches} batch{'es' * (self.batches != 1)}"
        head = [f"{batches} in {self.parts} parts of {samples}", "", *table, "", self._said()]
        return "\n".join([*head, *(f"Not looked at: {x}." for x in self.skipped), *self.notes])

    def _said(self) -> str:
        if not self.layers:
            return "NOT JUDGED: no layer that could be looked at uses statistics of the batch."
        if self.conclusion == "one sample":
            return (
                "ONE SAMPLE PER PART: training normalizes each by itself, evaluation by running "
                "statistics of many: these are two functions. Synchronize."
            )
        as_much = round(self.chance * (1 + SHUFFLES)) - 1
        chance = f"than by chance ({as_much} of {SHUFFLES} random divisions differ as much)"
        only = "Only training with and without synchronization can tell whether that matters."
        off = f"normalized values are off by {self.off:.2f} standard deviations in the median layer"
        if self.conclusion == "alike":
            expect = "Expect no difference that you see."
            return f"ALIKE: the parts differ no more {chance}: {off}. {expect}"
        if self.conclusion == "noisy":
            like = f"as in batch norm with batches of {self.samples:g}"
            large = f"but chance is large: {off}, {like}"
            return f"NOISY: the parts differ no more {chance}, {large}. {only}"
        worst = min(self.layers, key=lambda layer: layer.samples)
        like = f"most in layer {worst.name}: like random parts of {worst.samples:.1f} samples"
        if self.conclusion == "unlike":
            names = listed([layer.name for layer in self.unlike])
            only = f"Less than two in {names}. Synchronize."
        return f"{self.conclusion.upper()}: the parts differ more {chance}, {like}. {only}"


def _row(layer: LayerParts) -> tuple[str, ...]:
    off = (layer.mean, layer.mean_by_chance, layer.variance, layer.variance_by_chance)
    cells = [f"{layer.values:.0f}", *(f"{value:.3f}" for value in off), f"{layer.ratio:.2f}"]
    return (layer.name, *cells, f"{layer.samples:.1f}")
