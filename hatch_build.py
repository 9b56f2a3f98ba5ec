"""The long description of the package: the README, whose links lead to files of the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeWithAddress(MetadataHookInterface):
    """Its `address` is the one in pyproject.toml; without it links stay relative."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_address(text, self.config["address"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_address(readme: str, address: str) -> str:
    """The relative links below `address`, as in "https://example.org/syncbn/blob/main/".

    Pictures are taken from where their bytes are, at "/raw/" in the place of "/blob/".
    """

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        base = address.replace("/blob/", "/raw/") if mark else address
        return f"{mark}[{text}]({base}{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", link, readme)
