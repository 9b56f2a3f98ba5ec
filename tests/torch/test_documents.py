"""What README and docs show runs, and so do the examples that need no scikit-learn."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = ("README.md", "docs/arrays.md", "docs/communication.md", "docs/conversion.md")
BLOCKS = [
    pytest.param(code, id=f"{document.name}-{index}")
    for document in [ROOT / name for name in SHOWN]
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_the_documents_runs(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "document", "exec"), names)


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(
            r"\]\(([\w./-]+)\)", re.sub(r"(?s)```.*?```", "", document.read_text())
        ):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_word_count_example_counts_over_all_members() -> None:
    script = ROOT / "examples" / "word_count.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("60 words, 'it' 10 times" in line for line in lines)
