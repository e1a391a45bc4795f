"""Tests that no shipped source calls what turns data into code: a hard gate of zero.

The one pickle in the house is Numba's own kernel cache, in a 0700 folder of the user; no line of ours touches it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.reader import Module

pytestmark = pytest.mark.pure

MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"})
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset(
    {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system"), ("os", "popen")}
)
KEYWORDS = frozenset({("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)})


def find_forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names if (node.module, a.name) in METHODS)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in METHODS:
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from _forbidden_call(node)


def _forbidden_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
        yield node.lineno, f"{node.func.id}()"
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in KEYWORDS:
            yield keyword.value.lineno, f"{keyword.arg}={keyword.value.value!r}"


def test_source_never_turns_data_into_code(house: dict[str, Module]) -> None:
    found = [f"{module.shown_path}:{line} {what}" for module in house.values() for line, what in find_forbidden(module.tree)]
    assert not found, "\n" + "\n".join(found)
