"""The figures in README and docs are those of the files in benchmarks/results."""

from pathlib import Path

import figures
import pytest
from scripts import run

ROOT = figures.ROOT
NAMES = (
    figures.CPU,
    figures.COLD,
    *figures.NETS.values(),
    *figures.FUSED.values(),
    figures.REPLICAS,
    figures.H100,
    figures.H200,
    figures.COMPILED,
)


@pytest.mark.parametrize("page", figures.PAGES)
def test_every_figure_of_a_page_follows_from_its_file(page: str) -> None:
    lacks = figures.lacking(page, (ROOT / page).read_text(encoding="utf-8"))
    assert not lacks, f"{page} lacks:\n" + "\n".join(lacks)


def test_another_figure_in_a_page_is_noticed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = next(figures.readme())
    assert sentence in " ".join(text.split())
    (lack,) = figures.lacking("README.md", text.replace("of timm are ", "of timm are 1"))
    assert lack == sentence


def test_other_results_ask_for_other_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    results = {name: figures.read(name) for name in NAMES}
    results[figures.H100] = results[figures.H100] | {"bandwidth": 4.89e12}
    monkeypatch.setattr(figures, "read", results.__getitem__)
    assert any("4.89 TB/s" in lack for lack in figures.lacking("docs/speed.md", text))


@pytest.mark.parametrize(
    ("name", "first", "pages"),
    [
        (figures.H100, 0, ["speed.md", "speed.md", "internals/gpu-results.md"]),
        (figures.H200, 1, ["speed.md"]),
    ],
)
def test_the_tables_of_a_gpu_are_those_of_its_file(
    name: str, first: int, pages: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    done = run("gpu_plot.py", str(ROOT / "benchmarks" / "results" / name), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    tables = done.stdout.split("\n\n")[1::2]
    for table, page in zip(tables[first:], pages, strict=False):
        assert table.count("\n") > 4
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert table in text, f"{page} lacks\n{table}"
