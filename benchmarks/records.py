"""Where benchmarks leave their results: NAME-DATE.json, with facts about the run."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "write"]

FOLDER = Path(__file__).with_name("results")


def write(folder: Path, name: str, facts: dict[str, Any], **found: Any) -> Path:
    """Write `found` and `facts`, with date and machine; `name`: with "DATE" where the date goes."""
    date = datetime.date.today().isoformat()
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    path = folder / f"{name.replace('DATE', date)}.json"
    path.write_text(json.dumps({"facts": {"date": date, **machine, **facts}, **found}, indent=1))
    return path
