"""Tests that the tables of folders in the pages are those of the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.folder_tables import PAGES, PLACE, SOURCE, filled, summary

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_folders_are_those_of_the_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert PLACE.search(text)
    assert text == filled(text), "make derived"


def test_a_folder_is_said_by_the_first_sentence_of_its_docstring() -> None:
    assert summary(SOURCE / "policy" / "__init__.py").endswith("queues, routing, limits.")
