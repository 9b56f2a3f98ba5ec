"""The library does not grow: logical lines per package, which a change may lower.

Blank lines, comments, docstrings, imports and `__all__` do not count. A change that takes out code
lowers the number here; one that adds some says in its message for what. See also `test_walk.py`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CUDA = (ROOT / "syncbn_core" / "backends" / "cuda", ROOT / "syncbn_core" / "_kernels" / "cuda")
BLANK = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def logical_lines(source: str) -> int:
    """How many lines hold code; of a string or an expression over several lines each counts."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_all or is_text:
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - skipped)


def test_what_counts() -> None:
    source = '''"""Text."""

import os
from a import (
    b,
)

__all__ = [
    "f",
]


def f(  # a comment
    x,
):
    """Text

    over lines."""
    return """1
2"""
'''
    assert logical_lines(source) == 5


def files(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*.py")}


@pytest.mark.parametrize(
    ("package", "ceiling"),
    [
        ("core without CUDA", 4596),
        ("CUDA", 2745),
        ("syncbn_torch", 3931),
        ("syncbn_verify", 1731),
        ("syncbn_jax", 229),
        ("syncbn_paddle", 114),
    ],
)
def test_no_package_grows(package: str, ceiling: int) -> None:
    of_cuda = files(*CUDA) | {ROOT / "syncbn_core" / "cupy_arrays.py"}
    held = {"core without CUDA": files(ROOT / "syncbn_core") - of_cuda, "CUDA": of_cuda}
    sources = held.get(package) or files(ROOT / "adapters" / package)
    lines = sum(logical_lines(path.read_text(encoding="utf-8")) for path in sources)
    assert lines == ceiling, f"{package}: {lines} logical lines; write this number here if it fell"
