"""Tests for one public class per name, short functions, and field words only, in the source and in the docs. There are no exceptions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.named import docstrings
from tests.house.reader import ROOT, Module
from tests.house.test_docs import PAGES

pytestmark = pytest.mark.pure

MAX_LINES = 60
"""Lines of one function, its signature and docstring included."""

PRIVATE_WORDS = re.compile(
    r"\b(limbo|news|settle[sd]?|settling|somebody|nobody|everybody|anybody|who|whom|told|those behind|so many)\b", re.IGNORECASE
)
"""Pictures, and words for people, which data are not."""
FRAGMENT = re.compile(r"\s*(Of|So many|So much|One part in|Those|What (is|was) (told|said))\b")


def find_private_words(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and word: pictures and persons that stand for data, and docstrings that are no sentence. tree: the text's."""
    yield from _matches(text)
    for place, docstring in docstrings(tree):
        if found := FRAGMENT.match(docstring):
            yield place, found[0]


def _matches(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, word[0]) for word in PRIVATE_WORDS.finditer(line))


def _functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}.{child.name}" if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from below(child, name)

    yield from below(module.tree, module.name)


def _is_written(module: Module) -> bool:
    return "_pb2" not in module.name


def test_public_class_names_are_unique(house: dict[str, Module]) -> None:
    places = defaultdict(list)
    for module in filter(_is_written, house.values()):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.shown_path}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    fresh = [f"{name}: {', '.join(found)}" for name, found in sorted(twice.items())]
    assert not fresh, "a public class name stands for one thing:\n" + "\n".join(fresh)


def test_functions_are_short(house: dict[str, Module]) -> None:
    long = []
    for module in filter(_is_written, house.values()):
        for name, node in _functions(module):
            if (num_lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_LINES:
                long.append(f"{module.shown_path}:{node.lineno} {name} has {num_lines} lines, and the most is {MAX_LINES}")
    assert not long, "\n" + "\n".join(long)


def test_source_speaks_in_field_words(house: dict[str, Module]) -> None:
    broken = [
        f"{module.shown_path}:{line} {word!r}"
        for module in filter(_is_written, house.values())
        for line, word in sorted(find_private_words(module.path.read_text(encoding="utf-8"), module.tree))
    ]
    assert not broken, "words that a stranger does not know:\n" + "\n".join(broken)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_speak_in_field_words(page: Path) -> None:
    broken = list(_matches(page.read_text(encoding="utf-8")))
    assert not broken, "words that a stranger does not know:\n" + "\n".join(f"{line}: {word!r}" for line, word in broken)
