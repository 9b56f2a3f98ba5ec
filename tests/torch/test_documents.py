"""What README and docs show runs, and so do the examples that need no scikit-learn."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Pages whose blocks do not run here, and why.
NOT_RUN = {
    "docs/diagnostics.md": "pieces of programs",
    "docs/verify.md": "test_verify_command.py runs its program",
    "docs/frameworks.md": "test_recipes.py and tests/works_with run its blocks",
    "docs/gpu.md": "needs CuPy",
    "docs/pytorch.md": "pieces of programs",
    "docs/scaling.md": "a piece of a program",
}
CODE = {
    f"{document.relative_to(ROOT)}-{index}": code
    for document in DOCUMENTS
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.S))
}
BLOCKS = [
    pytest.param(code, id=name)
    for name, code in CODE.items()
    if name.rpartition("-")[0] not in NOT_RUN
]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_the_documents_runs(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "document", "exec"), names)


def test_pages_that_are_not_run_have_code() -> None:
    assert NOT_RUN.keys() <= {name.rpartition("-")[0] for name in CODE}


def test_commands_that_are_not_run_are_in_the_documents() -> None:
    """`python3 dev.py commands` runs all others."""
    names = runpy.run_path(str(ROOT / "tests" / "commands.py"))
    texts = [document.read_text() for document in names["documents"]()]
    assert len([c for text in texts for c in names["commands"](text)]) > 20
    assert not names["stale"](texts)
    assert not names["unknown_sessions"]()


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
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
