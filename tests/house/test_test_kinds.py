"""Tests the tests themselves: only timing tests measure seconds of a real clock, and the quarantine stays short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from kinds import KINDS
from quarantine import MAX_DAYS, MAX_LINES, read_quarantine

from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLOCKS = tuple(f"time.{name}" for name in ("monotonic", "perf_counter", "process_time", "thread_time", "time"))
NEVER_IN_QUARANTINE = (
    *("auth", "key", "canary", "hostile", "tls", "tenant"),
    *("limit", "budget", "spender", "ledger", "usage", "spool", "record"),
    *("failover", "resume", "replica", "change", "process"),
)
"""Words in the id of a test of what a site cannot do without: such a test is mended at once."""


def marks_of(tree: ast.AST) -> set[str]:
    """Names of pytest's marks anywhere in a file or a function."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    }


def module_marks(tree: ast.Module) -> set[str]:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    return {mark for node in assigned for mark in marks_of(node)}


def reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS


def is_difference(node: ast.AST) -> bool:
    """Of two readings of a clock, as far as one of them stands there."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(map(reads_clock, ast.walk(node)))


def seconds_asserted(function: ast.AST) -> Iterator[int]:
    """Lines of the assertions on a difference of two readings of a clock, also of one that has a name."""
    taken = {
        ast.unparse(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(map(is_difference, ast.walk(node.value)))
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            parts = list(ast.walk(node.test))
            if any(map(is_difference, parts)) or any(isinstance(part, ast.Name) and part.id in taken for part in parts):
                yield node.lineno


def test_seconds_of_a_real_clock_are_asserted_by_timing_tests_alone() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(clock in text for clock in CLOCKS):
            continue
        tree = ast.parse(text)
        for test in [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]:
            lines = list(seconds_asserted(test))
            if lines and not (marks_of(test) | module_marks(tree)) & {"timing", "slow"}:
                found += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    assert not found, "a promise in seconds is asserted on virtual time, or under the marker timing"


@pytest.mark.parametrize(
    "text",
    [
        "assert time.monotonic() - began < 2",
        "took_s = time.perf_counter() - began\nassert took_s < 2",
        "took_s = time.monotonic() - began\nassert 0 < max(took_s, 1) < 2",
    ],
)
def test_an_assertion_on_seconds_is_seen(text: str) -> None:
    assert list(seconds_asserted(ast.parse(text)))
    assert not list(
        seconds_asserted(ast.parse("assert loop.time() - began == 2\ndeadline = time.monotonic() + 60\nassert time.monotonic() < deadline"))
    )


def test_the_quarantine_is_short_and_holds_no_test_of_what_a_site_cannot_do_without() -> None:
    lines = read_quarantine()
    assert len(lines) <= MAX_LINES
    for line in lines:
        path, _, name = line.test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        [test] = [each for each in ast.walk(tree) if isinstance(each, FUNCTIONS) and each.name == name.partition("[")[0]]
        assert line.reason
        assert 0 <= (datetime.now(UTC).date() - line.since).days <= MAX_DAYS, f"{line.test} is to be mended or deleted by now"
        assert not [word for word in NEVER_IN_QUARANTINE if word in line.test.lower()], line.test
        kinds = marks_of(test) & set(KINDS) or module_marks(tree) & set(KINDS)
        assert "pure" not in kinds, f"{line.test} depends on nothing but its code"
