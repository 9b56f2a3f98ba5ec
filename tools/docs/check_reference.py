"""What the built reference may not hold: python tools/docs/check_reference.py site."""

import re
import sys
from pathlib import Path

FAULTS = {
    r",</em>\)": "attributes in one entry (`a, b: text`), of which Sphinx makes a type",
    r"&lt;(function|lambda|object)": "a default whose text is no value",
    r"(?<![\w/])docs/[\w-]+\.md": "a page by its file, which is no link",
}


def main(site: Path) -> None:
    pages = sorted((site / "api").glob("*.html"))
    if not pages:
        raise SystemExit(f"expected pages in {site / 'api'}, got none")
    found = [
        f"{page.name}: {what}: ...{page_text[match.start() - 60 : match.end()]}"
        for page in pages
        for page_text in [page.read_text(encoding="utf-8")]
        for pattern, what in FAULTS.items()
        for match in re.finditer(pattern, page_text)
    ]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
