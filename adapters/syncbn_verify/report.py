"""`SyncReport`: what `verify_sync` found, as an object and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from syncbn_core.errors import StateError

__all__ = ["Conclusion", "LayerReport", "SyncReport", "Verdict"]

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
Conclusion = Literal["ok", "wrong", "incomplete"]


@dataclass(frozen=True)
class LayerReport:
    """What was found for one layer. docs/verify.md says what differences are shares of.

    A difference is None if it is not known.

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
        functional: the modules that call `F.batch_norm` in training over the samples of a part.
        not_compared: which results could not be compared, and why.
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
    functional: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def faulty(self) -> tuple[LayerReport, ...]:
        """The layers with which something is wrong."""
        return tuple(x for x in self.layers if not x.ok and x.verdict != "unclear")

    @property
    def model_differs(self) -> bool:
        """Whether the whole model's results differ by more than rounding."""
        figures = (self.output, self.gradient, self.buffer)
        return any(figure is not None and figure > self.tolerance for figure in figures)

    @property
    def conclusion(self) -> Conclusion:
        """Whether the step over parts is that of the undivided batch ("ok") or not ("wrong").

        "incomplete": nothing is wrong in what was compared, but not all could be compared.
        """
        differs = self.model_differs and not self.random
        if self.error or self.faulty or self.functional or differs:
            return "wrong"
        unclear = any(layer.verdict == "unclear" for layer in self.layers)
        return "incomplete" if unclear or self.not_compared or self.random else "ok"

    @property
    def ok(self) -> bool:
        """Whether the step over parts is that of the undivided batch, and all was compared."""
        return self.conclusion == "ok"

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
        elif self.conclusion == "wrong":
            said.append("NOT OK:")
            if self.error:
                said.append(f"- The split step failed: {self.error}")
            said += _reasons(self.faulty)
            if self.functional:
                said.append(
                    f"- {_listed(list(self.functional))}: calls F.batch_norm in training, which "
                    "uses the statistics of each part alone. Call a layer that convert_model "
                    "knows, such as nn.BatchNorm2d."
                )
            if len(said) == 1:
                said.append(f"- {self._what_differs()}")
        else:
            right = self._what_is_right() if self._checked else "nothing wrong was found."
            said.append(f"INCOMPLETE: {right}")
        said += self._what_was_not_compared()
        kinds = dict.fromkeys(x.reason for x in self.layers if x.ok and x.reason)
        for reason in kinds:
            names = [layer.name for layer in self.layers if layer.ok and layer.reason == reason]
            said.append(f"Note: {_listed(names)}: {reason}")
        return said + [f"Note: {note}" for note in self.notes]

    @property
    def _checked(self) -> int:
        return sum(layer.verdict == "ok" for layer in self.layers)

    def _what_was_not_compared(self) -> list[str]:
        said = list(self.not_compared)
        if self.random:
            said.append(
                f"the whole model: it draws random numbers ({_listed(list(self.random))}), so both "
                "steps differ as a whole. Each layer was judged by itself"
            )
        lines = [f"- {text}." for text in said]
        if not self.error:  # else the error is what matters
            lines += _reasons(x for x in self.layers if x.verdict == "unclear")
        return ["Not compared:", *lines] if lines else []

    def _what_is_right(self) -> str:
        checked = self._checked
        if not checked:
            return "no batch norm layer used statistics of the batch."
        noun = "layer gives" if checked == 1 else "layers give"
        what = "the results" if self.gradient is not None else "the forward results"
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
    return str(calls[0]) if len(set(calls)) == 1 else ", ".join(map(str, calls)) or "-"


def _reasons(layers: Iterable[LayerReport]) -> list[str]:
    """A line for each reason, with the layers to which it applies."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.reason, []).append(layer.name)
    return [f"- {_listed(own)}: {reason}" for reason, own in names.items()]


def _figure(figure: float | None) -> str:
    if figure is None:
        return "-"
    return "0" if figure == 0 else f"{figure:.0e}"


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
