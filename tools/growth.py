"""Prints how large the house is, beside the committed numbers (`tools/growth.txt`). It refuses nothing: growth is to be seen and said.

    python tools/growth.py [--write]

Statements are those of Python without docstrings. Words are split at white space: those of docstrings, and those of the pages under docs.
Options are the keys of the configuration, as tests/house/options.txt lists them.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "growth.txt"
OPTIONS = ROOT / "tests" / "house" / "options.txt"
HEAD = ("part", "statements", "files", "words")


class Size(NamedTuple):
    statements: int
    files: int
    words: int


def main(args: list[str]) -> None:
    now = sizes(ROOT)
    before = read_table(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    if args == ["--write"]:
        TABLE.write_text(table(now), encoding="utf-8")
    print(table(now, before), end="")


def sizes(root: Path) -> dict[str, Size]:
    """Part -> its size: every package of src, src, tests, docs, and the number of keys as the files of `option keys`."""
    house = root / "src" / "headrace"
    packages = {f"src/{path.parent.name}": of_python(path.parent) for path in sorted(house.glob("*/__init__.py"))}
    pages = [path.read_text(encoding="utf-8") for path in (root / "docs").glob("*.md")]
    keys = [
        line for line in OPTIONS.read_text(encoding="utf-8").splitlines() if re.match(r"[^ ]+: ", line) and not line.startswith("headrace")
    ]
    return {
        **packages,
        "src": of_python(house),
        "tests": of_python(root / "tests"),
        "docs": Size(0, len(pages), sum(len(page.split()) for page in pages)),
        "option keys": Size(0, len(keys), 0),
    }


def of_python(folder: Path) -> Size:
    statements = files = words = 0
    for path in folder.rglob("*.py"):
        files += 1
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                words += len(node.value.value.split())
            elif isinstance(node, ast.stmt):
                statements += 1
    return Size(statements, files, words)


def table(now: dict[str, Size], before: dict[str, Size] | None = None) -> str:
    """One line per part; where `before` has other numbers, they are shown as a change."""
    rows: list[tuple[str, ...]] = [HEAD]
    for part, size in now.items():
        old = (before or {}).get(part, size)
        rows.append((part, *(f"{new}" if new == was else f"{new} ({new - was:+})" for new, was in zip(size, old, strict=True))))
    return "".join("  ".join(f"{cell:>18}" if i else f"{cell:<16}" for i, cell in enumerate(row)).rstrip() + "\n" for row in rows)


def read_table(text: str) -> dict[str, Size]:
    rows = (line.rsplit(maxsplit=3) for line in text.splitlines()[1:])
    return {part: Size(*map(int, numbers)) for part, *numbers in rows}


if __name__ == "__main__":
    main(sys.argv[1:])
