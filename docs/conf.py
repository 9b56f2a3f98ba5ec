"""The documentation site: `python3 dev.py docs`."""

from importlib import metadata

project = "syncbn"
author = copyright = "The syncbn developers"
version = release = metadata.version("syncbn")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"syncbn {release}"

autodoc_typehints = "none"
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_mock_imports = ["jax", "flax", "paddle"]
