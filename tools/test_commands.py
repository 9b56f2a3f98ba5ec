"""What `commands.py` leaves out is in a document, and each session that documents name exists."""

from __future__ import annotations

import commands


def test_what_is_not_run_stands_in_a_document() -> None:
    texts = [document.read_text(encoding="utf-8") for document in commands.documents()]
    assert commands.stale(texts) == []
    assert commands.stale([""]) == [*commands.NOT_RUN, *commands.DRY_RUN, *commands.STATUS]


def test_sessions_that_documents_name_exist() -> None:
    assert commands.unknown_sessions() == []


def test_commands_of_consoles_and_of_the_text_are_found() -> None:
    text = "Run `pip install x`, not `x`.\n```console\n$ python a.py  # why\n1\n```\n"
    assert commands.commands(text) == ["pip install x", "python a.py"]
