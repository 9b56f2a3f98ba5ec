"""Write docs/works-with.md from what the tests of this folder recorded: `page.py ROWS PAGE`."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

HEAD = """# Works with

Written by `python3 dev.py works_with` on {date} with torch {torch}. Each row was run: one training
step in float64, split over two replicas or two processes, compared with the step of the undivided
batch. "Difference" is the largest in outputs, gradients, buffers, and outputs in eval afterwards,
as a share of the largest value of its tensor. "Layers" says how many batch norm layers the model
has, and how many of them `convert_model` made synchronized.
"""


def page(rows: list[dict[str, Any]]) -> str:
    """The page: a table for each library, in the order in which they were recorded."""
    text = [HEAD.format(date=date.today().isoformat(), torch=torch.__version__)]
    libraries = list(dict.fromkeys((row["library"], row["version"]) for row in rows))
    for library, version in libraries:
        own = [row for row in rows if row["library"] == library]
        text += [
            f"## {library} {version}",
            "",
            "| | over | layers | difference | |",
            "|---|---|---|---|---|",
        ]
        text += [_line(row) for row in own]
        text += [""]
    return "\n".join(text)


def _line(row: dict[str, Any]) -> str:
    layers = ""
    if "layers" in row:
        layers = f"{row.get('converted', row['layers'])} of {row['layers']}"
    difference = f"{row['difference']:.0e}" if "difference" in row else ""
    cells = [row["subject"], row.get("over", ""), layers, difference, row.get("note", "")]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    lines = source.read_text(encoding="utf-8").splitlines()
    target.write_text(page([json.loads(line) for line in lines]), encoding="utf-8")
