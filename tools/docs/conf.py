"""The documentation site: `python3 dev.py docs`."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

project = "syncbn"
author = copyright = "The syncbn developers"
version = release = metadata.version("syncbn")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_title = f"syncbn {release}"

autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_mock_imports = ["jax", "flax", "paddle"]
autodoc_inherit_docstrings = False
default_role = "literal"  # docstrings have code in single backticks


def equations_and_links(
    app: object, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    """Docstrings show equations as indented lines, which are a quotation in reStructuredText.

    And they name pages by their files.
    """
    shown: list[str] = []
    for line in lines:
        line = re.sub(r"docs/([\w-]+)\.md", r":doc:`/\1`", line)
        before = next((s for s in reversed(shown) if s), "")
        if line.startswith("    ") and shown and not shown[-1] and not before.startswith(" "):
            shown += ["::", ""]
        shown.append(line)
    lines[:] = shown


def readme_for_start(app: object, docname: str, source: list[str]) -> None:
    """The start page is the README, whose links are made to fit the folder `docs`."""
    if docname == "index":
        readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## More")[0]
        readme = re.sub(r"\]\((?=examples|tests)", "](../", readme).replace("](docs/", "](")
        source[0] = source[0].replace("{readme}", readme)


def setup(app: Any) -> None:
    app.connect("source-read", readme_for_start)
    app.connect("autodoc-process-docstring", equations_and_links, priority=400)  # before napoleon
