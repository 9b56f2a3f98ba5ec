"""What README and docs show runs, and so do the examples that need no scikit-learn."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import syncbn_core
import syncbn_torch
from syncbn_core import errors
from syncbn_core.__main__ import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# Pages whose blocks do not run here, and why.
NOT_RUN = {
    "docs/verify.md": "test_verify_command.py runs its program",
    "docs/frameworks.md": "tests/works_with runs its blocks",
    "docs/processes.md": "test_recipes.py runs its functions",
    "docs/replicas.md": "pieces of programs",
    "docs/gpu.md": "needs CuPy",
    "docs/jax.md": "tests/jax runs its programs",
    "docs/paddle.md": "tests/paddle runs it",
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
def test_code_in_the_documents_runs(
    code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in one_rank.items():  # as torchrun sets them
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    exec(compile(code, "document", "exec"), names)
    if dist.is_initialized():
        names.clear()
        dist.destroy_process_group()


def test_pages_that_are_not_run_have_code() -> None:
    assert NOT_RUN.keys() <= {name.rpartition("-")[0] for name in CODE}


def test_commands_that_are_not_run_are_in_the_documents() -> None:
    """`python3 dev.py commands` runs all others."""
    names = runpy.run_path(str(ROOT / "tools" / "commands.py"))
    texts = [document.read_text() for document in names["documents"]()]
    assert len([c for text in texts for c in names["commands"](text)]) > 20
    assert not names["stale"](texts)
    assert not names["unknown_sessions"]()


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", without_code(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def without_code(document: Path) -> str:
    return re.sub(r"(?s)```.*?```", "", document.read_text())


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", without_code(document)):
            target = document.parent / path if path else document
            assert target.exists(), f"{document.name}: {path}"
            assert not anchor or anchor in anchors(target), f"{document.name}: {path}#{anchor}"


def test_pages_that_the_code_names_exist() -> None:
    sources = [*ROOT.glob("syncbn_core/**/*.py"), *ROOT.glob("adapters/**/*.py")]
    named = [n for s in sources for n in re.findall(r"docs/[\w/-]+\.md", s.read_text())]
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name


def test_files_that_pages_for_developers_name_exist() -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [f"/{name}" for name in listed.splitlines()]
    for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "internals").glob("*.md")):
        for name in re.findall(r"`([\w./-]+(?:\.py|/))`", page.read_text()):
            assert any(f"/{name}" in file for file in files), f"{page.name}: {name}"


def test_every_error_is_explained() -> None:
    """In a section of its own, except those that are only caught."""
    page = ROOT / "docs" / "troubleshooting.md"
    explained = anchors(page)
    for name in set(errors.__all__) - {"SyncBNError", "CommError"}:
        assert name.lower() in explained, name


def test_a_command_says_where_the_documentation_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "troubleshooting.md").exists()


def test_word_count_example_counts_over_all_members() -> None:
    script = ROOT / "examples" / "word_count.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("60 words, 'it' 10 times" in line for line in lines)


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    modules = {"comm", "errors", "functional", "__version__"}
    for name in {*syncbn_torch.__all__, *syncbn_core.__all__} - modules:
        assert re.search(rf":: {name}$", pages, re.M), name
