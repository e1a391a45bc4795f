"""Writes the tables of folders into the pages, from the docstrings of the source: `python tools/folder_tables.py`.

A place is `<!-- folders: PACKAGE -->` ... `<!-- end -->`. tests/tools/test_folder_tables.py fails where a page has another table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "headrace"
PAGES = (ROOT / "docs" / "architecture.md", ROOT / "docs" / "gateway.md")

PLACE = re.compile(r"(<!-- folders: ([a-z_.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def summary(module: Path) -> str:
    """The first sentence of the module's docstring, in one line."""
    text = " ".join((ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z`])", text, maxsplit=1)[0]


def folders(top: Path) -> Iterator[Path]:
    """`top` and each package below it, parents first."""
    yield top
    for inner in sorted(folder for folder in top.iterdir() if (folder / "__init__.py").is_file()):
        yield from folders(inner)


def table(package: str) -> str:
    """A row per folder of the package: its name, and what its docstring says first."""
    top = SOURCE.joinpath(*package.split("."))
    lines = ["| folder | what |", "|---|---|"]
    for folder in folders(top):
        name = "(top)" if folder == top else f"`{folder.relative_to(top).as_posix()}/`"
        lines.append(f"| {name} | {summary(folder / '__init__.py')} |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The page with every table as the source gives it."""
    return PLACE.sub(lambda place: place[1] + table(place[2]) + place[3], text)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
