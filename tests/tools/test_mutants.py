"""Tests that the list of planted bugs follows the code, and that its committed result covers all of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.run import chosen_by

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "mutants" / "mutants.json").read_text())
RESULTS: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())}


def test_every_planted_bug_still_has_its_place_in_the_source() -> None:
    for row in ROWS:
        text = (ROOT / "src" / "headrace" / row["path"]).read_text()
        assert text.count(row["old"]) == 1, row["name"]


def test_the_committed_result_shows_every_planted_bug_caught() -> None:
    assert {name for name, row in RESULTS.items() if row["caught"]} == {row["name"] for row in ROWS}
    assert len(ROWS) >= 20


def test_the_committed_result_is_of_the_bugs_as_they_are_planted_now() -> None:
    """A bug that has moved, or is planted in another way, was not the one that was caught: `make test-mutants` writes the result anew."""
    for row in ROWS:
        result = RESULTS[row["name"]]
        assert {key: result[key] for key in row if key in result} == {key: row[key] for key in row if key in result}, row["name"]


def is_there(node: str) -> bool:
    """Whether its file defines a test of this node id: a function, a class or its method, a name that is assigned, with any parameters."""
    path, *names = node.partition("[")[0].split("::")
    if not (ROOT / path).is_file():
        return not names and (ROOT / path).is_dir()
    body = ast.parse((ROOT / path).read_text()).body
    for name in names:
        found = [statement for statement in body if name in names_of(statement)]
        if not found:
            return False
        if isinstance(found[0], ast.Assign):  # `TestMachine = Machine.TestCase`: its methods are the library's
            return True
        body = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    return [target.id for target in statement.targets if isinstance(target, ast.Name)] if isinstance(statement, ast.Assign) else []


def test_the_tests_that_are_to_turn_red_and_those_that_did_are_there() -> None:
    for row in ROWS:
        named = [word for word in row["test"].partition(" -k ")[0].split() if not is_there(word)]
        assert not named, f"{row['name']}: {named}"
        assert is_there(RESULTS[row["name"]]["red"]), f"{row['name']}: {RESULTS[row['name']]['red']} is gone: plant this bug again"


def test_a_test_that_is_gone_is_noticed() -> None:
    here = "tests/tools/test_mutants.py"
    assert is_there(f"{here}::test_a_test_that_is_gone_is_noticed[of any parameter]")
    assert is_there("tests/policy/kvcache/test_leases.py::test_lease_state_machine::runTest")
    gone = (f"{here}::test_that_never_was", f"{here}::test_a_test_that_is_gone_is_noticed::method", "tests/tools/test_gone.py")
    assert not any(is_there(node) for node in gone)


def test_bugs_are_chosen_by_their_names_in_full() -> None:
    first, *_, last = (row["name"] for row in ROWS)
    assert [mutant.name for mutant in chosen_by([last, first])] == [first, last]
    assert len(chosen_by([])) == len(ROWS)


@pytest.mark.parametrize("known", [True, False], ids=["beside a known one", "alone"])
def test_an_unknown_name_is_refused_with_those_near_it_and_plants_nothing(capsys: pytest.CaptureFixture[str], known: bool) -> None:
    names = [ROWS[0]["name"]] if known else []
    with pytest.raises(SystemExit, match="2"):
        chosen_by([*names, ROWS[-1]["name"][:-3]])
    assert f"Near: {ROWS[-1]['name']}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        chosen_by([*names, "qqq"])
    assert "Near: none" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        chosen_by([*names, "--help"])
