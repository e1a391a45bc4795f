"""Reads the source as data: every import of every module, wherever it stands.

Function bodies, `if TYPE_CHECKING`, `importlib.import_module("literal")` and `__import__("literal")` count. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module name.

    target     absolute dotted name, e.g. "headrace.core.ids" or "torch.nn"
    is_lazy    stands inside a function
    is_typing  stands under `if TYPE_CHECKING`
    """

    target: str
    line: int
    is_lazy: bool
    is_typing: bool


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def shown_path(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else str(self.path)


def read_package(folder: Path, name: str) -> dict[str, Module]:
    """All modules of the package that lives in `folder`, by dotted name; generated protobuf modules included."""
    paths = sorted(folder.rglob("*.py"))
    known = {_module_name(path, folder, name) for path in paths}
    return {module.name: module for module in (_read(path, folder, name, known) for path in paths)}


def read_source(text: str, name: str, known: frozenset[str] = frozenset(), *, is_package: bool = False) -> tuple[Import, ...]:
    """Imports of one source text, for tests of the reader itself."""
    return tuple(_imports(ast.parse(text), name, known, is_package))


def _module_name(path: Path, folder: Path, name: str) -> str:
    parts = list(path.relative_to(folder).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join([name, *parts])


def _read(path: Path, folder: Path, package: str, known: set[str]) -> Module:
    name = _module_name(path, folder, package)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return Module(name, path, tree, tuple(_imports(tree, name, frozenset(known), path.name == "__init__.py")))


def _imports(tree: ast.AST, name: str, known: frozenset[str], is_package: bool) -> Iterator[Import]:
    for node, is_lazy, is_typing in _walk(tree):
        for target in _targets(node, name, known, is_package):
            yield Import(target, getattr(node, "lineno", 0), is_lazy, is_typing)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node in the order of the text, whether it stands inside a function, and whether under `if TYPE_CHECKING`."""
    rest = [(tree, False, False)]
    while rest:
        node, is_lazy, is_typing = found = rest.pop()
        yield found
        inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) else []
        children = [(child, inside, is_typing or child in guarded) for child in ast.iter_child_nodes(node)]
        rest += reversed(children)


def _targets(node: ast.AST, name: str, known: frozenset[str], is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, name, is_package)
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in known else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            yield node.args[0].value


def _absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def find_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one node, plus self-loops; each sorted (Tarjan, iterative over recursion depth of imports)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1 or node in edges.get(node, ()):
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found
