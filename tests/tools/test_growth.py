"""Tests the table of the house's size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.growth import Size, of_python, read_table, table

pytestmark = pytest.mark.pure


def test_statements_are_counted_without_docstrings_and_words_in_docstrings_alone(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '"""Two words."""\n\nX = "not counted"\n"""An attribute\'s."""\n\n\ndef f() -> None:\n    return None\n'
    )
    assert of_python(tmp_path) == Size(statements=3, files=1, words=4)


def test_a_table_is_read_back_and_changes_are_shown_beside_it() -> None:
    before = {"src": Size(10, 2, 30), "option keys": Size(0, 5, 0)}
    assert read_table(table(before)) == before
    shown = table({"src": Size(12, 2, 29), "option keys": Size(0, 5, 0), "new": Size(1, 1, 1)}, before)
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["src", "12", "(+2)", "2", "29", "(-1)"],
        ["option", "keys", "0", "5", "0"],
        ["new", "1", "1", "1"],
    ]
