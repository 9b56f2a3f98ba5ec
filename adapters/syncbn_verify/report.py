"""`SyncReport`: what `verify_sync` found, as an object and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from syncbn_core.errors import StateError

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
Conclusion = Literal["ok", "wrong", "incomplete", "failed"]


@dataclass(frozen=True)
class LayerReport:
    """What was found for one layer. docs/verify.md says what differences are shares of.

    A difference is None if it is not known.

    Attributes:
        name: in the model.
        kind: the name of the class.
        calls: how often each part of the batch called the layer.
        verdict: see docs/verify.md.
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
        output: the largest difference of the whole model's outputs to those of the undivided
            step; None if not known.
        gradient: the same for the gradients of parameters.
        buffer: the same for buffers.
        tolerance: the largest difference of these that counts as rounding.
        not_compared: which results could not be compared, and why.
        first: the first layer whose input differs from that in the undivided step, or "".
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
    not_compared: tuple[str, ...] = ()
    first: str = ""
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
        "failed": the split step raised an error, and no layer is known to be at fault.
        """
        if self.faulty or self.model_differs:
            return "wrong"
        if self.error:
            return "failed"
        unclear = any(layer.verdict == "unclear" for layer in self.layers)
        return "incomplete" if unclear or self.not_compared else "ok"

    @property
    def ok(self) -> bool:
        """Whether the step over parts is that of the undivided batch, and all was compared."""
        return self.conclusion == "ok"

    def raise_if_wrong(self) -> None:
        """Raise `StateError` with the table unless `ok`."""
        if not self.ok:
            raise StateError(str(self))

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 0) -> str:
        """The table and the conclusion; a table wider than `width` loses classes, then names."""
        sizes = " + ".join(map(str, self.sizes))
        head = f"{self.parts} with {sizes} samples, {self.dtype}"
        return "\n".join([head, "", *self._table(width), "", *self._conclusion()])

    def _table(self, width: int) -> list[str]:
        columns = ("layer", "class", "calls", "verdict", "output", "gradient", "running")
        whole = ("(the whole model)", "", "", "", self.output, self.gradient, self.buffer)
        rows = [columns, *map(_row, self.layers), (*whole[:4], *map(_figure, whole[4:]))]
        texts, spare = 4, width - sum(_widths(rows)) - 12
        if width and spare < 0:
            texts, spare = 3, spare + _widths(rows)[1] + 2
            longest = max(len("(the whole model)"), _widths(rows)[0] + min(spare, 0))
            rows = [(_end_of(name, longest), *rest) for name, _, *rest in rows]
        lines = aligned(rows, texts)
        return [*lines[:-1], lines[1], lines[-1]]

    def _conclusion(self) -> list[str]:
        checked = [layer for layer in self.layers if layer.verdict == "ok"]
        noun = "layer gives" if len(checked) == 1 else "layers give"
        backward = any(layer.gradient is not None for layer in checked)
        what = "the results" if backward else "the forward results"
        right = f"{len(checked)} {noun} {what} of the undivided batch, up to rounding."
        if self.conclusion in ("wrong", "failed"):
            said = ["NOT OK:" if self.conclusion == "wrong" else "COULD NOT BE JUDGED:"]
            if self.error:
                said.append(f"- The split step failed: {self.error}")
            said += _reasons(self.faulty)
            if len(said) == 1:
                said.append(
                    "- Each layer is right, but the whole model differs from the undivided step. "
                    "So the model itself mixes samples outside of batch norm layers (such as by a "
                    "mean over the batch, or by F.batch_norm), or does something else for a part "
                    "than for the whole batch."
                    + (f" The first layer whose input differs is {self.first}." * bool(self.first))
                )
        elif self.ok:
            nothing = "no batch norm layer used statistics of the batch."
            said = [f"OK: {right if checked else nothing}"]
        else:
            said = [f"INCOMPLETE: {right if checked else 'nothing wrong was found.'}"]
        missing = [f"- {text}." for text in self.not_compared]
        if not self.error:  # else the error is what matters
            missing += _reasons(x for x in self.layers if x.verdict == "unclear")
        said += ["Not compared:", *missing] if missing else []
        eval_mode = [layer for layer in self.layers if layer.verdict == "eval mode"]
        said += [f"Note: {text.removeprefix('- ')}" for text in _reasons(eval_mode)]
        return said + [f"Note: {note}" for note in self.notes]


def aligned(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """The lines of a table, with a rule under the first; the first `texts` columns to the left."""
    lines = [
        "  ".join(
            cell.ljust(size) if column < texts else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, _widths(rows), strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _widths(rows: Iterable[Iterable[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*rows, strict=True)]


def _end_of(name: str, size: int) -> str:
    return name if len(name) <= size else f"...{name[3 - size :]}"


def _row(layer: LayerReport) -> tuple[str, ...]:
    same = len(set(layer.calls)) == 1
    calls = str(layer.calls[0]) if same else ", ".join(map(str, layer.calls)) or "-"
    figures = map(_figure, (layer.output, layer.gradient, layer.running))
    return (layer.name, layer.kind, calls, layer.verdict, *figures)


def _figure(figure: float | None) -> str:
    return "-" if figure is None else "0" if figure == 0 else f"{figure:.0e}"


def _reasons(layers: Iterable[LayerReport]) -> list[str]:
    return [f"- {line}" for line in by_reason((x.name, x.reason) for x in layers)]


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, with the layers to which it applies; `pairs`: a name, a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return [f"{listed(own)}: {reason}" for reason, own in names.items()]


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
