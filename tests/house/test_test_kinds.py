"""What holds for the tests themselves: no promise is measured against the machine's lateness, and the quarantine stays short."""

from __future__ import annotations

import ast

import pytest
from kinds import KINDS
from quarantine import MAX_LINES, read_quarantine

from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NEVER_IN_QUARANTINE = ("auth", "key", "limit", "ledger", "failover")
"""Words in the id of a test of what a site cannot do without: such a test is mended at once."""


def marks_of(tree: ast.AST) -> set[str]:
    """Names of pytest's marks anywhere in a file or a function."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    }


def kinds_of(test: ast.AST, tree: ast.Module) -> set[str]:
    """Of a test: its own, else its module's."""
    module = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    return marks_of(test) & set(KINDS) or {kind for node in module for kind in marks_of(node) & set(KINDS)}


def imports_of(tree: ast.Module) -> set[str]:
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_the_machines_lateness_is_asked_for_by_timing_tests_alone() -> None:
    asking = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "lateness" in text and "lateness" in imports_of(tree := ast.parse(text)) and "timing" not in marks_of(tree):
            asking.append(str(path.relative_to(ROOT)))
    assert not asking, "a promise in seconds is asserted on virtual time, or beside the marker timing"


def test_the_quarantine_is_short_and_holds_no_test_of_what_a_site_cannot_do_without() -> None:
    lines = read_quarantine()
    assert len(lines) <= MAX_LINES
    for line in lines:
        path, _, name = line.test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        [test] = [each for each in ast.walk(tree) if isinstance(each, FUNCTIONS) and each.name == name.partition("[")[0]]
        assert line.reason
        assert not [word for word in NEVER_IN_QUARANTINE if word in line.test.lower()], line.test
        assert "pure" not in kinds_of(test, tree), f"{line.test} depends on nothing but its code"
