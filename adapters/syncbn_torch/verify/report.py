"""`SyncReport`: what `verify_sync` found, as an object and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncbn_core.errors import StateError

__all__ = ["LayerReport", "SyncReport", "Verdict"]

Verdict = Literal[
    "ok",
    "eval mode",
    "not called",
    "not reached",
    "not synchronized",
    "wrong group",
    "unequal calls",
    "unclear",
]
_RIGHT = ("ok", "eval mode", "not called", "not reached")


@dataclass(frozen=True)
class LayerReport:
    """What was found for one layer. Differences are shares of the largest value; None: not known.

    Attributes:
        name, kind: the name in the model, and the name of the class.
        calls: how often each part of the batch called the layer.
        verdict: see docs/verify.md.
        statistics: of mean and standard deviation of the layer's whole input, between the split
            and the undivided step. They differ if something before the layer went wrong.
        output: of what the layer returned to the parts, to what it returns for all of its input
            at once. It is the layer's own fault.
        gradient: the same for the gradient of the input.
        running: the same for the running statistics.
        reason: why the verdict is not "ok", and what to do.
    """

    name: str
    kind: str
    calls: tuple[int, ...]
    verdict: Verdict
    statistics: float | None = None
    output: float | None = None
    gradient: float | None = None
    running: float | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the layer."""
        return self.verdict in _RIGHT


@dataclass(frozen=True)
class SyncReport:
    """What `verify_sync` found; `str(report)` is a table with a conclusion.

    Attributes:
        parts: how the batch was split, such as "2 replicas".
        sizes: the number of samples of each part.
        dtype: of the model that was checked.
        layers: one `LayerReport` for each batch norm layer, in the order of the model.
        output, gradient, buffer: the largest differences of the whole model's outputs, gradients
            of parameters and buffers to those of the undivided step; None if not known.
        tolerance: the largest difference of outputs and gradients that counts as rounding.
        random: where the model draws random numbers; then the whole model can't be compared.
        error: what the split step raised, or "".
        notes: further remarks.
    """

    parts: str
    sizes: tuple[int, ...]
    dtype: str
    layers: tuple[LayerReport, ...]
    output: float | None
    gradient: float | None
    buffer: float | None
    tolerance: float
    random: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def faulty(self) -> tuple[LayerReport, ...]:
        """The layers with which something is wrong."""
        return tuple(layer for layer in self.layers if not layer.ok)

    @property
    def model_differs(self) -> bool:
        """Whether the whole model's results differ by more than rounding."""
        figures = (self.output, self.gradient, self.buffer)
        return any(figure is not None and figure > self.tolerance for figure in figures)

    @property
    def ok(self) -> bool:
        """Whether the step over parts is that of the undivided batch.

        For a model with random numbers: whether that holds for each layer.
        """
        return not (self.error or self.faulty or (self.model_differs and not self.random))

    def raise_if_wrong(self) -> None:
        """Raise `StateError` with the table unless `ok`."""
        if not self.ok:
            raise StateError(str(self))

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes))
        head = f"{self.parts} with {sizes} samples, {self.dtype}"
        return "\n".join([head, "", *self._table(), "", *self._conclusion()])

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("layer", "class", "calls", "verdict", "statistics", "output", "gradient", "running")
        ]
        rows += [
            (
                layer.name,
                layer.kind,
                _calls(layer.calls),
                layer.verdict,
                *map(_figure, (layer.statistics, layer.output, layer.gradient, layer.running)),
            )
            for layer in self.layers
        ]
        figures = map(_figure, (self.output, self.gradient, self.buffer))
        rows.append(("(the whole model)", "", "", "", "", *figures))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [
                cell.ljust(width) if column < 4 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        rule = "-" * max(map(len, lines))
        return [lines[0], rule, *lines[1:-1], rule, lines[-1]]

    def _conclusion(self) -> list[str]:
        said = []
        if self.ok:
            said.append(f"OK: {self._what_is_right()}")
        else:
            said.append("NOT OK:")
            if self.error:
                said.append(f"- The split step failed: {self.error}")
            reasons = dict.fromkeys(layer.reason for layer in self.faulty)
            for reason in reasons:
                names = [layer.name for layer in self.faulty if layer.reason == reason]
                said.append(f"- {_listed(names)}: {reason}")
            if not self.error and not self.faulty:
                said.append(f"- {self._what_differs()}")
        if self.random:
            where = _listed(list(self.random))
            said.append(
                f"Note: the model draws random numbers ({where}), so the split and the undivided "
                "step differ as a whole; each layer was judged by itself."
            )
        kinds = dict.fromkeys(x.reason for x in self.layers if x.ok and x.reason)
        for reason in kinds:
            names = [layer.name for layer in self.layers if layer.ok and layer.reason == reason]
            said.append(f"Note: {_listed(names)}: {reason}")
        return said + [f"Note: {note}" for note in self.notes]

    def _what_is_right(self) -> str:
        checked = sum(layer.verdict == "ok" for layer in self.layers)
        if not checked:
            return "no batch norm layer used statistics of the batch."
        noun = "layer gives" if checked == 1 else "layers give"
        # without outputs there are no gradients
        what = "the results" if self.output is not None else "the forward results"
        return f"{checked} {noun} {what} of the undivided batch, up to rounding."

    def _what_differs(self) -> str:
        text = (
            "Each layer is right, but the whole model differs from the undivided step. So the "
            "model itself mixes samples outside of batch norm (such as a mean over the batch), or "
            "does something else for a part than for the whole batch."
        )
        limit = self.tolerance
        drifted = (x.name for x in self.layers if x.statistics is not None and x.statistics > limit)
        first = next(drifted, None)
        return text if first is None else f"{text} The first layer whose input differs is {first}."


def _calls(calls: tuple[int, ...]) -> str:
    """A single number if all parts made as many calls."""
    return str(calls[0]) if len(set(calls)) == 1 else ", ".join(map(str, calls))


def _figure(figure: float | None) -> str:
    if figure is None:
        return "-"
    return "0" if figure == 0 else f"{figure:.0e}"


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
