"""Finds names between backticks in pages and docstrings, and whether the code still has them. Nothing is imported or run.

A file (`planner.py`, `gateway/app.py`) must end a path of this repository; a dotted name (`gateway.app`, `launch.threading_layer`,
`Plan.drafts`) must be a module of ours, or something that a module or class of ours defines; a single word must occur in the code outside
of docstrings and comments, as a name or as a part of a string, or in the wire's format.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.house.reader import ROOT, SOURCE

TICKED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w./-]+\.(py|proto|md|toml)")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(?=$|\()")
WORD = re.compile(r"[A-Za-z_]\w*")
PACKAGES = tuple(folder.name for folder in SOURCE.iterdir() if folder.is_dir())
FOLDERS = ("src", "bench", "tests", "tools")
EXAMPLES = "tests/tools/test_house_gates.py"
"""Names stand there as examples of what is gone."""
NOT_OURS = {"__pycache__", "build", "dist", "node_modules", "var"}
"""Folders that hold no source, beside those whose names begin with a point."""


@dataclass(slots=True)
class Code:
    """What the code has.

    files     paths from the repository's root
    modules   dotted suffixes of every module: "headrace.gateway.app", "gateway.app", "app" -> the names that these modules define
    classes   class -> `attributes_of` all classes of this name
    options   attributes of the classes in modules named config: `gateway.limits.max_body_bytes` is a place in the configuration file
    words     every name, and every word of a string that is not a docstring
    """

    files: tuple[str, ...] = ()
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    options: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is a statement: docstrings, and the texts below constants."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """The tree's nodes without contexts (`Load`, `Store`), which are a third of them. Several times as fast as `ast.walk`."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
    return found


def defined_in(body: list[ast.stmt]) -> set[str]:
    """Names that a module's or a class's body binds, imports and branches included."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(statement.name)
        else:
            nodes = nodes_of(statement)
            found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            found |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
            found |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What `Class.name` may mean: its body's names, attributes that methods set, and parameters of methods."""
    nodes = nodes_of(node)
    stored = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return defined_in(node.body) | stored | {each.arg for each in nodes if isinstance(each, ast.arg)}


def words_of(nodes: list[ast.AST]) -> set[str]:
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Constant):
            texts.update([node.value] if isinstance(node.value, str) and id(node) not in documented else ())
        else:
            texts.update(value for name in node._fields if isinstance(value := getattr(node, name, None), str))
    return {word for text in texts for word in WORD.findall(text)}


def _paths() -> Iterator[str]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in NOT_OURS and not name.endswith(".egg-info"))
        yield from (os.path.relpath(os.path.join(folder, name), ROOT) for name in sorted(names))


@cache
def read_code() -> Code:
    listed = [*_paths()]
    code = Code(files=tuple(listed))
    for name in listed:
        if name.endswith(".proto") or name.startswith("deploy/helm/"):
            code.words.update(WORD.findall((ROOT / name).read_text(encoding="utf-8")))
        if not name.endswith(".py") or not name.startswith(FOLDERS) or name == EXAMPLES:
            continue
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        nodes = nodes_of(tree)
        code.words |= words_of(nodes)
        parts = name.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").split("/")
        for start in range(len(parts)):
            code.modules[".".join(parts[start:])] |= defined_in(tree.body)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                code.classes[node.name] |= attributes_of(node)
                code.options |= attributes_of(node) if parts[-1] == "config" else set()
    for name in list(code.modules):
        head, _, last = name.rpartition(".")
        if head in code.modules:
            code.modules[head].add(last)
    return code


def is_known(name: str, code: Code) -> bool:
    """See the header. Names with blanks, signs or options are not names of code, and are known."""
    if FILE.fullmatch(name):
        return any(path == name or path.endswith("/" + name.removeprefix("./").lstrip("/")) for path in code.files)
    match = DOTTED.match(name)
    if match is None or (match.end() != len(name) and not name.endswith(")")):
        return True
    return is_known_dotted(match.group(), code)


def is_known_dotted(name: str, code: Code) -> bool:
    """A single word; `module`, `module.name`, `Class.attribute`, or `value.attribute` where some class has the attribute."""
    head, _, last = name.rpartition(".")
    if name in code.modules or last in code.modules.get(head, ()):
        return True
    if not head:
        return is_known_word(name, code)
    owner = head.rpartition(".")[2]
    if owner in code.classes:
        return last in code.classes[owner]
    if name.partition(".")[0] in PACKAGES:
        return last in code.options
    return not last[0].isupper() and any(last in attributes for attributes in code.classes.values())


def is_known_word(word: str, code: Code) -> bool:
    """A counter is exported with "_total" after its name; a leading "_" may stand for the beginning of the metric named before."""
    bare = word.removesuffix("_total")
    return bool({word, bare} & code.words) or (word[0] == "_" and any(each.endswith(bare) for each in code.words))
