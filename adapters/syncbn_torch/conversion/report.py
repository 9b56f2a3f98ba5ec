"""`ConversionReport`: what `convert_model` did with each layer, and why it kept some."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ReportedLayer(NamedTuple):
    """One layer of a model.

    Attributes:
        name: its name in the model, as `layer1.0.bn1`; in a plain list as `layers[0]`.
        before: the name of its class.
        after: the name of the class that it got, or None if it was kept.
        reason: why it was kept, and what to do; "" for a layer that got a new class.
        expected: whether it was kept on purpose, so that no warning is needed.
        registered: whether it is a submodule; False if only a plain list or attribute holds it.
    """

    name: str
    before: str
    after: str | None
    reason: str = ""
    expected: bool = False
    registered: bool = True


class ConversionReport(list[ReportedLayer]):
    """A list that `convert_model(model, report=report)` fills: a `ReportedLayer` for each layer.

    They are in the order of the model; a second call replaces them. `print(report)` shows a line
    for each class and reason.
    """

    @property
    def converted(self) -> list[ReportedLayer]:
        """The layers that got a new class."""
        return [layer for layer in self if layer.after is not None]

    @property
    def kept(self) -> list[ReportedLayer]:
        """The layers that are as they were."""
        return [layer for layer in self if layer.after is None]

    def __str__(self) -> str:
        return "\n".join(_lines(self)) or "no batch norm layers"

    def warn(self, caller: str) -> None:
        """For a function `caller`: one warning about layers that were kept unexpectedly."""
        unexpected = [layer for layer in self.kept if not layer.expected]
        if unexpected:
            lines = list(_lines(unexpected, names=1))
            lines[2:] = [f"{len(lines) - 2} more"] if len(lines) > 2 else []
            warnings.warn(
                f"{caller} kept {len(unexpected)} of {len(self)} layers as they are: "
                f"{'; '.join(lines)}; to see all, pass report=ConversionReport() and print it",
                stacklevel=3,
            )


def _lines(layers: Iterable[ReportedLayer], names: int = 4) -> Iterator[str]:
    """For each class and reason: how many layers, and the first `names`."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, before, after, reason, _, registered in layers:
        what = before if after is None else f"{before} -> {after}"
        groups.setdefault((what, reason, registered), []).append(name)
    for (what, reason, registered), own in groups.items():
        first = ", ".join([*own[:names], *["..."] * (len(own) > names)])
        why = f": {reason}" if reason else ""
        where = "" if registered else "; no submodule, so a replica that calls it raises StateError"
        yield f"{len(own)} {what} ({first}){why}{where}"
