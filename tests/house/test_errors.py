"""Tests that the tree in `core.errors` is the tree of the source: every exception class, its parent, and the HTTP status of its row."""

from __future__ import annotations

import ast
import builtins
import importlib
import re

import pytest

import headrace.core.errors as errors
from headrace.gateway.http.errors import INTERNAL, TABLE
from tests.house.reader import Module

pytestmark = pytest.mark.pure

LINE = re.compile(r"^    (?P<depth>(?:[|`] ?[ -] ?|   )*)(?P<name>[A-Z]\w+) {2,}\S.*?(?: -> (?P<status>\d+))?$")


def drawn() -> dict[str, tuple[str | None, int | None]]:
    """Class -> (its parent, its status), as the docstring has them."""
    found: dict[str, tuple[str | None, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if (match := LINE.match(line)) is not None:
            del path[len(match["depth"]) // 3 :]
            found[match["name"]] = (path[-1] if path else None, int(match["status"]) if match["status"] else None)
            path.append(match["name"])
    return found


def outside() -> set[str]:
    """Classes that the docstring names as standing outside the tree."""
    _, _, text = (errors.__doc__ or "").partition("outside the tree")
    return set(re.findall(r"`([A-Z]\w+)`", text.partition("Statuses")[0]))


def defined(house: dict[str, Module]) -> dict[str, tuple[str, str]]:
    """Exception class -> (its parent, its module), from the source."""
    classes = {
        node.name: (node.bases[0].id, module.name)
        for module in house.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name)
    }

    def is_exception(name: str, steps: int = 0) -> bool:
        if name in classes and steps < 9:
            return is_exception(classes[name][0], steps + 1)
        found = getattr(builtins, name, None)
        return isinstance(found, type) and issubclass(found, BaseException)

    return {name: told for name, told in classes.items() if is_exception(name)}


def test_every_exception_of_the_source_is_in_the_tree_under_its_parent(house: dict[str, Module]) -> None:
    source, tree = defined(house), drawn()
    inside = {name: parent for name, (parent, _) in source.items() if name not in outside()}
    assert len(tree) > 40, "the docstring was not understood"
    assert {name: parent or "Exception" for name, (parent, _) in tree.items()} == inside
    assert outside() == {name for name, (parent, _) in source.items() if parent == "Exception" and name != "HeadraceError"}


def test_the_statuses_in_the_tree_are_those_of_the_gateways_table(house: dict[str, Module]) -> None:
    source = defined(house)
    for name, (_, status) in drawn().items():
        if status is not None:
            kind = getattr(importlib.import_module(source[name][1]), name)
            assert status == next((row.status for row_kind, row in TABLE if issubclass(kind, row_kind)), INTERNAL.status), name
    listed = {kind.__name__ for kind, _ in TABLE}
    assert listed <= {name for name, (_, status) in drawn().items() if status is not None}, "every row of the table is in the tree"
