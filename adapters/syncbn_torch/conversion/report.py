"""`ConversionReport`: what `convert_model` did with each layer, and why it kept some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["ConversionReport", "ReportedLayer"]

_LONGEST_WARNING = 400
_SHOWN_NAMES = 4


@dataclass(frozen=True)
class ReportedLayer:
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


@dataclass
class ConversionReport:
    """Pass one to `convert_model(model, report=report)`, then `print(report)`.

    Attributes:
        layers: a `ReportedLayer` for each layer, in the order of the model. A second call with the
            same report replaces them.
        title: what was called, for example "convert_model".
    """

    layers: list[ReportedLayer] = field(default_factory=list)
    title: str = "not filled yet: pass it to convert_model(model, report=report)"

    @property
    def converted(self) -> list[ReportedLayer]:
        """The layers that got a new class."""
        return [layer for layer in self.layers if layer.after is not None]

    @property
    def kept(self) -> list[ReportedLayer]:
        """The layers that are as they were."""
        return [layer for layer in self.layers if layer.after is None]

    def __str__(self) -> str:
        """A table: classes with their number of layers, the first names, and the reasons."""
        lines = [f"{self.title}: {len(self.converted)} converted, {len(self.kept)} kept"]
        for heading, layers in (("converted", self.converted), ("kept", self.kept)):
            if layers:
                lines += ["", heading]
            for (what, reason), names in _grouped(layers).items():
                lines.append(f"  {len(names):4}  {what}: {_first(names, _SHOWN_NAMES)}")
                if reason:
                    lines.append(f"        {reason}")
        hidden = [layer.name for layer in self.layers if not layer.registered]
        if hidden:
            lines += [
                "",
                "not registered as submodules: a replica that calls them in training raises "
                "StateError",
                f"  {len(hidden):4}  {_first(hidden, _SHOWN_NAMES)}",
            ]
        return "\n".join(lines)

    def warning(self) -> str:
        """One sentence about the layers that were kept unexpectedly; "" if there are none."""
        unexpected = [layer for layer in self.kept if not layer.expected]
        if not unexpected:
            return ""
        start = f"{self.title} kept {len(unexpected)} of {len(self.layers)} layers as they are: "
        end = "; to see all, pass report=ConversionReport() and print it"
        groups = [
            f"{len(names)} {what} ({_short(names[0])}{', ...' if len(names) > 1 else ''}: {reason})"
            for (what, reason), names in _grouped(unexpected).items()
        ]
        shown = 1
        while shown < len(groups):
            length = len(start) + len("; ".join(groups[: shown + 1])) + len(end)
            if length > _LONGEST_WARNING - len("; 99 more classes"):
                break
            shown += 1
        more = len(groups) - shown
        rest = [f"{more} more class{'es' if more > 1 else ''}"] if more else []
        return start + "; ".join(groups[:shown] + rest) + end


def _grouped(layers: Iterable[ReportedLayer]) -> dict[tuple[str, str], list[str]]:
    """The names of the layers by (`BatchNorm2d -> SynchronizedBatchNorm2d`, reason)."""
    groups: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        what = layer.before if layer.after is None else f"{layer.before} -> {layer.after}"
        groups.setdefault((what, layer.reason), []).append(layer.name)
    return groups


def _first(names: list[str], count: int) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def _short(name: str) -> str:
    return name if len(name) <= 50 else f"{name[:20]}...{name[-27:]}"
