"""Write docs/works-with.md from what the tests of this folder recorded: `page.py ROWS PAGE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

HEAD = """# Works with

Written by `python3 dev.py works_with` on {date} with torch {torch}. That session ran every row.
"""

MODELS = """## Models

One training step, split over replicas (threads) or ranks (processes), compared with the step of
the undivided batch by torch's own layers. The number is the largest difference in outputs,
gradients, buffers, and outputs in eval after the step, as a share of the largest value of its
tensor; where the note says nothing else, in float64. "Layers" are the model's batch norm layers;
`convert_model` made all of them synchronized, unless it says how many of them.
"""

PROGRAMS = """## Programs

The programs of [Frameworks](frameworks.md), on two processes. Compared are the parameters and
buffers after training with those of one process and undivided batches, as above.
"""


def page(rows: list[Row]) -> str:
    """The page: a table of all libraries, then one for each, and one for programs."""
    models = [row for row in rows if row.get("kind") != "program"]
    programs = [row for row in rows if row.get("kind") == "program"]
    parts = [HEAD.format(date=date.today().isoformat(), torch=torch.__version__)]
    parts += [_summary(rows)]
    if models:
        parts += [MODELS, *(f"### {_versioned(own)}\n\n{_models(own)}" for own in _by(models))]
    if programs:
        parts += [PROGRAMS, _programs(programs)]
    return "\n".join(parts)


def _by(rows: list[Row]) -> list[list[Row]]:
    """The rows of each library, in the order of names."""
    names = sorted({row["library"] for row in rows}, key=str.lower)
    return [[row for row in rows if row["library"] == name] for name in names]


def _summary(rows: list[Row]) -> str:
    lines = []
    for own in _by(rows):
        subjects = {row["subject"] for row in own}
        differences = [row["difference"] for row in own if "difference" in row]
        largest = _number(max(differences)) if differences else ""
        lines.append([own[0]["library"], own[0]["version"], str(len(subjects)), largest])
    return _table(("library", "version", "models or programs", "largest difference"), lines)


def _models(rows: list[Row]) -> str:
    """One line for each model, with a column for each way to split the batch."""
    ways = sorted({row["over"] for row in rows if row.get("over")}, key=_replicas_first)
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["subject"], []).append(row)
    lines = []
    for subject, own in models.items():
        cells = [_cell([row for row in own if row.get("over") == way]) for way in ways]
        said = dict.fromkeys(row["note"] for row in own if row.get("note"))
        lines.append([subject, _layers(own), *cells, "; ".join(said)])
    return _without_empty_notes(("model", "layers", *ways, "note"), lines)


def _programs(rows: list[Row]) -> str:
    lines = [[_versioned([row]), _layers([row]), _cell([row]), row.get("note", "")] for row in rows]
    lines.sort(key=lambda line: line[0].lower())
    return _without_empty_notes(("program for", "layers", "difference", "note"), lines)


def _without_empty_notes(head: tuple[str, ...], lines: list[list[str]]) -> str:
    if any(line[-1] for line in lines):
        return _table(head, lines)
    return _table(head[:-1], [line[:-1] for line in lines])


def _versioned(rows: list[Row]) -> str:
    return f"{rows[0]['library']} {rows[0]['version']}"


def _replicas_first(way: str) -> tuple[bool, str]:
    return "replica" not in way, way


def _layers(rows: list[Row]) -> str:
    for row in rows:
        if "layers" in row:
            layers, converted = row["layers"], row.get("converted", row["layers"])
            return str(layers) if converted == layers else f"{converted} of {layers}"
    return ""


def _cell(rows: list[Row]) -> str:
    """The largest difference of several rows with one model, split in one way."""
    differences = [row["difference"] for row in rows if "difference" in row]
    return _number(max(differences)) if differences else "✓" * bool(rows)


def _number(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _table(head: Iterable[str], lines: list[list[str]]) -> str:
    head = list(head)
    cells = [head, ["---"] * len(head), *lines]
    text = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in cells)
    return "".join(f"| {line} |\n" for line in text)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    read = source.read_text(encoding="utf-8").splitlines()
    target.write_text(page([json.loads(line) for line in read]), encoding="utf-8")
