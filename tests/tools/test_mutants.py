"""The list of planted bugs follows the code, and its committed result covers all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "tests" / "mutants" / "mutants.json").read_text())


def test_every_planted_bug_still_has_its_place_in_the_source() -> None:
    for row in ROWS:
        text = (ROOT / "src" / "headrace" / row["path"]).read_text()
        assert text.count(row["old"]) == 1, row["name"]


def test_the_committed_result_shows_every_planted_bug_caught() -> None:
    results = {row["name"]: row for row in json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())}
    assert {name for name, row in results.items() if row["caught"]} == {row["name"] for row in ROWS}
    assert len(ROWS) >= 20


def test_the_committed_result_is_of_the_bugs_as_they_are_planted_now() -> None:
    """A bug that has moved, or is planted in another way, was not the one that was caught: `make test-mutants` writes the result anew."""
    results = {row["name"]: row for row in json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())}
    for row in ROWS:
        result = results[row["name"]]
        assert {key: result[key] for key in row if key in result} == {key: row[key] for key in row if key in result}, row["name"]
