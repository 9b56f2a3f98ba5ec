"""The picture of docs/is-it-for-me.md from the JSON of `benchmarks/pays.py`.

python tools/figures/pays_plot.py benchmarks/results/pays-....json docs/pays.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from syncbn_verify.picture import draw


def name_of(row: dict[str, Any]) -> str:
    """A task, or the kind of parts of a network."""
    name, samples = str(row["name"]), row["samples"]
    if "photograph" not in name:
        return name
    return f"{name.rpartition(', ')[2]}, {samples:g} sample{'s' * (samples > 1)}"


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rows = results["tasks"] + results["networks"]
    dots = [(name_of(row), row["samples"], row["like"], row["conclusion"]) for row in rows]
    draw(dots, Path(sys.argv[2]))
